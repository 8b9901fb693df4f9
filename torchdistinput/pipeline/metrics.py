"""Input metrics: how long the training loop waits for its input, and which rank makes all ranks wait.

Problem. A loop that is slow because of its input looks like a slow model, and one slow rank makes all ranks wait.

Decision. Each stage adds up the seconds that it takes, from readings of the clock, without a lock: one thread at a time
writes each sum. The totals are recorded every few steps, which gives a window over the last steps. The ranks exchange
their windows in the periodic syncs: one exchange in 64 rows (256 where steps are short; more often with ``log_every``),
in which workers that read files of their own also exchange their positions, and when an epoch begins, for the one
before. This is the only cost that grows with the number of ranks: about 300 bytes for each, with ``log_every`` 1 KiB.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from heapq import nlargest
from operator import itemgetter
from typing import Any, Final, TypeVar, final

from torch.autograd import profiler

from torchdistinput.coordination.private_names import profiler_runs
from torchdistinput.report.verdict import VOTE, RankTimes, verdict
from torchdistinput.step_types import ROWS_BETWEEN_SYNCS, PeriodicSync
from torchdistinput.tracing.epoch_trace import EpochTrace

T = TypeVar("T")

FETCH: Final = "torchdistinput::fetch"
COORDINATE: Final = "torchdistinput::coordinate"
COPY: Final = "torchdistinput::copy"
WAIT: Final = "torchdistinput::wait"

_STEPS_BETWEEN_MARKS: Final = 8
_MARKS: Final = 9  # a window of 64 steps, and of up to 7 more between two marks

_LEAST_BETWEEN_SYNCS: Final = 8
_MOST_TOLD: Final = 3
"""Ranks for which this one waited that the others are told of."""

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
      rank_of: the name of a rank of the vote, as users know it.
    """

    def __init__(
        self,
        rank: int = 0,
        ranks: Sequence[dict[str, Any]] = (),
        fresh: Callable[[], int] = int,
        rank_of: Callable[[int], int] = int,
    ) -> None:
        self.rank = rank
        self._rank_of = rank_of
        self.ranks = list(ranks)
        """The window of each rank, by rank, from the last exchange."""
        self._told: list[dict[str, Any]] = []  # of the whole epoch, by rank, from the last exchange
        self._waited_for: dict[int, float] = {}
        self.trace: EpochTrace | None = None
        """The times of each step; ``None`` where they are not measured."""
        self._fresh = fresh
        self._fresh_before = fresh()
        self.steps = self.samples = self.bytes = self.skipped = 0
        # Written by the consumer; `last` is when the last step was delivered:
        self.waiting = self.drawing = 0.0
        self.called = self.idle_since = 0.0  # when ``next`` was called last; since when it does nothing but wait
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

    def waited_for(self, rank: int, vote: int, seconds: float) -> None:
        """The consumer waited for the rank that voted last in a vote. Consumer's thread."""
        name = self._rank_of(rank)
        self._waited_for[name] = self._waited_for.get(name, 0.0) + seconds
        if self.trace is not None and self.trace.waits is not None:
            self.trace.waits.waited_for(name, vote, seconds)

    def own(self) -> dict[str, Any]:
        """What the other ranks receive of this one: its window, and its epoch so far. Consumer's thread."""
        return {"rank": self.rank, **self.window(), "epoch": self._epoch_so_far()}

    def _epoch_so_far(self) -> dict[str, Any]:
        longest = nlargest(_MOST_TOLD, self._waited_for.items(), key=itemgetter(1))
        waits = None if self.trace is None else self.trace.waits
        return {
            "rank": self.rank,
            "steps": self.steps,
            "seconds": self.last - self.began,
            "waiting": self.waiting,
            "waited_for": {str(rank): seconds for rank, seconds in longest},
            **({} if waits is None else waits.own()),
        }

    def learn(self, told: Sequence[dict[str, Any]]) -> None:
        """Takes what all ranks told of themselves; see ``own``."""
        self._told = [each.pop("epoch") for each in told]
        self.ranks = list(told)
        if self.trace is not None and self.trace.waits is not None:
            self.trace.waits.learn(self._told)

    def rank_times(self) -> list[RankTimes]:
        """The numbers of all ranks for the verdict, as of the last exchange of the epoch; before that of this one."""
        told = self._told or [{**self._epoch_so_far(), "unsettled": 0.0}]
        found = [_times_of(each, told) for each in told]
        if not self._told:  # this rank knows for whom it waited, and not what they did
            found += [
                RankTimes(rank=rank, seconds=found[0].seconds, waiting=0.0, made_wait=seconds)
                for rank, seconds in self._waited_for.items()
            ]
        return found

    @property
    def told_steps(self) -> int | None:
        """Steps of the epoch that this rank had taken at the last exchange; ``None`` before the first one."""
        return next((each.get("steps") for each in self._told if each["rank"] == self.rank), None)

    def flat_stats(self, epoch: int, *, alone: bool) -> dict[str, float]:
        """The measurements as ``DistributedDataset.stats(flat=True)`` returns them. Any thread.

        Args:
          epoch: the number of the epoch.
          alone: whether there is no other rank.
        """
        others = 0.0 if self._told or alone else math.nan  # nothing is known of them
        steps, samples, num_bytes, skipped, _, waiting, reading, coordinating, copying = self._totals(self.steps)
        seconds = time.perf_counter() - self.began
        return {
            "epoch": epoch,
            "steps": steps,
            "samples": samples,
            "bytes": num_bytes,
            "skipped_samples": skipped,
            "seconds": seconds,
            "samples_per_second": samples / seconds if seconds else 0.0,
            "exposed_wait_seconds": others + max([waiting, *(each["waiting"] for each in self._told)]),
            "wait_seconds": waiting,
            "read_seconds": reading,
            "vote_seconds": coordinating,
            "copy_seconds": copying,
            "made_others_wait_seconds": others + _made_wait(self.rank, self._told),
        }

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
      log_every: after how many steps each a verdict is logged, which needs the numbers of all ranks; 0 for never.
    """

    def __init__(self, metrics: Metrics, inner: PeriodicSync | None, log_every: int = 0) -> None:
        # Twice from line to line, so that each line has numbers of all ranks, unless lines are more frequent.
        often = min(max(log_every // 2, _LEAST_BETWEEN_SYNCS), ROWS_BETWEEN_SYNCS) if log_every else ROWS_BETWEEN_SYNCS
        self.every: int = often if inner is None else inner.every
        self.early: bool = inner is not None and inner.early
        self._metrics = metrics
        self._inner = inner

    def mine(self, rows: int) -> str:
        """See ``PeriodicSync.mine``."""
        return json.dumps([self._metrics.own(), None if self._inner is None else self._inner.mine(rows)])

    def learn(self, rows: int, texts: Sequence[str]) -> None:
        """See ``PeriodicSync.learn``."""
        answers = [json.loads(text) for text in texts]
        self._metrics.learn([each for each, _ in answers])
        if self._inner is not None:
            self._inner.learn(rows, [text for _, text in answers])


def verdict_at(epoch: int, step: int, metrics: Metrics, *, alone: bool) -> str:
    """The verdict on the epoch so far, as one line, with what it is about. Local.

    Args:
      epoch: the number of the epoch.
      step: steps of the epoch that were delivered.
      metrics: this rank's measurements, with what the ranks exchanged last.
      alone: whether there is no other rank.
    """
    told, about = metrics.told_steps, ""
    of_all = alone or told is not None
    if not of_all:
        about = f", as rank {metrics.rank} alone sees it"
    elif told is not None and told < metrics.steps:
        about = f", of {told} steps"
    return f"step {step} of epoch {epoch}{about}: {verdict(metrics.rank_times(), of_all=of_all)}"


def _made_wait(rank: int, told: Sequence[Mapping[str, Any]]) -> float:
    """How long a rank made the others wait: as long as the rank that waited longest for it."""
    return max((each["waited_for"].get(str(rank), 0.0) for each in told), default=0.0)


def _times_of(told: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> RankTimes:
    workers, busy, unsettled = told.get("num_workers"), told.get("seconds_of_workers", 0.0), told.get("unsettled", 0.0)
    waited_in = dict(told.get("waited_in", {}))
    if unsettled:  # the numbers of the ranks are to agree for whom they waited
        waited_in[VOTE] -= unsettled
    return RankTimes(
        rank=told["rank"],
        seconds=told["seconds"],
        waiting=told["waiting"] - unsettled,
        made_wait=_made_wait(told["rank"], others),
        late_in=told.get("late_in", {}),
        waited_in=waited_in,
        files=told.get("files", {}),
        waited_files=told.get("waited_files", {}),
        num_workers=workers,
        busy=busy / (workers * told["seconds"]) if workers and told["seconds"] else None,
    )
