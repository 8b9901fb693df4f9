"""Reads NumPy's ``.npy`` files: ``npy_rows``. The format is described in ``numpy.lib.format``; see also ``readers``."""

from __future__ import annotations

import io
import math
import tokenize
from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO, Final, NamedTuple, final

import numpy as np

from torchdistinput.errors import SourceError
from torchdistinput.sources.formats.columns import Columns, RecordList, SchemaOfFiles, each_row
from torchdistinput.sources.formats.reader_api import Block, Layout, LazyRecords, in_blocks
from torchdistinput.sources.storage.io import read_pieces, skip_to

_NUMBERS: Final = "biufc"  # kinds of dtypes
_BLOCK_BYTES: Final = 1 << 20
_MAX_HEADER_BYTES: Final = 1 << 16
_BEFORE_HEADER: Final = {(1, 0): 10, (2, 0): 12}  # bytes, the last of which are the length of the header

# The exceptions of NumPy's and Python's parsers for text that is not a header.
_NOT_A_HEADER: Final = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, SyntaxError, TypeError,
    ValueError, tokenize.TokenError,
)  # fmt: skip


@final
class _NpyHeader(NamedTuple):
    """The header of a ``.npy`` file: its array, and the offset of the data in bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    size: int

    @property
    def row_bytes(self) -> int:
        """How many bytes a row has."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def types(self) -> dict[str, str]:
        """What all files of a dataset have in common. The sizes of rows, and the lengths of strings, may differ."""
        return {"rows": f"{_kind_of(self.dtype)} of {len(self.shape) - 1} dimension(s)"}

    def read(self, file: BinaryIO, count: int) -> tuple[Columns | LazyRecords, int]:
        """The next rows, as far as they are whole, and how many bytes are there."""
        data = read_pieces(file, count * self.row_bytes)
        whole = len(data) // self.row_bytes
        rows = np.frombuffer(data, self.dtype, whole * math.prod(self.shape[1:])).reshape(whole, *self.shape[1:])
        if rows.dtype.kind in _NUMBERS and rows.size:
            return Columns.of_rows(rows), len(data)
        return LazyRecords(whole, lambda lo, hi: [*each_row(rows[lo:hi])]), len(data)


def _kind_of(dtype: np.dtype[Any]) -> str:
    if dtype.fields is not None:
        return f"[{', '.join(f'{name}: {_kind_of(field[0])}' for name, field in dtype.fields.items())}]"
    return dtype.type.__name__ if dtype.kind in "SU" else str(dtype.newbyteorder("="))


def _types(file: BinaryIO) -> dict[str, str] | None:
    header = _read_header(file)
    return header.types if header.shape[0] else None


def _layout(file: BinaryIO, size: int, schema: SchemaOfFiles | None = None) -> Layout | None:
    """The places of the rows; ``None`` if the file cannot be read to its end."""
    try:
        header = _read_header(file, schema)
    except SourceError:  # the reader raises it, at the step to which it belongs
        return None
    if size != header.size + header.shape[0] * header.row_bytes:
        return None
    return Layout(header.shape[0], lambda row: header.size + row * header.row_bytes, partial(_read_rows, header))


def _read_rows(header: _NpyHeader, file: BinaryIO, lo: int, hi: int) -> RecordList:
    file.seek(header.size + lo * header.row_bytes)
    return header.read(file, hi - lo)[0][:]


@in_blocks(layout=_layout, types=_types)
def npy_rows(file: BinaryIO, offset: int, *, schema: SchemaOfFiles | None = None) -> Iterator[Block[Any]]:
    """Yields the rows of a ``.npy`` file: ``array[0], array[1], …``, in the byte order of this machine.

    Each row is an array with memory of its own; the rows of a one-dimensional array are NumPy scalars. The array is
    read in blocks of about 1 MiB. Pickled objects are refused, and arrays in Fortran order, whose rows are spread over
    the file. All files of a dataset must have one dtype, and rows of one number of dimensions.

    Raises:
      SourceError: the header is not valid or of version 3, or the array has no rows or rows without a byte, holds
        objects, is in Fortran order, is cut off, or is followed by further bytes.
    """
    header = _read_header(file, schema)
    count, row_bytes = header.shape[0], header.row_bytes
    per_block = max(1, _BLOCK_BYTES // row_bytes)
    first = max(0, offset - header.size) // row_bytes
    skip_to(file, header.size + first * row_bytes, header.size)
    for start in range(first, count, per_block):
        wanted, place = min(per_block, count - start), header.size + start * row_bytes
        rows, found = header.read(file, wanted)
        yield place, rows
        if len(rows) < wanted:
            row, rest = start + len(rows), found % row_bytes
            place += found - rest
            raise SourceError(
                f"the file is cut off: row {row} of {count} at byte {place} needs {row_bytes} bytes, {rest} are left",
                offset=place,
            )
    if file.read(1):
        end = header.size + count * row_bytes
        raise SourceError(
            f"the array of shape {header.shape} ends at byte {end}, but the file goes on: its header is damaged, or "
            "it holds more than one array",
            offset=end,
        )


def _read_header(file: BinaryIO, schema: SchemaOfFiles | None = None) -> _NpyHeader:
    head = file.read(np.lib.format.MAGIC_LEN)
    try:
        version = np.lib.format.read_magic(io.BytesIO(head))
        if version not in _BEFORE_HEADER:
            raise ValueError(f"version {version[0]}.{version[1]} of the format is not known")
        head += file.read(_BEFORE_HEADER[version] - len(head))
        promised = int.from_bytes(head[np.lib.format.MAGIC_LEN :], "little")
        text = file.read(min(promised, _MAX_HEADER_BYTES))
        if len(text) < promised:
            raise ValueError(f"its header of {promised} bytes is cut off, or too long to be one")
        whole = io.BytesIO(len(text).to_bytes(4, "little") + text)  # version 1 is version 2 with a shorter length
        shape, fortran_order, dtype = np.lib.format.read_array_header_2_0(whole, max_header_size=_MAX_HEADER_BYTES)
        if any(isinstance(size, bool) or size < 0 for size in shape):
            raise ValueError(f"the shape {shape} is none")
        if dtype.subdtype is not None:
            raise ValueError(f"its elements are arrays themselves: {dtype}")
        np.empty((0, *shape[1:]), dtype)  # too many dimensions, or too large ones
    except _NOT_A_HEADER as error:
        raise SourceError(f"this is not a .npy file: {error}", offset=0) from error
    if problem := _no_rows_in(shape, dtype, is_transposed=fortran_order and len(shape) > 1):
        raise SourceError(f"an array of shape {shape} and dtype {dtype.str} {problem}", offset=0)
    header = _NpyHeader(shape, dtype, len(head) + len(text))
    if schema is not None and shape[0]:
        schema.check(header.types)
    return header


def _no_rows_in(shape: tuple[int, ...], dtype: np.dtype[Any], *, is_transposed: bool) -> str:
    """Why an array cannot be read row by row; empty if it can."""
    if dtype.hasobject:
        return (
            "holds Python objects, which are pickled, and unpickling runs code of the file; save numbers or strings of "
            "fixed length instead"
        )
    if not shape or not dtype.itemsize or 0 in shape[1:]:
        return "has no rows to read"
    if is_transposed:
        return (
            "is in Fortran order, so that its rows are spread over the file: save it by numpy.save(name, "
            "numpy.ascontiguousarray(array))"
        )
    return ""
