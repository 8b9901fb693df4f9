"""The background thread that makes steps: it waits for loader workers, and begins the copies to the devices.

It takes the drawn steps in their order, sets their marks (``LocalStep.is_made``), and casts no vote.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Final, final

from torchdistinput.pipeline.step_maker import StepMaker
from torchdistinput.step_types import LocalStep

_THREAD_NAME: Final = "torchdistinput-input"


@final
class StepCompleter:
    """Makes steps on a thread of its own.

    Args:
      maker: makes the steps.
      at_end: is called on the thread when it ends.
    """

    def __init__(self, maker: StepMaker, at_end: Callable[[], object]) -> None:
        self._maker = maker
        self._at_end = at_end
        self._thread = threading.Thread(target=self._run, name=_THREAD_NAME, daemon=True)
        self._drawn: queue.SimpleQueue[LocalStep | None] = queue.SimpleQueue()
        self._wake_up: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_waited_for = False
        self._is_busy = False
        self._ends = False
        self.error: BaseException | None = None
        """The error of the thread, if it failed; the steps before are made."""
        self.has_left = False
        """Whether the thread has ended."""
        self.start = self._thread.start
        """Starts the thread. After an interruption it may run: ``end`` ends it."""
        self.put = self._drawn.put
        """Hands over a drawn step. Consumer's thread."""

    def rest(self, step: LocalStep, seconds: float) -> None:
        """Sleeps until this step is made, for at most ``seconds``. An interruption loses nothing."""
        self._is_waited_for = True
        try:
            # Checked again: a step that was made before ``_is_waited_for`` was set wakes no thread.
            if not (step.is_made or self.has_left):
                with contextlib.suppress(queue.Empty):
                    self._wake_up.get(timeout=seconds)
        finally:
            self._is_waited_for = False

    def end(self, grace_seconds: float) -> None:
        """Ends the thread, and closes the source if the thread may wait for loader workers. Any thread. Idempotent.

        A thread that does not end within the grace time ends later, after the step that it makes.
        """
        self._ends = True
        self.put(None)
        thread = self._thread
        if thread is threading.current_thread():  # the garbage collector drops the iterator on it
            return
        if thread.ident is None:  # it was never started, or will end as soon as it runs
            self.has_left = True
            return
        thread.join(0 if self._is_busy else grace_seconds)
        if thread.is_alive():
            self._maker.close_source()
            thread.join(grace_seconds)

    def _run(self) -> None:
        try:
            self._maker.enter_thread()
            while not self._ends:
                self._make(self._drawn.get())  # no local name: it would keep the last step alive during a wait
        except BaseException as error:  # the consumer raises it, and tells the other ranks
            self.error = error
        finally:
            self.has_left = True
            self._wake()
            at_end, self._at_end = self._at_end, int  # else a cycle would keep the loader workers until a collection
            at_end()

    def _make(self, step: LocalStep | None) -> None:
        self._is_busy = True
        if step is not None and not self._ends:
            self._maker.make(step)
            self._wake()
        self._is_busy = False

    def _wake(self) -> None:
        if self._is_waited_for:
            self._wake_up.put(None)
