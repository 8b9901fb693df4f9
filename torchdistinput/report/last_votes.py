"""Who voted last for each step, by how much, and which ranks waited for it.

A rank that has voted may still make others wait: a vote takes several messages, and without loader workers a rank
answers them in ``next`` only, not while its training thread reads or trains.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import islice
from typing import Any, Final, final

import numpy as np

from torchdistinput.report.clocks import Clocks
from torchdistinput.report.read_trace import LONG_NS, RunTrace

_MOST_BUSY: Final = 8  # in one vote, the longest; of thousands of ranks that are busy at once, none is to blame


@final
@dataclass(slots=True)
class WaitForRank:
    """The part of a wait, by ``rank``, in which only another rank was missing, ``other``. On the common clock."""

    rank: int
    other: int
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
      answers: waits for a rank that had voted, and was busy when the others wanted its answer.
    """

    rank: int
    start: int
    first_step: int
    steps: int
    before: int | None = None
    waits: list[WaitForRank] = field(default_factory=list)
    answers: list[WaitForRank] = field(default_factory=list)

    @property
    def late(self) -> int:
        """By how much it was later than the next to last."""
        return 0 if self.before is None else self.start - self.before

    def times(self) -> Iterator[tuple[int, int, int]]:
        """(rank, start, end) of the times in which some rank waited for this one."""
        end, rank = 0, -1
        for wait in sorted((*self.waits, *self.answers), key=lambda wait: (wait.other, wait.start)):
            start = max(wait.start, end) if wait.other == rank else wait.start
            if start < wait.end:
                yield wait.other, start, wait.end
                end, rank = wait.end, wait.other


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
    ends = {rank: common(trace, clocks, rank, votes.end) for rank, votes in trace.votes.items()}
    latest: dict[int, int] = {}
    for rank, votes in trace.votes.items():
        for key, end in zip(votes.key, ends[rank], strict=True):
            latest[key] = max(latest.get(key, end), end)
    busy_times = [_BusyTimes(trace, clocks, rank) for rank, votes in trace.votes.items() if votes.busy_start]
    busy = {}
    for key, end in latest.items():
        if end - found[key].start > LONG_NS:
            parts = ((each.rank, *part) for each in busy_times for part in each.within(found[key].start, end))
            busy[key] = nlargest(_MOST_BUSY, parts, key=lambda part: part[2] - part[1])
    for rank in trace.votes:
        _add_waits(trace, clocks, rank, (starts[rank], ends[rank]), (found, busy))
    return found


@final
class _BusyTimes:
    """The times in which the training thread of a rank was busy, which do not overlap."""

    def __init__(self, trace: RunTrace, clocks: Clocks, rank: int) -> None:
        self.rank = rank
        votes = trace.votes[rank]
        starts, ends = (common(trace, clocks, rank, times) for times in (votes.busy_start, votes.busy_end))
        self._starts, self._ends = sorted(starts), sorted(ends)

    def within(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """The parts of them between two times."""
        for place in range(bisect_right(self._ends, low), len(self._ends)):
            if self._starts[place] >= high:
                break
            yield max(low, self._starts[place]), min(high, self._ends[place])


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
    trace: RunTrace,
    clocks: Clocks,
    rank: int,
    cast: tuple[Sequence[int], Sequence[int]],
    of_all: tuple[Mapping[int, LastVote], Mapping[int, Sequence[tuple[int, int, int]]]],
) -> None:
    """Adds the waits of a rank, whose votes began and ended at ``cast``, to those for the last voter, or busy ranks."""
    votes, (found, busy) = trace.votes[rank], of_all
    begins, ends = (common(trace, clocks, rank, times) for times in (votes.wait_start, votes.wait_end))
    waits = dict(zip(votes.wait_step, zip(begins, ends, strict=True), strict=True))
    for key, vote_start, vote_end in zip(votes.key, *cast, strict=True):
        last = found[key]
        for step in range(last.first_step, last.first_step + last.steps):
            if step not in waits:
                continue
            begin, end = waits[step]
            start, until = max(begin, vote_start), min(end, last.start)
            if last.rank != rank and start < until:
                last.waits.append(WaitForRank(rank, last.rank, step, start, until))
            for other, low, high in busy.get(key, ()):
                start, until = max(begin, low), min(end, vote_end, high)
                if other != rank and start < until:
                    last.answers.append(WaitForRank(rank, other, step, start, until))
