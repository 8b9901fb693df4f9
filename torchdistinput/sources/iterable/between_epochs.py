"""What data in this process keeps of its own from one epoch to the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

from torchdistinput.errors import StateMismatch
from torchdistinput.sources.iterable.cursor import Place, Reader, ReadLog
from torchdistinput.sources.iterable.user_state import OwnState, front_of

__all__ = ["BetweenEpochs"]


@final
class BetweenEpochs:
    """Knows the own state with which epochs begin.

    After an epoch that was read to its end: in the middle of one, a state says where the data stands in that. And
    before the first one of data that is its own iterator: it is at its end afterwards, and would have no front.

    Args:
      own_state: see ``InputOptions.own_state``.
      data: what the first epoch reads, or a function that returns it.
    """

    def __init__(self, own_state: OwnState, data: Any) -> None:
        self._own_state = own_state
        self._last: ReadLog | None = None
        self._data = data

    def begin(self, data: Any) -> Place:
        """The place at which an epoch of the data begins that is entered at its front."""
        stands_somewhere = self._last.has_ended if self._last is not None else isinstance(data, Iterator)
        snapshot = front_of(data, self._own_state) if stands_somewhere else None
        return Place((Reader(text=snapshot.text if snapshot is not None and snapshot.text else None),))

    def begun(self, log: ReadLog, data: Any) -> None:
        """An epoch of the data has begun, which the log counts."""
        self._last, self._data = log, data

    def position(self) -> list[Any]:
        """The place at which the next epoch begins, as a state has it.

        Raises:
          StateMismatch: the dataset's own state cannot be saved.
        """
        place = self.begin(self._data)
        if place.is_front and self._last is not None and self._last.has_ended:
            snapshot = front_of(self._data, self._own_state)
            if snapshot is not None and snapshot.refusal and not snapshot.reads_again:
                raise StateMismatch(snapshot.refusal)
        return place.to_json()
