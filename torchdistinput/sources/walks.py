"""The walk over the records of files: which file has the next turn, in which order a file yields, what came last.

**Shuffling.** ``shuffle_files`` permutes the files by (seed, epoch). ``shuffle_buffer`` is a *window shuffle*: every
window of that many consecutive records of a file is yielded in a permutation keyed by (seed, epoch, file, window). A
buffer that is refilled record by record, as in TensorFlow, can only be left where it was entered, by reading everything
up to there; a window can be entered again by reading that window.

**Interleaving.** ``cycle_length`` slots, each with an open file, have turns in a fixed order. A turn yields up to
``block_length`` records; a slot whose file ended in its turn takes the next file at its next turn. These are the rules
of TensorFlow's ``interleave``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import chain, compress, count, islice
from typing import Any, BinaryIO, NamedTuple, final

from torchdistinput.backends.filesystem import OpenedFile
from torchdistinput.errors import SourceError
from torchdistinput.plan.permutation import shuffled

__all__ = ["Lane", "Read", "RecordPlace", "RecordWalk"]

Read = Callable[[BinaryIO], Iterable[Any]]
"""A reader: takes a binary file object and yields the records in it."""


class RecordPlace(NamedTuple):
    """Where a record comes from."""

    file: str
    """The name of the file."""
    record: int
    """The index of the record inside its file, from 0, before any shuffling."""
    file_number: int
    """The place of the file in the dataset's list."""


@final
class RecordWalk:
    """An iterator over undecoded records that knows where the last one came from.

    Its files are opened as their turns come, and closed at the end, after an error, by ``close``, and when the walk is
    dropped.

    Args:
      order: the files, in the order in which they are opened.
      open_lane: opens one.
      cycle_length: how many are open at the same time.
      block_length: how many records one of them yields in a turn.
    """

    def __init__(
        self, order: Sequence[int], open_lane: Callable[[int], Lane], cycle_length: int, block_length: int
    ) -> None:
        num_slots = min(cycle_length, len(order))
        length = block_length if num_slots > 1 else None  # alone, a file has all turns: one will do
        self._cursor = _Cursor()
        self._records = _take_turns(deque(order), open_lane, num_slots, length, self._cursor)

    def __iter__(self) -> Iterator[Any]:
        """The walk's one generator: a loop over it makes no call of a method for every record."""
        return self._records

    def __next__(self) -> Any:
        """The next record."""
        return next(self._records)

    @property
    def place(self) -> RecordPlace:
        """Where the last record came from.

        Raises:
          RuntimeError: before the first record.
        """
        if self._cursor.lane is None:
            raise RuntimeError("the walk has yielded no record yet, so there is no place")
        return self._cursor.lane.place()

    def take(self, count: int) -> list[Any]:
        """The next ``count`` records, fewer at the end; ``places`` tells where they came from."""
        cursor = self._cursor
        cursor.turns = []
        if cursor.first is not None and cursor.lane is not None:
            cursor.first = cursor.lane.count()
        return list(islice(self._records, count))

    def places(self, lo: int, hi: int) -> list[RecordPlace]:
        """Where the records ``[lo, hi)`` of the last ``take`` came from. Before the next record is taken."""
        cursor = self._cursor
        turns = list(cursor.turns or ())
        if cursor.first is not None and cursor.lane is not None:
            turns.append((cursor.lane, cursor.first, cursor.lane.count()))
        found: list[RecordPlace] = []
        start = 0  # the position of the turn's first record among those taken
        for lane, first, end in turns:
            stop = start + end - first
            if lo < stop and start < hi:
                found += lane.places(first + max(lo - start, 0), min(end, first + hi - start))
            start = stop
        return found

    def close(self) -> None:
        """Closes the open files; the walk is at its end. More calls do nothing."""
        self._records.close()


@final
class _Cursor:
    """The lane of the last record. Apart from the walk: a generator that knew its walk would keep it alive.

    With it, what came since the last ``take``: the turns that ended, each with its range of the lane's records, and
    where the turn in progress began.
    """

    __slots__ = ("first", "lane", "turns")

    def __init__(self) -> None:
        self.lane: Lane | None = None
        self.first: int | None = None
        self.turns: list[tuple[Lane, int, int]] | None = None  # nobody asks unless records are taken


@final
class _Window:
    """The window of a file that is being yielded: its start, the order of its records, and that of the one before."""

    __slots__ = ("order", "previous", "start")

    def __init__(self) -> None:
        self.start = 0
        self.order: list[int] = []
        self.previous: list[int] = []


@final
class Lane:
    """An open file of a walk.

    Records are counted by an iterator that runs beside them and costs no Python code; asking for the count makes one
    more step of it, which is taken off.

    Args:
      name: the name of the file.
      number: its place in the dataset's list.
      opened: the file; the lane closes it.
      read: the reader.
      window_size: how many records are shuffled together; 0 for none.
      key: what the order of a window depends on, beside its number.
    """

    __slots__ = (
        "_asked",
        "_key",
        "_opened",
        "_read",
        "_records",
        "_source",
        "_ticks",
        "_window",
        "_window_size",
        "name",
        "number",
    )

    def __init__(
        self, name: str, number: int, opened: OpenedFile, read: Read, window_size: int, key: tuple[int, ...]
    ) -> None:
        self.name = name
        self.number = number
        self._opened = opened
        self._read = read
        self._window_size = window_size
        self._key = key
        self._window = _Window()
        self._ticks = count(1)
        self._asked = 0
        self._source: Iterator[Any] = iter(())
        self._records: Iterator[Any] | None = None

    def turn(self, length: int | None) -> Iterator[Any]:
        """The next ``length`` records, or all that are left."""
        if self._records is None:
            self._source = iter(self._read(self._opened.stream))
            self._records = compress(self._in_order(), self._ticks)
        return islice(self._records, length)

    def count(self) -> int:
        """How many records were yielded."""
        self._asked += 1
        return next(self._ticks) - self._asked

    def place(self) -> RecordPlace:
        """Where the last record came from."""
        self._asked += 1  # count(), without the call: this may be asked for every record
        last = next(self._ticks) - self._asked - 1
        if self._window_size:
            last = self._window.start + self._window.order[last - self._window.start]
        return RecordPlace(self.name, last, self.number)

    def places(self, first: int, end: int) -> list[RecordPlace]:
        """Where records came from that were yielded before: those in ``[first, end)``, counted as they were yielded."""
        name, number, size = self.name, self.number, self._window_size
        if not size:
            return [RecordPlace(name, record, number) for record in range(first, end)]
        found: list[RecordPlace] = []
        while first < end:
            start = first - first % size
            stop = min(end, start + size)
            order = self._order_from(start)[first - start : stop - start]
            found += [RecordPlace(name, start + record, number) for record in order]
            first = stop
        return found

    def _order_from(self, start: int) -> list[int]:
        """The order of the window that starts there. All windows but the last one are full."""
        window = self._window
        if start == window.start:
            return window.order
        if start == window.start - self._window_size:
            return window.previous
        return shuffled(self._window_size, *self._key, start // self._window_size)

    def failure(self, error: Exception) -> SourceError:
        """What to raise for an exception of the reader."""
        if isinstance(error, SourceError):
            return SourceError(f"{self.name}: {error}", file=self.name, offset=error.offset)
        offset, where = None, ""
        try:
            offset = self._opened.stream.tell()
            where = f" near byte {offset}"
        except (OSError, ValueError):
            where = ""  # a stream that cannot tell; the file alone must do
        return SourceError(
            f"{self.name}: reading failed{where}, after {self.count()} records: {type(error).__name__}: {error}",
            file=self.name,
            offset=offset,
        )

    def close(self) -> None:
        """Ends the reader, then closes the file."""
        source, self._source, self._records = self._source, iter(()), iter(())
        if isinstance(source, Generator):
            source.close()
        self._opened.close()

    def _in_order(self) -> Iterator[Any]:
        if not self._window_size:
            return self._source
        return chain.from_iterable(_windows(self._source, self._window_size, self._key, self._window))


def _windows(
    records: Iterator[Any], size: int, key: tuple[int, ...], window: _Window
) -> Generator[Iterator[Any], None, None]:
    """Each window of records in its own order."""
    for number in count():
        held = list(islice(records, size))
        if not held:
            return
        window.start = number * size
        window.previous = window.order
        window.order = shuffled(len(held), *key, number)
        yield map(held.__getitem__, window.order)
        del held  # before the next window is read


def _take_turns(
    waiting: deque[int],
    open_lane: Callable[[int], Lane],
    num_slots: int,
    block_length: int | None,
    cursor: _Cursor,
) -> Generator[Any, None, None]:
    """The walk: the turns of the slots in order, until no file is open or waiting."""
    slots: list[Lane | None] = [None] * num_slots
    try:
        while waiting or any(slots):
            for number in range(num_slots):
                lane = slots[number]
                if lane is None:
                    if not waiting:
                        continue
                    lane = slots[number] = open_lane(waiting.popleft())
                taken = yield from _turn(lane, block_length, cursor)
                if block_length is None or taken < block_length:
                    slots[number] = None
                    lane.close()
    finally:
        for lane in slots:
            if lane is not None:
                lane.close()


def _turn(lane: Lane, length: int | None, cursor: _Cursor) -> Generator[Any, None, int]:
    """Yields the records of one turn; returns how many they were."""
    before, previous = lane.count(), cursor.lane
    cursor.lane, cursor.first = lane, before
    try:
        yield from lane.turn(length)
    except Exception as error:
        raise lane.failure(error) from error
    finally:
        end = lane.count()
        taken = end - before
        if cursor.turns is not None:
            cursor.turns.append((lane, cursor.first, end))
        cursor.first = None
        if not taken:
            cursor.lane = previous
    return taken
