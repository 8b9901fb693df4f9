"""What a rank's training loop waited for, and what this rank did while the others waited for it.

A wait is an interval of time. What this rank read in it is known from the times of its reads; while it read nothing, it
was in the training code, or elsewhere in ``next``. Who voted last in a vote, and by how much, all ranks learn by their
next vote; then that rank looks up what it did.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from torchdistinput.report.verdict import TRAINING, VOTE
from torchdistinput.tracing.read_times import PARTS, BatchTimes

_LEAST: Final = 20e-6
"""Shorter waits are not looked into."""
_MOST_FILES: Final = 64
_RECENT: Final = 512  # rows and reads


def note_stages(
    lo: float,
    hi: float,
    called: float,
    reads: Sequence[tuple[str, BatchTimes]],
    stages: dict[str, float],
    files: dict[str, float],
) -> None:
    """Adds up what a rank did in an interval, in seconds. Local.

    Args:
      lo: its begin.
      hi: its end.
      called: when ``next`` was called in it; before that the rank was in the training code, unless it read.
      reads: what it read, with the name of what is not in the parts of the read; the first ones count before others.
      stages: gets the seconds by stage.
      files: gets the seconds of reading by file or index.
    """
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


def _add(seconds: dict[str, float], name: str, more: float) -> None:
    if more > 0:
        seconds[name] = seconds.get(name, 0.0) + more


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
        self._waited_in: dict[str, float] = {}
        self._late_in: dict[str, float] = {}
        self._waited_files: dict[str, float] = {}
        self._files: dict[str, float] = {}

    def fetched(self, row: int, reads: Sequence[BatchTimes]) -> None:
        """A row is complete, by what was read for it."""
        for each in reads:
            self._of_workers.setdefault(each.worker, deque(maxlen=_RECENT)).append((row, each))
            self._busy += each.ended - each.began
        _keep(self._readers, row, reads[0].worker)

    def vote_ends(self, called: float, waits_since: float, row: int) -> None:
        """A vote for the rows from this one on ended; for the two times see ``EpochTrace.vote_ends``."""
        self._vote = waits_since, called, row

    def was_last(self, seconds: float) -> None:
        """This rank came last in the vote of the last ``vote_ends``, by so much."""
        if seconds > _LEAST:
            waits_since, called, row = self._vote
            self._note(waits_since - seconds, waits_since, called, row, self._late_in, self._files)

    def delivered(self, began: float, ended: float, row: int) -> None:
        """A step was delivered, after ``next`` was called at ``began``."""
        if ended - began < _LEAST:
            return
        waits_since = self._vote[0]
        own_end = waits_since if began <= waits_since else ended  # else no vote ended in this call
        self._note(began, own_end, began, row, self._waited_in, self._waited_files)
        _add(self._waited_in, VOTE, ended - own_end)

    def _note(
        self, lo: float, hi: float, called: float, row: int, stages: dict[str, float], files: dict[str, float]
    ) -> None:
        in_background = bool(self._of_workers)
        reads = [("draw" if in_background else "fetch", each) for each in self.reads if each.ended > lo]
        of_worker = tuple(self._of_workers.get(self._readers.get(row), ()))  # another thread may append meanwhile
        reads += [("fetch", each) for number, each in of_worker if number <= row and each.ended > lo]
        note_stages(lo, hi, called, reads, stages, files)
        if len(files) > 4 * _MOST_FILES:
            kept = _largest(files, _MOST_FILES)
            files.clear()
            files.update(kept)

    def facts(self, seconds: float) -> dict[str, Any]:
        """What ``RankTimes`` has of this rank, of so many seconds."""
        workers = None if None in self._of_workers else len(self._of_workers)
        return {
            "waited_in": dict(self._waited_in),
            "late_in": dict(self._late_in),
            "waited_files": dict(self._waited_files),
            "files": dict(self._files),
            "num_workers": workers,
            "busy": self._busy / (workers * seconds) if workers and seconds else None,
        }


def _keep(found: dict[int, Any], number: int, value: Any) -> None:
    """Puts a value into the dict, which forgets the first one instead of growing without bound."""
    if len(found) >= _RECENT:
        del found[next(iter(found))]
    found[number] = value


def _largest(files: Mapping[str, float], count: int) -> dict[str, float]:
    """The files that took longest, and the rest under the empty name."""
    names = sorted(files, key=lambda name: files[name], reverse=True)
    found = {name: files[name] for name in names[:count]}
    rest = sum(files.values()) - sum(found.values())
    return {**found, "": rest} if rest > 0 else found
