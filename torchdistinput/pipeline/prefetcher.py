"""Prefetching: keeps steps ready ahead of the training loop, and delivers them in ``next``.

Problem. The training thread must never block in an exchange with other ranks, nor wait for a copy. The user's sampler
and dataset must still run on the training thread where torch would run them there. A wait must be interruptible, and
its error must name the late rank. And beside a training loop that asks for the next step at once, a background thread
costs more than it hides: the two threads wait for each other's lock.

The way of a step:
1. *Drawn*. The *consumer*, which is the user's thread in ``next``, draws its half of each step, up to ``depth`` steps
   beyond the one that it waits for.
2. *Held*. The consumer or the background thread completes the step: fetches it, checks it, begins its copies.
3. *Agreed*. The consumer or the background thread votes for the held steps (``voter``). A rank without other ranks
   settles each step by itself.
4. *Ready*. The step lies in ``_ready`` until the consumer takes it.

Which thread works. ``_decide`` says so, once in each ``next``. As a rule the consumer hands the drawn steps over as
*work items*, and the background thread completes them and votes. Exceptions:
- A consumer that comes back within 100 us, step after step, completes the steps itself and polls the votes.
- With a prefetch depth of four or more, every consumer polls the votes. Beside a training loop in Python the background
  thread would get the interpreter's lock too late, when no step is ready any more.
- Where pieces are copied to a device, the background thread does all the work.
- Where there is no background thread (no votes, no copies, no fetch in the background), the consumer does all the work.
The background thread takes over votes that the consumer leaves unfinished, when the consumer has to wait or does not
come back for 0.1 s. It completes a work item that is queued before it votes, so that one message covers both; except
after a step that took more than 200 us.

How far ahead. How much is drawn depends on the number of the step alone, never on how many steps are ready. How often
user code was called at the k-th step must not depend on timing, or seeded runs would not repeat, and generators would
differ between ranks. The depth grows by one with each step, up to the bound on which the ranks agreed. With a large
depth, a quarter of the steps (8 at most) are drawn in a row, each time that there is room for as many. A training step
evicts the code and data of a draw from the processor's caches; the first draw of a row loads them again for the others.

Closing. The thread tells the other ranks in its next vote that this rank stopped. If all ranks stop, all answer at
once. If the others do not answer within the grace time, the channel is aborted, and they learn the reason. The thread
that leaves last discards the steps that were not delivered: as a rule the consumer; the background thread where the
garbage collector drops the iterator on that thread, or where the thread still waits for its data after the grace time.
An interruption (Ctrl-C) may come between any two lines of ``close``. So each line can run again, and runs again in the
next call.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final, NamedTuple, final

import torch

from torchdistinput.coordination.failures import in_one_line
from torchdistinput.coordination.fork_safety import register_for_forks
from torchdistinput.coordination.private_names import profiler_runs
from torchdistinput.coordination.timeouts import StragglerTimeout
from torchdistinput.pipeline.end_errors import after_the_error, closed_elsewhere, left_to_parent, not_an_end
from torchdistinput.pipeline.interfaces import Upstream, Votes
from torchdistinput.pipeline.metrics import FETCH, Metrics, in_range
from torchdistinput.pipeline.ready_queue import ReadyQueue
from torchdistinput.pipeline.voter import Voter
from torchdistinput.plan.prefetch_depth import drawn_at_once, is_deep
from torchdistinput.step_types import Ahead, Drawn, EmptyStep, End, Held, LocalStep, Missed, Outcome, Raised

_LOG = logging.getLogger("torchdistinput")
GRACE_SECONDS = 2.0
"""How long the thread and the other ranks may take to end, before the channel is aborted."""
SOON_SECONDS = 100e-6
"""A consumer is back soon if this is the mean time until its next call: about the cost of waking another thread."""
_WATCHFUL_SECONDS: Final = 5 * SOON_SECONDS
_LONG_SECONDS: Final = 10 * SOON_SECONDS  # longer steps count as this, so one long step has no lasting effect
_FAST_SECONDS: Final = 200e-6
_TAKE_OVER_SECONDS: Final = 0.1
_LOOK: Final = object()  # queued like a work item: look whether there is a step to vote for


class _StopRequest(NamedTuple):
    """Queued like a work item: the consumer takes no further step."""

    delivered: int
    """Steps that the consumer took."""


@final
class Prefetcher:
    """Delivers the steps that all ranks agreed on, and keeps further steps ready.

    Args:
      upstream: the stages before the vote.
      votes: the stage in which all ranks agree.
      depth: the prefetch depth at first: steps ahead of the one that the consumer waits for.
      threaded: whether there is a background thread; without one, the consumer does all the work.
      helps: whether the consumer may do the work of the background thread, too.
      meter: collects the times.
      timeout_seconds: how long the consumer waits for another rank.
      names: the number of each rank as users know it.
      bound: up to which the depth grows by one with each step; the ranks may still agree on another one.
      max_bytes: bytes of steps ahead that this rank has room for; ``None`` where the depth is fixed.
      first_step: the number of the first step, for messages.
      note_fits: is called at the end with how many steps ahead fit the memory of this rank, if that is known.
    """

    def __init__(  # noqa: PLR0913 - the engine is one call
        self,
        upstream: Upstream,
        votes: Votes,
        *,
        depth: int,
        threaded: bool,
        helps: bool,
        meter: Metrics,
        timeout_seconds: float,
        names: Callable[[int], int],
        bound: int = 0,
        max_bytes: int | None = None,
        first_step: int = 0,
        note_fits: Callable[[int], None] | None = None,
    ) -> None:
        self._upstream = upstream
        self._votes = votes
        self._with_others = not votes.alone
        self._helps = helps or not threaded
        self._meter = meter
        self._straggler_timeout = StragglerTimeout(votes, timeout_seconds, names)
        self._first_step = first_step
        self._note_fits = note_fits
        self._ready = ReadyQueue()
        self._voter = Voter(votes, self._ready, depth=depth, max_bytes=max_bytes, meter=meter, weigh=upstream.weigh)
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="torchdistinput-input", daemon=True)
        # Of the consumer:
        self._bound = bound
        self._read_ahead(depth)
        self._away = _LONG_SECONDS  # time between two calls, as a mean over the last ones
        self._completes, self._polls = not threaded, False  # which work the consumer does; see ``_decide``
        self._drawn: deque[Drawn | Held] = deque()  # steps that were neither completed nor handed over yet
        self._in_flight = 0  # steps drawn and not taken
        self._given = 0  # work items that were handed over
        self._peeked: LocalStep | None = None
        self._missed: BaseException | None = None  # the error of a step, after which the epoch goes on
        self._final: End | Raised | None = None
        self._was_raised = False  # whether the error that ended the iteration was raised
        self._closed_by: int | None = None  # the thread that closed it before its end
        self._closed = False
        # Between the two threads:
        self._work_items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._made = 0  # work items that the background thread completed
        self._watched = False  # whether the consumer polls the votes
        self._looks = 0  # how often the consumer polled
        self._votes_at_once = False  # whether the background thread votes before it completes queued items
        self._has_failed = False
        # Of the end:
        self._end_lock = threading.RLock()
        self._consumer_left = False
        self._thread_left = not threaded
        self._left: list[Outcome] = []  # outcomes that were neither delivered nor discarded yet
        self._is_tidy = False

    def begin(self) -> None:
        """Starts the background thread, if there is one. After an interruption it may run: ``close`` ends it."""
        register_for_forks(self)
        if self._thread is not None:
            self._thread.start()

    @property
    def closed(self) -> bool:
        """True once the iteration is over and ``close`` has released everything."""
        return self._closed

    @property
    def depth(self) -> int:
        """The prefetch depth now: steps ahead of the one that the consumer waits for."""
        return self._depth

    @property
    def _next_step(self) -> int:
        """The number of the next step, for messages."""
        return self._first_step + self._meter.steps

    # The consumer

    def take(self) -> LocalStep | None:
        """The next step, or ``None`` at the end and on each further call. Consumer's thread.

        Raises the error of the step on every rank, as a rule an ``InputError``. The next call raises an ``InputError``
        about that error, and later calls return ``None``. Only a process without other ranks may go on after an error,
        as in torch.
        """
        if self._peeked is not None:
            step, self._peeked = self._peeked, None
            return step
        if self._thread is not None and torch.is_inference_mode_enabled():
            # The loop may train on the steps that are read ahead, which inference tensors would prevent.
            with torch.inference_mode(mode=False), torch.no_grad():
                return self._next()
        return self._next()

    def peek(self) -> LocalStep | None:
        """The step that ``take`` will return."""
        if self._peeked is None:
            self._peeked = self.take()
        return self._peeked

    def _next(self) -> LocalStep | None:
        began = perf_counter()
        away = began - self._meter.last
        self._away += ((away if away < _LONG_SECONDS else _LONG_SECONDS) - self._away) / 8
        while self._final is None:
            try:
                self._work_ahead()
            except BaseException as error:
                self.end_by(error)
                self._raise_if_closed_elsewhere(error)
                raise not_an_end(error) from error.__cause__
            if not self._ready:
                self._as_waiting(self._wait)  # an interruption in here loses nothing
            step = self._next_ready(began)
            if step is not None:
                return step
            if self._missed is not None:
                break
        self._raise_what_was_met()
        return None

    def _next_ready(self, began: float) -> LocalStep | None:
        """Takes the next outcome; returns it if it is a step. An interruption in here ends the iteration."""
        meter = self._meter
        try:
            try:
                outcome = self._ready.take()
            except IndexError:  # closed by another thread
                return None
            if type(outcome) is LocalStep:
                meter.last = now = perf_counter()
                meter.waiting += now - began
                self._in_flight -= 1
                if self._depth < self._bound:
                    self._read_ahead(self._depth + 1)
                return outcome
            self._note(outcome)
        except BaseException as error:
            self.end_by(error)
            raise
        return None

    def _note(self, outcome: Outcome) -> None:
        """Handles an outcome that is no step."""
        if isinstance(outcome, EmptyStep):
            self._in_flight -= 1
            if outcome.step is not None:
                self._meter.skipped += outcome.step.skipped.samples
                self._upstream.discard([outcome.step])
        elif isinstance(outcome, Missed):
            self._in_flight -= 1
            self._missed = outcome.error
        elif isinstance(outcome, Ahead):
            self._bound = outcome.steps
        elif isinstance(outcome, End | Raised):
            if self._final is None:  # else this iterator was closed meanwhile, and the outcome is the ranks' answer
                self._final = outcome
            self.close()

    def _read_ahead(self, steps: int) -> None:
        self._depth = steps
        self._draws_at = steps + 1 - drawn_at_once(steps)
        self._is_deep = is_deep(steps)
        self._voter.read_ahead(steps)

    def _work_ahead(self) -> None:
        """Draws up to the prefetch depth, and does the consumer's part of the other work. Waits for no other rank."""
        if self._in_flight <= self._draws_at:
            self._draw_ahead()
        self._decide()
        completed = self._complete_drawn()
        if self._polls:
            self._poll()
        elif self._with_others:
            self._watched = False
            if completed and not self._voter.waits and self._voter.is_due:
                self._work_items.put(_LOOK)  # the background thread may not know
        # Without other ranks, the thread delivers one step for each work item: hand over only if it has none.
        if not (self._ready or self._polls_for_a_moment()) and (
            self._with_others or self._in_flight == len(self._drawn)
        ):
            self._hand_over()

    def _draw_ahead(self) -> None:
        drawn, draw, profiled = self._drawn, self._upstream.draw, profiler_runs()
        began = perf_counter()
        while self._in_flight <= self._depth:
            drawn.append(in_range(FETCH, draw) if profiled else draw())
            self._in_flight += 1
        self._meter.drawing += perf_counter() - began

    def _decide(self) -> None:
        """Decides which thread completes the drawn steps, and which thread votes, until the next call."""
        if self._thread is not None:
            self._completes = self._helps and self._away < SOON_SECONDS
            self._polls = self._helps and self._with_others and (self._completes or self._is_deep)

    def _complete_drawn(self) -> bool:
        """Completes drawn steps here, or hands them over. Returns whether this thread could complete steps.

        A step that is complete when it is drawn is never handed over, unless an earlier step was.
        """
        drawn = self._drawn
        if not drawn:
            return False
        could = self._helps and self._given == self._made  # only after the thread has completed all its work items
        if could and self._thread is None:
            self._complete_here()
        elif could:
            self._as_waiting(self._complete_here)  # it may wait for loader workers
        if drawn and not self._completes:
            self._hand_over()
        return could

    def _complete_here(self) -> None:
        drawn = self._drawn
        while drawn and (self._completes or type(drawn[0]) is not Drawn):
            self._complete(drawn.popleft())

    def _hand_over(self) -> None:
        while self._drawn:
            self._given += 1
            self._work_items.put(self._drawn.popleft())

    def _poll(self) -> None:
        self._watched = True
        self._looks += 1
        if self._has_failed or self._thread_left:  # the last outcome is in ``_ready``
            return
        try:
            self._voter.poll()
        except Exception as error:  # the consumer takes the ready steps first, as where the thread fails
            self._fail(error)

    def _polls_for_a_moment(self) -> bool:
        """Polls the vote for a moment, for a consumer that comes back at once: cheaper than to be woken.

        Returns whether an outcome is ready.
        """
        until = perf_counter() + _WATCHFUL_SECONDS
        while self._polls and self._completes and perf_counter() < until:
            self._poll()
            if self._ready:
                return True
            _let_others_run()  # the message may need this processor
        return False

    def _as_waiting(self, call: Callable[[], None]) -> None:
        """Calls ``call``, in which the time that this consumer waits for loader workers counts."""
        self._upstream.consumers[self] = perf_counter()
        try:
            call()
        finally:
            self._upstream.consumers.pop(self, None)

    def _wait(self) -> None:
        """Waits until an outcome is ready, or until another thread closes the iterator."""
        began = time.monotonic()
        while True:
            try:
                self._sleep(self._straggler_timeout.nap_seconds)
            except RuntimeError as error:
                if not str(error).startswith("DataLoader worker"):
                    raise
                # torch's signal handler reports a dead loader worker wherever the main thread happens to be. The
                # background thread meets the same loader worker, and its vote tells all ranks at the same step.
                _LOG.debug("while waiting: %s", error)
            if self._ready or self._final is not None:
                return
            self._upstream.look()
            late = self._straggler_timeout.look(began, self._next_step)
            if late is not None:
                self._ends_with(late)
                self.close()
                raise late

    def _sleep(self, seconds: float) -> None:
        """Leaves the votes to the background thread, and sleeps until there is an outcome, for at most ``seconds``."""
        self._watched = False
        self._work_items.put(_LOOK)
        self._ready.wait(seconds)

    # Either thread

    def _complete(self, item: Drawn | Held) -> float:
        """Completes a step, and holds it for the vote, or settles it where no other rank votes. Returns the seconds."""
        seconds = 0.0
        if type(item) is LocalStep and item.transfers:  # it is complete
            held: Held = item
        else:
            began = perf_counter()
            held = self._upstream.produce(item)
            seconds = perf_counter() - began
        if self._with_others:
            self._voter.hold(held)
        else:
            self._ready.put((self._votes.settle(held),))
        return seconds

    def _fail(self, error: BaseException) -> None:
        self._has_failed = True
        try:
            self._votes.abort(f"failed: {type(error).__name__}: {error}")
        finally:
            self._ready.put([Raised(not_an_end(error))])

    # The background thread

    def _run(self) -> None:
        try:
            self._upstream.enter_thread()
            while not self._votes.over:
                if self._votes_now():
                    self._votes_at_once = False
                    self._voter.conclude()
                else:
                    self._work(self._next_item())  # no local name: it would keep the last step alive during a wait
        except BaseException as error:  # the consumer and the other ranks must hear of every error
            self._fail(error)
        finally:
            self._thread_left = True
            self._tidy_up(0)

    def _votes_now(self) -> bool:
        if self._watched or not self._with_others:
            return False
        may_vote = self._votes_at_once or self._work_items.empty()
        return self._voter.in_progress or (may_vote and self._voter.is_due)

    def _next_item(self) -> Any:
        looks = self._looks
        try:
            return self._work_items.get(timeout=_TAKE_OVER_SECONDS if self._with_others else None)
        except queue.Empty:
            if self._looks == looks:  # the consumer did not come back in time
                self._watched = False
            return _LOOK

    def _work(self, item: Any) -> None:
        if item is _LOOK:
            return
        if type(item) is _StopRequest:
            self._watched = False
            self._votes_at_once = True
            dropped = self._voter.stop(item.delivered)
            self._upstream.discard(dropped)
            dropped.clear()
            return
        seconds = self._complete(item)
        self._made += 1
        self._votes_at_once = seconds > _FAST_SECONDS

    # The end

    def _raise_what_was_met(self) -> None:
        """Raises the error of a missed step; else the error that ended the iteration, if one did."""
        error, self._missed = self._missed, None
        if error is None and isinstance(self._final, Raised):
            error = self._final.error
            if self._was_raised:
                self._final = End()
            else:
                self._ends_with(error)
        if error is not None:
            try:
                raise error
            finally:
                del error  # the traceback of the error refers to this frame: avoids a reference cycle
        self._raise_if_closed_elsewhere(None)

    def _raise_if_closed_elsewhere(self, error: BaseException | None) -> None:
        """Raises if another thread closed the iterator: this thread must not take that for the end of the data.

        Args:
          error: the error that this thread met, if any; a Ctrl-C is not replaced.
        """
        if self._closed_by in (None, threading.get_ident()) or not isinstance(error, Exception | None):
            return
        self._upstream.close_source()  # the closing thread could not close the source while this thread read
        if not threading.main_thread().is_alive():  # the interpreter exits, which ends this daemon thread
            raise SystemExit
        raise closed_elsewhere(self._next_step) from error

    def end_by(self, error: BaseException) -> None:
        """Ends the iteration after an error, such as Ctrl-C, that lost the step in progress. Idempotent."""
        if self._final is None:
            self._ends_with(error)
            self._votes.abort(f"failed: {type(error).__name__}: {error}")
        self.close()

    def _ends_with(self, error: BaseException) -> None:
        """The iteration ends with this error, which the caller raises; the next call raises ``after_the_error``."""
        self._final, self._was_raised = Raised(after_the_error(error, in_one_line(error), self._next_step)), True

    def _stopped(self) -> str:
        """The reason that the other ranks are told."""
        return f"stopped reading after {self._next_step} step(s)"

    def close(self) -> None:
        """Ends the iteration: its thread, its loader workers, its copies. Takes a few milliseconds when all ranks stop.

        Any thread. Idempotent. After an interruption in here, the next call does the rest.
        """
        if self._closed:
            return
        if self._final is None:
            self._closed_by = threading.get_ident()
            self._final = End()
        if self._thread is None:
            self._votes.abort(self._stopped())
        else:
            self._end_thread(self._thread)
        if self._peeked is not None:
            self._upstream.discard([self._peeked])
        self._consumer_left = True
        self._tidy_up(self._next_step)
        self._peeked = None
        self._closed = True

    def _end_thread(self, thread: threading.Thread) -> None:
        if thread is not threading.current_thread():
            self._voter.let_go()
        self._work_items.put(_StopRequest(self._next_step))
        if thread is threading.current_thread():
            return
        if thread.ident is None:  # it was never started, or will end as soon as it runs
            self._votes.abort(self._stopped())
            self._thread_left = True
            return
        thread.join(GRACE_SECONDS if self._with_others else 0)
        if thread.is_alive():
            self._votes.abort(self._stopped())
            self._upstream.close_source()  # a thread that waits for loader workers is released by their end
            thread.join(GRACE_SECONDS)

    def _tidy_up(self, delivered: int) -> None:
        """Discards the steps that were not delivered, once the consumer and the background thread have both left."""
        with self._end_lock:
            if not (self._consumer_left and self._thread_left) or self._is_tidy:
                return
            self._upstream.close_source()
            held = self._votes.stop(delivered)
            self._upstream.discard(held)
            held.clear()
            left = self._left
            with contextlib.suppress(IndexError):  # a consumer on another thread may take the last one
                while self._ready:
                    left.append(self._ready.take())
            steps = [each.step if isinstance(each, EmptyStep) else each for each in left]
            self._upstream.discard([step for step in steps if isinstance(step, LocalStep)])
            left.clear()
            if self._note_fits is not None and self._voter.fits is not None:
                self._note_fits(self._voter.fits)
            if not self._is_tidy:  # a garbage collection on this thread may have run this method in between
                self._is_tidy = True  # set first: the devices must not be given to the next iterator twice
                self._upstream.close_devices()

    def leave_to_parent(self) -> None:
        """See ``fork_safety.Inherited``: the thread and the connections to other ranks are the parent's.

        An iterator without a thread and without other ranks has neither, and a fork can use its copy.
        """
        if self._final is None and (self._with_others or self._thread is not None):
            self._final, self._was_raised = Raised(left_to_parent()), True


def _let_others_run() -> None:
    if sys.platform == "win32":
        time.sleep(0)
    else:
        os.sched_yield()
