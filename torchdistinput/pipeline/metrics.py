"""Input metrics: how long the training loop waits for its input, and which rank makes all ranks wait.

Problem. A loop that is slow because of its input looks like a slow model, and one slow rank makes all ranks wait.

Decision. Each stage adds up the seconds that it takes, from readings of the clock, without a lock: one thread at a time
writes each sum. The totals are recorded every few steps, which gives a window over the last steps. The ranks exchange
their windows in the periodic syncs: one exchange in 64 rows (256 where steps are short), in which workers that read
files of their own also exchange their positions, and when an epoch begins, for the one before. This is the only cost
that grows with the number of ranks: about 300 bytes for each rank.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, final

from torch.autograd import profiler

from torchdistinput.coordination.private_names import profiler_runs
from torchdistinput.step_types import ROWS_BETWEEN_SYNCS, PeriodicSync

T = TypeVar("T")

FETCH: Final = "torchdistinput::fetch"
COORDINATE: Final = "torchdistinput::coordinate"
COPY: Final = "torchdistinput::copy"
WAIT: Final = "torchdistinput::wait"

_STEPS_BETWEEN_MARKS: Final = 8
_MARKS: Final = 9  # a window of 64 steps, and of up to 7 more between two marks

_NUMBERS: Final = (
    "steps",
    "samples",
    "bytes",
    "skipped",
    "seconds",
    "seconds_waiting",
    "seconds_reading",
    "seconds_coordinating",
    "seconds_copying",
)


def in_range(name: str, call: Callable[..., T], *args: Any) -> T:
    """Calls ``call``, inside a range of this name if torch's profiler runs. Local."""
    # Code that runs for every step asks whether a profiler runs before it calls this.
    if not profiler_runs():
        return call(*args)
    with profiler.record_function(name):
        return call(*args)


@final
class Metrics:
    """The measurements of one rank in one epoch: seconds, samples and bytes of this rank's replicas.

    Args:
      rank: this rank, as users know it; 0 where there is only one.
      ranks: the windows that the ranks exchanged last, if they did in an earlier epoch.
      fresh: returns the number of loader workers' batches that came in new memory, in this epoch and before.
    """

    def __init__(self, rank: int = 0, ranks: Sequence[dict[str, Any]] = (), fresh: Callable[[], int] = int) -> None:
        self.rank = rank
        self.ranks = list(ranks)
        """The window of each rank, by rank, from the last exchange."""
        self._fresh = fresh
        self._fresh_before = fresh()
        self.steps = self.samples = self.bytes = self.skipped = 0
        # Written by the consumer; `last` is when the last step was delivered:
        self.waiting = self.drawing = 0.0
        self.began = self.last = time.perf_counter()
        # The first two are written by the thread that completes steps, the others by the thread that votes:
        self.fetching = self.copying = 0.0
        self.coordinating = self.filling = 0.0  # filling: empty pieces made in a vote, which count as copying
        self._marks = deque([self._totals(0)], maxlen=_MARKS)

    def deliver(self, samples: int, num_bytes: int) -> None:
        """Counts a delivered step. Consumer's thread. After an interruption in here the step does not count."""
        steps = self.steps + 1
        self.samples += samples
        self.bytes += num_bytes
        if not steps % _STEPS_BETWEEN_MARKS:
            self._marks.append(self._totals(steps))
        self.steps = steps

    def _totals(self, steps: int) -> tuple[float, ...]:
        reading = self.drawing + self.fetching
        return (
            *(steps, self.samples, self.bytes, self.skipped),
            *(self.last - self.began, self.waiting, reading, self.coordinating, self.copying + self.filling),
        )

    def window(self) -> dict[str, Any]:
        """The numbers of the last 64 to 71 steps, or of all while there are fewer. Any thread."""
        before, totals = self._marks[0], self._totals(self.steps)
        return dict(zip(_NUMBERS, (now - then for now, then in zip(totals, before, strict=True)), strict=True))

    def own(self) -> dict[str, Any]:
        """The window of this rank, as the other ranks receive it. Any thread."""
        return {"rank": self.rank, **self.window()}

    def stats(self, epoch: int) -> dict[str, Any]:
        """All measurements, as ``DistributedDataset.stats`` returns them. Any thread."""
        totals = dict(zip(_NUMBERS, self._totals(self.steps), strict=True))
        totals["seconds"] = time.perf_counter() - self.began
        totals["fresh_batches"] = self._fresh() - self._fresh_before
        return {"epoch": epoch, **totals, "window": self.window(), "ranks": [dict(each) for each in self.ranks]}


@final
class StatsSync:
    """The periodic sync that carries the measurements of each rank, and the stream's own periodic sync.

    Args:
      metrics: this rank's measurements.
      inner: the periodic sync of the stream, if it has one.
    """

    def __init__(self, metrics: Metrics, inner: PeriodicSync | None) -> None:
        self.every: int = ROWS_BETWEEN_SYNCS if inner is None else inner.every
        self.early: bool = inner is not None and inner.early
        self._metrics = metrics
        self._inner = inner

    def mine(self, rows: int) -> str:
        """See ``PeriodicSync.mine``."""
        return json.dumps([self._metrics.own(), None if self._inner is None else self._inner.mine(rows)])

    def learn(self, rows: int, texts: Sequence[str]) -> None:
        """See ``PeriodicSync.learn``."""
        answers = [json.loads(text) for text in texts]
        self._metrics.ranks = [each for each, _ in answers]
        if self._inner is not None:
            self._inner.learn(rows, [text for _, text in answers])


def summary(epoch: int, step: int, metrics: Metrics) -> str:
    """One line: the largest part of the time that a rank's loop waited for data, and the slowest rank. Local.

    The time of a rank is its time to read and copy a step. Its time in exchanges is mostly a wait for slower ranks.

    Args:
      epoch: the number of the epoch.
      step: steps of the epoch that were delivered.
      metrics: this rank's measurements.
    """
    ranks = metrics.ranks or [metrics.own()]
    most = max(ranks, key=_waiting)
    bound = f"{100 * _waiting(most):.0f} %"
    slowest = max(ranks, key=lambda each: _per_step(each, "reading") + _per_step(each, "copying"))
    who = ""
    if len(ranks) > 1:
        bound, who = f"{bound} on rank {most['rank']}", f"slowest rank {slowest['rank']}: "
    reading, copying = _per_step(slowest, "reading"), _per_step(slowest, "copying")
    return (
        f"step {step} of epoch {epoch}: input-bound {bound}, {who}{reading + copying:.1f} ms/step "
        f"(reading {reading:.1f}, copying {copying:.1f}; coordinating {_per_step(slowest, 'coordinating'):.1f}, "
        f"waiting {_per_step(slowest, 'waiting'):.1f})"
    )


def _waiting(window: dict[str, Any]) -> float:
    """The part of the time that the loop waited for data."""
    return float(window["seconds_waiting"] / window["seconds"]) if window["seconds"] else 0.0


def _per_step(numbers: dict[str, Any], what: str) -> float:
    """Milliseconds a step."""
    return 1000 * float(numbers[f"seconds_{what}"]) / max(1, int(numbers["steps"]))
