"""The last stage: steps ahead of the consumer, and the one background thread.

Problem. The training thread must never sit in an exchange with other ranks, nor wait for a copy; user code of the data
must run on it all the same where torch would run it; and whoever waits must stay interruptible and name the late rank.

Decision. The caller gives the thread *tickets*: the halves of steps that were drawn on its own thread, at most
``depth`` beyond the one it waits for. The thread completes them, votes for them, and puts the outcomes in a queue.
Without a thread (nothing to vote for, to copy or to fetch in the background) the caller does the same work in line.

The thread votes as soon as it holds a step, unless the source answered the last ticket within 200 us and has another
one: then the next step will ride on the same message. Where it reads four steps ahead or more it waits with its vote
until half of them are used up, so that a message covers the other half.

How far ahead: an explicit depth stays. Else it begins with two steps, and a rank *wishes* for twice as many when its
consumer was left waiting by at least half of the last eight votes, and not by its data, and when so many steps of the
size of the largest so far fit into its bytes; it objects when those ahead do not fit. Wishes ride on the votes, and
where all wish and none objects the depth doubles (law H of ``plan.ending``). It may not change otherwise: how far user
code is drawn ahead must be the same on all ranks at each step, or a loop that is left early would leave the generators
of the ranks in different states. So the new depth comes as an outcome, between the steps, at the same place for all.
One process alone has no votes that could show, and keeps to its two steps.

Closing: the thread says in its next vote that nobody reads here any more, which all ranks answer at once when all stop.
If the others do not come within the grace time, the channel is aborted and they learn the reason. The shares that
nobody took are given up by whoever leaves last: the consumer as a rule; the thread, where the garbage collector drops
the iterator on it, or where it still waits for its data after the grace time.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

from torchdistinput.errors import CoordinationTimeout
from torchdistinput.flow import Ahead, Delivered, Drawn, End, Held, Outcome, PassedOver, Raised, Share
from torchdistinput.plan.read_ahead import ReadAhead
from torchdistinput.stats import COORDINATE, Meter, in_range

__all__ = ["Buffer", "Votes", "Walk"]

_LOG = logging.getLogger("torchdistinput")
_FAST_SECONDS = 200e-6
_GRACE_SECONDS = 2.0
_WARN_SECONDS = 5.0
_STOP = object()
_LOOK = object()  # in the place of a ticket: the consumer waits, there may be something to vote for


class Votes(Protocol):
    """The stage that makes all ranks take the same steps, as this one needs it."""

    @property
    def over(self) -> bool:
        """Whether the last outcome was cast."""

    @property
    def alone(self) -> bool:
        """Whether nobody else votes."""

    @property
    def holds(self) -> bool:
        """Whether there is something to vote for."""

    def settle(self, held: Held) -> Outcome:
        """Where nobody else votes: what becomes of the next step of this rank."""

    def hold(self, held: Held) -> None:
        """Takes the next step of this rank."""

    def vote(self, ahead: int = 0) -> list[Outcome]:
        """One exchange: what the ranks agree on. ``ahead``: 1 to read further ahead, -1 not so far."""

    def stop(self, delivered: int) -> list[Share]:
        """Nobody reads here any more, after so many steps; returns the shares that were held."""

    def waiting_since(self) -> float | None:
        """When the exchange in progress began, or ``None``. Any thread."""

    def late(self) -> list[int]:
        """The ranks that have not come to it. Any thread."""

    def abort(self, reason: str) -> None:
        """Ends the exchange on all ranks, which learn the reason. Any thread, idempotent."""


@final
@dataclass(frozen=True)
class Walk:
    """The stages before this one, as calls.

    Args:
      draw: the caller's half of the next step.
      produce: the rest of it: fetched, and on its way to the devices.
      discard: gives up shares that nobody will take.
      enter_thread: called first by the thread that produces.
      close_source: ends loader workers and open files.
      close_devices: lets go of the devices, once the thread has stopped.
      lost_workers: which loader workers died, in words; nothing where none did.
    """

    draw: Callable[[], Drawn | Held]
    produce: Callable[[Drawn | Held], Held]
    discard: Callable[[Sequence[Share]], None]
    enter_thread: Callable[[], None]
    close_source: Callable[[], None]
    close_devices: Callable[[], None]
    lost_workers: Callable[[], str] = str


@final
class Buffer:
    """Delivers agreed steps, some of them ahead.

    Args:
      walk: the stages before.
      votes: the stage that makes all ranks agree.
      depth: steps ahead of the one that the consumer waits for, at first.
      threaded: whether a background thread does the work.
      timeout_seconds: how long the consumer waits for another rank.
      names: the ranks, as users know them.
      first_step: the number of the first step, for messages.
      meter: takes down how long the exchanges take.
      room: bytes of steps ahead within which the depth may grow; ``None`` where it stays.
    """

    def __init__(  # noqa: PLR0913 - one stage is one call
        self,
        walk: Walk,
        votes: Votes,
        *,
        depth: int,
        threaded: bool,
        timeout_seconds: float,
        names: Callable[[int], int],
        first_step: int = 0,
        meter: Meter | None = None,
        room: int | None = None,
    ) -> None:
        self._meter = Meter() if meter is None else meter
        self._walk = walk
        self._votes = votes
        self._depth = depth  # as the consumer has it
        self._read_ahead = ReadAhead(depth, room)  # the thread's, which hears first of a change
        self._waits = False  # whether the consumer has nothing to take
        self._making = 0.0  # seconds that the steps took which were not voted for yet
        self._timeout_seconds = timeout_seconds
        self._names = names
        self._tickets: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._peeked: Delivered | None = None
        self._in_flight = 0
        self._delivered = first_step
        self._final: End | Raised | None = None
        self._closed = False
        self._warned = False
        self._lock = threading.Lock()
        self._present = 2 if threaded else 1  # the consumer, and the thread
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="torchdistinput-input", daemon=True)
            self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether nothing more will be delivered: it ended, failed, or was closed."""
        return self._closed

    def take(self) -> Delivered | None:
        """The next step; ``None`` at the end, and again on each further call. Caller's thread.

        Raises:
          InputError: what went wrong, on every rank; again on each further call.
        """
        delivered = self._peeked
        if delivered is None:
            delivered = self._advance()
        else:
            self._peeked = None
        if delivered is not None:
            self._delivered += 1
        return delivered

    def peek(self) -> Delivered | None:
        """The step that ``take`` will return."""
        if self._peeked is None:
            self._peeked = self._advance()
        return self._peeked

    def _advance(self) -> Delivered | None:
        while self._final is None:
            if self._thread is None:  # the next step is made now
                walk = self._walk
                outcome = self._votes.settle(walk.produce(walk.draw()))
            else:
                self._top_up()
                outcome = self._wait()
            if type(outcome) is Delivered:
                self._in_flight -= 1
                return outcome
            if isinstance(outcome, PassedOver):
                self._in_flight -= 1
                if outcome.share is not None:
                    self._meter.skipped += outcome.share.skipped.samples
                    self._walk.discard([outcome.share])
            elif isinstance(outcome, Ahead):
                self._depth = outcome.steps
            else:
                self._final = outcome
                self.close()
        if isinstance(self._final, Raised):
            raise self._final.error
        return None

    def _top_up(self) -> None:
        """Draws as far ahead as there is room.

        Never less when something is ready already: how often user code was called at the k-th step must not depend on
        timing, or seeded runs would not repeat, and generators would differ between ranks.
        """
        while self._in_flight <= self._depth:
            ticket = self._walk.draw()
            self._in_flight += 1
            self._tickets.put(ticket)

    def _wait(self) -> Outcome:
        try:
            return self._ready.get_nowait()
        except queue.Empty:
            self._waits = True
        self._tickets.put(_LOOK)
        try:
            return self._wait_long()
        finally:
            self._waits = False

    def _wait_long(self) -> Outcome:
        began = time.monotonic()
        while True:
            try:
                return self._ready.get(timeout=min(1.0, self._timeout_seconds / 4))
            except queue.Empty:
                pass
            except RuntimeError as error:
                if not str(error).startswith("DataLoader worker"):
                    raise
                # torch's signal handler, which tells of a dead loader worker wherever the main thread happens to be.
                # The background thread meets the same worker, and its vote tells all ranks at the same step.
                _LOG.debug("while waiting: %s", error)
            if self._final is not None:  # closed by another thread meanwhile
                return self._final
            self._look_at_clock(began)

    def _look_at_clock(self, began: float) -> None:
        """Names who is late, first in a warning, then in an error. Time spent on our own data does not count."""
        since = self._votes.waiting_since()
        if since is None:
            return
        waited = time.monotonic() - max(began, since)
        if waited < min(_WARN_SECONDS, self._timeout_seconds):
            return
        late = ", ".join(str(self._names(rank)) for rank in self._votes.late()) or "unknown"
        place = f"at step {self._delivered}"
        if waited >= self._timeout_seconds:
            self._votes.abort(f"gave up waiting for rank {late} {place} after {self._timeout_seconds:g} seconds")
            error = CoordinationTimeout(
                f"rank {late} did not come to the exchange {place} within {self._timeout_seconds:g} seconds. It is "
                "still busy with its data or its training step, or it left its loop; look at what it does there "
                "(py-spy dump --pid). If it is only slow, raise timeout_seconds."
            )
            self._final = Raised(error)
            self.close()
            raise error
        if not self._warned:
            self._warned = True
            _LOG.warning("waiting for rank %s %s for %.0f seconds", late, place, waited)

    def _work(self) -> None:
        """Completes tickets and casts one vote; where nobody else votes, completes one."""
        while not (self._votes.holds and self._tickets.empty() and self._vote_is_due()):
            if self._complete(self._tickets.get()):  # no name for it: a thread that waits would keep the last step
                break
        if not self._votes.alone:
            for outcome in self._exchange():
                self._ready.put(outcome)

    def _complete(self, ticket: Any) -> bool:
        """Takes a ticket. Whether it is time to vote, or, where nobody else does, to look whether it is over."""
        votes = self._votes
        if ticket is _LOOK:
            return False
        if ticket is _STOP:
            self._walk.discard(votes.stop(self._delivered))
            if votes.alone:
                self._ready.put(votes.vote()[0])
            return True
        began = time.perf_counter()
        held = self._walk.produce(ticket)
        if votes.alone:
            self._ready.put(votes.settle(held))
            return True
        votes.hold(held)
        took = time.perf_counter() - began
        self._making += took
        return took > _FAST_SECONDS and self._vote_is_due()

    def _vote_is_due(self) -> bool:
        return self._read_ahead.vote_is_due(self._ready.qsize())

    def _exchange(self) -> list[Outcome]:
        """A vote, timed. Pieces without a sample are made and sent in it, which counts as copying."""
        meter = self._meter
        began, copying = time.perf_counter(), meter.copying
        outcomes = in_range(COORDINATE, self._votes.vote, self._read_ahead.wish(meter.largest))
        took = time.perf_counter() - began - (meter.copying - copying)
        meter.coordinating += took
        self._read_ahead.voted(kept_waiting=self._waits and self._making < took)
        self._making = 0.0
        for outcome in outcomes:
            if isinstance(outcome, Ahead):
                self._read_ahead.agreed(outcome.steps)
        return outcomes

    def _run(self) -> None:
        try:
            self._walk.enter_thread()
            while not self._votes.over:
                self._work()
        except BaseException as error:  # whatever it is, the consumer and the other ranks must hear of it
            try:
                self._votes.abort(f"failed: {type(error).__name__}: {error}")
            finally:
                self._ready.put(Raised(_not_an_end(error)))
        finally:
            self._leave()

    def close(self) -> None:
        """Ends the iteration: thread, loader workers, parcels. Idempotent; takes a few milliseconds when all stop."""
        if self._closed:
            return
        self._closed = True
        if self._final is None:
            self._final = End()
        lost = "" if self._votes.over else self._walk.lost_workers()
        if lost:  # torch told the training thread, wherever it was, before the thread could vote for a failure
            self._votes.abort(f"stopped reading after {self._delivered} step(s), as its {lost}")
        if self._thread is None:
            self._votes.abort(f"stopped reading after {self._delivered} step(s)")
        else:
            self._tickets.put(_STOP)
            if self._thread is not threading.current_thread():
                self._end_thread(self._thread)
        self._leave()

    def _end_thread(self, thread: threading.Thread) -> None:
        thread.join(0 if self._votes.alone else _GRACE_SECONDS)
        if thread.is_alive():
            self._votes.abort(f"stopped reading after {self._delivered} step(s)")
            self._walk.close_source()  # a thread that waits for loader workers is released by their end
            thread.join(_GRACE_SECONDS)

    def _leave(self) -> None:
        """The last one to leave, consumer or thread, gives up what nobody took."""
        with self._lock:
            self._present -= 1
            last = self._present == 0
        if not last:
            return
        self._walk.close_source()
        left = self._votes.stop(self._delivered)
        if self._peeked is not None:
            left.append(self._peeked.share)
            self._peeked = None
        while not self._ready.empty():
            outcome = self._ready.get()
            if isinstance(outcome, Delivered | PassedOver) and outcome.share is not None:
                left.append(outcome.share)
        self._walk.discard(left)
        self._walk.close_devices()


def _not_an_end(error: BaseException) -> BaseException:
    """The error; a ``StopIteration`` from within would end the user's loop as if the data had ended."""
    if not isinstance(error, StopIteration):
        return error
    found = RuntimeError("an iterator of the input's own ended where it must not: a defect of torchdistinput.")
    found.__cause__ = error
    return found
