"""The own state (``state_dict``) that data in this process keeps from one epoch to the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

from torchdistinput.errors import StateMismatch
from torchdistinput.sources.iterable.position import Place, ReaderPosition
from torchdistinput.sources.iterable.user_state import OwnState, front_of
from torchdistinput.sources.kernel.position_log import PositionLog


@final
class BetweenEpochs:
    """Keeps the own state of the data at the start of an epoch.

    The state is taken after an epoch that was read to its end: in the middle of an epoch it would be a position in that
    epoch. For data that is its own iterator the state is also taken before the first epoch: after it the data is at its
    end, and its start would be lost.

    Args:
      own_state: see ``InputOptions.own_state``.
      data: the data of the first epoch, or a function that returns it.
    """

    def __init__(self, own_state: OwnState, data: Any) -> None:
        self._own_state = own_state
        self._last: PositionLog[Any] | None = None
        self._data = data

    def begin(self, data: Any) -> Place:
        """The position at the start of an epoch of the data."""
        stands_somewhere = self._last.has_ended if self._last is not None else isinstance(data, Iterator)
        snapshot = front_of(data, self._own_state) if stands_somewhere else None
        return Place((ReaderPosition(text=snapshot.text if snapshot is not None and snapshot.text else None),))

    def begun(self, log: PositionLog[Any], data: Any) -> None:
        """Notes that an epoch of the data has begun, whose batches are counted in the log."""
        self._last, self._data = log, data

    def position(self) -> list[Any]:
        """The position at the start of the next epoch, as a state saves it.

        Raises:
          StateMismatch: the dataset's own state cannot be saved.
        """
        place = self.begin(self._data)
        if place.is_front and self._last is not None and self._last.has_ended:
            snapshot = front_of(self._data, self._own_state)
            if snapshot is not None and snapshot.refusal and not snapshot.reads_again:
                raise StateMismatch(snapshot.refusal)
        return place.to_json()
