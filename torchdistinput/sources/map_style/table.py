"""Tensors and arrays side by side, as one dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeGuard, final

import numpy as np
import torch
from torch.utils.data import Dataset

from torchdistinput.batches.containers import open_container
from torchdistinput.errors import BatchingError, InputError

__all__ = ["Table", "columns_in", "is_table", "refuse_frame"]

_AS_DICT: Final = {
    ("pandas", "DataFrame"): "{name: column.to_numpy() for name, column in data.items()}",
    ("polars", "DataFrame"): "{column.name: column.to_numpy() for column in data}",
    ("pyarrow", "Table"): "{name: data[name].to_numpy() for name in data.column_names}",
}
"""Tables of other libraries, which are indexed by column or give rows of their own kind; and the dict of each."""


@final
class Table(Dataset[Any]):
    """A map-style dataset: sample ``i`` has entry ``i`` of each of its columns.

    Args:
      columns: nested dicts, lists and tuples of tensors and arrays, each ``(n, ...)``.

    Raises:
      BatchingError: they differ in length, or one has no dimension; they are named by path.
    """

    def __init__(self, columns: Any) -> None:
        self.columns = columns
        self._length = _length_of(columns)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return _map_columns(lambda column: column[index], self.columns)


def is_table(data: Any) -> TypeGuard[Mapping[Any, Any]]:
    """Whether it is a mapping with nothing but tensors and arrays in it, nested or not; one at least. Local."""
    if not isinstance(data, Mapping):
        return False
    columns = columns_in(data)
    return bool(columns) and all(isinstance(column, torch.Tensor | np.ndarray) for column in columns)


def refuse_frame(data: object, what: str) -> None:
    """Refuses the tables of other libraries, which torch would index as something else. Local.

    Args:
      data: what was given.
      what: as what.

    Raises:
      InputError: it is such a table; the dict of its columns is named.
    """
    library, name = type(data).__module__.partition(".")[0], type(data).__name__
    if (library, name) in _AS_DICT:
        raise InputError(
            f"found a {library} {name} as {what}, which does not give samples by their numbers. For columns of numbers "
            f"give the dict {_AS_DICT[library, name]}; else a Dataset whose __getitem__ makes a sample of a row."
        )


def columns_in(columns: Any) -> list[Any]:
    """The tensors and arrays of nested containers, in order, and whatever else is no container. Local."""
    return [column for _, column in _named(columns, "")]


def _named(columns: Any, path: str) -> Iterator[tuple[str, Any]]:
    # Not as in ``pytree``: an array stays an array, and a list is never a leaf.
    container = open_container(columns)
    if container is None:
        yield path, columns
        return
    for key, child in zip(container.keys, container.children, strict=True):
        yield from _named(child, f"{path}[{key!r}]")


def _map_columns(fn: Callable[[Any], Any], columns: Any) -> Any:
    container = open_container(columns)
    if container is None:
        return fn(columns)
    return container.rebuild([_map_columns(fn, child) for child in container.children])


def _length_of(columns: Any) -> int:
    lengths = {path: len(column) if column.ndim else None for path, column in _named(columns, "")}
    if len({*lengths.values()}) > 1 or None in lengths.values():
        found = ", ".join(f"{path} has {length}" for path, length in lengths.items())
        raise BatchingError(
            f"the tensors and arrays of a dict have different numbers of entries: {found}. Each must have one entry "
            "per sample along its first dimension (None: it has no dimension)."
        )
    return int(next(iter(lengths.values())) or 0)
