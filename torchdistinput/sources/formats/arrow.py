"""Makes ``Columns`` of an Arrow table. It imports pyarrow, so it is imported only where such a file is read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from torchdistinput.errors import SourceError
from torchdistinput.sources.formats.columns import Columns
from torchdistinput.sources.formats.reader_api import LazyRecords


def columns_of(table: Any, fill_null: Any = None) -> Columns | LazyRecords:
    """The records of a table, of which slices are taken; see ``readers.parquet`` for the types of their columns.

    Numbers become arrays once, mostly without a copy; other columns are converted record by record, as they are read.

    Args:
      table: a ``pyarrow.Table`` with at least one column.
      fill_null: see ``readers.parquet``.
    """
    columns: dict[str, Any] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        array = _in_one(column)
        whole = _is_number(array.type) and not array.null_count
        columns[name] = _numbers(array) if whole else array
    if all(isinstance(column, np.ndarray) for column in columns.values()):
        return Columns(columns)
    fill, fills = (None, fill_null) if isinstance(fill_null, Mapping) else (fill_null, {})
    return LazyRecords(table.num_rows, partial(_columns, columns, fill, fills))


def type_as_text(kind: Any) -> str:
    """A type as text: equal for types whose values come out alike, however they are stored.

    Raises:
      SourceError: a struct has two fields of one name.
    """
    types = pa.types
    if types.is_dictionary(kind):
        return type_as_text(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return type_as_text(kind.storage_type)
    if types.is_struct(kind):
        fields = {field.name: type_as_text(field.type) for field in kind}
        if len(fields) < kind.num_fields:
            raise SourceError(f"a struct has two fields of one name: {kind}")
        return f"struct<{', '.join(f'{name}: {fields[name]}' for name in sorted(fields))}>"
    if types.is_fixed_size_list(kind):
        return f"list<{type_as_text(kind.value_type)}>[{kind.list_size}]"
    if types.is_list(kind) or types.is_large_list(kind):
        return f"list<{type_as_text(kind.value_type)}>"
    name = str(kind).removeprefix("large_")
    return {"string_view": "string", "binary_view": "binary"}.get(name, name)


def _columns(columns: Mapping[str, Any], fill: Any, fills: Mapping[str, Any], lo: int, hi: int) -> Columns:
    """The records ``[lo, hi)`` of columns that are arrays of NumPy, and arrays of Arrow that are still to be converted.

    Raises:
      SourceError: a column has missing values that are not filled.
    """
    return Columns(
        {
            name: column[lo:hi]
            if isinstance(column, np.ndarray)
            else _column(name, column.slice(lo, hi - lo), fill, fills)
            for name, column in columns.items()
        }
    )


def _in_one(column: Any) -> Any:
    if column.num_chunks == 1:
        return column.chunk(0)  # ``combine_chunks`` would copy it
    whole = column.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):  # several chunks too long for one array, or no chunk
        whole = pa.concat_arrays(whole.chunks) if whole.num_chunks else pa.array([], column.type)
    return whole


def _column(name: str, array: Any, fill: Any, fills: Mapping[str, Any]) -> Any:
    """The values of a column.

    Args:
      name: its path: a field of a struct is ``struct.field``.
      array: its content.
      fill: the value that replaces missing ones, if there is none of this name.
      fills: such values by name.
    """
    kind, fill = array.type, fills.get(name, fill)
    if pa.types.is_dictionary(kind):
        return _column(name, array.cast(kind.value_type), fill, fills)
    if isinstance(kind, pa.ExtensionType):
        return _column(name, array.storage, fill, fills)
    if pa.types.is_struct(kind):  # where it is missing, so are its fields
        own = fill if isinstance(fill, Mapping) else dict.fromkeys([field.name for field in kind], fill)
        inner = zip([field.name for field in kind], array.flatten(), strict=True)
        return {field: _column(f"{name}.{field}", values, own.get(field), fills) for field, values in inner}
    if array.null_count:
        array = _filled(name, array, fill)
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
    return _filled(name, array, fill, "in lists ") if array.null_count else array


def _filled(path: str, array: Any, fill: Any, where: str = "") -> Any:
    missing = f"column {path}: {array.null_count} of {len(array)} values {where}are missing (null)"
    if fill is None:
        raise SourceError(f"{missing}, and a tensor has no such value; give fill_null={{{path!r}: value}}")
    try:
        return array.fill_null(pa.scalar(fill, array.type))
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise SourceError(f"{missing}, and fill_null={fill!r:.100} is no {array.type}: {error}") from error
