"""What a rank's training loop waited for, and what this rank did while the others waited for it.

A wait is an interval of time. What this rank read in it is known from the times of its reads; while it read nothing, it
was in the training code, or elsewhere in ``next``. Who voted last in a vote, and by how much, all ranks learn by their
next vote; then that rank looks up what it did. This is the only place that explains a wait: the log tells the sums of
an epoch, and the trace has each explanation beside the wait that it is of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final, final

from torchdistinput.tracing.read_times import PARTS, BatchTimes
from torchdistinput.tracing.verdict import TRAINING, VOTE

_LEAST: Final = 20e-6
"""Shorter waits are not looked into."""
_MOST_FILES: Final = 256
_RECENT: Final = 512  # rows and reads

Seconds = dict[str, float]
"""By stage (``verdict.STAGES``), or of reading by file or index."""
NOT_EXPLAINED: Final[tuple[Seconds, Seconds]] = {}, {}


def explain_wait(
    lo: float, hi: float, called: float, reads: Iterable[tuple[str, BatchTimes]]
) -> tuple[Seconds, Seconds]:
    """What a rank did in an interval: seconds by stage, and those of reading by file or index. Local.

    Args:
      lo: its begin.
      hi: its end.
      called: when ``next`` was called in it; before that the rank was in the training code, unless it read.
      reads: what it read, with the name of what is not in the parts of the read; the first ones count before others.
    """
    stages: Seconds = {}
    files: Seconds = {}
    left = [(lo, hi)]
    for rest, read in reads:
        length = read.ended - read.began
        overlap = 0.0
        for a, b in left:
            overlap += max(0.0, min(b, read.ended) - max(a, read.began))
        if overlap <= 0 or length <= 0:
            continue
        for part, seconds in zip(PARTS, read.parts, strict=True):
            _add(stages, part, overlap * seconds / length)
        _add(stages, rest, overlap * max(0.0, 1 - sum(read.parts) / length))
        if read.file is not None or read.number is not None:
            name = f"index {read.number}" if read.file is None else read.file
            _add(files, name, overlap * (read.parts[1] / length))
        left = [
            part for a, b in left for part in ((a, min(b, read.began)), (max(a, read.ended), b)) if part[0] < part[1]
        ]
    for a, b in left:
        _add(stages, TRAINING, max(0.0, min(b, called) - a))
        _add(stages, "fetch", max(0.0, b - max(a, called)))
    return stages, files


def _add(seconds: Seconds, name: str, more: float) -> None:
    if more > 0:
        seconds[name] = seconds.get(name, 0.0) + more


@final
class ExplainedTime:
    """Sums of explanations. Of many files only those that took longest are kept; the rest is under the empty name."""

    def __init__(self) -> None:
        self.stages: Seconds = {}
        self.files: Seconds = {}

    def add(self, stages: Mapping[str, float], files: Mapping[str, float]) -> None:
        """Adds an explanation."""
        for name, seconds in stages.items():
            _add(self.stages, name, seconds)
        for name, seconds in files.items():
            _add(self.files, name, seconds)
        if len(self.files) > 2 * _MOST_FILES:
            names = sorted(self.files, key=lambda name: self.files[name])
            rest = sum(self.files.pop(name) for name in names[:-_MOST_FILES])
            _add(self.files, "", rest)


@final
class Waits:
    """The waits of one rank in one epoch. ``fetched`` is called by the thread that completes steps."""

    def __init__(self) -> None:
        self.reads: deque[BatchTimes] = deque(maxlen=_RECENT)
        """Of the draws, in this process."""
        # By loader worker: its reads, each with the number of the row. It reads rows ahead, for which nobody waits.
        self._of_workers: dict[int | None, deque[tuple[int, BatchTimes]]] = {}
        self._readers: dict[int, int | None] = {}  # the loader worker of each row
        self._busy = 0.0
        self._vote = 0.0, 0.0, 0  # that ended last: waits since, next was called, the first row
        self._waited, self._late = ExplainedTime(), ExplainedTime()

    def fetched(self, row: int, reads: Sequence[BatchTimes]) -> None:
        """A row is complete, by what was read for it."""
        for each in reads:
            self._of_workers.setdefault(each.worker, deque(maxlen=_RECENT)).append((row, each))
            self._busy += each.ended - each.began
        if len(self._readers) >= _RECENT:
            del self._readers[next(iter(self._readers))]
        self._readers[row] = reads[0].worker

    def vote_ends(self, called: float, waits_since: float, row: int) -> None:
        """A vote for the rows from this one on ended; for the two times see ``EpochTrace.vote_ends``."""
        self._vote = waits_since, called, row

    def was_last(self, seconds: float) -> tuple[Seconds, Seconds]:
        """What this rank did, which came last in the vote of the last ``vote_ends``, by so much."""
        if seconds < _LEAST:
            return NOT_EXPLAINED
        waits_since, called, row = self._vote
        found = explain_wait(waits_since - seconds, waits_since, called, self._reads(waits_since - seconds, row))
        self._late.add(*found)
        return found

    def delivered(self, began: float, ended: float, row: int) -> tuple[Seconds, Seconds]:
        """What the loop waited for in ``next``, which was called at ``began``, and delivered a step at ``ended``."""
        if ended - began < _LEAST:
            return NOT_EXPLAINED
        waits_since = self._vote[0]
        own_end = waits_since if began <= waits_since else ended  # else no vote ended in this call
        stages, files = explain_wait(began, own_end, began, self._reads(began, row))
        _add(stages, VOTE, ended - own_end)
        self._waited.add(stages, files)
        return stages, files

    def _reads(self, lo: float, row: int) -> Iterator[tuple[str, BatchTimes]]:
        """What was read after ``lo`` up to a row."""
        rest = "draw" if self._of_workers else "fetch"
        for each in takewhile(lambda each: each.ended > lo, reversed(self.reads)):
            yield rest, each
        of_worker = tuple(self._of_workers.get(self._readers.get(row), ()))  # another thread may append meanwhile
        for number, each in takewhile(lambda told: told[1].ended > lo, reversed(of_worker)):
            if number <= row:
                yield "fetch", each

    def facts(self, seconds: float) -> dict[str, Any]:
        """What ``RankTimes`` has of this rank, of so many seconds."""
        workers = None if None in self._of_workers else len(self._of_workers)
        return {
            "waited_in": dict(self._waited.stages),
            "late_in": dict(self._late.stages),
            "waited_files": dict(self._waited.files),
            "files": dict(self._late.files),
            "num_workers": workers,
            "busy": self._busy / (workers * seconds) if workers and seconds else None,
        }
