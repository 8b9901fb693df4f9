"""The votes of one rank: begins a vote when one is due, goes on with it, and holds its outcomes.

A vote is due as soon as a step is held; with a prefetch depth of four or more, when two thirds of the steps ahead are
used, so that one message covers as many steps as possible (``ready_at_a_vote``). A rank says in its votes how many
steps ahead fit its memory, by the largest of the steps that it weighed: steps 1, 3, 7, 15 and so on of the epoch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import final

from torchdistinput.coordination.exchanges import StartedExchange
from torchdistinput.coordination.step_sync import StepSync
from torchdistinput.pipeline.end_errors import not_an_end
from torchdistinput.pipeline.metrics import COORDINATE, Metrics, in_range
from torchdistinput.plan.prefetch_depth import ready_at_a_vote
from torchdistinput.step_types import Held, LocalStep, Outcome, Raised


@final
class Voter:
    """Votes for the steps that this rank holds. One thread at a time, except where a method says otherwise.

    A rank without other ranks settles each step by itself.

    Args:
      votes: the stage in which all ranks agree.
      metrics: collects the time that votes take.
      weigh: notes the size of a step, and returns how many steps ahead fit the memory of this rank, if that is known;
        ``None`` for a fixed depth.
    """

    def __init__(
        self,
        votes: StepSync,
        metrics: Metrics,
        weigh: Callable[[LocalStep], int | None] | None = None,
    ) -> None:
        self.alone = votes.alone
        """Whether there are no other ranks."""
        self.ready: deque[Outcome] = deque()
        """The outcomes that the consumer did not take yet."""
        self.has_ended = False
        """Whether this rank takes part in no vote any more: it failed or left, or this is a fork of its process."""
        self._votes = votes
        self._metrics = metrics
        self._weigh = weigh
        self._due_at = 0
        self._vote: StartedExchange[list[Outcome]] | None = None
        self._vote_began = 0.0
        self._fits: int | None = None  # steps ahead, by the largest step that was weighed
        self._num_held = 0
        self._stops_after: int | None = None

    def read_ahead(self, depth: int) -> None:
        """The prefetch depth is ``depth`` from here on."""
        self._due_at = ready_at_a_vote(depth, self._votes.rounds)
        if self._metrics.trace is not None:
            self._metrics.trace.ahead = depth

    def hold(self, held: Held) -> None:
        """Takes the next step of this rank."""
        if self.alone:
            self.ready.append(self._votes.settle(held))
            return
        self._num_held += 1
        if not self._num_held & (self._num_held + 1) and self._weigh is not None and type(held) is LocalStep:
            self._fits = self._weigh(held)
        self._votes.hold(held)

    @property
    def in_progress(self) -> bool:
        """Whether a vote began and its outcomes are not known yet."""
        return self._vote is not None

    @property
    def is_over(self) -> bool:
        """Whether no vote will follow."""
        return self.has_ended or self._votes.over

    def poll(self) -> None:
        """Goes on with the vote in progress as far as no wait is needed, and begins one if one is due. Local.

        If the vote fails, the consumer gets its error after the steps that are ready.
        """
        if self.alone or self.is_over:
            return
        try:
            while (vote := self._vote) is not None or self._is_due():
                if vote is None:
                    self._vote_began = perf_counter() - self._metrics.filling
                    self._votes.waiting_us = int(1e6 * self._waited_so_far())
                    if self._metrics.trace is not None:
                        self._metrics.trace.vote_begins(self._num_held)
                    self._vote = StartedExchange(self._votes.vote(self._fits))
                    if self.ready:  # there is time until the next call
                        return
                elif in_range(COORDINATE, vote.poll):  # the time for pieces without a sample counts as copying
                    self._vote = None
                    self._metrics.coordinating += perf_counter() - self._metrics.filling - self._vote_began
                    outcomes = vote.conclude()
                    self._note_waits(outcomes)
                    self.ready.extend(outcomes)
                else:
                    return
        except Exception as error:
            self.fail(error)

    def _note_waits(self, outcomes: Sequence[Outcome]) -> None:
        """Notes how long the consumer waited in the vote that ended, and for whom it waited in the one before."""
        metrics, votes = self._metrics, self._votes
        # The time in which this rank did other things does not count. The rank that waits least in a vote, and for the
        # texts that may follow it, came last. Nobody is blamed for the first vote, as ranks begin at different times.
        waits_since, ended = max(self._vote_began, metrics.idle_since), perf_counter()
        votes.waited_us = int(1e6 * (ended - waits_since))
        waits = votes.waits
        if waits is not None:
            metrics.learn(waits, of_first_vote=votes.num_votes <= 2)
        if metrics.trace is not None:
            last, late = None if waits is None else waits.last, 1e-6 * votes.late_us
            metrics.trace.vote_ends(outcomes, last, late, metrics.called, waits_since)

    def _waited_so_far(self) -> float:
        """How long the consumer has waited in the epoch, in ``next`` now, unless it leaves."""
        metrics = self._metrics
        return metrics.waiting + (perf_counter() - metrics.called if self._stops_after is None else 0.0)

    def _is_due(self) -> bool:
        if self._votes.over:
            return False
        if self._stops_after is not None:
            self._votes.stop(self._stops_after)
            return True
        return self._votes.holds and len(self.ready) <= self._due_at

    def rest(self, seconds: float) -> None:
        """Sleeps until the vote in progress may go on, for at most ``seconds``. An interruption loses nothing."""
        if self._vote is not None:
            self._vote.rest(seconds)

    def tell_others(self, why: str) -> None:
        """Tells the other ranks that this one leaves, unless all steps were taken on which they agreed. Any thread."""
        if not self.is_over or any(type(each) is LocalStep for each in list(self.ready)):
            self._votes.notify(why)

    def departed(self) -> str:
        """Which other rank left or died, and why; empty if none is known to have. Any thread."""
        return self._votes.departed()

    def why_stopped(self, delivered: int) -> str:
        """What this rank does that leaves after so many steps, in words for the others."""
        return self._votes.why_stopped(delivered)

    def leave(self, delivered: int, grace_seconds: float) -> None:
        """Tells the other ranks that this one stopped: in a last vote if all answer in time, else by an abort.

        Args:
          delivered: steps that the consumer took.
          grace_seconds: how long the others may take to answer.
        """
        until = time.monotonic() + grace_seconds
        self._stops_after = delivered
        while not (self.alone or self.is_over):
            self.poll()
            left = until - time.monotonic()
            if left <= 0:
                self.abort(self.why_stopped(delivered))
            else:
                self.rest(left)

    def abort(self, reason: str) -> None:
        """Takes part in no further vote, and tells the other ranks why. Any thread. Idempotent."""
        self.has_ended = True
        self._votes.abort(reason)

    def fail(self, error: BaseException) -> None:
        """Tells the other ranks of an error here; the consumer raises it after the steps that are ready."""
        try:
            self.abort(f"failed: {type(error).__name__}: {error}")
        finally:
            self.ready.append(Raised(not_an_end(error)))

    def drop(self, delivered: int) -> list[LocalStep]:
        """Gives up the vote in progress, if any. Returns the list of the held steps, which the caller clears."""
        self._vote = None
        return self._votes.stop(delivered)
