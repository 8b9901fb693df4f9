"""The other side of ``prefetcher``: the one background thread, which completes steps and votes for them.

The *consumer* is the user's thread, in ``next``. It hands over *work items*: steps of which its own half is done. The
thread completes them, and tells the other ranks in *votes* that it holds them.

When to vote. As soon as a step is held; but if that step was complete within 200 us and another work item lies there,
the other one is completed first, so that one message covers both. Where four steps or more are read ahead, a vote waits
until two thirds of them are used up, so that a message covers as many.

Who votes. The thread; but where four steps or more are read ahead, the consumer begins the votes, and looks after them
each time that it comes, if it may help. Beside a training loop in Python the thread would get the interpreter's lock
too late: when nothing is ready any more. Votes that the consumer leaves unfinished are taken over by the thread, when
the consumer has to wait or stays away for 0.1 s.

At the end, whoever leaves last gives up the shares that nobody took. That is the consumer as a rule. It is the thread
where the garbage collector drops the iterator on that very thread, or where the thread still waits for its data after
the grace time.
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
from torchdistinput.pipeline.metrics import COORDINATE, Metrics, in_range
from torchdistinput.pipeline.shutdown import Shutdown, not_an_end
from torchdistinput.plan.prefetch_depth import PrefetchDepth, shows
from torchdistinput.step_types import Ahead, Drawn, Held, LocalStep, Outcome, Raised

__all__ = ["LoaderWorkers", "PrefetchThread", "Upstream", "Votes"]

_FAST_SECONDS = 200e-6
_MOST_BETWEEN_WEIGHINGS = 256  # steps
_LOOK_SECONDS = 0.1
_LOOK = object()  # in the place of a work item: there may be something to vote for


class _Stop(NamedTuple):
    """In the place of a work item: nobody reads here any more."""

    delivered: int


class Votes(Protocol):
    """The stage that makes all ranks take the same steps, as this one needs it."""

    @property
    def over(self) -> bool:
        """Whether the last outcome was cast."""

    @property
    def alone(self) -> bool:
        """Whether nobody else votes."""

    @property
    def rounds(self) -> int:
        """How many times, about, a vote has to be looked after."""

    @property
    def holds(self) -> bool:
        """Whether there is something to vote for."""

    def settle(self, held: Held) -> Outcome:
        """Where nobody else votes: what becomes of the next step of this rank."""

    def hold(self, held: Held) -> None:
        """Takes the next step of this rank. Any thread, one at a time."""

    def vote(self, ahead: int = 0) -> Exchange[list[Outcome]]:
        """One exchange: what the ranks agree on. ``ahead``: 1 to read further ahead, -1 not so far."""

    def stop(self, delivered: int) -> list[LocalStep]:
        """Nobody reads here any more, after so many steps; returns the shares that were held, until that is cleared."""

    def waiting_since(self) -> float | None:
        """When the exchange in progress began, or ``None``. Any thread."""

    def late(self) -> list[int]:
        """The ranks that have not come to it. Any thread."""

    def abort(self, reason: str) -> None:
        """Ends the exchange on all ranks, which learn the reason. Any thread, idempotent."""


class LoaderWorkers(Protocol):
    """The loader workers of a source, as far as somebody waits for them."""

    consumers: dict[object, float]
    """Since when each consumer waits for a step, by ``perf_counter``, while it does."""

    def lost_workers(self) -> str:
        """Which loader workers died, in words; nothing where none did."""

    def look(self) -> object:
        """Looks whether a loader worker is late for a consumer that waits."""


class Upstream(LoaderWorkers, Protocol):
    """The stages before the vote, in which no other rank takes part; see ``upstream``."""

    def draw(self) -> Drawn | Held:
        """The caller's half of the next step. Caller's thread."""

    def produce(self, drawn: Drawn | Held, /) -> Held:
        """The rest of it: fetched, and on its way to the devices."""

    def discard(self, steps: Sequence[LocalStep], /) -> None:
        """Gives up steps that nobody will take."""

    def enter_thread(self) -> None:
        """Called first by the thread that produces."""

    def close_source(self) -> None:
        """Ends loader workers and open files."""

    def close_devices(self) -> None:
        """Lets go of the devices, once the thread has stopped."""

    def weigh(self, step: LocalStep, /) -> int:
        """How many bytes a step of the source takes about; 0 where that is not known."""

    def expect(self, steps: int, /) -> None:
        """Is told how many steps will be drawn at once."""


@final
class PrefetchThread:
    """Completes work items, votes for them, and puts the outcomes where the consumer finds them.

    Args:
      upstream: the stages before.
      votes: the stage that makes all ranks agree.
      depth: steps ahead of the one that the consumer waits for, at first.
      threaded: whether there is a thread; else the consumer does everything, and this only tidies up.
      meter: takes down how long the exchanges take.
      room: bytes of steps ahead within which the depth may grow; ``None`` where it stays.
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
        self._largest = 0  # bytes of a step that was weighed
        self._until_weighed = self._between_weighings = 1  # steps
        self._between = 0.0  # seconds between the beginnings of the last two votes
        self._work_items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.ready: deque[Outcome] = deque()
        """What the ranks agreed on, and nobody took yet. The consumer takes from its left side."""
        self._wake_up: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_waited_for = False
        self._given = self._made = 0  # work items
        self._vote: StartedExchange[list[Outcome]] | None = None
        self._vote_began = 0.0
        self._watched = False  # whether the consumer looks after the votes
        self._looks = 0  # times that it did
        self._has_failed = False  # in a vote that the consumer looked after
        self._vote_lock = threading.RLock()  # held by whoever goes on with the vote; it knows by which thread
        self._concludes = False  # whether that is the thread, which waits for it
        self.shutdown = Shutdown(upstream, votes, self.ready, threaded=threaded)
        self.thread: threading.Thread | None = None
        if threaded:
            self.thread = threading.Thread(target=self._run, name="torchdistinput-input", daemon=True)

    def begin(self) -> None:
        """Starts the thread, if there is to be one. After an interruption in here it may run: ``stop`` ends it."""
        if self.thread is not None:
            self.thread.start()

    @property
    def idle(self) -> bool:
        """Whether every work item that was given is complete, and held. Consumer's thread."""
        return self._given == self._made

    def give(self, item: Drawn | Held) -> None:
        """Hands a work item over to the thread. Consumer's thread."""
        self._given += 1
        self._work_items.put(item)

    def make(self, item: Drawn | Held) -> None:
        """Completes a work item here. Consumer's thread, while this is idle."""
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
        """Leaves the votes to the thread. Consumer's thread.

        Args:
          wake: whether the thread may not know that there is something to vote for.
        """
        self._watched = False
        if wake and not self._concludes and self._vote_is_due():
            self._work_items.put(_LOOK)

    def help_voting(self) -> None:
        """Begins a vote if it is time to, and goes on with it as far as that takes no waiting. Consumer's thread."""
        self._watched = True
        self._looks += 1
        if self._has_failed or (self._vote is None and not self._vote_is_due()):
            return
        if self.shutdown.thread_left or not self._vote_lock.acquire(blocking=False):
            return  # the thread has left, and its last word lies there; or it goes on with the vote
        try:
            vote = self._vote
            if vote is None and not self.votes.over and self.votes.holds and self._vote_is_due():
                vote = self._begin_vote()
            if vote is not None and vote.look():
                self._conclude()
        except Exception as error:  # what is ready comes first, as where the thread fails
            self._vote = None
            self._has_failed = True
            self._fail(error)
        except BaseException:
            self._vote = None  # it is over, for the thread too
            raise
        finally:
            try:  # noqa: SIM105 - for every step, and `suppress` takes as long as all the rest
                self._vote_lock.release()
            except RuntimeError:  # a signal's handler closed the iterator meanwhile, and released it
                pass

    @property
    def to_spare(self) -> int:
        """Outcomes that may be taken before there is anything to do for votes. Consumer's thread, which helps."""
        return len(self.ready) - self._read_ahead.due_at if self._vote is None else 0

    def wait(self, seconds: float) -> None:
        """Until there is an outcome, or that time has passed. Consumer's thread."""
        self._watched = False
        self._work_items.put(_LOOK)
        self._is_waited_for = True
        try:
            if not self.ready:  # looked at once more: who did not see that it is waited for put it there before
                with contextlib.suppress(queue.Empty):
                    self._wake_up.get(timeout=seconds)
        finally:
            self._is_waited_for = False

    def _put(self, outcomes: Iterable[Outcome]) -> None:
        self.ready.extend(outcomes)
        if self._is_waited_for:
            self._wake_up.put(None)

    def stop(self, delivered: int) -> None:
        """Nobody reads here any more, after so many steps. Any thread, as often as it likes."""
        lock: Any = self._vote_lock  # to `release` what is not held would put an error into the context of others
        if lock._is_owned() and threading.current_thread() is not self.thread:  # noqa: SLF001 - has no public name
            lock.release()  # an interruption came just before it was left
        self._work_items.put(_Stop(delivered))

    def _run(self) -> None:
        try:
            self.upstream.enter_thread()
            while not self.votes.over:
                self._work()
        except BaseException as error:  # whatever it is, the consumer and the other ranks must hear of it
            self._fail(error)
        finally:
            self.shutdown.thread_leaves()

    def _fail(self, error: BaseException) -> None:
        try:
            self.votes.abort(f"failed: {type(error).__name__}: {error}")
        finally:
            self._put([Raised(not_an_end(error))])

    def _work(self) -> None:
        """Completes work items and casts one vote; where nobody else votes, completes one."""
        due = False
        while not (due or self._is_time_to_vote()):
            due = self._complete(self._next_item())  # no name for it: a thread that waits would keep the last step
        if self._alone:
            return
        with self._vote_lock:
            if not self.votes.over and (due or self._is_time_to_vote()):  # else the consumer was faster
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
            if self._watched and self._looks == looks:  # the consumer is away for long
                self._watched = False
                return _LOOK

    def _complete(self, item: Any) -> bool:
        """Takes a work item. Whether it is time to vote, or, where nobody else does, to look whether it is over."""
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
        """Looks how much memory a step takes, ever more seldom: the rank's wish to read ahead depends on it."""
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
        """Waits for the outcomes of the vote, and puts them where the consumer finds them.

        Pieces without a sample are made and sent in it, which counts as copying.
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
