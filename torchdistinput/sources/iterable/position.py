"""The position in an opaque iterable: how it is tracked while batches are read ahead, saved, and restored.

An opaque iterable is read by one or more *readers*: the loader workers of a ``DataLoader``, or this process. Only two
facts are known: how many batches each reader has given, and the iterable's own state, if it has one, which is taken
from time to time. To resume, each reader restores this state and skips the batches after it; without a state it skips
all batches.

Each batch is noted in a ``PositionLog`` when it is fetched, and counted when a position is asked for.

Data in this process may keep a state of its own from one epoch to the next: ``BetweenEpochs``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, final

from torchdistinput.errors import StateMismatch
from torchdistinput.sources.iterable.user_state import OwnState, front_of
from torchdistinput.sources.kernel.batcher import BatchRead
from torchdistinput.sources.kernel.row_stream import PositionLog, in_any_order
from torchdistinput.step_types import Start

_TAG: Final = "iterable"


class ReaderPosition(NamedTuple):
    """The position of one reader."""

    batches: int = 0
    """Batches that it gave, from the start of the epoch."""
    since: int = 0
    """Batches after the one that ended with the marked element; all batches if none is marked, or if the text is the
    state before the first element."""
    text: str | None = None
    """The own state before the marked element, as JSON; ``None``: all batches are read again."""
    digest: int = 0
    """The digest of the marked element; 0: it is not compared."""


@final
class IterablePosition(NamedTuple):
    """A position between two rows.

    Args:
      readers: the position of each reader.
      turn: the number of the reader whose batch comes next.
      rows: rows to skip from there on.
      samples: samples in all batches before.
    """

    readers: tuple[ReaderPosition, ...]
    turn: int = 0
    rows: int = 0
    samples: int = 0

    @property
    def is_front(self) -> bool:
        """Whether it is the start of an epoch: nothing was read before it."""
        return self.rows == 0 and self == IterablePosition((ReaderPosition(),) * len(self.readers))

    def to_json(self) -> list[Any]:
        """The position as plain lists, ints and strings."""
        return [_TAG, self.turn, self.rows, self.samples, [list(reader) for reader in self.readers]]

    @classmethod
    def from_json(cls, value: Sequence[Any], num_readers: int) -> IterablePosition:
        """Makes the position from the result of ``to_json``.

        Args:
          value: this result.
          num_readers: how many readers there are now.

        Raises:
          StateMismatch: the value is malformed, or has another number of readers.
        """
        if not (len(value) == 5 and value[0] == _TAG and all(map(_is_count, value[1:4])) and _are_readers(value[4])):
            raise StateMismatch(
                f"position: found {value!r:.200}; {[_TAG, 0, 0, 0, [[0, 0, None, 0, 0]]]!r} with other numbers is "
                "needed. Load the state as it was saved."
            )
        if len(value[4]) != num_readers:
            raise StateMismatch(
                f"position: {len(value[4])} reader(s) (loader workers, or datasets of a function) in the state, "
                f"{num_readers} here. Which of them reads what is known to the dataset only: use the same number."
            )
        if value[1] >= num_readers:
            raise StateMismatch(f"position: the turn of reader {value[1]} of {num_readers}. Load the state as saved.")
        # In states of the version before digests, a text had another meaning: such data is read again. States of 0.2
        # have a fifth value, a digest of more elements.
        readers = [each[:4] if len(each) > 3 else (each[0], each[0]) for each in value[4]]
        return cls(tuple(ReaderPosition(*each) for each in readers), *value[1:4])

    def without_states(self) -> IterablePosition:
        """The same position without own states, so that all batches before it are read again."""
        return self._replace(readers=tuple(each._replace(text=None) for each in self.readers))


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _are_readers(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(each, list | tuple)
        and len(each) in {3, 4, 5}
        and _is_count(each[0])
        and _is_count(each[1])
        and each[1] <= each[0]
        and (each[2] is None or isinstance(each[2], str))
        and all(map(_is_count, each[3:]))
        for each in value
    )


def place_of(start: Start, num_readers: int) -> IterablePosition:
    """The position at which an epoch begins; without a saved position, ``start.steps`` rows after its start.

    Raises:
      StateMismatch: see ``IterablePosition.from_json``.
    """
    if start.position is not None:
        return IterablePosition.from_json(start.position, num_readers)
    return IterablePosition((ReaderPosition(),) * num_readers, rows=start.steps)


class _Reached(NamedTuple):
    """Where reading stood, and what the marks up to there said of the data's own state."""

    place: IterablePosition
    owns_state: bool = False
    """Whether there is one."""
    refusal: str = ""
    """Why the state of the last mark cannot be saved."""
    left_out: str = ""
    """Why the data is read again on a resume instead."""


@final
class IterableTrack:
    """Tracks the position in an opaque iterable. One for each stream.

    Args:
      place: where the stream begins.
      read_ahead: how many rows may be drawn beyond the one for which the consumer waits.
      owns_state: whether the dataset is known to have a state of its own.
      in_order: whether the readers' batches come in turn.
    """

    def __init__(self, place: IterablePosition, read_ahead: int, *, owns_state: bool, in_order: bool = True) -> None:
        self._in_order = in_order
        self.owns_state = owns_state
        self._warned = False
        # Also the row for which the consumer waits, and one that was inspected.
        begun = _Reached(place._replace(rows=0))
        self.log: PositionLog[_Reached] = PositionLog(-place.rows, begun, -place.rows, read_ahead + 2, _follow)
        """The log of the batches, each noted as ``BatchRead``."""

    def position(self, rows: int) -> list[Any]:
        """See ``Stream.position``.

        Raises:
          StateMismatch: the dataset's own state cannot be saved, or it is unknown which batches were delivered.
        """
        if not self._in_order:
            raise in_any_order()
        row, (place, owns_state, refusal, left_out) = self.log.at(rows)
        self.owns_state = self.owns_state or owns_state
        if refusal:
            raise StateMismatch(refusal)
        if left_out and not self._warned:
            self._warned = True
            warnings.warn(
                f"the data's own state cannot be saved, so on a resume the data is read again: {left_out} Give "
                'InputOptions(own_state="use") to have this as an error, or "ignore" not to ask for it.',
                stacklevel=2,
            )
        return place._replace(rows=self.log.rows_read(rows) - row).to_json()


def _follow(reached: _Reached, batches: Sequence[BatchRead]) -> _Reached:
    """The position after these batches, too."""
    (readers, turn, _, samples), owns_state, refusal, left_out = reached
    counts: list[list[Any]] = [[*reader] for reader in readers]
    for more, taken in batches:
        samples += more
        for number, count, mark in taken:
            reader = counts[number]
            reader[0] += count
            reader[1] += count
            if mark is None:
                continue
            owns_state = owns_state or mark.text is not None
            if mark.reads_again:
                left_out = mark.refusal
            elif mark.text is not None or reader[2] is None:
                reader[1:4] = 0, mark.text, mark.digest
                refusal = mark.refusal
        turn = (taken[-1].reader + 1) % len(counts)
    place = IterablePosition(tuple(ReaderPosition(*each) for each in counts), turn, 0, samples)
    return _Reached(place, owns_state, refusal, left_out)


_NOT_DRAWN_AGAIN: Final = (
    " Its loader workers had lived on from an epoch before (persistent_workers=True): if it draws from their random "
    "state, other elements come this time, which is a StateMismatch. Let its draws follow from set_epoch(epoch), or "
    "use persistent_workers=False."
)


def warn_of_reading_again(
    start: Start, place: IterablePosition, per_batch: int, data: object, *, unused: str = "", lived_on: bool = False
) -> None:
    """Warns of the cost of resuming an iterable without a state of its own. Once for each resume.

    Args:
      start: where the epoch begins.
      place: the same as a position in the iterable.
      per_batch: elements of the iterable that make a batch.
      data: the iterable.
      unused: why the iterable's own state is not used.
      lived_on: whether persistent loader workers read it that were beyond their first epoch.
    """
    batches = sum(reader.batches for reader in place.readers if reader.text is None)
    sought = start.position is None
    again = "" if sought else f": {batches * per_batch} element(s)"
    if batches or (sought and start.steps):
        warnings.warn(
            f"the iterable {type(data).__name__} is read again from its front, to go on after {start.steps} steps"
            f"{again}. "
            + (f"Its own state is not used: {unused}. " if unused else "")
            + "To avoid that, give the dataset or its iterator state_dict() and load_state_dict(), or use a map-style "
            "dataset or a FileDataset." + (_NOT_DRAWN_AGAIN if lived_on else ""),
            stacklevel=3,
        )


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

    def begin(self, data: Any) -> IterablePosition:
        """The position at the start of an epoch of the data."""
        last, _ = self._last
        stands_somewhere = last.has_ended if last is not None else isinstance(data, Iterator)
        mark = front_of(data, self._own_state) if stands_somewhere else None
        return IterablePosition((ReaderPosition(text=mark.text if mark is not None and mark.text else None),))

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
