"""One open file of a walk: its records in their order, where each comes from, and where it can be entered again.

**Shuffling.** ``shuffle_buffer`` is a *window shuffle*: every window of that many consecutive records of a file is
yielded in a permutation keyed by (seed, epoch, file, window). A buffer that is refilled record by record, as in
TensorFlow, can only be left where it was entered, by reading everything up to there; a window can be entered again by
reading that window.

**Entering again.** A lane starts at the last block of its reader in front of the record, or the window, where it was
left, and passes over what is between. The records of a reader without blocks are passed over from the front.

**Going on after a record that cannot be read.** Where that is asked for, and the reader knows where the next record
starts, a ``Spoiled`` stands in its place. It counts as a record, so that numbers, windows and places are what they
would be without the damage, and a lane that is entered again meets it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from itertools import chain, compress, count, islice
from typing import Any, BinaryIO, NamedTuple, final

from torchdistinput.backends.filesystem import OpenedFile
from torchdistinput.backends.retrying import one_line
from torchdistinput.errors import SourceError, StateMismatch
from torchdistinput.failures import in_one_line
from torchdistinput.plan.lanes import LanePlace
from torchdistinput.plan.permutation import shuffled
from torchdistinput.sources.blocks import Block, Records, blocks_of

__all__ = ["Lane", "Read", "RecordPlace", "Spoiled"]

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
class Spoiled(NamedTuple):
    """Stands for a record that could not be read."""

    reason: str
    """What is to be told: the file, the offset, and what is wrong there."""


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
      opened: the file; the lane closes it.
      read: the reader.
      window_size: how many records are shuffled together; 0 for none.
      key: what the order of a window depends on, beside its number.
      start: which file of the dataset it is, and where to start in it.
      skip: whether a ``Spoiled`` stands for a record that cannot be read, where it is certain how to go on.
    """

    __slots__ = (
        "_anchors",
        "_asked",
        "_blocks",
        "_key",
        "_opened",
        "_read",
        "_records",
        "_skip",
        "_source",
        "_ticks",
        "_window",
        "_window_size",
        "before",
        "name",
        "number",
    )

    def __init__(
        self,
        name: str,
        opened: OpenedFile,
        read: Read,
        window_size: int,
        key: tuple[int, ...],
        start: LanePlace,
        *,
        skip: bool = False,
    ) -> None:
        self.name = name
        self.number = start.file
        self.before = start.delivered
        """How many records were yielded before the turn in progress, or altogether between turns."""
        self._opened = opened
        self._read = read
        self._blocks = blocks_of(read)
        self._skip = skip
        anchor = (0, 0) if self._blocks is None else (start.offset, start.record)
        self._anchors = deque([anchor], maxlen=None if window_size else 1)
        self._window_size = window_size
        self._key = key
        self._window = _Window()
        self._ticks = count(start.delivered + 1)
        self._asked = 0
        self._source: Iterator[Any] = iter(())
        self._records: Iterator[Any] | None = None

    def turn(self, length: int | None) -> Iterator[Any]:
        """The next ``length`` records, or all that are left.

        Raises:
          StateMismatch: the file has fewer records than were read before.
        """
        if self._records is None:
            self._records = self._entered()
        return islice(self._records, length)

    def position(self) -> LanePlace:
        """Where the lane stands: one that starts there yields the rest."""
        delivered = self.count()
        needed = self._start_of_window(delivered)
        anchors = self._anchors
        while len(anchors) > 1 and anchors[1][1] <= needed:
            anchors.popleft()
        offset, record = anchors[0]
        return LanePlace(self.number, offset, record, delivered, self._opened.size)

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
            return SourceError(f"{one_line(self.name)}: {error}", file=self.name, offset=error.offset)
        offset, where = None, ""
        try:
            offset = self._opened.stream.tell()
            where = f" near byte {offset}"
        except (OSError, ValueError):
            where = ""  # a stream that cannot tell; the file alone must do
        return SourceError(
            f"{one_line(self.name)}: reading failed{where}, after {self.count()} records: {in_one_line(error)}",
            file=self.name,
            offset=offset,
        )

    def close(self) -> None:
        """Ends the reader, then closes the file."""
        source, self._source, self._records = self._source, iter(()), iter(())
        if isinstance(source, Generator):
            source.close()
        self._opened.close()

    def _entered(self) -> Iterator[Any]:
        """The records after those that were delivered."""
        delivered = self.count()
        start = self._window.start = self._start_of_window(delivered)
        offset, record = self._anchors[0]
        if self._blocks is None:
            records = self._source = iter(self._read(self._opened.stream))
        else:
            enter = partial(self._blocks, self._opened.stream)
            blocks = _with_spoiled(enter, self._opened.stream, offset, self.name) if self._skip else enter(offset)
            self._source = _noted(blocks, record, self._anchors, self._window)
            records = chain.from_iterable(self._source)
        if start < record:
            raise StateMismatch(
                f"{one_line(self.name)}: the saved state enters the file at record {record}, behind record {start}, "
                "which is needed next: it is damaged, or of another shuffle_buffer; load the state as it was saved"
            )
        self._pass_over(records, start - record)
        if self._window_size:
            first = start // self._window_size
            records = chain.from_iterable(_windows(records, self._window_size, self._key, self._window, first))
            self._pass_over(records, delivered - start)
        return compress(records, self._ticks)

    def _start_of_window(self, delivered: int) -> int:
        """The first record that is needed to yield the next one."""
        return delivered - delivered % self._window_size if self._window_size else delivered

    def _pass_over(self, records: Iterator[Any], number: int) -> None:
        last = deque(enumerate(islice(records, number), 1), maxlen=1)
        found = last[0][0] if last else 0
        if found < number:
            raise StateMismatch(
                f"{one_line(self.name)}: the saved state goes on after {self.count()} records, but the file ends "
                f"{number - found} records before that: it is not the file that the state was saved with; put that "
                "back, or start the epoch anew"
            )


def _with_spoiled(
    enter: Callable[[int], Iterator[Block[Any]]], file: BinaryIO, offset: int, name: str
) -> Iterator[Block[Any]]:
    """The blocks from an offset on, with a ``Spoiled`` in place of each record that cannot be read.

    A reader that is entered expects the file at its front. A compressed file is read again for that, which costs as
    much as what comes before the record: the number of records that may be left out bounds it.
    """
    while True:
        try:
            yield from enter(offset)
        except SourceError as error:
            start, after = error.offset, error.resume_at
            if start is None or after is None or not offset <= start < after or not _rewound(file):
                raise
            spoiled = Spoiled(f"{one_line(name)}, offset {start}: {in_one_line(error).removeprefix('SourceError: ')}")
        else:
            return
        yield start, [spoiled]
        offset = after


def _rewound(file: BinaryIO) -> bool:
    """Goes to the front of a file; whether that was possible."""
    try:
        return file.seek(0) == 0
    except (OSError, ValueError, NotImplementedError):  # as those of some web servers
        return False


def _noted(
    blocks: Iterator[Block[Any]], record: int, anchors: deque[tuple[int, int]], window: _Window
) -> Generator[Records[Any], None, None]:
    """The records of each block. Notes where it can be entered; forgets blocks that lie before the window."""
    for offset, records in blocks:
        while len(anchors) > 1 and anchors[1][1] <= window.start:
            anchors.popleft()
        anchors.append((offset, record))
        record += len(records)
        yield records


def _windows(
    records: Iterator[Any], size: int, key: tuple[int, ...], window: _Window, first: int
) -> Generator[Iterator[Any], None, None]:
    """Each window of records in its own order, from number ``first`` on."""
    for number in count(first):
        held = list(islice(records, size))
        if not held:
            return
        window.start = number * size
        window.previous = window.order
        window.order = shuffled(len(held), *key, number)
        yield map(held.__getitem__, window.order)
        del held  # before the next window is read
