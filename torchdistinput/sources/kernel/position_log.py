"""The log of where reading stood after each batch, so that a state can say where it stood after a row.

Problem. Batches are read ahead of the training loop, and a state describes what was delivered. Readers tell where they
stand in different ways: a reader of records gives its cursor from time to time; of an opaque iterable only the batches
can be counted.

Decision. Each batch is noted when it is fetched, with what its reader told. What the notes mean is the reader's matter:
``follow`` brings a position forward over notes, which happens when a position is asked for. Notes that lie behind all
rows that may still be asked for are followed and dropped, many together: one at a time costs part of a step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, Final, Generic, TypeVar, final

from torchdistinput.errors import StateMismatch

_FOLLOWED_TOGETHER: Final = 32

T = TypeVar("T")


def in_any_order() -> StateMismatch:
    """The error for a state in the middle of an epoch whose batches come in any order."""
    return StateMismatch(
        "the DataLoader has in_order=False, so its batches come in any order, and nobody knows which of them were "
        "delivered. Build it with in_order=True to save its state in the middle of an epoch, or save it at the end."
    )


Note = tuple[int, int, Any]
"""A batch that was read: the row before it, its last row, and what its reader told."""


@final
class PositionLog(Generic[T]):
    """Where reading stood after the rows of one epoch.

    Rows are read on one thread, and positions are asked for on another, perhaps by the handler of a signal.

    Args:
      row: a row, after which reading stood at ``position``.
      position: this position.
      begins_at: the row at which the stream begins.
      most_behind: how many rows behind the batch that was read last a position may be asked for.
      follow: brings a position forward over what the reader told, batch by batch.
    """

    def __init__(
        self, row: int, position: T, begins_at: int, most_behind: int, follow: Callable[[T, Sequence[Any]], T]
    ) -> None:
        self._row, self._position = row, position
        self._last = self._begins_at = begins_at
        self._most_behind = most_behind
        self._follow = follow
        self._notes: deque[Note] = deque()
        self._lock = threading.RLock()
        self.has_ended = False
        """Whether all batches were read."""

    @property
    def is_unread(self) -> bool:
        """Whether nothing of the epoch was read, not even its end."""
        return self._last == self._begins_at and not self.has_ended

    def add(self, rows: int, told: Any) -> None:
        """Notes a fetched batch of so many rows; ``None``: its reader told nothing. Fetching thread."""
        before = self._last
        with self._lock:
            self._last = before + rows
            if told is None:
                return
            self._notes.append((before, self._last, told))
            if len(self._notes) > self._most_behind + _FOLLOWED_TOGETHER:
                self._row, self._position, passed = self._reached(before - self._most_behind)
                for _ in range(passed):
                    self._notes.popleft()

    def at(self, row: int) -> tuple[int, T]:
        """The last row up to ``row`` after which it is known where reading stood, and where."""
        with self._lock:
            if row < self._row:
                raise AssertionError(f"the position after row {row} is asked for; up to {self._row} they are forgotten")
            return self._reached(row)[:2]

    def in_progress(self, row: int) -> Any:
        """What the reader of the batch told of which some rows up to ``row`` were delivered; ``None``: nothing."""
        with self._lock:
            return next((told for before, last, told in self._notes if before < row < last), None)

    def rows_read(self, row: int) -> int:
        """``row``, or the last row of the data, if that comes before."""
        return min(row, self._last) if self.has_ended else row

    def _reached(self, row: int) -> tuple[int, T, int]:
        passed = list(takewhile(lambda note: note[1] <= row, self._notes))
        if not passed:
            return self._row, self._position, 0
        return passed[-1][1], self._follow(self._position, [told for _, _, told in passed]), len(passed)
