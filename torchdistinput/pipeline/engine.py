"""The engine of one epoch: draws steps ahead, has them made and agreed by all ranks, and delivers them in ``next``.

Problem. The training thread must not wait for an exchange that other ranks can answer meanwhile, nor for a copy. The
user's sampler and dataset must still run on the training thread where torch would run them there. A wait must be
interruptible, and its error must name the late rank. And beside a training loop in Python, a second thread costs more
than it hides: the two threads wait for each other's lock.

The consumer, which is the user's thread in ``next``, does everything. A step is one object (``LocalStep``) in one
queue, from the draw until it is taken; three marks say how far it is. The walk of a step:

    drawn       ``StepMaker.draw``   by the consumer: each ``next`` draws until ``depth`` are ahead of the awaited one.
                                     Where no loader workers read, the step is read and checked here, too
    made        ``StepMaker.make``   else it is read and checked; its copies begin: by the consumer; by a background
                                     thread (``step_completer``) where steps come from loader workers or go to a device
    agreed      ``StepSync.vote``    by the consumer: one message covers all steps that are made. It is sent in one
                                     ``next``, and its answers are read in a later one. A rank without other ranks
                                     settles each step by itself
    taken       ``Engine.take``      an agreed step is returned without any wait; one without a sample is passed over

Only where no step is agreed the consumer waits, in naps: for the vote in progress, else for the background thread. A
rank that is long away from ``next`` answers votes late. The others then run as many steps ahead of it as were agreed,
and wait in their own ``next``, as they would wait in the next collective of the training.

How much is drawn depends on the number of the step alone, never on how many steps are agreed: else seeded runs would
not repeat, and generators would differ between ranks. The depth grows by one with each step, up to the bound on which
the ranks agreed. With a large depth, several steps are drawn in a row (``drawn_at_once``). A vote is due as soon as a
step is made; with a depth of four or more, when two thirds of the steps ahead are used, so that one message covers as
many steps as possible (``ready_at_a_vote``).

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
from collections.abc import Callable
from itertools import islice
from time import perf_counter
from typing import final

import torch
from torch.autograd import profiler

from torchdistinput.coordination.exchanges import StartedExchange
from torchdistinput.coordination.failures import OF_RANKS, in_one_line
from torchdistinput.coordination.fork_safety import register_for_forks
from torchdistinput.coordination.private_names import profiler_runs
from torchdistinput.coordination.step_sync import Agreement, StepSync
from torchdistinput.coordination.timeouts import StragglerTimeout
from torchdistinput.coordination.watch import WATCH
from torchdistinput.pipeline.end_errors import after_the_error, closed_elsewhere, left_to_parent, not_an_end
from torchdistinput.pipeline.metrics import COORDINATE, FETCH, WAIT, Metrics, in_range
from torchdistinput.pipeline.step_completer import StepCompleter
from torchdistinput.pipeline.step_maker import StepMaker
from torchdistinput.plan.options import drawn_at_once, ready_at_a_vote
from torchdistinput.step_types import NOTHING_SKIPPED, LocalStep

_LOG = logging.getLogger("torchdistinput")
GRACE_SECONDS = 2.0
"""How long the thread and the other ranks may take to end, before the channel is aborted."""


@final
class Engine:
    """Delivers the steps that all ranks agreed on, and keeps further steps ready.

    Args:
      draw: the maker's ``draw``, or what takes its place.
      maker: makes the steps.
      votes: the stage in which all ranks agree.
      straggler_timeout: bounds the waits for other ranks.
      metrics: collects the times.
      depth: the prefetch depth at first: steps ahead of the one that the consumer waits for. It grows by one with each
        step, up to a bound on which the ranks may agree.
      in_background: whether a background thread makes the steps.
      reads_together: whether one read may give the pieces of several steps, whatever the depth.
      first_step: the number of the first step, for messages.
    """

    def __init__(  # noqa: PLR0913 - made in one place
        self,
        draw: Callable[[], LocalStep],
        maker: StepMaker,
        votes: StepSync,
        straggler_timeout: StragglerTimeout,
        metrics: Metrics,
        *,
        depth: int,
        in_background: bool = False,
        reads_together: bool = False,
        first_step: int = 0,
    ) -> None:
        self._draw = draw
        self._makes_ahead = depth > 0 or reads_together
        self._maker = maker
        self._votes = votes
        self._alone = votes.alone
        self._straggler_timeout = straggler_timeout
        self._metrics = metrics
        self._first_step = first_step
        self._completer = StepCompleter(maker, self._tidy_up) if in_background else None
        self._bound = depth
        self._read_ahead(depth)
        self._ahead: deque[LocalStep] = deque()  # drawn and not taken, oldest first
        self._held = 0  # of these, from the front: made, and seen to be
        self._agreed = 0  # of these, from the front
        self._peeked: LocalStep | None = None
        self._num_held = 0  # in the epoch
        self._vote: StartedExchange[Agreement] | None = None
        self._vote_began = 0.0
        self._stops_after: int | None = None  # how many steps were taken, once no further one is
        self._has_ended = False  # whether this rank takes part in no vote any more: it ended, failed, left or is a fork
        self._last: Agreement | None = None  # the end, or the error, that comes after the agreed steps
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
        if not self._alone:
            WATCH.add(self)
        if self._completer is not None:
            self._completer.start()

    @property
    def _next_step(self) -> int:
        """The number of the next step, for messages."""
        return self._first_step + self._metrics.steps

    def _has_next(self) -> bool:
        """Whether a step is agreed, or the end is."""
        return self._agreed > 0 or self._last is not None

    def take(self) -> LocalStep | None:
        """The next step, or ``None`` at the end and on each further call. Consumer's thread.

        Raises the error of the step on every rank, as a rule an ``InputError``. The next call raises an ``InputError``
        about that error, and later calls return ``None``.
        """
        if self._peeked is not None:
            step, self._peeked = self._peeked, None
            return step
        try:
            infers = self._makes_ahead and torch.is_inference_mode_enabled()
            return self._next_within(infers=infers) if infers or profiler_runs() else self._next()
        except OF_RANKS as error:
            raise error.with_traceback(None) from error.__cause__

    def _next_within(self, *, infers: bool) -> LocalStep | None:
        """The next step, where a profiler runs, or the loop is in inference mode."""
        step: LocalStep | None = None
        try:
            with contextlib.ExitStack() as modes:
                if profiler_runs():
                    modes.enter_context(profiler.record_function(WAIT))
                if infers:  # the loop may train on what is made ahead, which inference tensors would prevent
                    modes.enter_context(torch.inference_mode(mode=False))
                    modes.enter_context(torch.no_grad())
                step = self._next()
        except BaseException:
            self._peeked = step  # interrupted as a mode ended: the step stays the next one
            raise
        return step

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
                    if len(self._ahead) < self._refill_below:
                        self._draw_ahead()
                    self._go_on()
                    if not (self._agreed or self._last):  # no call, as this is for every step
                        self._wait()
                except BaseException as error:
                    if not self._asleep:  # else nothing is lost
                        self.end_by(error)
                        self._raise_if_closed_elsewhere(error)
                    self._asleep = False
                    raise not_an_end(error) from error.__cause__
                step = self._take_first(began)
                if step is not None:
                    return step
        finally:
            self._drives = False
        if self._errors:
            raise self._errors.pop(0)  # not kept: its traceback keeps batches in memory
        self._raise_if_closed_elsewhere(None)
        return None

    def _draw_ahead(self) -> None:
        """Draws up to the prefetch depth, and makes the steps or hands them over."""
        draw, profiled = self._draw, profiler_runs()
        began = perf_counter()
        count = self._depth + 1 - len(self._ahead)
        drawn = [in_range(FETCH, draw) if profiled else draw() for _ in range(count)]
        self._metrics.drawing += perf_counter() - began
        self._ahead.extend(drawn)
        for step in drawn:
            if step.is_made:
                continue
            if self._completer is not None:
                self._completer.put(step)
            else:
                self._make(step)
        self._metrics.idle_since = perf_counter()

    def _make(self, step: LocalStep) -> None:
        self._maker.consumers[self] = perf_counter()  # it may wait for loader workers
        try:
            self._maker.make(step)
        finally:
            self._maker.consumers.pop(self, None)

    def _go_on(self) -> None:
        """Sees which steps are made, and goes on with the votes. Waits for nothing."""
        ahead, completer = self._ahead, self._completer
        error = None if completer is None else completer.error  # before the steps, which were made before it
        while self._held < len(ahead) and ahead[self._held].is_made:
            self._hold(ahead[self._held])
        if error is not None and self._last is None:
            self._fail(error)
        if not self._alone:
            self._poll()

    def _hold(self, step: LocalStep) -> None:
        """Sees that a step is made. A rank without other ranks settles it."""
        self._held += 1
        if self._last is not None:
            return
        if step.skipped is not NOTHING_SKIPPED and step.failure is None:
            self._votes.note_left_out(step.skipped.first)
        if self._alone:
            self._learn(self._votes.settle(step))
            return
        self._num_held += 1

    def _learn(self, agreement: Agreement) -> None:
        """Takes over what the ranks agreed on."""
        self._agreed += agreement.steps
        if agreement.bound is not None:
            self._bound = agreement.bound
        if agreement.is_last:
            self._has_ended = True
            self._last = self._last or agreement

    def _poll(self) -> None:
        """Goes on with the vote in progress as far as no wait is needed, and begins one if one is due. Local.

        If the vote fails, the consumer raises its error after the steps that are agreed.
        """
        try:
            while not self._has_ended and ((vote := self._vote) is not None or self._is_due()):
                if vote is None:
                    self._begin_vote()
                    if self._agreed:  # there is time until the next call
                        return
                elif in_range(COORDINATE, vote.poll):  # the time for pieces without a sample counts as copying
                    self._end_vote(vote)
                else:
                    return
        except Exception as error:
            self._fail(error)

    def _is_due(self) -> bool:
        if self._stops_after is not None:
            return True
        return self._held > self._agreed and self._agreed <= self._due_at

    def _begin_vote(self) -> None:
        metrics, votes = self._metrics, self._votes
        self._vote_began = perf_counter() - metrics.filling
        here = perf_counter() - metrics.called if self._stops_after is None else 0.0
        votes.waiting_us = int(1e6 * (metrics.waiting + here))
        if metrics.trace is not None:
            metrics.trace.vote_begins(self._num_held)
        held = list(islice(self._ahead, self._agreed, self._held))
        self._vote = StartedExchange(votes.vote(held, stops_after=self._stops_after))

    def _end_vote(self, vote: StartedExchange[Agreement]) -> None:
        """Learns what was agreed, and notes how long the consumer waited, and for whom in the vote before."""
        metrics, votes = self._metrics, self._votes
        self._vote = None
        metrics.coordinating += perf_counter() - metrics.filling - self._vote_began
        agreement, before = vote.conclude(), self._agreed
        # The time in which this rank did other things does not count. The rank that waits least in a vote, and for the
        # texts that may follow it, came last. Nobody is blamed for the first vote, as ranks begin at different times.
        waits_since, ended = max(self._vote_began, metrics.idle_since), perf_counter()
        votes.waited_us = int(1e6 * (ended - waits_since))
        waits, of_first_vote = votes.waits, votes.num_votes <= 2
        if waits is not None:
            metrics.learn(waits, of_first_vote=of_first_vote)
        self._learn(agreement)
        if metrics.trace is not None:
            steps = list(islice(self._ahead, before, self._agreed))
            blamed, late = None if of_first_vote else waits, 1e-6 * votes.late_us
            metrics.trace.vote_ends(steps, blamed, late, metrics.called, waits_since)

    def _wait(self) -> None:
        """Waits until a step is agreed, or until another thread closes the iterator."""
        began = checked = time.monotonic()
        self._maker.consumers[self] = perf_counter()
        try:
            while not (self._has_next() or self._is_over):
                self._sleep()
                self._go_on()
                if self._has_next() or time.monotonic() - checked < self._straggler_timeout.nap_seconds:
                    continue
                checked = time.monotonic()
                late = self._straggler_timeout.check(began, self._next_step)
                if late is not None:
                    raise late
        finally:
            self._maker.consumers.pop(self, None)

    def _sleep(self) -> None:
        """Sleeps until the vote in progress or the background thread may have gone on, for one nap at most."""
        vote, completer, seconds = self._vote, self._completer, self._straggler_timeout.nap_seconds
        awaited = None if vote is not None or completer is None else self._ahead[self._held]
        self._asleep = True
        try:
            if vote is not None:
                vote.rest(seconds)
            elif completer is not None and awaited is not None:
                completer.rest(awaited, seconds)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            # torch's signal handler reports a dead loader worker wherever the main thread happens to be. The
            # background thread meets the same loader worker, and the vote tells all ranks at the same step.
            _LOG.debug("while waiting: %s", error)
        self._asleep = False

    def _take_first(self, began: float) -> LocalStep | None:
        """Takes the first step; returns it if it is agreed and has samples. An interruption ends the iteration."""
        metrics = self._metrics
        try:
            if not self._agreed:
                self._take_end()
                return None
            try:
                step = self._ahead.popleft()
            except IndexError:  # closed by another thread
                return None
            self._agreed -= 1
            self._held -= 1
            if self._is_over:  # the other thread may have taken the agreed ones
                self._maker.discard(step)
            elif step.is_passed:
                self._pass_over(step)
            else:
                metrics.last = now = perf_counter()
                metrics.waiting += now - began
                if metrics.trace is not None:
                    metrics.trace.delivered(step, began, now, metrics.bytes, self._agreed)
                if self._depth < self._bound:
                    self._read_ahead(self._depth + 1)
                return step
        except BaseException as error:
            self.end_by(error)
            raise
        return None

    def _read_ahead(self, steps: int) -> None:
        self._depth = steps
        self._refill_below = steps + 2 - drawn_at_once(steps)
        self._due_at = ready_at_a_vote(steps, self._votes.rounds)
        if self._metrics.trace is not None:
            self._metrics.trace.ahead = steps

    def _pass_over(self, step: LocalStep) -> None:
        if self._metrics.trace is not None:
            self._metrics.trace.passed(step)
        self._metrics.skipped += step.skipped.samples
        self._maker.discard(step)

    def _take_end(self) -> None:
        """Takes the end of the data, or the error that ends the epoch, if it has come."""
        if self._last is None:
            return
        error, self._last = self._last.error, Agreement(0, is_last=True)
        if error is not None and not self._is_over:  # else it was closed, and this is the ranks' answer
            self._errors.append(error)
            self._ends_with(error)
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
        self._maker.close_source()  # the closing thread could not close the source while this thread read
        while threading.current_thread().daemon and not threading.main_thread().is_alive():
            # The interpreter exits, and ends this thread the next time that the thread takes the GIL. Where torch takes
            # it, as it has freed a tensor, that aborts the process: so nothing is freed here.
            time.sleep(1.0)
        raise closed_elsewhere(self._next_step) from error

    def end_by(self, error: BaseException) -> None:
        """Ends the iteration after an error, such as Ctrl-C, that lost the step in progress. Idempotent."""
        if not self._is_over:
            self._ends_with(error)
            why = f"failed: {type(error).__name__}: {error}"
            self._tell_others(why)
            self._abort(why)
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
            self._tell_others(self._votes.why_stopped(self._next_step))
        if not self._has_ended:
            self._leave_votes()
        if self._completer is not None:
            self._completer.end(GRACE_SECONDS)
        if self._peeked is not None:
            self._maker.discard(self._peeked)
        self._tidy_up()
        self._peeked = None
        if self._metrics.trace is not None:
            self._metrics.trace.stops(self._metrics.called, self._metrics.bytes)
        self.closed = True
        if not self._alone:
            WATCH.look()

    def tell_departure(self) -> None:
        """Logs once who left, while this rank is in its training code, where it may wait for that rank. Any thread."""
        away = perf_counter() - self._metrics.last
        if self._has_told or self._drives or self._is_over or away < GRACE_SECONDS:
            return
        told = self._votes.departed()
        if told:
            self._has_told = True
            _LOG.warning("%s; this rank is in its training code", told)

    def _leave_votes(self) -> None:
        """Tells the other ranks that this one stopped: in a last vote if all answer in time, else by an abort."""
        if self._drives:  # a thread may be inside a vote
            self._abort(self._votes.why_stopped(self._next_step))
            return
        self._drives = True  # stays after an interruption, so the next call aborts
        until = time.monotonic() + GRACE_SECONDS
        self._stops_after = self._next_step
        while not (self._alone or self._has_ended):
            self._poll()
            left = until - time.monotonic()
            if left <= 0:
                self._abort(self._votes.why_stopped(self._next_step))
            elif self._vote is not None:
                self._vote.rest(left)
        self._drives = False

    def _tell_others(self, why: str) -> None:
        """Tells the other ranks that this one leaves, unless all steps were taken on which they agreed. Any thread."""
        if not self._has_ended or not all(step.is_passed for step in list(self._ahead)[: self._agreed]):
            self._votes.notify(why)

    def _abort(self, reason: str) -> None:
        """Takes part in no further vote, and tells the other ranks why. Any thread. Idempotent."""
        self._has_ended = True
        self._votes.abort(reason)

    def _fail(self, error: BaseException) -> None:
        """Tells the other ranks of an error here; the consumer raises it after the steps that are agreed."""
        try:
            self._abort(f"failed: {type(error).__name__}: {error}")
        finally:
            self._last = self._last or Agreement(0, is_last=True, error=not_an_end(error))

    def _tidy_up(self) -> None:
        """Discards the steps that were not delivered, once the consumer and the background thread have both left."""
        completer = self._completer
        with self._end_lock:
            if self._is_tidy or not self._is_over or not (completer is None or completer.has_left):
                return
            self._maker.close_source()
            self._vote = None
            while self._ahead:  # a consumer on another thread may take the last one
                with contextlib.suppress(IndexError):
                    self._maker.discard(self._ahead.popleft())
            if not self._is_tidy:  # a garbage collection on this thread may have run this method in between
                self._is_tidy = True  # set first: the devices must not be given to the next iterator twice
                self._maker.close_devices()

    def leave_to_parent(self) -> None:
        """See ``fork_safety.Inherited``: the thread and the connections to other ranks are the parent's.

        An iterator without a thread and without other ranks has neither, and a fork can use its copy.
        """
        if not self._is_over and not (self._alone and self._completer is None):
            self._is_over = self._has_ended = self._is_tidy = True
            self._errors.append(left_to_parent())
