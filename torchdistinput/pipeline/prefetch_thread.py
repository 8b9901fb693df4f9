"""The background thread of an iterator: completes prefetched steps, and votes with the other ranks for them.

``prefetcher`` is the other side: the *consumer*, which is the user's thread in ``next``. The consumer draws its half of
a step and hands the step over as a *work item*. The thread completes work items, and tells the other ranks in *votes*
which steps this rank holds.

When to vote. As soon as a step is held. Exception: if the step was complete within 200 us and another work item is
queued, the thread completes that item first, so that one message covers both. With a prefetch depth of four or more, a
vote waits until two thirds of the steps ahead are used, so that one message covers as many steps as possible.

Which thread votes. The background thread. Exception: with a prefetch depth of four or more, and where the consumer may
help, the consumer begins the votes and polls them in each ``next``. Beside a training loop in Python the background
thread would get the interpreter's lock too late, when no step is ready any more. The background thread takes over votes
that the consumer leaves unfinished, when the consumer has to wait or does not come back for 0.1 s.

At the end, the side that leaves last discards the steps that nobody took. As a rule this is the consumer. It is the
background thread where the garbage collector drops the iterator on that thread, or where the thread still waits for
its data after the grace time.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, final

from torchdistinput.coordination.exchanges import Exchange, StartedExchange, conclude
from torchdistinput.coordination.private_names import holds
from torchdistinput.pipeline.metrics import COORDINATE, Metrics, in_range
from torchdistinput.pipeline.shutdown import Shutdown, not_an_end
from torchdistinput.plan.prefetch_depth import PrefetchDepth, shows
from torchdistinput.step_types import Ahead, Drawn, Held, LocalStep, Outcome, Raised

__all__ = ["LoaderWorkers", "PrefetchThread", "Upstream", "Votes"]

_FAST_SECONDS = 200e-6
_MOST_BETWEEN_WEIGHINGS = 256  # steps
_LOOK_SECONDS = 0.1
_LOOK = object()  # queued like a work item: look whether there is a step to vote for


class _Stop(NamedTuple):
    """Queued like a work item: the consumer takes no further step."""

    delivered: int
    """Steps that the consumer took."""


class Votes(Protocol):
    """The stage in which all ranks agree on their steps; see ``step_sync.StepSync``."""

    @property
    def over(self) -> bool:
        """Whether the last outcome of the epoch was returned."""

    @property
    def alone(self) -> bool:
        """Whether no other rank votes."""

    @property
    def rounds(self) -> int:
        """About how many times a vote has to be polled until it is complete."""

    @property
    def holds(self) -> bool:
        """Whether there is something to vote for."""

    def settle(self, held: Held) -> Outcome:
        """Where no other rank votes: the outcome of the next step of this rank."""

    def hold(self, held: Held) -> None:
        """Takes the next step of this rank. Any thread, but only one at a time."""

    def vote(self, ahead: int = 0) -> Exchange[list[Outcome]]:
        """One exchange: the outcomes that the ranks agree on. ``ahead``: 1 asks for more depth, -1 for less."""

    def stop(self, delivered: int) -> list[LocalStep]:
        """The consumer stopped after ``delivered`` steps. Returns the list of held steps, which the caller clears."""

    def waiting_since(self) -> float | None:
        """When the exchange in progress began, or ``None``. Any thread."""

    def late(self) -> list[int]:
        """The ranks that have not yet joined the exchange in progress. Any thread."""

    def abort(self, reason: str) -> None:
        """Ends the exchange on all ranks and tells them the reason. Any thread, idempotent."""


class LoaderWorkers(Protocol):
    """The loader workers of a source: whether one of them died, or is late for a waiting consumer."""

    consumers: dict[object, float]
    """The consumers that wait for a step now, each with the time since when, by ``perf_counter``."""

    def lost_workers(self) -> str:
        """Which loader workers died, in words; empty where none did."""

    def look(self) -> object:
        """Checks whether a loader worker is late for a consumer that waits."""


class Upstream(LoaderWorkers, Protocol):
    """The stages before the vote, in which no other rank takes part; see ``upstream``."""

    def draw(self) -> Drawn | Held:
        """The half of the next step that belongs to the caller's thread."""

    def produce(self, drawn: Drawn | Held, /) -> Held:
        """The complete step: fetched, and its copies to the devices begun."""

    def discard(self, steps: Sequence[LocalStep], /) -> None:
        """Discards steps that nobody will take."""

    def enter_thread(self) -> None:
        """The thread that calls ``produce`` calls this first."""

    def close_source(self) -> None:
        """Ends loader workers and open files."""

    def close_devices(self) -> None:
        """Releases the devices, once the thread has stopped."""

    def weigh(self, step: LocalStep, /) -> int:
        """About how many bytes a step takes; 0 where the size is not known."""

    def expect(self, steps: int, /) -> None:
        """Announces that ``steps`` steps will be drawn at once."""


@final
class PrefetchThread:
    """Completes work items, votes for them, and puts the outcomes into ``ready``, from which the consumer takes them.

    Args:
      upstream: the stages before the vote.
      votes: the stage in which all ranks agree.
      depth: the prefetch depth at first: steps ahead of the one that the consumer waits for.
      threaded: whether there is a thread; without one, the consumer does all the work.
      meter: collects the time that exchanges take.
      room: bytes of steps ahead within which the depth may grow; ``None`` for a fixed depth.
    """

    def __init__(
        self, upstream: Upstream, votes: Votes, *, depth: int, threaded: bool, meter: Metrics, room: int | None = None
    ) -> None:
        self.upstream = upstream
        self.votes = votes
        self._alone = votes.alone
        self.meter = meter
        self.depth = depth
        self._read_ahead = PrefetchDepth(depth, room, votes.rounds)
        self._making = 0.0  # seconds that completing steps took since the last vote began
        self._grows = room is not None
        self._largest = 0  # bytes of the largest step that was weighed
        self._until_weighed = self._between_weighings = 1  # steps
        self._between = 0.0  # seconds between the beginnings of the last two votes
        self._work_items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.ready: deque[Outcome] = deque()
        """The outcomes that nobody took yet. The consumer takes from the left side."""
        self._wake_up: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_waited_for = False
        self._given = self._made = 0  # work items
        self._vote: StartedExchange[list[Outcome]] | None = None
        self._vote_began = 0.0
        self._watched = False  # whether the consumer polls the votes
        self._looks = 0  # how often the consumer polled
        self._has_failed = False  # whether a vote failed while the consumer polled it
        self._vote_lock = threading.RLock()  # held by the thread that continues the vote
        self._concludes = False  # whether the background thread holds the lock and waits for the vote
        self.shutdown = Shutdown(upstream, votes, self.ready, threaded=threaded)
        self.thread: threading.Thread | None = None
        if threaded:
            self.thread = threading.Thread(target=self._run, name="torchdistinput-input", daemon=True)

    def begin(self) -> None:
        """Starts the thread, if there is one. After an interruption in this call it may run: ``stop`` ends it."""
        if self.thread is not None:
            self.thread.start()

    @property
    def idle(self) -> bool:
        """Whether every work item that was handed over is complete and held. Consumer's thread."""
        return self._given == self._made

    def give(self, item: Drawn | Held) -> None:
        """Hands a work item over to the thread. Consumer's thread."""
        self._given += 1
        self._work_items.put(item)

    def make(self, item: Drawn | Held) -> None:
        """Completes a work item on the consumer's thread. Called only while ``idle`` is true."""
        if type(item) is LocalStep and item.parcels:  # it is complete
            held: Held = item
        else:
            began = time.perf_counter()
            held = self.upstream.produce(item)
            self._making += time.perf_counter() - began
        if self._alone:
            self._put([self.votes.settle(held)])
            return
        if self._grows:
            self._weigh(held)
        self.votes.hold(held)

    def leave_votes(self, *, wake: bool) -> None:
        """Leaves the votes to the background thread. Consumer's thread.

        Args:
          wake: whether to wake the background thread where a vote is due, as it may not know.
        """
        self._watched = False
        if wake and not self._concludes and self._vote_is_due():
            self._work_items.put(_LOOK)

    def help_voting(self) -> None:
        """Begins a vote if one is due, and continues the vote in progress without waiting. Consumer's thread."""
        self._watched = True
        self._looks += 1
        if self._has_failed or (self._vote is None and not self._vote_is_due()):
            return
        if self.shutdown.thread_left or not self._vote_lock.acquire(blocking=False):
            return  # the thread has left, and its last outcome is in ``ready``; or it continues the vote itself
        try:
            vote = self._vote
            if vote is None and not self.votes.over and self.votes.holds and self._vote_is_due():
                vote = self._begin_vote()
            if vote is not None and vote.look():
                self._conclude()
        except Exception as error:  # the consumer takes what is ready first, as where the thread fails
            self._vote = None
            self._has_failed = True
            self._fail(error)
        except BaseException:
            self._vote = None  # the vote is over, for the background thread too
            raise
        finally:
            try:  # noqa: SIM105 - this runs for every step, and `suppress` takes as long as all the rest
                self._vote_lock.release()
            except RuntimeError:  # a signal handler closed the iterator meanwhile, and released the lock
                pass

    @property
    def to_spare(self) -> int:
        """How many outcomes may be taken before a vote is due. Consumer's thread, while it polls the votes."""
        return len(self.ready) - self._read_ahead.due_at if self._vote is None else 0

    def wait(self, seconds: float) -> None:
        """Waits until there is an outcome, for at most ``seconds``. Consumer's thread."""
        self._watched = False
        self._work_items.put(_LOOK)
        self._is_waited_for = True
        try:
            if not self.ready:  # checked again: an outcome put before ``_is_waited_for`` was set wakes nobody
                with contextlib.suppress(queue.Empty):
                    self._wake_up.get(timeout=seconds)
        finally:
            self._is_waited_for = False

    def _put(self, outcomes: Iterable[Outcome]) -> None:
        self.ready.extend(outcomes)
        if self._is_waited_for:
            self._wake_up.put(None)

    def stop(self, delivered: int) -> None:
        """The consumer stopped after ``delivered`` steps. Any thread, idempotent."""
        if threading.current_thread() is not self.thread and holds(self._vote_lock):
            self._vote_lock.release()  # an interruption came just before the release in ``help_voting``
        self._work_items.put(_Stop(delivered))

    def _run(self) -> None:
        try:
            self.upstream.enter_thread()
            while not self.votes.over:
                self._work()
        except BaseException as error:  # the consumer and the other ranks must hear of every error
            self._fail(error)
        finally:
            self.shutdown.thread_leaves()

    def _fail(self, error: BaseException) -> None:
        try:
            self.votes.abort(f"failed: {type(error).__name__}: {error}")
        finally:
            self._put([Raised(not_an_end(error))])

    def _work(self) -> None:
        """Completes work items until a vote is due, and votes; where no other rank votes, completes one item."""
        due = False
        while not (due or self._is_time_to_vote()):
            due = self._complete(self._next_item())  # no local name: it would keep the last step alive during a wait
        if self._alone:
            return
        with self._vote_lock:
            if not self.votes.over and (due or self._is_time_to_vote()):  # else the consumer voted first
                self._concludes = True
                self._conclude()
                self._concludes = False

    def _is_time_to_vote(self) -> bool:
        if self._watched:
            return False
        return self._vote is not None or (self.votes.holds and self._work_items.empty() and self._vote_is_due())

    def _next_item(self) -> Any:
        seconds = None if self._alone else _LOOK_SECONDS
        while True:
            looks = self._looks
            with contextlib.suppress(queue.Empty):
                return self._work_items.get(timeout=seconds)
            if self._watched and self._looks == looks:  # the consumer did not come back in time
                self._watched = False
                return _LOOK

    def _complete(self, item: Any) -> bool:
        """Completes a work item. Returns whether to vote now; where no other rank votes, whether to check ``over``."""
        votes = self.votes
        if item is _LOOK:
            return False
        if type(item) is _Stop:
            with self._vote_lock:
                if self._vote is not None:
                    self._conclude()
                dropped = votes.stop(item.delivered)
                self.upstream.discard(dropped)
                dropped.clear()
            if self._alone:
                self._put(conclude(votes.vote()))
            return True
        began = time.perf_counter()
        held = self.upstream.produce(item)
        if self._alone:
            self._put([votes.settle(held)])
            self._made += 1
            return True
        if self._grows:
            self._weigh(held)
        votes.hold(held)
        self._made += 1
        took = time.perf_counter() - began
        self._making += took
        return took > _FAST_SECONDS and not self._watched and self._vote_is_due()

    def _vote_is_due(self) -> bool:
        return len(self.ready) <= self._read_ahead.due_at

    def _weigh(self, held: Held) -> None:
        """Measures the memory of a step, ever more rarely: the depth that this rank asks for depends on it."""
        self._until_weighed -= 1
        if self._until_weighed <= 0 and type(held) is LocalStep:
            self._between_weighings = min(2 * self._between_weighings, _MOST_BETWEEN_WEIGHINGS)
            self._until_weighed = self._between_weighings
            self._largest = max(self._largest, self.upstream.weigh(held))

    def _begin_vote(self) -> StartedExchange[list[Outcome]]:
        now = time.perf_counter()
        self._between, self._vote_began = now - self._vote_began, now
        self._making = 0.0
        self._vote = vote = StartedExchange(
            self.votes.vote(self._read_ahead.wish(max(self._largest, self.meter.largest)))
        )
        return vote

    def _conclude(self) -> None:
        """Waits for the outcomes of the vote, and puts them into ``ready``.

        A vote may make and send pieces without a sample; this time counts as copying.
        """
        meter = self.meter
        filling = meter.filling
        vote = self._vote or self._begin_vote()
        try:
            outcomes = in_range(COORDINATE, vote.conclude)
        finally:
            self._vote = None
        took = time.perf_counter() - self._vote_began - (meter.filling - filling)
        meter.coordinating += took
        self._read_ahead.voted(shown=shows(took - self._making, self._between))
        for outcome in outcomes:
            if isinstance(outcome, Ahead):
                self._read_ahead.agreed(outcome.steps)
        self._put(outcomes)
