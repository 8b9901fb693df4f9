"""Prefetching, the consumer's side: keeps steps ready ahead of the training loop, and delivers them in ``next``.

``prefetch_thread`` is the other side, the background thread.

Problem. The training thread must never block in an exchange with other ranks, nor wait for a copy. The user's sampler
and dataset must still run on the training thread where torch would run them there. A wait must be interruptible, and
its error must name the late rank. And beside a training loop that asks for the next step at once, a background thread
costs more than it hides: the two threads wait for each other's lock.

Decision. The training thread (the *caller*) draws its half of each step, up to ``depth`` steps beyond the one that it
waits for, and hands the steps over as *work items*. The background thread completes the work items, votes for them, and
puts the outcomes into a queue. Exceptions:
- A caller that comes back within 100 us, step after step, completes the work items itself and polls the votes. The
  background thread takes over when the caller has to wait, or does not come back.
- A step that is complete when it is drawn is never handed over.
- With a large prefetch depth, every caller polls the votes.
- Where pieces are copied to a device, the background thread does all the work.
- Where there is no background thread (no votes, no copies, no fetch in the background), the caller does all the work.

Prefetch depth. An explicit depth is fixed. Otherwise the depth is two steps at first, and may change:
- A vote is *slow* (``shows``) when it takes more than an eighth of the time from one vote to the next.
- A rank asks for twice the depth when at least half of the last eight votes were slow, and so many steps, each as large
  as the largest so far, fit into ``prefetch_bytes``. It asks for half the depth when the present depth does not fit.
- These requests travel in the votes. The depth doubles where all ranks ask for more, and halves where one rank asks for
  less (law A8). The change is an outcome between two steps, at the same step on every rank. Otherwise user code would
  be drawn ahead by different amounts, and a loop that is left early would leave the ranks' generators in different
  states.
- A process without other ranks has no votes, and keeps the depth of two.

With a large depth, a quarter of the steps (8 at most) are drawn in a row, each time that there is room for as many. A
training step evicts the code and data of a draw from the processor's caches; the first draw of a row loads them again
for the others.

Closing. The thread tells the other ranks in its next vote that this rank stopped. If all ranks stop, all answer at
once. If the others do not answer within the grace time, the channel is aborted, and they learn the reason.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Final, final

import torch

from torchdistinput.coordination.failures import in_one_line
from torchdistinput.coordination.fork_safety import told_of_forks
from torchdistinput.coordination.private_names import profiler_runs
from torchdistinput.coordination.timeouts import StragglerTimeout
from torchdistinput.pipeline.metrics import FETCH, in_range
from torchdistinput.pipeline.prefetch_thread import PrefetchThread
from torchdistinput.pipeline.shutdown import after_the_error, closed_elsewhere, left_to_parent, not_an_end
from torchdistinput.plan.prefetch_depth import drawn_at_once, is_deep
from torchdistinput.step_types import Ahead, Drawn, EmptyStep, End, Held, LocalStep, Missed, Outcome, Raised

__all__ = ["Prefetcher"]

_LOG = logging.getLogger("torchdistinput")
_GRACE_SECONDS = 2.0
_SOON_SECONDS: Final = 100e-6  # about the cost of handing work to another thread
_WATCHFUL_SECONDS: Final = 5 * _SOON_SECONDS
_LONG_SECONDS: Final = 10 * _SOON_SECONDS  # longer steps count as this, so one long step has no lasting effect


@final
class Prefetcher:
    """Delivers the steps that all ranks agreed on, and keeps further steps ready.

    Args:
      background: the other side, with the stages before the vote; with or without a thread.
      helps: whether the consumer may do the work of the background thread, too.
      timeout_seconds: how long the consumer waits for another rank.
      names: the number of each rank as users know it.
      first_step: the number of the first step, for messages.
      deeper: is called with the new prefetch depth at the step where the depth changes.
    """

    def __init__(
        self,
        background: PrefetchThread,
        *,
        helps: bool,
        timeout_seconds: float,
        names: Callable[[int], int],
        first_step: int = 0,
        deeper: Callable[[int], None] | None = None,
    ) -> None:
        self._background = background
        self._upstream = background.upstream
        self._votes = background.votes
        self._in_line = background.thread is None
        self._draw = self._upstream.draw
        self._with_others = not self._votes.alone
        self._meter = background.meter
        self._read_ahead(background.depth)
        self._deeper = deeper
        self._helps = helps
        self._away = _LONG_SECONDS  # time between two calls, as a mean over the last ones
        self._looks_after_votes = False
        self._straggler_timeout = StragglerTimeout(self._votes, timeout_seconds, names)
        self._ready = background.ready
        self._to_spare = 0  # ready steps that may be taken before there is other work to do
        self._peeked: LocalStep | None = None
        self._in_flight = 0
        self._drawn: deque[Drawn | Held] = deque()  # steps that were not handed over yet
        self._first_step = first_step
        self._final: End | Raised | None = None
        self._was_raised = False  # whether the error that ended the iteration was raised
        self._missed: BaseException | None = None
        self._closed_by: int | None = None  # the thread that closed it before its end
        self._closed = False
        told_of_forks(self)

    @property
    def closed(self) -> bool:
        """True once the iteration is over and ``close`` has released everything."""
        return self._closed

    @property
    def _next_step(self) -> int:
        """The number of the next step, for messages."""
        return self._first_step + self._meter.steps

    @property
    def take(self) -> Callable[[], LocalStep | None]:
        """The function that returns the next step, or ``None`` at the end and on each further call. Caller's thread.

        It raises the error of the step on every rank, as a rule an ``InputError``. The next call raises an
        ``InputError`` about that error, and later calls return ``None``. Only a process without other ranks may go on
        after an error, as in torch.
        """
        return self._take_in_line if self._in_line else self._take_ahead

    def _take_ahead(self) -> LocalStep | None:
        if self._to_spare > 0:  # there is no other work to do
            self._to_spare -= 1
            try:
                outcome = self._ready.popleft()
                if type(outcome) is LocalStep:
                    self._meter.last = perf_counter()
                    self._in_flight -= 1
                    return outcome
                self._ready.appendleft(outcome)
            except IndexError:  # closed by another thread
                pass
            except BaseException as error:  # Ctrl-C
                self.end_by(error)
                raise
            self._to_spare = 0
        if self._peeked is None:
            return self._next_in_no_mode() if torch.is_inference_mode_enabled() else self._next_ahead()
        step, self._peeked = self._peeked, None
        return step

    def _next_in_no_mode(self) -> LocalStep | None:
        """Leaves inference mode to read ahead: the loop may train on these steps, which inference tensors prevent."""
        with torch.inference_mode(mode=False), torch.no_grad():
            return self._next_ahead()

    def peek(self) -> LocalStep | None:
        """The step that ``take`` will return."""
        if self._peeked is None:
            self._peeked = self.take()
            self._to_spare = 0
        return self._peeked

    def _take_in_line(self) -> LocalStep | None:
        if self._peeked is not None:
            step, self._peeked = self._peeked, None
            return step
        began = perf_counter()
        meter, draw = self._meter, self._draw
        try:
            while self._final is None:
                held = in_range(FETCH, draw) if profiler_runs() else draw()
                complete = False
                if type(held) is LocalStep and held.parcels:
                    complete = True
                    outcome = self._votes.settle(held)
                else:
                    meter.drawing += perf_counter() - began
                    outcome = self._votes.settle(self._upstream.produce(held))
                if type(outcome) is LocalStep:
                    meter.last = now = perf_counter()
                    if complete:
                        meter.reading_in_line += now - began
                    else:
                        meter.waiting += now - began
                    return outcome
                self._note(outcome)
                if self._missed is not None:
                    del outcome  # the traceback of its error refers to this frame: avoids a reference cycle
                    break
                if type(outcome) is EmptyStep:
                    passed = perf_counter()
                    meter.waiting += passed - began
                    began = passed
        except BaseException as error:
            self.end_by(error)
            self._raise_if_closed_elsewhere(error)
            raise
        self._raise_what_was_met()
        return None

    def _next_ahead(self) -> LocalStep | None:
        began = perf_counter()
        away = began - self._meter.last
        self._away += ((away if away < _LONG_SECONDS else _LONG_SECONDS) - self._away) / 8
        while self._final is None:
            try:
                self._top_up()
                # Without other ranks, the thread delivers one step for each work item: hand over only if it has none.
                if not (self._ready or self._look_a_while()) and (
                    self._with_others or self._in_flight == len(self._drawn)
                ):
                    self._hand_over()
            except BaseException as error:
                self.end_by(error)
                self._raise_if_closed_elsewhere(error)
                raise not_an_end(error) from error.__cause__
            if not self._ready:
                self._wait()  # an interruption in here loses nothing
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
                outcome = self._ready.popleft()
            except IndexError:  # closed by another thread
                return None
            if type(outcome) is LocalStep:
                meter.last = now = perf_counter()
                meter.waiting += now - began
                self._in_flight -= 1
                if self._looks_after_votes:
                    self._to_spare = min(self._background.to_spare, self._in_flight - self._draws_at)
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
            if outcome.share is not None:
                self._meter.skipped += outcome.share.skipped.samples
                self._upstream.discard([outcome.share])
        elif isinstance(outcome, Missed):
            self._in_flight -= 1
            self._missed = outcome.error
        elif isinstance(outcome, Ahead):
            self._read_ahead(outcome.steps)
            if self._deeper is not None:
                self._deeper(outcome.steps)
        elif isinstance(outcome, End | Raised):
            if self._final is None:  # else this iterator was closed meanwhile, and the outcome is the ranks' answer
                self._final = outcome
            self.close()

    def _read_ahead(self, steps: int) -> None:
        self._depth = steps
        self._draws_at = steps + 1 - drawn_at_once(steps)
        self._is_deep = is_deep(steps)

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
                del error  # as above
        self._raise_if_closed_elsewhere(None)

    def _raise_if_closed_elsewhere(self, error: BaseException | None) -> None:
        """Raises if another thread closed the iterator: this thread must not take that for the end of the data.

        Args:
          error: the error that this thread met, if any; a Ctrl-C is not replaced.
        """
        if self._closed_by in (None, threading.get_ident()) or not isinstance(error, Exception | None):
            return
        self._upstream.close_source()  # the closing thread could not close what this thread was reading
        if not threading.main_thread().is_alive():  # the interpreter exits, which ends this daemon thread
            raise SystemExit
        raise closed_elsewhere(self._next_step) from error

    def _top_up(self) -> None:
        """Draws up to the prefetch depth, once there is room for a row of steps.

        How much is drawn never depends on how many steps are ready. How often user code was called at the k-th step
        must not depend on timing, or seeded runs would not repeat, and generators would differ between ranks.
        """
        if self._in_flight <= self._draws_at:
            self._draw_ahead()
        soon = self._helps and self._away < _SOON_SECONDS
        makes = bool(self._drawn) and self._make_ahead(soon=soon)
        self._looks_after_votes = self._helps and self._with_others and (soon or self._is_deep)
        if self._looks_after_votes:
            self._background.help_voting()
        elif self._with_others:
            self._background.leave_votes(wake=makes)

    def _draw_ahead(self) -> None:
        drawn, draw, profiled = self._drawn, self._draw, profiler_runs()
        began = perf_counter()
        in_range(FETCH, self._upstream.expect, self._depth + 1 - self._in_flight)
        while self._in_flight <= self._depth:
            drawn.append(in_range(FETCH, draw) if profiled else draw())
            self._in_flight += 1
        self._meter.drawing += perf_counter() - began

    def _make_ahead(self, *, soon: bool) -> bool:
        """Completes the drawn steps, here or on the thread. Returns whether this thread could complete them.

        Args:
          soon: whether the caller comes back so soon that the background thread would only slow it down.
        """
        background, drawn = self._background, self._drawn
        makes = self._helps and background.idle  # only after the thread has completed all its work items
        if makes and soon:
            self._make_all()
        while makes and drawn and type(drawn[0]) is not Drawn:
            background.make(drawn.popleft())
        if drawn and not soon:
            self._hand_over()
        return makes

    def _make_all(self) -> None:
        """Completes the drawn steps on this thread; may wait for loader workers."""
        self._upstream.consumers[self] = perf_counter()
        try:
            while self._drawn:
                self._background.make(self._drawn.popleft())
        finally:
            self._upstream.consumers.pop(self, None)

    def _hand_over(self) -> None:
        while self._drawn:
            self._background.give(self._drawn.popleft())

    def end_by(self, error: BaseException) -> None:
        """Ends the iteration after an error, such as Ctrl-C, that lost the step in progress. Idempotent."""
        if self._final is None:
            self._ends_with(error)
            lost = self._upstream.lost_workers()  # torch reports them wherever this thread happens to be
            self._votes.abort(self._stopped(lost) if lost else f"failed: {type(error).__name__}: {error}")
        self.close()

    def _ends_with(self, error: BaseException) -> None:
        """The iteration ends with this error, which the caller raises; the next call raises ``after_the_error``."""
        self._final, self._was_raised = Raised(after_the_error(error, in_one_line(error), self._next_step)), True

    def _look_a_while(self) -> bool:
        """Polls the vote for a moment, for a consumer that comes back at once: cheaper than to be woken.

        Returns whether an outcome is ready.
        """
        background = self._background
        until = perf_counter() + _WATCHFUL_SECONDS
        while self._looks_after_votes and self._away < _SOON_SECONDS and perf_counter() < until:
            background.help_voting()
            if self._ready:
                return True
            _let_others_run()  # the message may need this processor
        return False

    def _wait(self) -> None:
        """Waits until an outcome is ready, or until another thread closes the iterator."""
        self._upstream.consumers[self] = perf_counter()
        try:
            self._wait_for_outcome()
        finally:
            self._upstream.consumers.pop(self, None)

    def _wait_for_outcome(self) -> None:
        began = time.monotonic()
        while True:
            try:
                self._background.wait(self._straggler_timeout.nap_seconds)
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

    def _stopped(self, lost_workers: str = "") -> str:
        """The reason that the other ranks are told."""
        why = f", as its {lost_workers}" if lost_workers else ""
        return f"stopped reading after {self._next_step} step(s){why}"

    def close(self) -> None:
        """Ends the iteration: its thread, its loader workers, its copies. Takes a few milliseconds when all ranks stop.

        Any thread. Idempotent. After an interruption in here, the next call does the rest.
        """
        if self._closed:
            return
        if self._final is None:
            self._closed_by = threading.get_ident()
            self._final = End()
        self._to_spare = 0
        lost = "" if self._votes.over else self._upstream.lost_workers()
        if lost:  # torch's error reached the training thread before the background thread could vote for a failure
            self._votes.abort(self._stopped(lost))
        thread = self._background.thread
        if thread is None:
            self._votes.abort(self._stopped())
        else:
            self._background.stop(self._next_step)
            if thread is not threading.current_thread():
                self._end_thread(thread)
        self._background.shutdown.consumer_leaves(self._next_step, self._peeked)
        self._peeked = None
        self._closed = True

    def leave_to_parent(self) -> None:
        """See ``fork_safety.Inherited``: the thread and the connections to other ranks are the parent's.

        An iterator without a thread and without other ranks has neither, and a fork can use its copy.
        """
        if self._final is None and (self._with_others or self._background.thread is not None):
            self._to_spare = 0
            self._final, self._was_raised = Raised(left_to_parent()), True

    def _end_thread(self, thread: threading.Thread) -> None:
        thread.join(_GRACE_SECONDS if self._with_others else 0)
        if thread.is_alive():
            self._votes.abort(self._stopped())
            self._upstream.close_source()  # a thread that waits for loader workers is released by their end
            thread.join(_GRACE_SECONDS)


def _let_others_run() -> None:
    if sys.platform == "win32":
        time.sleep(0)
    else:
        os.sched_yield()
