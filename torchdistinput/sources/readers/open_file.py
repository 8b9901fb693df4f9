"""One open file, or other fragment: yields its records in order, and has a cursor from which reading can go on.

**Resuming.** Reading starts at the last block in front of the record, or of the window, at which it was left, and skips
the records between. With a reader without blocks the records are skipped from the start of the file.

**Reading only some of the records.** With a ``Layout``, an ``OpenFile`` skips records without reading them, and reads
any range of the skipped records. It does not shuffle.

**Going on after a record that cannot be read.** If asked for, and if the reader knows the start of the next record,
a ``CorruptRecord`` takes the place of the record. It counts as a record, so that numbers, windows and cursors are the
same as without the damage, and a resumed file yields it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeAlias, cast, final

from torchdistinput.coordination.failures import in_one_line
from torchdistinput.errors import SourceError, StateMismatch
from torchdistinput.plan.file_resharding import FileCursor
from torchdistinput.plan.permutation import shuffled
from torchdistinput.sources.formats.columns import Columns, RecordList, SchemaOfFiles, as_records, in_windows, joined
from torchdistinput.sources.formats.reader_api import Block, BoundedFile, Layout, LazyRecords, Records, facts_of
from torchdistinput.sources.readers.corrupt_records import with_corrupt_records
from torchdistinput.sources.readers.window_shuffle import Window, windows
from torchdistinput.sources.storage.retry import one_line

Read = Callable[[BinaryIO], Iterable[Any]]
"""A reader: takes a binary file object and yields the records in it."""


class Opened(Protocol):
    """A file that is open for reading, or a fragment of another kind."""

    @property
    def size(self) -> int:
        """Its stored size, or another number that changes with its content; -1 if there is none."""

    @property
    def mark(self) -> str:
        """A short text that changes with its content; empty if there is none."""

    @property
    def stream(self) -> BinaryIO:
        """The file object for a reader that reads the file from start to end."""

    @property
    def exact(self) -> BinaryIO:
        """The file object for a reader that reads some of its bytes and no others."""

    def where(self) -> tuple[int | None, str]:
        """How many bytes were read, if that is known; and the same as text, for messages."""

    def rewind(self) -> bool:
        """Goes to the start of the file, where a reader begins. Returns whether that was possible."""

    def close(self) -> None:
        """Closes it; more calls do nothing."""


class RecordPlace(NamedTuple):
    """The origin of a record."""

    file: str
    """The name of the file."""
    record: int
    """The index of the record inside its file, from 0, before any shuffling."""
    file_number: int
    """The position of the file in the dataset's list."""


FindPlaces: TypeAlias = Callable[[], Sequence[RecordPlace]]
"""Returns the origins of some records. Called only where they are needed, as it takes time."""
Decoded: TypeAlias = tuple[list[Any], dict[int, str]]
"""Decoded records; and the messages for those that were left out, by their positions."""


@final
class OpenFile:
    """An open file of an ``Interleave``.

    If its records come in lists (blocks, or windows of a shuffle), they are taken in slices of these lists: for most
    records no Python code runs.

    Args:
      name: the name of the file.
      opened: the file, which is closed here.
      read: the reader.
      window_size: how many records are shuffled together; 0 for none.
      key: determines the order of a window, together with the window's number.
      start: the cursor: the number of the file in the dataset, and the position at which to start.
      skip: whether to yield a ``CorruptRecord`` for a record that cannot be read, if reading can certainly go on.
      layout: the offsets of its records; then only ``skip`` and ``read_range`` are used.
      schema: the columns of the files that were read before, if its records are ``Columns``.
    """

    __slots__ = (
        "_anchors",
        "_blocks",
        "_entered",
        "_first",
        "_key",
        "_layout",
        "_lists",
        "_opened",
        "_read",
        "_ready",
        "_schema",
        "_skip",
        "_source",
        "_window",
        "_window_size",
        "delivered",
        "name",
        "number",
    )

    def __init__(  # noqa: PLR0913 - one open file is one call
        self,
        name: str,
        opened: Opened,
        read: Read,
        window_size: int,
        key: tuple[int, ...],
        start: FileCursor,
        *,
        skip: bool = False,
        layout: Layout | None = None,
        schema: SchemaOfFiles | None = None,
    ) -> None:
        self.name = name
        self.number = start.file
        self.delivered = start.delivered
        """How many records were yielded, or skipped."""
        self._opened = opened
        self._read = read
        self._blocks = facts_of(read).blocks
        self._skip = skip
        self._layout = layout
        self._schema = schema
        anchor = (0, 0) if self._blocks is None else (start.offset, start.record)
        self._anchors = deque([anchor], maxlen=None if window_size else 1)
        self._window_size = window_size
        self._key = key
        self._window = Window()
        self._entered = False
        self._source: Iterator[Any] = iter(())
        self._lists: Iterator[Records[Any]] | None = None  # none: a plain reader yields the records one by one
        self._ready: RecordList | LazyRecords = []
        self._first = 0  # the number of the first of the ready ones, counted as they are yielded

    def take(self, count: int) -> RecordList:
        """The next ``count`` records, fewer at the end of the file.

        Raises:
          StateMismatch: the file has fewer records than were read before.
        """
        if not self._entered:
            self._enter()
        if self._lists is None:
            taken: list[Any] = []
            try:
                taken.extend(islice(self._source, count))
            finally:  # records in front of a failure were read
                self.delivered += len(taken)
            return taken
        parts: list[RecordList] = []
        missing = count
        while missing and self._has_ready(self._lists):
            start = self.delivered - self._first
            found = self._ready[start : start + missing]
            self.delivered += len(found)
            missing -= len(found)
            parts.append(found)
        return parts[0] if len(parts) == 1 else joined(parts)

    @property
    def num_ready(self) -> int:
        """How many records are known to need no reading."""
        return max(0, len(self._ready) - (self.delivered - self._first))

    @property
    def can_skip(self) -> bool:
        """Whether it has a layout, and can skip records without reading them."""
        return self._layout is not None

    def skip(self, count: int) -> int:
        """Counts records as yielded without reading them. Returns how many: fewer at the end of the file.

        Raises:
          StateMismatch: the file has fewer records than were read before.
        """
        assert self._layout is not None
        left = self._layout.records - self.delivered
        if left < 0:
            raise self._too_short(-left)
        self.delivered += min(count, left)
        return min(count, left)

    def read_range(self, lo: int, hi: int) -> RecordList:
        """Reads skipped records, and nothing else of the file.

        Raises:
          SourceError: naming the file.
        """
        assert self._layout is not None
        try:
            records = self._read_of(self._layout, lo, hi)
            if len(records) != hi - lo:
                raise SourceError(
                    f"found {len(records)} of the {hi - lo} records from number {lo} on: the file is not the one that "
                    "it was when its size was asked, or its index made; put it back, or remove the index",
                    offset=self._layout.offset_of(lo),
                )
            self._check_schema(records)
        except Exception as error:
            raise self.failure(error) from error
        return records

    def _check_schema(self, records: object) -> None:
        if self._schema is not None and isinstance(records, Columns) and (types := records.types()):
            self._schema.check(types, self.name)

    def _read_of(self, layout: Layout, lo: int, hi: int) -> RecordList:
        if layout.read is not None:
            return layout.read(self._opened.exact, lo, hi)
        start, end = layout.offset_of(lo), layout.offset_of(hi)
        part = cast(BinaryIO, BoundedFile(self._opened.exact, start, end))
        return list(chain.from_iterable(records for _, records in self._blocks_from(part, start)))

    def _blocks_from(self, file: BinaryIO, offset: int) -> Iterator[Block[Any]]:
        assert self._blocks is not None
        enter = partial(self._blocks, file)
        return with_corrupt_records(enter, self._opened.rewind, offset, self.name) if self._skip else enter(offset)

    def take_ready(self, most: int) -> RecordList:
        """Up to ``most`` records that are ready; reads more if none is. Empty only at the end of the file.

        Raises:
          StateMismatch: as ``take``.
        """
        if not self._entered:
            self._enter()
        if self._lists is None:
            return self.take(1)
        if not self._has_ready(self._lists):
            return []
        start = self.delivered - self._first
        records = self._ready[start : start + most]
        self.delivered += len(records)
        return records

    def _has_ready(self, lists: Iterator[Records[Any]]) -> bool:
        """Whether there is another record; reads the next list if none is ready."""
        while self.delivered - self._first == len(self._ready):
            self._ready, self._first = [], self.delivered  # frees them before others are read
            records = next(lists, None)
            if records is None:
                return False
            self._check_schema(records)
            self._ready = records if isinstance(records, LazyRecords) else as_records(records)
        return True

    def position(self) -> FileCursor:
        """The cursor: an ``OpenFile`` that starts there yields the rest."""
        delivered, of_file = self.delivered, (self._opened.size, self._opened.mark)
        if self._layout is not None:
            return FileCursor(self.number, self._layout.offset_of(delivered), delivered, delivered, *of_file)
        needed = self._start_of_window(delivered)
        anchors = self._anchors
        while len(anchors) > 1 and anchors[1][1] <= needed:
            anchors.popleft()
        offset, record = anchors[0]
        return FileCursor(self.number, offset, record, delivered, *of_file)

    def places(self, first: int, end: int) -> list[RecordPlace]:
        """The origins of the records ``[first, end)``, counted in the order in which they were yielded."""
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
        """The order of the window that begins at record ``start``. All windows but the last one are full."""
        window = self._window
        if start == window.start:
            return window.order
        if start == window.start - self._window_size:
            return window.previous
        return shuffled(self._window_size, *self._key, start // self._window_size)

    def failure(self, error: BaseException) -> SourceError:
        """The error to raise for an exception of the reader."""
        if isinstance(error, SourceError):
            offset = error.offset if isinstance(error.offset, int) else None
            return SourceError(f"{one_line(self.name)}: {error}", file=self.name, offset=offset)
        offset, where = self._opened.where()
        return SourceError(
            f"{one_line(self.name)}: reading failed{where}, after {self.delivered} records: {in_one_line(error)}",
            file=self.name,
            offset=offset,
        )

    def close(self) -> None:
        """Ends the reader, then closes the file."""
        source, self._source = self._source, iter(())
        self._entered, self._lists, self._ready, self._first = True, None, [], self.delivered
        if isinstance(source, Generator):
            source.close()
        self._opened.close()

    def _enter(self) -> None:
        """Goes to the first record that was not delivered."""
        self._entered = True
        delivered = self.delivered
        start = self._window.start = self._start_of_window(delivered)
        offset, record = self._anchors[0]
        if self._blocks is None:
            self._source = iter(self._read(self._opened.stream))
        else:
            blocks = self._blocks_from(self._opened.stream, offset)
            self._source = _noted(blocks, record, self._anchors, self._window)
        if start < record:
            raise StateMismatch(
                f"{one_line(self.name)}: the saved state enters the file at record {record}, behind record {start}, "
                "which is needed next: it is damaged, or of another shuffle_buffer; load the state as it was saved"
            )
        if self._window_size:
            if self._blocks is None:
                self._drop(self._source, start)
                records: Iterator[RecordList] = iter(partial(_next_list, self._source, self._window_size), [])
            else:
                records = in_windows(self._behind(self._source, start - record), self._window_size)
            first = start // self._window_size
            self._lists = windows(records, self._window_size, self._key, self._window, first)
            self._go(self._lists, start, delivered)
        elif self._blocks is None:
            self._drop(self._source, start)
        else:
            self._lists = self._source
            self._go(self._lists, record, delivered)

    def _start_of_window(self, delivered: int) -> int:
        """The first record that is needed to yield the next one."""
        return delivered - delivered % self._window_size if self._window_size else delivered

    def _go(self, lists: Iterator[Records[Any]], first: int, number: int) -> None:
        """Makes the list with record ``number`` ready, or the list before, if the record begins the next one.

        Args:
          lists: the lists from here on.
          first: the number of their first record.
          number: the record that is wanted.
        """
        self._first, self.delivered = first, first
        try:
            while self.delivered < number and self._has_ready(lists):
                self.delivered = min(number, self._first + len(self._ready))
            missing = number - self.delivered
        finally:
            self.delivered = number
        if missing:
            raise self._too_short(missing)

    def _behind(self, blocks: Iterator[Any], number: int) -> Iterator[Any]:
        """The records of blocks, without the first ``number``."""
        for block in blocks:
            if len(block) > number:
                yield as_records(block)[number:]
            number = max(0, number - len(block))
        if number:
            raise self._too_short(number)

    def _drop(self, records: Iterator[Any], number: int) -> None:
        last = deque(enumerate(islice(records, number), 1), maxlen=1)
        found = last[0][0] if last else 0
        if found < number:
            raise self._too_short(number - found)

    def _too_short(self, missing: int) -> StateMismatch:
        return StateMismatch(
            f"{one_line(self.name)}: the saved state goes on after {self.delivered} records, but the file ends "
            f"{missing} records before that: it is not the file that the state was saved with; put that back, or start "
            "the epoch anew"
        )


def _next_list(records: Iterator[Any], size: int) -> list[Any]:
    return list(islice(records, size))


def _noted(
    blocks: Iterator[Block[Any]], record: int, anchors: deque[tuple[int, int]], window: Window
) -> Generator[Records[Any], None, None]:
    """The records of each block. Notes the offsets of blocks; drops the offsets of blocks before the window."""
    for offset, records in blocks:
        while len(anchors) > 1 and anchors[1][1] <= window.start:
            anchors.popleft()
        anchors.append((offset, record))
        record += len(records)
        yield records
        del records  # before the next block is read
