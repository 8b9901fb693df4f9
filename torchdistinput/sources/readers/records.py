"""``RecordReader``: reads the undecoded records of several files, in the order of ``interleave``, with their origins.

**Resuming.** A reader has a cursor between any two records. Another reader that starts at this cursor yields the same
records, in the same order and the same turns.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any, Final, Protocol, final

import numpy.typing as npt

from torchdistinput.plan.file_resharding import ReaderCursor
from torchdistinput.plan.mixed_turns import Cursor
from torchdistinput.sources.formats.columns import RecordList, SchemaOfFiles, joined
from torchdistinput.sources.readers.interleave import Interleave, Turn, taken_turns
from torchdistinput.sources.readers.open_file import OpenFile, RecordPlace
from torchdistinput.step_types import Digest

_MOST_READY: Final = 256  # rows of arrays are made as they are handed out


class Reads(Protocol):
    """A reader of undecoded records: of files, or of a mixture."""

    @property
    def opened(self) -> int:
        """A count; where it has grown, the cursor is reported after the batch: fresh files that were opened."""

    @property
    def of_columns(self) -> bool:
        """Whether the records that were read are ``Columns``."""

    def take(self, count: int) -> RecordList:
        """The next ``count`` records, fewer at the end; ``places`` returns their origins."""

    def reserve(self, count: int) -> Reserved:
        """Reserves the next ``count`` records, fewer at the end. The result is valid until the next call."""

    def places(self, lo: int, hi: int) -> list[RecordPlace]:
        """The origins of the records ``[lo, hi)`` of the last ``take``. Call it before the next record is taken."""

    def digest(self) -> Digest:
        """A number of what was read so far that is the same on all ranks that read the same. Once a batch."""

    def position(self) -> Cursor:
        """The cursor: another reader that starts there yields the records that this one has not yielded."""

    def close(self) -> None:
        """Ends the reading. More calls do nothing."""


@final
class RecordReader:
    """An iterator over undecoded records that knows the origin of the last one.

    A file is opened when its turn comes. All files are closed at the end, after an error, by ``close``, and when the
    reader is garbage-collected.

    Args:
      table: the open files, and whose turn it is.
      schema: the columns of the files that were read, if their records are ``Columns``.
    """

    def __init__(self, table: Interleave, schema: SchemaOfFiles) -> None:
        self._table = table
        self._schema = schema
        self._records = _one_by_one(table)

    def __iter__(self) -> Iterator[Any]:
        """The reader's only generator: a loop over it is faster than a method call for every record."""
        return self._records

    def __next__(self) -> Any:
        """The next record."""
        return next(self._records)

    @property
    def place(self) -> RecordPlace:
        """The origin of the last record.

        Raises:
          RuntimeError: before the first record.
        """
        if self._table.last is None:
            raise RuntimeError("the reader has yielded no record yet, so there is no place")
        return self._table.last.place()

    @property
    def opened(self) -> int:
        """How many fresh files were opened so far."""
        return self._table.opened

    @property
    def of_columns(self) -> bool:
        """Whether the records that were read are ``Columns``; in lists they may be beside a ``CorruptRecord``."""
        return self._schema.is_known

    def digest(self) -> Digest:
        """See ``Reads.digest``: how many records each file had that was read to its end."""
        return self._table.digest()

    def position(self) -> ReaderCursor:
        """The cursor: another reader that starts there yields the records that this one has not yielded."""
        return self._table.position()

    def take(self, count: int) -> RecordList:
        """The next ``count`` records, fewer at the end; ``places`` returns their origins."""
        table = self._table
        table.taken = []
        parts: list[RecordList] = []
        missing = count
        while missing:
            found = table.take_rounds(missing)
            if not found:
                turn = table.next_turn(missing)
                if turn is None:
                    break
                file, wanted = turn
                found = table.read(file, file.take, wanted)
                if len(found) < wanted:
                    table.end_file(file)
            parts.append(found)
            missing -= len(found)
        return parts[0] if len(parts) == 1 else joined(parts)

    def reserve(self, count: int) -> Reserved:
        """Reserves the next ``count`` records, fewer at the end. A record is read when the result is sliced.

        If a file must be read from start to end, its records are read at once. The result is valid until the next call.
        """
        table = self._table
        table.taken = []
        table.let_go()
        parts: list[RecordList | Turn] = []
        size = 0
        while size < count:
            if records := table.take_rounds(count - size):
                parts.append(records)
                size += len(records)
                continue
            turn = table.next_turn(count - size)
            if turn is None:
                break
            file, wanted = turn
            before = file.delivered
            if file.can_pass_over:
                number = table.read(file, file.pass_over, wanted)
                parts.append((file, before, before + number))
            else:
                records = table.read(file, file.take, wanted)
                number = len(records)
                parts.append(records)
            if number < wanted:
                table.end_file(file, keep=True)
            size += number
        return Reserved(parts)

    def take_ready(self) -> RecordList:
        """The next records that are ready: at least one; empty only at the end.

        Good records in front of one that cannot be read are returned before its error is raised.
        """
        table = self._table
        table.taken = []
        if rounds := table.take_rounds(_MOST_READY):
            return rounds
        while (turn := table.next_turn(_MOST_READY)) is not None:
            file, wanted = turn
            if records := table.read(file, file.take_ready, wanted):
                return records
            table.end_file(file)
        return []

    def places(self, lo: int, hi: int) -> list[RecordPlace]:
        """The origins of the records ``[lo, hi)`` of the last ``take``. Call it before the next record is taken."""
        found: list[RecordPlace] = []
        start = 0  # the position of the first record of a turn among those taken
        for file, first, end in taken_turns(self._table.taken):
            stop = start + end - first
            if lo < stop and start < hi:
                found += file.places(first + max(lo - start, 0), min(end, first + hi - start))
            start = stop
        return found

    def close(self) -> None:
        """Closes the open files and ends the reading. More calls do nothing."""
        self._records.close()
        self._table.close()


@final
class Reserved:
    """Reserved records of a reader: a slice of them reads its records.

    Args:
      parts: in order: lists of records that were read already, or turns whose records are still to be read.
    """

    def __init__(self, parts: Sequence[RecordList | Turn]) -> None:
        self._parts = parts
        self._sizes = [part[2] - part[1] if isinstance(part, tuple) else len(part) for part in parts]
        self._size = sum(self._sizes)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, wanted: slice) -> RecordList:
        """The records of a slice without a step. The records of one file are read in one call.

        Raises:
          SourceError: naming the file.
        """
        found = self._parts_of(*wanted.indices(self._size)[:2])
        ranges: dict[OpenFile, tuple[int, int]] = {}
        for piece in found:
            if isinstance(piece, tuple):
                file, a, b = piece
                ranges[file] = (ranges[file][0] if file in ranges else a, b)
        read = {file: file.read_range(a, b) for file, (a, b) in ranges.items()}
        whole: list[RecordList] = []
        for piece in found:
            if isinstance(piece, tuple):
                file, a, b = piece
                first = ranges[file][0]
                whole.append(read[file][a - first : b - first])
            else:
                whole.append(piece)
        return joined(whole)

    def rows(self, lo: int, hi: int) -> list[npt.NDArray[Any]]:
        """The records ``[lo, hi)`` as rows of arrays, one array for each file; empty if they are not such rows.

        Raises:
          SourceError: naming the file.
        """
        arrays: list[npt.NDArray[Any]] = []
        turns = [part for part in self._parts_of(lo, hi) if isinstance(part, tuple)]
        if len({file for file, _, _ in turns}) == len(turns):  # else the files take turns: many short pieces
            arrays = [rows for turn in turns if (rows := turn[0].read_rows(*turn[1:])) is not None]
        return arrays if sum(map(len, arrays)) == hi - lo else []

    def _parts_of(self, lo: int, hi: int) -> list[RecordList | Turn]:
        found: list[RecordList | Turn] = []
        for part, size in zip(self._parts, self._sizes, strict=True):
            a, b = max(lo, 0), min(hi, size)
            lo, hi = lo - size, hi - size  # as the next part counts
            if a >= b:
                continue
            if isinstance(part, tuple):
                file, first, _ = part
                found.append((file, first + a, first + b))
            else:
                found.append(part[a:b])
        return found


def _one_by_one(table: Interleave) -> Generator[Any, None, None]:
    """The records of all turns, until no file is open or waiting."""
    try:
        while (turn := table.next_turn(_MOST_READY)) is not None:
            file, wanted = turn
            start = delivered = file.delivered
            previous, table.last = table.last, file
            try:
                for record in file.at_hand(wanted):
                    file.delivered = delivered = delivered + 1
                    yield record
                    if file.delivered != delivered:  # records were taken meanwhile
                        break
            except BaseException as error:
                table.fail(file, error)
                raise
            finally:
                if file.delivered == start:
                    table.last = previous
            if file.delivered == start:
                table.end_file(file)
    finally:
        table.close()
