"""The background thread that completes steps: it waits for loader workers, and begins the copies to the devices.

It takes the drawn steps in their order, and casts no vote. The consumer takes over what is complete.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, final

from torchdistinput.pipeline.step_maker import StepMaker
from torchdistinput.step_types import Drawn, Held, Raised

_THREAD_NAME: Final = "torchdistinput-input"


@final
class StepCompleter:
    """Completes steps on a thread of its own.

    Args:
      upstream: the stages before the vote.
      at_end: is called on the thread when it ends.
    """

    def __init__(self, upstream: StepMaker, at_end: Callable[[], object]) -> None:
        self._upstream = upstream
        self._at_end = at_end
        self._thread = threading.Thread(target=self._run, name=_THREAD_NAME, daemon=True)
        self._drawn: queue.SimpleQueue[Drawn | Held | None] = queue.SimpleQueue()
        self.completed: deque[Held | Raised] = deque()
        """The complete steps that the consumer did not take over yet; last the error of the thread, if it failed."""
        self._wake_up: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_waited_for = False
        self._is_busy = False
        self._ends = False
        self.has_left = False
        """Whether the thread has ended."""
        self.start = self._thread.start
        """Starts the thread. After an interruption it may run: ``end`` ends it."""
        self.put = self._drawn.put
        """Hands over a drawn step. Consumer's thread."""

    def rest(self, seconds: float) -> None:
        """Sleeps until a step is complete, for at most ``seconds``. An interruption loses nothing."""
        self._is_waited_for = True
        try:
            if not self.completed:  # checked again: a step put before ``_is_waited_for`` was set wakes no thread
                with contextlib.suppress(queue.Empty):
                    self._wake_up.get(timeout=seconds)
        finally:
            self._is_waited_for = False

    def end(self, grace_seconds: float) -> None:
        """Ends the thread, and closes the source if the thread may wait for loader workers. Any thread. Idempotent.

        A thread that does not end within the grace time ends later, after the step that it completes.
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
            self._upstream.close_source()
            thread.join(grace_seconds)

    def _run(self) -> None:
        try:
            self._upstream.enter_thread()
            while not self._ends:
                self._complete(self._drawn.get())  # no local name: it would keep the last step alive during a wait
        except BaseException as error:  # the consumer raises it, and tells the other ranks
            self._put(Raised(error))
        finally:
            self.has_left = True
            at_end, self._at_end = self._at_end, int  # else a cycle would keep the loader workers until a collection
            at_end()

    def _complete(self, drawn: Drawn | Held | None) -> None:
        self._is_busy = True
        if drawn is not None and not self._ends:
            self._put(self._upstream.produce(drawn))
        self._is_busy = False

    def _put(self, held: Held | Raised) -> None:
        self.completed.append(held)
        if self._is_waited_for:
            self._wake_up.put(None)
