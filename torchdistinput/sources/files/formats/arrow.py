"""Makes ``Columns`` of an Arrow table. It imports pyarrow, so it is imported only where such a file is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from torchdistinput.errors import SourceError
from torchdistinput.sources.files.columns import Columns

__all__ = ["columns_of"]


def columns_of(table: Any, fill_null: Any = None) -> Columns:
    """The columns of a table; see ``readers.parquet`` for their types.

    Args:
      table: a ``pyarrow.Table`` with at least one column.
      fill_null: the value that replaces missing values: one value, or a dict by the names of columns.

    Raises:
      SourceError: a column has missing values that are not filled.
    """
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        fill = fill_null.get(name) if isinstance(fill_null, Mapping) else fill_null
        columns[name] = _column(name, column.combine_chunks(), fill)
    return Columns(columns)


def _column(name: str, array: Any, fill: Any) -> Any:
    kind = array.type
    if isinstance(array, pa.ChunkedArray):  # several chunks too long for one array, or no chunk
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], kind)
    if pa.types.is_dictionary(kind):
        return _column(name, array.cast(kind.value_type), fill)
    if isinstance(kind, pa.ExtensionType):
        return _column(name, array.storage, fill)
    if array.null_count:
        array = _filled(name, array, fill)
    if pa.types.is_struct(kind):
        inner = zip(kind, array.flatten(), strict=True)
        return {field.name: _column(f"{name}.{field.name}", values, fill) for field, values in inner}
    if pa.types.is_fixed_size_list(kind) and _is_number(kind.value_type):
        values = _numbers(_filled_inside(name, array.flatten(), fill))
        return values.reshape(len(array), kind.list_size)
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _is_number(kind.value_type):
        whole = torch.tensor(_numbers(_filled_inside(name, array.flatten(), fill)))
        parts = torch.split(whole, pc.list_value_length(array).to_pylist())
        return [part.clone() for part in parts]
    if _is_number(kind):
        return _numbers(array)
    return array.to_pylist()


def _is_number(kind: Any) -> bool:
    types = pa.types
    return bool(
        types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_temporal(kind)
    ) and not types.is_interval(kind)


def _numbers(array: Any) -> np.ndarray[Any, Any]:
    if pa.types.is_temporal(array.type):
        array = array.view(pa.int64() if array.type.bit_width == 64 else pa.int32()).cast(pa.int64())
    numbers: np.ndarray[Any, Any] = array.to_numpy(zero_copy_only=False)
    return numbers


def _filled_inside(name: str, array: Any, fill: Any) -> Any:
    return _filled(f"the lists of {name}", array, fill) if array.null_count else array


def _filled(name: str, array: Any, fill: Any) -> Any:
    missing = f"column {name}: {array.null_count} of {len(array)} values are missing (null)"
    if fill is None:
        raise SourceError(f"{missing}, and a tensor has no such value; give fill_null= a value")
    try:
        return array.fill_null(pa.scalar(fill, array.type))
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise SourceError(f"{missing}, and fill_null={fill!r:.100} is no {array.type}: {error}") from error
