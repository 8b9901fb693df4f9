"""The executor of one epoch's pipeline: reads steps ahead, has all ranks agree on them, and delivers them in ``next``.

Problem. The training thread must not wait for an exchange that other ranks can answer meanwhile, nor for a copy. The
user's sampler and dataset must still run on the training thread where torch would run them there. A wait must be
interruptible, and its error must name the late rank. And beside a training loop in Python, a second thread costs more
than it hides: the two threads wait for each other's lock.

The consumer, which is the user's thread in ``next``, does everything. The walk of a step:
1. *Drawn*. Each ``next`` draws steps until ``depth`` are ahead of the one that it waits for.
2. *Completed*: fetched, checked, its copies begun. Where the steps come from loader workers or are copied to a device,
   a background thread completes them, one after the other (``step_completer``); else the consumer does.
3. *Held*. The step waits for a vote (``voter``). One message covers all steps that are held. A vote is sent in one
   ``next``, and its answers are read in a later one. A rank without other ranks settles each step by itself.
4. *Ready*, until the consumer takes it. A ready step is returned without any wait.

Only where no step is ready the consumer waits, in naps: for the vote in progress, else for the background thread. A
rank that is long away from ``next`` answers votes late. The others then run as many steps ahead of it as were agreed,
and wait in their own ``next``, as they would wait in the next collective of the training.

How much is drawn depends on the number of the step alone, never on how many steps are ready: else seeded runs would not
repeat, and generators would differ between ranks. The depth grows by one with each step, up to the bound on which the
ranks agreed. With a large depth, several steps are drawn in a row (``drawn_at_once``).

Closing. Who closes tells the other ranks in a last vote that this rank stopped. If they do not answer within the grace
time, or another thread is in ``next``, the channel is aborted, and they learn the reason. Who leaves last discards the
steps that were not delivered: as a rule who closes; else the background thread. An interruption (Ctrl-C) may come
between any two lines of ``close``, so each line can run again, and runs again in the next call.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from time import perf_counter
from typing import Any, final

import torch

from torchdistinput.coordination.failures import OF_RANKS, in_one_line
from torchdistinput.coordination.fork_safety import register_for_forks
from torchdistinput.coordination.private_names import profiler_runs
from torchdistinput.coordination.timeouts import StragglerTimeout
from torchdistinput.coordination.watch import WATCH
from torchdistinput.pipeline.end_errors import after_the_error, closed_elsewhere, left_to_parent, not_an_end
from torchdistinput.pipeline.metrics import FETCH, Metrics, in_range
from torchdistinput.pipeline.step_completer import StepCompleter
from torchdistinput.pipeline.step_maker import StepMaker
from torchdistinput.pipeline.voter import Voter
from torchdistinput.plan.prefetch_depth import drawn_at_once
from torchdistinput.step_types import Ahead, Drawn, EmptyStep, End, Held, LocalStep, Missed, Outcome, Raised

_LOG = logging.getLogger("torchdistinput")
GRACE_SECONDS = 2.0
"""How long the thread and the other ranks may take to end, before the channel is aborted."""


@final
class PipelineExecutor:
    """Delivers the steps that all ranks agreed on, and keeps further steps ready.

    Args:
      upstream: the stages before the vote.
      voter: the votes of this rank.
      straggler_timeout: bounds the waits for other ranks.
      metrics: collects the times.
      depth: the prefetch depth at first: steps ahead of the one that the consumer waits for.
      bound: up to which the depth grows by one with each step; the ranks may still agree on another one.
      in_background: whether a background thread completes the steps.
      first_step: the number of the first step, for messages.
    """

    def __init__(
        self,
        upstream: StepMaker,
        voter: Voter,
        straggler_timeout: StragglerTimeout,
        metrics: Metrics,
        *,
        depth: int,
        bound: int = 0,
        in_background: bool = False,
        first_step: int = 0,
    ) -> None:
        self._upstream = upstream
        self._voter = voter
        self._straggler_timeout = straggler_timeout
        self._metrics = metrics
        self._first_step = first_step
        self._completer = StepCompleter(upstream, self._tidy_up) if in_background else None
        self._bound = bound
        self._read_ahead(depth)
        self._in_flight = 0  # steps drawn and not taken
        self._peeked: LocalStep | None = None
        self._errors: list[BaseException] = []  # the next calls raise these
        self._drives = False  # whether a thread is in ``take``, or in the last vote
        self._asleep = False  # whether the consumer sleeps, when an interruption loses nothing
        self._is_over = False  # whether the iteration has ended
        self._closed_by: int | None = None  # the thread that closed it before its end
        self.closed = False
        """Whether the iteration is over and ``close`` has released everything."""
        self._has_told = False  # that a rank left
        self._end_lock = threading.RLock()
        self._is_tidy = False

    def begin(self) -> None:
        """Starts the background thread, if there is one. After an interruption it may run: ``close`` ends it."""
        register_for_forks(self)
        if not self._voter.alone:
            WATCH.add(self)
        if self._completer is not None:
            self._completer.start()

    @property
    def _next_step(self) -> int:
        """The number of the next step, for messages."""
        return self._first_step + self._metrics.steps

    def take(self) -> LocalStep | None:
        """The next step, or ``None`` at the end and on each further call. Consumer's thread.

        Raises the error of the step on every rank, as a rule an ``InputError``. The next call raises an ``InputError``
        about that error, and later calls return ``None``. Only a process without other ranks may go on after an error,
        as in torch.
        """
        if self._peeked is not None:
            step, self._peeked = self._peeked, None
            return step
        try:
            if self._depth and torch.is_inference_mode_enabled():
                # The loop may train on the steps that are read ahead, which inference tensors would prevent.
                with torch.inference_mode(mode=False), torch.no_grad():
                    return self._next()
            return self._next()
        except OF_RANKS as error:
            raise error.with_traceback(None) from error.__cause__

    def peek(self) -> LocalStep | None:
        """The step that ``take`` will return."""
        if self._peeked is None:
            self._peeked = self.take()
        return self._peeked

    def _next(self) -> LocalStep | None:
        began = self._metrics.called = self._metrics.idle_since = perf_counter()
        self._drives = True  # before ``_is_over`` is read: who closes sets that first, and then reads this
        try:
            while not (self._is_over or self._errors):
                try:
                    if self._in_flight < self._refill_below:
                        self._draw_ahead()
                    self._go_on()
                    if not self._voter.ready:
                        self._wait()
                except BaseException as error:
                    if not self._asleep:  # else nothing is lost
                        self.end_by(error)
                        self._raise_if_closed_elsewhere(error)
                    self._asleep = False
                    raise not_an_end(error) from error.__cause__
                step = self._next_ready(began)
                if step is not None:
                    return step
        finally:
            self._drives = False
        if self._errors:
            raise self._errors.pop(0)  # not kept: its traceback keeps batches in memory
        self._raise_if_closed_elsewhere(None)
        return None

    def _draw_ahead(self) -> None:
        """Draws up to the prefetch depth, and completes the steps or hands them over."""
        draw, profiled = self._upstream.draw, profiler_runs()
        began = perf_counter()
        drawn = [in_range(FETCH, draw) if profiled else draw() for _ in range(self._depth + 1 - self._in_flight)]
        self._metrics.drawing += perf_counter() - began
        self._in_flight += len(drawn)
        if self._completer is not None:
            for each in drawn:
                self._completer.put(each)
        else:
            hold = self._voter.hold
            for each in drawn:
                hold(each if type(each) is LocalStep and each.transfers else self._complete(each))
        self._metrics.idle_since = perf_counter()

    def _complete(self, drawn: Drawn | Held) -> Held:
        self._upstream.consumers[self] = perf_counter()  # it may wait for loader workers
        try:
            return self._upstream.produce(drawn)
        finally:
            self._upstream.consumers.pop(self, None)

    def _go_on(self) -> None:
        """Takes over the steps that are complete, and goes on with the votes. Waits for nothing."""
        if self._completer is not None:
            completed = self._completer.completed
            while completed:
                held = completed.popleft()
                if type(held) is Raised:
                    self._voter.fail(held.error)
                else:
                    self._voter.hold(held)
        self._voter.poll()

    def _wait(self) -> None:
        """Waits until an outcome is ready, or until another thread closes the iterator."""
        began = checked = time.monotonic()
        self._upstream.consumers[self] = perf_counter()
        try:
            while not (self._voter.ready or self._is_over):
                self._sleep()
                self._go_on()
                if time.monotonic() - checked < self._straggler_timeout.nap_seconds or self._voter.ready:
                    continue
                checked = time.monotonic()
                self._upstream.check_workers()
                late = self._straggler_timeout.check(began, self._next_step)
                if late is not None:
                    raise late
        finally:
            self._upstream.consumers.pop(self, None)

    def _sleep(self) -> None:
        """Sleeps until the vote in progress or the background thread may have gone on, for one nap at most."""
        self._asleep = True
        try:
            awaited = self._voter if self._voter.in_progress or self._completer is None else self._completer
            awaited.rest(self._straggler_timeout.nap_seconds)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            # torch's signal handler reports a dead loader worker wherever the main thread happens to be. The
            # background thread meets the same loader worker, and the vote tells all ranks at the same step.
            _LOG.debug("while waiting: %s", error)
        self._asleep = False

    def _next_ready(self, began: float) -> LocalStep | None:
        """Takes the next outcome; returns it if it is a step. An interruption in here ends the iteration."""
        metrics = self._metrics
        try:
            try:
                outcome = self._voter.ready.popleft()
            except IndexError:  # closed by another thread
                return None
            if type(outcome) is LocalStep:
                metrics.last = now = perf_counter()
                metrics.waiting += now - began
                self._in_flight -= 1
                if metrics.trace is not None:
                    metrics.trace.delivered(outcome, began, now, metrics.bytes, len(self._voter.ready))
                if self._depth < self._bound:
                    self._read_ahead(self._depth + 1)
                return outcome
            self._note(outcome)
        except BaseException as error:
            self.end_by(error)
            raise
        return None

    def _read_ahead(self, steps: int) -> None:
        self._depth = steps
        self._refill_below = steps + 2 - drawn_at_once(steps)
        self._voter.read_ahead(steps)

    def _note(self, outcome: Outcome) -> None:
        """Handles an outcome that is no step."""
        if isinstance(outcome, EmptyStep):
            self._in_flight -= 1
            if self._metrics.trace is not None:
                self._metrics.trace.passed(outcome.step)
            if outcome.step is not None:
                self._metrics.skipped += outcome.step.skipped.samples
                self._upstream.discard([outcome.step])
        elif isinstance(outcome, Missed):
            self._in_flight -= 1
            self._errors.append(outcome.error)
        elif isinstance(outcome, Ahead):
            self._bound = outcome.steps
        elif isinstance(outcome, End | Raised):
            if isinstance(outcome, Raised) and not self._is_over:  # else it was closed, and this is the ranks' answer
                self._errors.append(outcome.error)
                self._ends_with(outcome.error)
            self._is_over = True
            self.close()

    # The end

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
        if not self._is_over:
            self._ends_with(error)
            why = f"failed: {type(error).__name__}: {error}"
            self._voter.tell_others(why)
            self._voter.abort(why)
        self.close()

    def _ends_with(self, error: BaseException) -> None:
        """The iteration ends with this error, which the caller raises; the next call raises ``after_the_error``."""
        self._errors.append(after_the_error(error, in_one_line(error), self._next_step))
        self._is_over = True

    def close(self) -> None:
        """Ends the iteration: its thread, its loader workers, its copies. Takes a few milliseconds when all ranks stop.

        Any thread. Idempotent. After an interruption in here, the next call does the rest.
        """
        if self.closed:
            return
        if not self._is_over:
            self._closed_by = threading.get_ident()
            self._is_over = True
            self._voter.tell_others(self._voter.why_stopped(self._next_step))
        if not self._voter.is_over:
            self._leave_votes()
        if self._completer is not None:
            self._completer.end(GRACE_SECONDS)
        if self._peeked is not None:
            self._upstream.discard([self._peeked])
        self._tidy_up()
        self._peeked = None
        if self._metrics.trace is not None:
            self._metrics.trace.stops(self._metrics.called, self._metrics.bytes)
        self.closed = True
        if not self._voter.alone:
            WATCH.look()

    def tell_departure(self) -> None:
        """Logs once who left, while this rank is in its training code, where it may wait for that rank. Any thread."""
        away = perf_counter() - self._metrics.last
        if self._has_told or self._drives or self._is_over or away < GRACE_SECONDS:
            return
        told = self._voter.departed()
        if told:
            self._has_told = True
            _LOG.warning("%s; this rank is in its training code", told)

    def _leave_votes(self) -> None:
        if self._drives:  # a thread may be inside a vote
            self._voter.abort(self._voter.why_stopped(self._next_step))
            return
        self._drives = True  # stays after an interruption, so the next call aborts
        self._voter.leave(self._next_step, GRACE_SECONDS)
        self._drives = False

    def _tidy_up(self) -> None:
        """Discards the steps that were not delivered, once the consumer and the background thread have both left."""
        completer = self._completer
        with self._end_lock:
            if self._is_tidy or not self._is_over or not (completer is None or completer.has_left):
                return
            self._upstream.close_source()
            held = self._voter.drop(self._next_step)
            self._upstream.discard(held)
            held.clear()
            self._discard_all(self._voter.ready)
            if completer is not None:
                self._discard_all(completer.completed)
            if not self._is_tidy:  # a garbage collection on this thread may have run this method in between
                self._is_tidy = True  # set first: the devices must not be given to the next iterator twice
                self._upstream.close_devices()

    def _discard_all(self, left: deque[Any]) -> None:
        with contextlib.suppress(IndexError):  # a consumer on another thread may take the last one
            while left:
                outcome = left.popleft()
                step = outcome.step if isinstance(outcome, EmptyStep) else outcome
                if isinstance(step, LocalStep):
                    self._upstream.discard([step])

    def leave_to_parent(self) -> None:
        """See ``fork_safety.Inherited``: the thread and the connections to other ranks are the parent's.

        An iterator without a thread and without other ranks has neither, and a fork can use its copy.
        """
        if not self._is_over and not (self._voter.alone and self._completer is None):
            self._is_over = self._voter.has_ended = self._is_tidy = True
            self._errors.append(left_to_parent())
