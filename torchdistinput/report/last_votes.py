"""Who voted last for each step, by how much, and which ranks waited for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, final

import numpy as np

from torchdistinput.report.clocks import Clocks
from torchdistinput.report.read_trace import RunTrace


@final
@dataclass(slots=True)
class WaitForRank:
    """The part of a wait in which only another rank's vote was missing: its own was cast. On the common clock."""

    rank: int
    step: int
    start: int
    end: int


@final
@dataclass(slots=True)
class LastVote:
    """A vote of all ranks, from the side of the rank that cast its own last. Times on the common clock, in nanoseconds.

    Args:
      rank: the last one.
      start: when it voted.
      before: when the one before it voted; ``None`` if it is alone.
      first_step: the first step that the vote covers, as ``read_trace.vote_key`` has it.
      steps: how many it covers.
      waits: of the other ranks, for this one.
    """

    rank: int
    start: int
    first_step: int
    steps: int
    before: int | None = None
    waits: list[WaitForRank] = field(default_factory=list)

    @property
    def late(self) -> int:
        """By how much it was later than the next to last."""
        return 0 if self.before is None else self.start - self.before

    @property
    def longest_wait(self) -> int:
        """The longest wait of another rank for this one."""
        return max((wait.end - wait.start for wait in self.waits), default=0)


def last_votes(trace: RunTrace, clocks: Clocks) -> Mapping[int, LastVote]:
    """The last voter of each vote, by ``read_trace.vote_key``."""
    found: dict[int, LastVote] = {}
    starts = {rank: common(trace, clocks, rank, votes.start) for rank, votes in trace.votes.items()}
    for rank, votes in trace.votes.items():
        for key, first, steps, start in zip(votes.key, votes.first_step, votes.steps, starts[rank], strict=True):
            last = found.get(key)
            if last is None:
                found[key] = LastVote(rank, start, first, steps)
            elif start > last.start:
                last.rank, last.start, last.before = rank, start, last.start
            else:
                last.before = start if last.before is None else max(last.before, start)
    for rank in trace.votes:
        _add_waits(trace, clocks, rank, starts[rank], found)
    return found


def timed_spans(trace: RunTrace, clocks: Clocks, rank: int) -> Iterator[tuple[Mapping[str, Any], int, int]]:
    """The spans of a rank, each with its start and end on the common clock."""
    spans = (span for span in trace.files[rank].spans() if "d" in span)
    while some := list(islice(spans, 1024)):
        starts = common(trace, clocks, rank, [span["t"] for span in some])
        ends = common(trace, clocks, rank, [span["t"] + span["d"] for span in some])
        yield from zip(some, starts, ends, strict=True)


def common(trace: RunTrace, clocks: Clocks, rank: int, times: Sequence[int]) -> list[int]:
    """Times of a rank's file on the common clock."""
    own = np.asarray(times, dtype=np.int64) + trace.files[rank].base_ns
    found: list[int] = clocks.common(rank, own).tolist()
    return found


def _add_waits(
    trace: RunTrace, clocks: Clocks, rank: int, starts: Sequence[int], found: Mapping[int, LastVote]
) -> None:
    votes = trace.votes[rank]
    begins, ends = (common(trace, clocks, rank, times) for times in (votes.wait_start, votes.wait_end))
    waits = dict(zip(votes.wait_step, zip(begins, ends, strict=True), strict=True))
    for key, start in zip(votes.key, starts, strict=True):
        last = found[key]
        if last.rank == rank:
            continue
        for step in range(last.first_step, last.first_step + last.steps):
            if step in waits:
                begin, end = max(waits[step][0], start), min(waits[step][1], last.start)
                if begin < end:
                    last.waits.append(WaitForRank(rank, step, begin, end))
