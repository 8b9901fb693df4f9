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
        self._data = data
        self._begun: list[tuple[PositionLog[Any], Any]] = []  # the epoch that was read last, and later ones

    @property
    def _last(self) -> tuple[PositionLog[Any] | None, Any]:
        """The log of the epoch that was read last, and its data."""
        return next((each for each in reversed(self._begun) if not each[0].is_unread), (None, self._data))

    def begin(self, data: Any) -> Place:
        """The position at the start of an epoch of the data."""
        last, _ = self._last
        stands_somewhere = last.has_ended if last is not None else isinstance(data, Iterator)
        mark = front_of(data, self._own_state) if stands_somewhere else None
        return Place((ReaderPosition(text=mark.text if mark is not None and mark.text else None),))

    def begun(self, log: PositionLog[Any], data: Any) -> None:
        """Notes that an epoch of the data has begun, whose batches are counted in the log."""
        last, _ = self._last
        self._begun = [each for each in self._begun if each[0] is last or each[0].is_unread] + [(log, data)]

    def closed(self, log: PositionLog[Any]) -> None:
        """Forgets an epoch of which nothing was read."""
        self._begun = [each for each in self._begun if each[0] is not log or not log.is_unread]

    def position(self) -> list[Any]:
        """The position at the start of the next epoch, as a state saves it.

        Raises:
          StateMismatch: the dataset's own state cannot be saved.
        """
        last, data = self._last
        place = self.begin(data)
        if place.is_front and last is not None and last.has_ended:
            mark = front_of(data, self._own_state)
            if mark is not None and mark.refusal and not mark.reads_again:
                raise StateMismatch(mark.refusal)
        return place.to_json()
