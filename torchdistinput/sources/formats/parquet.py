"""Reads Parquet files: ``readers.parquet``. A position in a file is the number of a record.

Only the needed row groups and columns are read. The footer of a file says how many records each row group has, so a
rank can read its part of a file without the rest, and the number of records is known without reading records.
"""

# ruff: noqa: PLC0415 - pyarrow is an extra, and imported where it is used

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, BinaryIO, Final, final

from torchdistinput.errors import InputError, SourceError
from torchdistinput.sources.checks import as_object
from torchdistinput.sources.formats.columns import RecordList, SchemaOfFiles, joined
from torchdistinput.sources.formats.reader_api import Block, Layout, in_blocks

_RECORDS_AT_ONCE: Final = 1 << 14


def parquet(columns: Sequence[str] | None = None, *, fill_null: Any = None) -> Callable[[BinaryIO], Iterator[Any]]:
    """Makes a reader of Parquet files; the reader can be pickled.

    It needs pyarrow: ``pip install torchdistinput[parquet]``.

    A record is a dict with the value of each column. Without a ``map_fn`` of the dataset and a ``collate_fn`` of your
    own, batches are made of whole columns, without a Python object for each record. Numbers and bools become tensors;
    lists of one fixed length become tensors of two dimensions. Dates, times and durations become int64, in the unit of
    the file. A struct becomes a dict. Other columns become lists: of text, of bytes, of tensors (for lists of numbers,
    one tensor for each record), and of Python values for all other types.

    All files must have the columns of the first one, in any order, and their types: times of another unit or numbers of
    another dtype are an error that names both files. A file without records may be anything.

    Only the wanted columns of the wanted row groups are read. One row group at a time is decoded for each open file. A
    resumed run reads on inside its row group. Under policy DATA a rank reads only the row groups of its records, and
    ``len`` is known: its first call reads the footers. With ``on_error="skip"`` each rank reads all files under DATA,
    and the length is unknown.

    With ``on_error="skip"`` a row group that cannot be decoded counts as one record that is left out.

    Args:
      columns: the names of the columns to read; ``None`` for all.
      fill_null: the value that replaces missing values: one value, or a dict of values by the names of columns; a field
        of a struct is ``"column.field"``. ``None``: a missing value is an error.

    Raises:
      InputError: pyarrow is not installed.
      TypeError, ValueError: an argument is not valid.
    """
    try:
        import pyarrow.parquet  # noqa: F401 - here, and not at the first file
    except ImportError as error:
        raise InputError(
            "readers.parquet needs pyarrow, which is not installed: pip install torchdistinput[parquet]"
        ) from error
    if columns is not None:
        if isinstance(columns, str) or not all(isinstance(as_object(name), str) for name in columns):
            raise TypeError(f"columns must be a list of names of columns, got {columns!r:.100}")
        if not columns or len(set(columns)) < len(columns):
            raise ValueError(f"columns must be names of columns, each once, got {[*columns]!r:.100}")
    return partial(_parquet, columns=None if columns is None else tuple(columns), fill_null=fill_null)


def _types(file: BinaryIO, **options: Any) -> dict[str, str] | None:
    rows = _ParquetRecords(file, **options)
    return rows.types if rows.starts[-1] else None


def _layout(file: BinaryIO, size: int, **options: Any) -> Layout | None:
    try:
        rows = _ParquetRecords(file, **options)
    except SourceError:  # the reader raises it, at the step to which it belongs
        return None
    return Layout(rows.starts[-1], int, rows.read_range, boundary_from=rows.boundary_from)


@in_blocks(layout=_layout, ranges=True, types=_types)
def _parquet(file: BinaryIO, offset: int, /, **options: Any) -> Iterator[Block[Any]]:
    rows = _ParquetRecords(file, **options)
    if offset > rows.starts[-1]:
        raise SourceError(f"reading is to go on at record {offset}, but the file has {rows.starts[-1]}", offset=offset)
    for group in range(rows.group_of(offset), len(rows.starts) - 1):
        start = rows.starts[group]
        for lo in range(max(0, offset - start), rows.size_of(group), _RECORDS_AT_ONCE):
            yield start + lo, rows.records(group, lo, lo + _RECORDS_AT_ONCE)


@final
class _ParquetRecords:
    """The records of a file. The footer is read at once, and the last row group that was read is kept.

    Raises:
      SourceError: the footer is damaged, the file lacks a wanted column or has two of its name, or its columns are not
        those of the schema.
    """

    def __init__(
        self,
        file: BinaryIO,
        *,
        columns: tuple[str, ...] | None,
        fill_null: Any,
        schema: SchemaOfFiles | None = None,
    ) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        from torchdistinput.sources.formats.arrow import type_as_text

        try:
            self._file = pq.ParquetFile(file, pre_buffer=True)
        except (pa.ArrowException, OSError) as error:
            _raise_if_of_the_disk(error)
            raise SourceError(f"this is not a Parquet file, or its footer is damaged: {error}", offset=0) from error
        there = self._file.schema_arrow.names
        missing = [name for name in columns or () if name not in there]
        if missing:
            raise SourceError(f"there is no column {', '.join(map(repr, missing))}; the file has {there}", offset=0)
        if not there:
            raise SourceError("the file has no column", offset=0)
        wanted = there if columns is None else columns
        twice = [name for name in wanted if there.count(name) > 1]
        if twice:
            raise SourceError(
                f"two columns have the name {twice[0]!r}, and a record has one value of a name: write the file with "
                "other names, or read others by readers.parquet(columns=[...])",
                offset=0,
            )
        about = self._file.metadata
        self.starts = [0, *accumulate(about.row_group(group).num_rows for group in range(about.num_row_groups))]
        """The number of the first record of each row group; at the end, the number of records."""
        self.types = {name: type_as_text(self._file.schema_arrow.field(name).type) for name in wanted}
        """The type of each wanted column."""
        self._names = [*self.types]
        if schema is not None and self.starts[-1]:
            schema.check(self.types)
            self._names = [*(schema.types or ())]  # in the order of the first file
        self._columns = None if columns is None else [*columns]
        self._fill_null = fill_null
        self._last: tuple[int, Any] = (-1, None)

    def group_of(self, record: int) -> int:
        """The row group of a record."""
        return bisect_right(self.starts, record) - 1

    def size_of(self, group: int) -> int:
        """How many records a row group has."""
        size: int = self.starts[group + 1] - self.starts[group]
        return size

    def _decoded(self, group: int) -> Any:
        """The records of a row group, of which slices are taken.

        Raises:
          SourceError: it cannot be decoded.
        """
        import pyarrow as pa

        from torchdistinput.sources.formats.arrow import columns_of

        if self._last[0] != group:
            self._last = (-1, None)  # frees it before another one is read
            try:
                table = self._file.read_row_group(group, columns=self._columns).select(self._names)
                self._last = (group, columns_of(table, self._fill_null))
            except (pa.ArrowException, OSError) as error:
                _raise_if_of_the_disk(error)
                raise self._failure(group, f"cannot be decoded: {error}") from error
        return self._last[1]

    def records(self, group: int, lo: int, hi: int) -> RecordList:
        """The records ``[lo, hi)`` of a row group."""
        decoded = self._decoded(group)
        try:
            records: RecordList = decoded[lo:hi]
        except SourceError as error:
            raise self._failure(group, str(error)) from error
        return records

    def boundary_from(self, record: int) -> int:
        return int(self.starts[bisect_left(self.starts, record)])

    def read_range(self, file: BinaryIO, lo: int, hi: int) -> RecordList:
        """See ``Layout.read``. It reads the file whose footer it has."""
        parts = []
        for group in range(self.group_of(lo), self.group_of(hi - 1) + 1):
            start = self.starts[group]
            parts.append(self.records(group, max(0, lo - start), min(hi, self.starts[group + 1]) - start))
        return joined(parts)

    def _failure(self, group: int, problem: str) -> SourceError:
        start, end = self.starts[group : group + 2]
        where = f"row group {group} (records {start} to {end - 1})"
        return SourceError(f"{where}: {' '.join(problem.split())}", offset=start, resume_at=end)


def _raise_if_of_the_disk(error: Exception) -> None:
    """Raises an error that came from reading bytes, not from their content."""
    if isinstance(error, OSError) and error.errno is not None:
        raise error
