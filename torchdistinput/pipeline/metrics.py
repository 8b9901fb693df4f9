"""Where the time of an input goes: whether the training waits for it, and which rank makes all of them wait.

Problem. A loop that is slow because of its input looks like a slow model, and one slow rank makes all ranks wait.

Decision. The stages add up the seconds that they take, from readings of the clock, without a lock: each sum is written
by one thread at a time. Totals are put aside every few steps, which gives a window over the last ones. What the ranks
measured rides on the periodic syncs: an exchange once in 64 rows (256 where steps are short), in which workers that
read files of their own also say where they stand. It is the only cost that grows with the number of ranks, some 300
bytes for each.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, final

from torch.autograd import profiler

from torchdistinput.step_types import ROWS_BETWEEN_LANDMARKS, PeriodicSync

__all__ = ["COORDINATE", "COPY", "FETCH", "WAIT", "Metrics", "StatsSync", "in_range", "summary"]

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
    """Calls it, in a range that torch's profiler shows, if one runs. Local."""
    # The public record_function takes some ten microseconds also when nobody records. This flag, torch's own for that
    # purpose, is the same for all threads. What is done for every step looks at it before it calls this function.
    if not profiler._is_profiler_enabled:  # noqa: SLF001 - see above
        return call(*args)
    with profiler.record_function(name):
        return call(*args)


@final
class Metrics:
    """What one rank measures in one epoch. Seconds, samples and bytes of this rank's replicas.

    Args:
      rank: this rank, as users know it; 0 where there is only one.
      ranks: what the ranks told each other last, if they did in an epoch before.
      fresh: batches of loader workers that came in fresh memory, in this epoch and before.
    """

    def __init__(self, rank: int = 0, ranks: Sequence[dict[str, Any]] = (), fresh: Callable[[], int] = int) -> None:
        self.rank = rank
        self.ranks = list(ranks)
        """The window of each rank, by rank, as they told each other last."""
        self._fresh = fresh
        self._fresh_before = fresh()
        self.steps = self.samples = self.bytes = self.skipped = 0
        self.largest = 0
        """Bytes of the largest step."""
        # Written by the consumer; the last one says when the last step was delivered:
        self.waiting = self.drawing = 0.0
        self.reading_in_line = 0.0  # counts as both: steps that the consumer waits for as it reads them
        self.began = self.last = time.perf_counter()
        # Written by whoever completes steps, and by whoever votes, which may be another thread:
        self.fetching = self.copying = 0.0
        self.coordinating = self.filling = 0.0  # pieces without a sample count as copied
        self._marks = deque([self._totals(0)], maxlen=_MARKS)

    def deliver(self, samples: int, num_bytes: int) -> None:
        """A step was delivered. The consumer's. After an interruption in here it does not count."""
        steps = self.steps + 1
        self.samples += samples
        self.bytes += num_bytes
        if num_bytes > self.largest:  # noqa: PLR1730 - max() takes four times as long
            self.largest = num_bytes
        if not steps % _STEPS_BETWEEN_MARKS:
            self._marks.append(self._totals(steps))
        self.steps = steps

    def _totals(self, steps: int) -> tuple[float, ...]:
        waiting = self.waiting + self.reading_in_line
        reading = self.drawing + self.fetching + self.reading_in_line
        return (
            *(steps, self.samples, self.bytes, self.skipped),
            *(self.last - self.began, waiting, reading, self.coordinating, self.copying + self.filling),
        )

    def window(self) -> dict[str, Any]:
        """The numbers of the last 64 to 71 steps, or of all while there are fewer. Any thread."""
        before, totals = self._marks[0], self._totals(self.steps)
        return dict(zip(_NUMBERS, (now - then for now, then in zip(totals, before, strict=True)), strict=True))

    def own(self) -> dict[str, Any]:
        """The window as the other ranks get it. Any thread."""
        return {"rank": self.rank, **self.window()}

    def stats(self, epoch: int) -> dict[str, Any]:
        """Everything, as users see it. Any thread."""
        totals = dict(zip(_NUMBERS, self._totals(self.steps), strict=True))
        totals["seconds"] = time.perf_counter() - self.began
        totals["fresh_batches"] = self._fresh() - self._fresh_before
        return {"epoch": epoch, **totals, "window": self.window(), "ranks": [dict(each) for each in self.ranks]}


@final
class StatsSync:
    """Landmarks that carry what each rank measured, beside the stream's own.

    Args:
      meter: this rank's.
      inner: what the stream tells, if it does.
    """

    def __init__(self, meter: Metrics, inner: PeriodicSync | None) -> None:
        self.every: int = ROWS_BETWEEN_LANDMARKS if inner is None else inner.every
        self.early: bool = inner is not None and inner.early
        self._meter = meter
        self._inner = inner

    def mine(self, rows: int) -> str:
        """See ``PeriodicSync.mine``."""
        return json.dumps([self._meter.own(), None if self._inner is None else self._inner.mine(rows)])

    def learn(self, rows: int, texts: Sequence[str]) -> None:
        """See ``PeriodicSync.learn``."""
        told = [json.loads(text) for text in texts]
        self._meter.ranks = [each for each, _ in told]
        if self._inner is not None:
            self._inner.learn(rows, [text for _, text in told])


def summary(epoch: int, step: int, meter: Metrics) -> str:
    """One line: the share of the time that the loop waited for data, and the rank whose input takes longest. Local.

    A rank's time is what its input takes for a step, reading and copying: the others only wait for it, in the exchange.

    Args:
      epoch: its number.
      step: steps of it that were delivered.
      meter: what was measured.
    """
    own = meter.window()
    bound = own["seconds_waiting"] / own["seconds"] if own["seconds"] else 0.0
    ranks = meter.ranks or [own]
    slowest = max(ranks, key=lambda each: _per_step(each, "reading") + _per_step(each, "copying"))
    who = f"slowest rank {slowest['rank']}: " if len(ranks) > 1 else ""
    reading, copying = _per_step(slowest, "reading"), _per_step(slowest, "copying")
    return (
        f"step {step} of epoch {epoch}: input-bound {100 * bound:.0f} %, {who}{reading + copying:.1f} ms/step "
        f"(reading {reading:.1f}, copying {copying:.1f}; coordinating {_per_step(slowest, 'coordinating'):.1f}, "
        f"waiting {_per_step(slowest, 'waiting'):.1f})"
    )


def _per_step(numbers: dict[str, Any], what: str) -> float:
    """Milliseconds a step."""
    return 1000 * float(numbers[f"seconds_{what}"]) / max(1, int(numbers["steps"]))
