"""Reads one fragment, or file: its records in order, or in windows that are shuffled. It has a cursor at any record.

**Resuming.** Reading starts at the last block in front of the record, or of the window, at which it was left, and skips
the records between.

**The window shuffle.** Every window of so many consecutive records is yielded in a permutation keyed by (seed, epoch,
file, window). A buffer that is refilled record by record, as in TensorFlow, can only be restored by reading everything
before it. A window is restored by reading this window again.

**Reading only some of the records.** Where a format tells the place of each record, a ``NumberedReader`` skips records
without reading them, and reads any range of the skipped records. It does not shuffle.

**Going on after a record that cannot be read.** If asked for, and if the source knows where the next record begins,
a ``CorruptRecord`` takes the place of the record. It counts as a record, so that numbers, windows and cursors are the
same as without the damage, and a resumed fragment yields it again.

**Several samples, or none, for a record** (``flat_map_fn``). The samples count as records of their fragment. The
function is applied where records are read. So numbers, windows, cursors and batches are those of its samples, and a
resumed run calls it again for the records of the block in which it goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import chain
from typing import Any, BinaryIO, TypeAlias, cast, final

from torchdistinput.coordination.failures import in_one_line
from torchdistinput.errors import SourceError, StateMismatch
from torchdistinput.plan.file_resharding import FileCursor
from torchdistinput.plan.permutation import shuffled
from torchdistinput.sources.formats.columns import (
    AsAsked,
    Columns,
    RecordList,
    SchemaOfFiles,
    as_records,
    in_windows,
    joined,
)
from torchdistinput.sources.formats.reader_api import BoundedFile, Layout, LazyRecords, ReaderFacts, Records
from torchdistinput.sources.kernel.read_failures import CorruptRecord, RecordPlace
from torchdistinput.sources.storage.io import OpenedFile
from torchdistinput.sources.storage.retry import one_line

ReadFrom: TypeAlias = Callable[[Any], Iterator[tuple[Any, Any]]]
"""Reads the blocks of a fragment from a position, or from the front for ``None``; see ``FragmentSource.read``."""
Mark: TypeAlias = Callable[[], tuple[int, str]]
"""Returns the size of a fragment, or another number that changes with its content (-1: none), and its mark."""


@final
class RecordsByNumber:
    """The records of an open file that can be read without the others.

    Args:
      opened: the file, which is closed here.
      facts: of its reader.
      layout: of the file.
      numbers: the range of the records that count.
    """

    def __init__(self, opened: OpenedFile, facts: ReaderFacts, layout: Layout, numbers: tuple[int, int]) -> None:
        self._opened, self._facts, self._layout = opened, facts, layout
        self._first = numbers[0]
        self.count = numbers[1] - numbers[0]
        """How many they are."""

    def position_of(self, record: int) -> int:
        """The position at which a reader of the file can start with this record."""
        return self._layout.offset_of(self._first + record)

    def read(self, lo: int, hi: int) -> RecordList:
        """Reads the records ``[lo, hi)``, and nothing else of the file."""
        if self._layout.read is not None:
            return self._layout.read(self._opened.exact, self._first + lo, self._first + hi)
        start, end = self.position_of(lo), self.position_of(hi)
        assert self._facts.blocks is not None
        blocks = self._facts.blocks(cast(BinaryIO, BoundedFile(self._opened.exact, start, end)), start)
        return list(chain.from_iterable(records for _, records in blocks))

    def close(self) -> None:
        """Closes the file."""
        self._opened.close()


class _Fragment:
    """What both readers of a fragment have in common: its name, the number of its records so far, and its errors."""

    def __init__(self, name: str, start: FileCursor, mark: Mark, schema: SchemaOfFiles) -> None:
        self.name = name
        self.number = start.file
        self.delivered = start.delivered
        """How many records were yielded, or skipped."""
        self._schema = schema
        self._mark = lru_cache(1)(mark)
        self._at: Any = None  # the position of the block that was read last

    def _cursor(self, position: Any, record: int) -> FileCursor:
        """The cursor whose anchor is a position. A position is kept as a list of one, so that none is the front's 0."""
        return FileCursor(self.number, 0 if position is None else [position], record, self.delivered, *self._mark())

    def _check_schema(self, records: object) -> None:
        if isinstance(records, Columns) and (types := records.types()):
            self._schema.check(types, self.name)

    def failure(self, error: BaseException) -> SourceError:
        """The error to raise for an exception of the source."""
        name = one_line(self.name)
        if isinstance(error, SourceError):
            text = str(error) if str(error).startswith(f"{name}: ") else f"{name}: {error}"
            offset = error.offset if isinstance(error.offset, int) else None
            return SourceError(text, file=self.name, offset=offset)
        near = "" if self._at is None else f" near position {self._at!r:.100}"
        problem = f"reading failed{near}, after {self.delivered} records: {in_one_line(error)}"
        return SourceError(f"{name}: {problem}", file=self.name)


@final
class FragmentReader(_Fragment):
    """A fragment of an ``Interleave`` that is read in blocks. Records are taken in slices of its blocks, or windows.

    Args:
      name: of the fragment.
      read: reads its blocks; see ``ReadFrom``.
      start: the cursor: the number of the fragment in the dataset, and where to start.
      window: how many records are shuffled together; 0 for none.
      key: determines the order of a window, together with the window's number.
      mark: see ``Mark``.
      schema: the columns of the fragments that were read before.
    """

    def __init__(
        self,
        name: str,
        read: ReadFrom,
        start: FileCursor,
        window: int,
        key: tuple[int, ...],
        mark: Mark,
        schema: SchemaOfFiles,
    ) -> None:
        super().__init__(name, start, mark, schema)
        self._window = window
        self._order = lru_cache(2)(lambda number, size: shuffled(size, *key, number))
        self._last_window: tuple[int, list[int]] = (-1, [])  # the number of the current window, and its order
        offset = start.offset
        self._anchors = deque([(offset[0] if isinstance(offset, list) else offset or None, start.record)])
        self._first = self._needed()  # the number of the first of the ready records, counted as they are yielded
        self._ready: RecordList | LazyRecords = []
        if self._first < start.record:
            raise StateMismatch(
                f"{one_line(name)}: the saved state enters the file at record {start.record}, behind record "
                f"{self._first}, which is needed next: it is damaged, or of another shuffle_buffer; load the state as "
                "it was saved"
            )
        blocks = self._blocks(read, self._first)
        self._lists: Generator[Records[Any], None, None] = blocks
        if window:
            self._lists = self._windows(map(partial(as_records, most=window), blocks), self._first // window)

    def open(self) -> None:
        """Opens the fragment: reads its first block.

        Raises:
          StateMismatch: it has fewer records than were read before.
        """
        self._has_ready()

    def take(self, count: int) -> RecordList:
        """The next ``count`` records, fewer at the end of the fragment."""
        parts: list[RecordList] = []
        while count and len(found := self.take_ready(count, asks=count)):
            count -= len(found)
            parts.append(found)
        return parts[0] if len(parts) == 1 else joined(parts)

    @property
    def num_ready(self) -> int:
        """How many records can be taken without reading; less than 1 if none."""
        return len(self._ready) - (self.delivered - self._first)

    def take_ready(self, most: int, asks: int = 1) -> RecordList:
        """Up to ``most`` records that are ready; if none is, more are read, which asks for so many.

        Empty only at the end of the fragment.
        """
        if not self._has_ready(asks):
            return []
        start = self.delivered - self._first
        found = self._ready[start : start + most]
        self.delivered += len(found)
        return found

    def position(self) -> FileCursor:
        """The cursor: a ``FragmentReader`` that starts there yields the rest."""
        if isinstance(self._ready, AsAsked):  # the same, however many were asked for at once
            return self._cursor(self.delivered, self.delivered)
        return self._cursor(*self._anchor(self._needed()))

    def places(self, first: int, end: int) -> list[RecordPlace]:
        """The origins of the records ``[first, end)``, counted in the order in which they were yielded."""
        name, number, size = self.name, self.number, self._window
        if not size:
            return [RecordPlace(name, record, number) for record in range(first, end)]
        found: list[RecordPlace] = []
        for record in range(first, end):
            window, inside = divmod(record, size)
            last, order = self._last_window  # the last window of a fragment may be shorter than all others
            order = order if window == last else self._order(window, size)
            found.append(RecordPlace(name, window * size + order[inside], number))
        return found

    def close(self) -> None:
        """Ends the reading; more calls do nothing."""
        self._lists.close()
        self._ready, self._first = [], self.delivered

    def _needed(self) -> int:
        """The first record that is needed to yield the next one."""
        return self.delivered - self.delivered % self._window if self._window else self.delivered

    def _anchor(self, needed: int) -> tuple[Any, int]:
        """The last block in front of a record: its position, and the number of its first record."""
        while len(self._anchors) > 1 and self._anchors[1][1] <= needed:
            self._anchors.popleft()
        return self._anchors[0]

    def _has_ready(self, most: int = 1) -> bool:
        """Whether there is another record; reads the next list if none is ready, see ``as_records``."""
        while self.delivered - self._first >= len(self._ready):
            self._first += len(self._ready)
            self._ready = []  # frees them before others are read
            records = next(self._lists, None)
            if records is None:
                if self.delivered > self._first:
                    raise too_short(self.name, self.delivered, self.delivered - self._first)
                return False
            self._ready = records if isinstance(records, LazyRecords) else as_records(records, most)
        return True

    def _blocks(self, read: ReadFrom, needed: int) -> Generator[Records[Any], None, None]:
        """The records from number ``needed`` on, in blocks, whose positions are noted."""
        position, record = self._anchors[0]
        blocks = read(position)
        try:
            for self._at, block in blocks:
                records: Any = Columns(block) if isinstance(block, Mapping) else block
                del block  # as below
                if self._window:
                    self._anchors.append((self._at, record))
                    self._anchor(self._needed())
                else:
                    self._anchors[0] = self._at, record
                self._check_schema(records)
                early = needed - record  # records of the block that are not needed
                if early < len(records):
                    if early > 0 and self._window:
                        record += early
                        records = as_records(records)[early:]
                    elif early > 0:
                        self._first -= early
                    yield records
                record += len(records)  # more were asked for since
                del records  # before the next block is read
        finally:
            if isinstance(blocks, Generator):
                blocks.close()
        if record < needed:
            raise too_short(self.name, self.delivered, self.delivered - record)

    def _windows(self, blocks: Iterator[RecordList], number: int) -> Generator[RecordList, None, None]:
        """Each window of records in its own order, from the one with this number on."""
        for held in in_windows(blocks, self._window):
            order = self._order(number, len(held))
            self._last_window = number, order
            number += 1
            yield held.take(order) if isinstance(held, Columns) else [held[each] for each in order]
            del held  # before the next window is read


def too_short(name: str, delivered: int, missing: int) -> StateMismatch:
    """The error for a fragment that ends before the record at which it is to be entered again."""
    return StateMismatch(
        f"{one_line(name)}: the saved state goes on after {delivered} records, but the file ends {missing} records "
        "before that: it is not the file that the state was saved with; put that back, or start the epoch anew"
    )


@final
class NumberedReader(_Fragment):
    """A file of an ``Interleave`` whose records are read by number: those that were skipped before.

    Args:
      name: of the file.
      records: finds and reads them.
      start: the cursor.
      mark: see ``Mark``.
      schema: see ``FragmentReader``.
    """

    def __init__(
        self, name: str, records: RecordsByNumber, start: FileCursor, mark: Mark, schema: SchemaOfFiles
    ) -> None:
        super().__init__(name, start, mark, schema)
        self._records = records

    def open(self) -> None:
        """Checks that the file has the records that were read before.

        Raises:
          StateMismatch: it has fewer.
        """
        if self.delivered > self._records.count:
            raise too_short(self.name, self.delivered, self.delivered - self._records.count)

    def skip(self, count: int) -> int:
        """Counts records as yielded without reading them. Returns how many: fewer at the end of the file."""
        count = min(count, self._records.count - self.delivered)
        self.delivered += count
        return count

    def read_range(self, lo: int, hi: int) -> RecordList:
        """Reads skipped records, and nothing else of the file.

        Raises:
          SourceError: naming the file.
        """
        try:
            records = self._records.read(lo, hi)
            if len(records) != hi - lo:
                raise SourceError(
                    f"found {len(records)} of the {hi - lo} records from number {lo} on: the file is not the one that "
                    "it was when it was opened; put it back",
                    offset=self._records.position_of(lo),
                )
            self._check_schema(records)
        except Exception as error:
            raise self.failure(error) from error
        return records

    def position(self) -> FileCursor:
        """The cursor: see ``FragmentReader.position``."""
        return self._cursor(self._records.position_of(self.delivered), self.delivered)

    def places(self, first: int, end: int) -> list[RecordPlace]:
        """The origins of the records ``[first, end)``."""
        return [RecordPlace(self.name, record, self.number) for record in range(first, end)]

    def close(self) -> None:
        """Closes the file; more calls do nothing."""
        self._records.close()


def with_corrupt_records(read: ReadFrom, name: str) -> ReadFrom:
    """Reads on after a record that cannot be read, with a ``CorruptRecord`` in its place, if the next one is certain.

    A compressed file is read again up to the record, for each such record; the limit of skipped records bounds this.
    """

    def blocks(position: Any) -> Iterator[tuple[Any, Any]]:
        while True:
            try:
                yield from read(position)
            except SourceError as error:
                bad: Any = error.offset
                after: Any = error.resume_at
                if bad is None or after is None or after in (bad, position):
                    raise
                where = f"offset {bad}" if isinstance(bad, int) else f"position {bad!r:.100}"
                reason = f"{one_line(name)}, {where}: {in_one_line(error).removeprefix('SourceError: ')}"
            else:
                return
            yield bad, [CorruptRecord(reason)]
            position = after

    return blocks


FlatMap: TypeAlias = Callable[[Any], Iterable[Any]]


def flat_mapped(read: ReadFrom, flat_map_fn: FlatMap, name: str, *, skip: bool) -> ReadFrom:
    """Reads the samples that a function makes of the records of a fragment.

    Args:
      read: reads the records.
      flat_map_fn: gives the samples of a record.
      name: the file, or fragment, for messages.
      skip: whether a record for which the function fails is left out; else it is a ``SourceError``.
    """

    def blocks(start: Any) -> Iterator[tuple[Any, Any]]:
        for position, records in read(start):
            made: list[Any] = []
            try:
                for record in as_records(records):
                    made += _samples_of(flat_map_fn, name, record, skip=skip)
            except SourceError:
                yield position, made  # the samples in front come first
                raise
            yield position, made

    return blocks


def _samples_of(flat_map_fn: FlatMap, name: str, record: Any, *, skip: bool) -> list[Any]:
    try:
        return list(flat_map_fn(record))
    except Exception as error:
        problem = f"flat_map_fn failed: {in_one_line(error)}; the record is {record!r:.100}"
        if skip:
            return [CorruptRecord(f"{one_line(name)}: {problem}")]
        raise SourceError(problem) from error
