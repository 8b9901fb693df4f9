"""A map-style dataset of named columns: a dict of tensors and arrays that have one row for each sample."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Final, final

import numpy as np
import torch
from torch.utils.data import Dataset

from torchdistinput.batches.containers import is_tensor_collection
from torchdistinput.errors import BatchingError, InputError

_TABLES: Final = {
    *(("pandas", "DataFrame"), ("polars", "DataFrame"), ("polars", "LazyFrame")),
    *(("pyarrow", "Table"), ("pyarrow", "Dataset"), ("pyarrow", "Scanner")),
    *(("duckdb", "DuckDBPyRelation"), ("deltalake", "DeltaTable")),
    *(("pyiceberg", "Table"), ("pyiceberg", "TableScan"), ("h5py", "Group"), ("zarr", "Group")),
}
"""Tables of other libraries, whose index is a column or whose rows have a class of their own."""
_WAY_OUT: Final = (
    "Give a dict of NumPy arrays with an entry for each sample, such as {name: table[name].to_numpy() for name in "
    "table.columns}, or of the arrays of h5py or zarr; or write Parquet files, for FileDataset(pattern, "
    "readers.parquet); or give a Dataset whose __getitem__ makes a sample of a row."
)

SERIES: Final = {("pandas", "Series"), ("polars", "Series"), ("pyarrow", "ChunkedArray"), ("pyarrow", "Array")}
"""Columns of these tables, which are found in a dict of such a table."""
_MOST_LOOKED_AT: Final = 16

_STORED: Final = {("h5py", "Dataset"), ("zarr", "Array")}
"""Arrays of other libraries, which are read from a store one entry at a time."""


@final
class Table(Dataset[Any]):
    """A map-style dataset: sample ``i`` has entry ``i`` of each of its columns.

    Args:
      columns: a dict of tensors and arrays, each ``(n, ...)``, also those of h5py and zarr; or one array of these.

    Raises:
      BatchingError: the columns differ in length, or one has no dimension; the message names them.
    """

    def __init__(self, columns: Any) -> None:
        self.columns = _map_columns(_collatable, columns)
        self._length = _length_of(columns)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return _map_columns(lambda column: column[index], self.columns)


def _collatable(column: Any) -> Any:
    """The column; as a tensor where torch's ``default_collate`` fails on its NumPy scalars."""
    if type(column) is not np.ndarray or column.ndim != 1 or column.dtype != np.uint64:
        return column
    with warnings.catch_warnings():  # torch warns of read-only arrays; samples are copied
        warnings.simplefilter("ignore")
        return torch.from_numpy(column if column.strides[0] >= 0 else column.copy())  # torch takes no negative stride


def is_table(data: Any) -> bool:
    """Whether the data is a mapping of tensors and arrays only, with at least one. Local.

    A mapping of the keys ``0, 1, ..., n - 1`` has samples by number, as torch reads it, and no columns.

    A single array of zarr counts too: it has no length, so it would not be recognised as map-style data. A
    ``TensorDict`` does not count: it is map-style data with batches of its own class.
    """
    if is_tensor_collection(data):
        return False
    if not isinstance(data, Mapping) or kinds_of(data) & _TABLES:
        return bool(kinds_of(data) & _STORED)
    columns = columns_in(data)
    return bool(columns) and data.keys() != {*range(len(data))} and all(map(_is_column, columns))


def _is_column(value: object) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray) or bool(kinds_of(value) & _STORED)


def kinds_of(value: object) -> set[tuple[str, str]]:
    """The classes of a value, each as library and name."""
    return {(kind.__module__.partition(".")[0].lstrip("_"), kind.__name__) for kind in type(value).__mro__}


def refuse_frame(data: object, what: str) -> None:
    """Refuses the tables of other libraries, whose index does not give samples. Local.

    Args:
      data: the user's object.
      what: the role in which the object was given, for the message.

    Raises:
      InputError: the object is such a table, or a dict of its columns; the message says what to write.
    """
    for library, _ in kinds_of(data) & _TABLES:
        raise InputError(
            f"found a {library} {type(data).__name__} as {what}, which does not give samples by their numbers. "
            f"{_WAY_OUT}"
        )
    if not isinstance(data, Mapping) or all(type(key) is int for key in islice(data, _MOST_LOOKED_AT)):
        return  # samples by their numbers may be of any kind
    for name, column in islice(data.items(), _MOST_LOOKED_AT):
        for library, kind in kinds_of(column) & SERIES:
            raise InputError(
                f"found a {library} {kind} as column {name!r} of a dict, as {what}; a tensor or NumPy array is needed. "
                f"{_WAY_OUT}"
            )


def columns_in(columns: Any) -> list[Any]:
    """The columns of a mapping or tuple, in order; a single one. Local."""
    if isinstance(columns, Mapping):
        return [*columns.values()]
    return list(columns) if isinstance(columns, list | tuple) else [columns]


def _map_columns(fn: Callable[[Any], Any], columns: Any) -> Any:
    return {name: fn(each) for name, each in columns.items()} if isinstance(columns, Mapping) else fn(columns)


def _length_of(columns: Any) -> int:
    is_dict = isinstance(columns, Mapping)
    named = {f"[{name!r}]": each for name, each in columns.items()} if is_dict else {"the array": columns}
    lengths = {name: column.shape[0] if column.ndim else None for name, column in named.items()}
    if len({*lengths.values()}) > 1 or None in lengths.values():
        found = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise BatchingError(
            f"the tensors and arrays of a dict have different numbers of entries: {found}. Each must have one entry "
            "per sample along its first dimension (None: it has no dimension)."
        )
    return int(next(iter(lengths.values())) or 0)
