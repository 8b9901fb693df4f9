"""Input metrics: how long the training loop waits for its input, and which rank makes all ranks wait.

Problem. A loop that is slow because of its input looks like a slow model, and one slow rank makes all ranks wait.

Decision. Each stage adds up the seconds that it takes, from readings of the clock, without a lock: one thread at a time
writes each sum. What the ranks know of each other rides on their votes (``AgreedWaits``): who came last and by how
much, and whose loop waited longest. Why it did is known to that rank alone, which says it in its own log.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, TypeVar, final

from torch.autograd import profiler

from torchdistinput.coordination.private_names import profiler_runs
from torchdistinput.plan.step_agreement import AgreedWaits
from torchdistinput.tracing.epoch_trace import EpochTrace
from torchdistinput.tracing.verdict import RankTimes, verdict

T = TypeVar("T")

FETCH: Final = "torchdistinput::fetch"
COORDINATE: Final = "torchdistinput::coordinate"
COPY: Final = "torchdistinput::copy"
WAIT: Final = "torchdistinput::wait"


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
      fresh: returns the number of loader workers' batches that came in new memory, in this epoch and before.
      rank_of: the name of a rank of the vote, as users know it.
      is_first: whether this rank says in its log what all ranks know.
    """

    def __init__(
        self,
        rank: int = 0,
        fresh: Callable[[], int] = int,
        rank_of: Callable[[int], int] = int,
        *,
        is_first: bool = True,
    ) -> None:
        self.rank = rank
        self._rank_of = rank_of
        self._is_first = is_first
        self._told: AgreedWaits | None = None
        self._made_wait: dict[int, float] = {}  # for how long, by rank
        self.trace: EpochTrace | None = None
        """The times of each step; ``None`` where they are not measured."""
        self._fresh = fresh
        self._fresh_before = fresh()
        self.steps = self.samples = self.bytes = self.skipped = 0
        # Written by the consumer; `last` is when the last step was delivered:
        self.waiting = self.drawing = 0.0
        self.called = self.idle_since = 0.0  # when ``next`` was called last; since when it does nothing but wait
        self.began = self.last = time.perf_counter()
        self.fetching = self.copying = 0.0  # written by the thread that makes steps
        self.coordinating = self.filling = 0.0  # filling: empty pieces made in a vote, which count as copying

    def learn(self, told: AgreedWaits, *, of_first_vote: bool) -> None:
        """Takes what all ranks know after a vote. Nobody is blamed for the first vote. Consumer's thread."""
        if told.last is not None and told.late > 0 and not of_first_vote:
            rank, seconds = self._rank_of(told.last), told.late / 1e6
            self._made_wait[rank] = self._made_wait.get(rank, 0.0) + seconds
        self._told = told

    def _rank_times(self) -> list[RankTimes]:
        """This rank; and of the others the one that came last, and the one that waited longest."""
        told, seconds = self._told, self.last - self.began
        facts = {} if self.trace is None else self.trace.waits.facts(seconds)
        own = RankTimes(rank=self.rank, seconds=seconds, waiting=self.waiting, **facts)
        if told is None:
            return [own]
        waited, waiter = told.waited / 1e6, self._rank_of(told.waiter)
        found = {self.rank: replace(own, waiting=min(self.waiting, waited))}
        for rank in {waiter, *self._latest()}:
            each = found.get(rank, RankTimes(rank=rank, seconds=seconds, waiting=0.0))
            made_wait = self._made_wait.get(rank, 0.0)
            found[rank] = replace(each, waiting=waited if rank == waiter else each.waiting, made_wait=made_wait)
        return [*found.values()]

    def _latest(self) -> list[int]:
        """The rank that made the others wait longest, if one did."""
        made_wait = dict(self._made_wait)  # the consumer may add a rank meanwhile
        return sorted(made_wait, key=lambda rank: made_wait[rank])[-1:]

    def line(self, epoch: int, step: int, *, alone: bool) -> str:
        """The verdict on the epoch so far, with what it is about; empty where another rank says it. Local.

        The first rank says what all know; the rank that it is about says the same, with what it did.

        Args:
          epoch: the number of the epoch.
          step: steps of the epoch that were delivered.
          alone: whether there is no other rank.
        """
        told = self._told
        of_all = alone or told is not None
        found = verdict(self._rank_times(), alike=None if told is None else told.alike, of_all=of_all)
        if not self._is_first and (told is None or found.rank != self.rank or found.stage is None):
            return ""
        about = "" if of_all else f", as rank {self.rank} alone sees it"
        return f"step {step} of epoch {epoch}{about}: {found}"

    def stats(self, epoch: int, *, alone: bool) -> dict[str, float]:
        """The measurements as ``DistributedDataset.stats`` returns them. Any thread.

        Args:
          epoch: the number of the epoch.
          alone: whether there is no other rank.
        """
        seconds, told = time.perf_counter() - self.began, self._told
        found = {
            "epoch": epoch,
            "steps": self.steps,
            "samples": self.samples,
            "bytes": self.bytes,
            "skipped_samples": self.skipped,
            "fresh_batches": self._fresh() - self._fresh_before,
            "seconds": seconds,
            "samples_per_second": self.samples / seconds if seconds else 0.0,
            "wait_seconds": self.waiting,
            "read_seconds": self.drawing + self.fetching,
            "vote_seconds": self.coordinating,
            "copy_seconds": self.copying + self.filling,
        }
        if alone:
            return {**found, "exposed_wait_seconds": self.waiting, "made_others_wait_seconds": 0.0}
        if told is not None:
            waits = (self.waiting, self.rank), (told.waited / 1e6, self._rank_of(told.waiter))
            found["exposed_wait_seconds"], found["exposed_wait_rank"] = max(waits)
            found["made_others_wait_seconds"] = self._made_wait.get(self.rank, 0.0)
        for rank in self._latest():
            found |= {"latest_rank": rank, "latest_rank_made_wait_seconds": self._made_wait[rank]}
        return found
