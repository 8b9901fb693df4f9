"""The votes of one rank: begins a vote when one is due, and continues it, with or without waiting.

When a vote is due. As soon as a step is held. With a prefetch depth of four or more, a vote waits until two thirds of
the steps ahead are used, so that one message covers as many steps as possible (``ready_at_a_vote``).

Prefetch depth. A rank says in its votes how many steps ahead fit its memory, by the largest of the steps that it
weighed: the first ones, and then one in 256.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from typing import final

from torchdistinput.coordination.exchanges import StartedExchange, conclude
from torchdistinput.coordination.private_names import holds
from torchdistinput.pipeline.interfaces import Votes
from torchdistinput.pipeline.metrics import COORDINATE, Metrics, in_range
from torchdistinput.pipeline.ready_queue import ReadyQueue
from torchdistinput.plan.prefetch_depth import ready_at_a_vote, steps_that_fit
from torchdistinput.step_types import Held, LocalStep, Outcome

_MAX_BETWEEN_WEIGHINGS = 256  # steps


@final
class Voter:
    """Votes for the steps that this rank holds. Two threads use it: one polls, one waits, and a lock keeps them apart.

    Args:
      votes: the stage in which all ranks agree.
      ready: the outcomes of each vote are put here.
      depth: the prefetch depth at first: steps ahead of the one that the consumer waits for.
      max_bytes: bytes of steps ahead within which the depth may grow; ``None`` for a fixed depth.
      meter: collects the time that votes take.
      weigh: returns about how many bytes a step takes; 0 where the size is not known.
    """

    def __init__(
        self,
        votes: Votes,
        ready: ReadyQueue,
        *,
        depth: int,
        max_bytes: int | None,
        meter: Metrics,
        weigh: Callable[[LocalStep], int],
    ) -> None:
        self._votes = votes
        self._ready = ready
        self._max_bytes = max_bytes
        self.read_ahead(depth)
        self._meter = meter
        self._weigh = weigh
        self._lock = threading.RLock()  # held by the thread that continues the vote
        self._vote: StartedExchange[list[Outcome]] | None = None
        self._vote_began = 0.0
        self._largest = 0  # bytes of the largest step that was weighed
        self._until_weighed = self._between_weighings = 1  # steps
        self._stopped = False
        self.waits = False
        """Whether a thread waits in ``conclude``."""

    def read_ahead(self, depth: int) -> None:
        """The prefetch depth is ``depth`` from here on. Consumer's thread."""
        self._due_at = ready_at_a_vote(depth, self._votes.rounds)

    @property
    def fits(self) -> int | None:
        """How many steps ahead fit the memory of this rank; ``None`` where it is not known, or the depth is fixed."""
        return None if self._max_bytes is None else steps_that_fit(self._largest, self._max_bytes)

    def hold(self, held: Held) -> None:
        """Takes the next step of this rank. Any thread, but only one at a time."""
        self._until_weighed -= 1
        if self._until_weighed <= 0 and self._max_bytes is not None and type(held) is LocalStep:
            self._between_weighings = min(2 * self._between_weighings, _MAX_BETWEEN_WEIGHINGS)
            self._until_weighed = self._between_weighings
            self._largest = max(self._largest, self._weigh(held))
        self._votes.hold(held)

    @property
    def in_progress(self) -> bool:
        """Whether a vote began and its outcomes are not known yet."""
        return self._vote is not None

    @property
    def is_due(self) -> bool:
        """Whether there is something to vote for, and it is time to do so."""
        return self._votes.holds and (self._stopped or len(self._ready) <= self._due_at)

    def poll(self) -> None:
        """Begins a vote if one is due, and continues the vote in progress as far as no wait is needed.

        Does nothing while the other thread votes. Local.
        """
        if not ((self._vote is not None or self.is_due) and self._lock.acquire(blocking=False)):
            return
        try:
            if self._vote is None and not self._votes.over and self.is_due:
                self._begin()
            if self._vote is not None and self._vote.look():
                self._finish()
        except BaseException:
            self._vote = None  # the vote is over, for the other thread too
            raise
        finally:
            if holds(self._lock):  # else a signal handler closed the iterator meanwhile, and released it
                self._lock.release()

    def conclude(self) -> None:
        """Waits for the outcomes of the vote in progress, or of a new one if one is due. Collective, as a vote is."""
        with self._lock:
            if not self._votes.over and (self._vote is not None or self.is_due):  # else the other thread voted first
                self.waits = True
                self._finish()
                self.waits = False

    def stop(self, delivered: int) -> list[LocalStep]:
        """The consumer stopped after ``delivered`` steps: concludes the vote in progress, and votes for no step more.

        Returns:
          The list of the steps that were held, which the caller clears.
        """
        with self._lock:
            if self._vote is not None:
                self._finish()
            self._stopped = True
            dropped = self._votes.stop(delivered)
        if self._votes.alone:
            self._ready.put(conclude(self._votes.vote()))
        return dropped

    def let_go(self) -> None:
        """Releases the lock where an interruption in ``poll`` left it taken by this thread."""
        if holds(self._lock):
            self._lock.release()

    def _begin(self) -> StartedExchange[list[Outcome]]:
        self._vote_began = perf_counter()
        self._vote = vote = StartedExchange(self._votes.vote(self.fits))
        return vote

    def _finish(self) -> None:
        """Waits for the outcomes of the vote, and puts them into the queue.

        A vote may make and send pieces without a sample; this time counts as copying.
        """
        meter = self._meter
        filling = meter.filling
        vote = self._vote or self._begin()
        try:
            outcomes = in_range(COORDINATE, vote.conclude)
        finally:
            self._vote = None
        meter.coordinating += perf_counter() - self._vote_began - (meter.filling - filling)
        self._ready.put(outcomes)
