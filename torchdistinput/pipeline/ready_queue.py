"""The agreed outcomes that the consumer did not take yet, and the consumer's sleep until there is one."""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from collections.abc import Iterable
from typing import final

from torchdistinput.step_types import Outcome


@final
class ReadyQueue:
    """A queue with one consumer. Putting costs next to nothing while the consumer does not sleep."""

    def __init__(self) -> None:
        self._outcomes: deque[Outcome] = deque()
        self._wake_up: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_waited_for = False
        self.take = self._outcomes.popleft
        """Removes and returns the first outcome; raises ``IndexError`` where there is none. Any thread."""

    def __len__(self) -> int:
        return len(self._outcomes)

    def put(self, outcomes: Iterable[Outcome]) -> None:
        """Appends outcomes. Any thread, but only one at a time."""
        self._outcomes.extend(outcomes)
        if self._is_waited_for:
            self._wake_up.put(None)

    def wait(self, seconds: float) -> None:
        """Sleeps until there is an outcome, for at most ``seconds``. Consumer's thread."""
        self._is_waited_for = True
        try:
            if not self._outcomes:  # checked again: an outcome put before ``_is_waited_for`` was set wakes no thread
                with contextlib.suppress(queue.Empty):
                    self._wake_up.get(timeout=seconds)
        finally:
            self._is_waited_for = False
