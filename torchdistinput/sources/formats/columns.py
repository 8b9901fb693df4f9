"""``Columns``: the records of a block as columns. A batch is a slice of each column: no Python code runs for a record.

A reader may yield ``Columns`` in place of a list of records, and a ``FragmentSource`` a dict of columns. A record is
then a dict with one value of each column. The columns are collated as ``default_collate`` collates such dicts, but for
lists that hold no numbers: they stay lists.

The rows of one array are ``Columns`` too (``Columns.of_rows``): a record is then a row, and a batch one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice, repeat
from operator import methodcaller
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch

from torchdistinput.errors import SourceError

_NUMBERS = (bool, int, float)
_ROWS = ""
_TYPES_OF_PYTHON = (np.dtype(np.bool_), np.dtype(np.int64), np.dtype(np.float64))


@final
class Columns:
    """The records of a block as columns. It is a sequence of records, each a dict; a slice of it is ``Columns`` again.

    Args:
      columns: by name, all of one length: an array or tensor of numbers (one row for each record), a list with any
        value for each record (a list of numbers becomes an array), or a dict of columns.

    Raises:
      SourceError: there is no column, a column is no such value, or the columns have different lengths.
    """

    __slots__ = ("_columns", "_size", "_types")

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._columns = {name: _column(name, column) for name, column in columns.items()}
        lengths = {name: len(column) for name, column in self._columns.items()}
        if len(set(lengths.values())) != 1:
            raise SourceError(f"the columns of a block must have one length, got {lengths or 'no column'!s:.300}")
        self._size = next(iter(lengths.values()))
        self._types = _types_of(self._columns)

    @staticmethod
    def of_rows(rows: npt.NDArray[Any]) -> Columns:
        """The rows of an array of numbers as records."""
        return _of({_ROWS: rows}, {})

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Any]:
        if not self._types:
            return each_row(self._columns[_ROWS])
        rows = zip(*map(_values, self._columns.values()), strict=True)
        return map(dict, map(zip, repeat(tuple(self._columns)), rows))  # no Python code runs for a record

    def __getitem__(self, wanted: slice) -> Columns:
        return _of({name: column[wanted] for name, column in self._columns.items()}, self._types)

    def take(self, order: Sequence[int] | npt.NDArray[np.int64]) -> Columns:
        """The records of some indices, in their order."""
        index = np.asarray(order, dtype=np.int64)
        return _of({name: _taken(column, index) for name, column in self._columns.items()}, self._types)

    def batch(self) -> Any:
        """The records as a batch in memory of its own: a tensor for each array, a list for each list."""
        found = {name: _batch(column) for name, column in self._columns.items()}
        return found if self._types else found[_ROWS]

    def types(self) -> dict[str, str]:
        """The type of each column, by its name: dtype and shape of an array, or ``list``. Empty for rows of an array.

        The native byte order is in the place of any other. The name of an inner column is ``outer.inner``.
        """
        return self._types

    @property
    def row_type(self) -> str | None:
        """The dtype and shape of each of the rows of an array; ``None`` for columns with names."""
        return None if self._types else _type(self._columns[_ROWS])

    @staticmethod
    def joined(parts: Sequence[Columns]) -> Columns:
        """The records of several blocks, which have the same columns."""
        first = parts[0]
        found = {name: _concatenated([part._columns[name] for part in parts]) for name in first._columns}  # noqa: SLF001 - of the same class
        return _of(found, None if first._types else {})  # noqa: SLF001


RecordList: TypeAlias = list[Any] | Columns
"""Records of a block, or of a batch."""


def joined(parts: Sequence[RecordList]) -> RecordList:
    """The records of all parts, in order: ``Columns`` if all parts are, else a list."""
    filled = [part for part in parts if len(part)]
    if len(filled) == 1:
        return filled[0]
    columns = [part for part in filled if isinstance(part, Columns)]
    if filled and len(columns) == len(filled) and len({part.row_type for part in columns}) == 1:
        return Columns.joined(columns)
    return list(chain.from_iterable(filled))


@final
class AsAsked(list[Any]):
    """The next record of a reader without blocks; ``ask`` adds those wanted, and no more, as each may be large."""

    __slots__ = ("failure", "more")  # set by who makes it: a constructor takes as long as the rest
    more: Iterator[Any]
    """The records behind it."""
    failure: Exception | None
    """What ended the reading, to be raised when the records in front of it were taken."""

    def ask(self, count: int) -> None:
        """Reads on until there are so many."""
        try:
            self.extend(islice(self.more, count - len(self)))
        except Exception as error:
            self.failure = error


def as_records(records: Any, most: int = 1) -> RecordList:
    """The records of a block: a dict becomes ``Columns``, any other sequence a list.

    Args:
      records: the block.
      most: how many records to read if it is ``AsAsked``.

    Raises:
      SourceError: see ``Columns``.
    """
    if most > 1 and isinstance(records, AsAsked):
        records.ask(most)
    if isinstance(records, list | Columns):
        return records
    return Columns(records) if isinstance(records, Mapping) else list(records)


def in_windows(blocks: Iterator[Any], size: int) -> Iterator[RecordList]:
    """The records of blocks in pieces of ``size`` records; the last one may be shorter."""
    held: list[RecordList] = []
    missing = size
    for block in blocks:
        left = as_records(block)
        del block  # before the next block is read
        while len(left):
            part, left = left[:missing], left[missing:]
            held.append(part)
            missing -= len(part)
            del part
            if not missing:
                yield joined(held)
                held, missing = [], size
    if held:
        yield joined(held)


def collated(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``Columns.batch`` for records that were taken out of their columns."""
    return {name: _collated([record[name] for record in records]) for name in records[0]}


@final
class SchemaOfFiles:
    """The columns of the first file with records, with which those of all other files are compared.

    Args:
      first: the name of the file.
      types: its columns: the type of each, by its name. ``None`` until one was read.
    """

    def __init__(self, first: str = "", types: Mapping[str, str] | None = None) -> None:
        self._first = first
        self.types = types

    @property
    def is_known(self) -> bool:
        """Whether a file with columns was read."""
        return self.types is not None

    @property
    def facts(self) -> dict[str, Any]:
        """The columns as plain facts, which all ranks must have."""
        return {"columns of the files": f"{_listed(self.types or {})} (of {self._first})"}

    def check(self, types: Mapping[str, str], name: str = "") -> None:
        """Compares the columns of a file.

        Raises:
          SourceError: they differ; both files are named.
        """
        if self.types is None:
            self._first, self.types = name, types
        elif types != self.types:
            here, there = (
                {name: kind for name, kind in one.items() if other.get(name) != kind}
                for one, other in ((types, self.types), (self.types, types))
            )
            raise SourceError(
                f"its columns differ from those of {self._first}: {_listed(here)} here, {_listed(there)} there; "
                "all files of a dataset need the same columns and types: write them alike, or read them as two datasets"
            )


def _types_of(columns: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, column in columns.items():
        inner = column.types() if isinstance(column, Columns) else None
        found |= {name: _type(column)} if inner is None else {f"{name}.{each}": kind for each, kind in inner.items()}
    return found


def _type(column: Any) -> str:
    return _type_of_rows(column.dtype, column.shape[1:]) if isinstance(column, np.ndarray) else "list"


@lru_cache(256)  # a text takes NumPy as long as a slice of some columns
def _type_of_rows(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    return f"{dtype.newbyteorder('=')}{f' of shape {shape}' if shape else ''}"


def _listed(schema: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {kind}" for name, kind in schema.items()) or "no such column"


def _of(columns: dict[str, Any], types: dict[str, str] | None) -> Columns:
    """A part of other columns, which has their ``types``, and needs no check."""
    made = Columns.__new__(Columns)
    made._columns = columns  # noqa: SLF001 - a second constructor
    made._size = len(next(iter(columns.values())))  # noqa: SLF001
    made._types = _types_of(columns) if types is None else types  # noqa: SLF001
    return made


def _column(name: str, column: Any) -> Any:
    if isinstance(column, Mapping):
        return Columns(column)
    if isinstance(column, torch.Tensor):
        column = column.numpy()
    if isinstance(column, np.ndarray) and column.ndim:
        return column if column.dtype.kind in "biufc" else column.tolist()
    if isinstance(column, list | tuple):
        kinds = set(map(type, column))
        return np.asarray(column) if kinds and kinds <= set(_NUMBERS) else list(column)
    if isinstance(column, Columns):
        return column
    raise SourceError(
        f"column {name!r} is a {type(column).__name__}; an array or a list with one entry for each record is needed, "
        "or a dict of them"
    )


def _values(column: Any) -> Any:
    """The value of each record, of which ``default_collate`` makes the type of the column. Rows can be written to."""
    if not isinstance(column, np.ndarray):
        return column
    return column.tolist() if column.ndim == 1 and column.dtype in _TYPES_OF_PYTHON else column.copy()


def _taken(column: Any, index: npt.NDArray[np.int64]) -> Any:
    if isinstance(column, np.ndarray):
        return column[index]
    return column.take(index) if isinstance(column, Columns) else [column[each] for each in index.tolist()]


def _concatenated(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return Columns.joined(parts) if isinstance(parts[0], Columns) else list(chain.from_iterable(parts))


def each_row(rows: npt.NDArray[Any]) -> Iterator[Any]:
    """Each row, in the byte order of this machine. It can be written to and does not keep other rows alive."""
    native = rows.dtype.newbyteorder("=")
    if rows.ndim == 1 and rows.dtype.names is None:
        return iter(rows.astype(native))
    return map(methodcaller("astype", native, "C"), rows)


def _batch(column: Any) -> Any:
    if isinstance(column, np.ndarray):  # in memory of torch, like all batches
        return torch.tensor(np.ascontiguousarray(column, column.dtype.newbyteorder("=")))
    return column.batch() if isinstance(column, Columns) else column[:]


def _collated(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return collated(values)
    kind = type(values[0])
    return _batch(np.stack(values)) if kind in _NUMBERS or issubclass(kind, np.ndarray | np.generic) else values
