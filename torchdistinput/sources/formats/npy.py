"""Reads NumPy's ``.npy`` files: ``npy_rows``. The format is described in ``numpy.lib.format``; see also ``readers``."""

from __future__ import annotations

import io
import math
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, Final, final

import numpy as np

from torchdistinput.errors import SourceError
from torchdistinput.sources.formats.columns import Columns, RecordList, SchemaOfFiles, each_row
from torchdistinput.sources.formats.reader_api import Block, Layout, LazyRecords, in_blocks
from torchdistinput.sources.storage.io import read_pieces, skip_to

_NUMBERS: Final = "biufc"  # kinds of dtypes
_BLOCK_BYTES: Final = 1 << 20
_PREFIX_BYTES: Final = np.lib.format.MAGIC_LEN
_MAX_HEADER_BYTES: Final = 1 << 16
_LENGTH_BYTES: Final = {(1, 0): 2, (2, 0): 4}

# The exceptions of NumPy's and Python's parsers for text that is not a header.
_NOT_A_HEADER: Final = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, SyntaxError, TypeError,
    ValueError, tokenize.TokenError,
)  # fmt: skip


@final
@dataclass(frozen=True)
class _NpyHeader:
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

    def whole_rows(self, data: bytes) -> np.ndarray[Any, Any]:
        """The rows that are whole in a block of bytes."""
        inner = self.shape[1:]
        whole = len(data) // self.row_bytes
        return np.frombuffer(data, self.dtype, whole * math.prod(inner)).reshape(whole, *inner)


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
    row_bytes = header.row_bytes
    if size != header.size + header.shape[0] * row_bytes:
        return None
    return Layout(header.shape[0], lambda row: header.size + row * row_bytes, partial(_read_rows, header))


def _read_rows(header: _NpyHeader, file: BinaryIO, lo: int, hi: int) -> RecordList:
    file.seek(header.size + lo * header.row_bytes)
    return _rows(header.whole_rows(read_pieces(file, (hi - lo) * header.row_bytes)))[:]


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
    yield from _blocks_in_order(file, header, offset)
    if file.read(1):
        end = header.size + math.prod(header.shape) * header.dtype.itemsize
        raise SourceError(
            f"the array of shape {header.shape} ends at byte {end}, but the file goes on: its header is damaged, or "
            "it holds more than one array",
            offset=end,
        )


def _blocks_in_order(file: BinaryIO, header: _NpyHeader, offset: int) -> Iterator[Block[Any]]:
    count, row_bytes = header.shape[0], header.row_bytes
    per_block = max(1, _BLOCK_BYTES // row_bytes)
    first = max(0, offset - header.size) // row_bytes
    skip_to(file, header.size + first * row_bytes, header.size)
    for start in range(first, count, per_block):
        wanted = min(per_block, count - start)
        place = header.size + start * row_bytes
        data = read_pieces(file, wanted * row_bytes)
        whole = len(data) // row_bytes
        yield place, _rows(header.whole_rows(data))
        if whole < wanted:
            place += whole * row_bytes
            raise SourceError(
                f"the file is cut off: row {start + whole} of {count} at byte {place} needs {row_bytes} bytes, "
                f"{len(data) - whole * row_bytes} are left",
                offset=place,
            )


def _rows(rows: np.ndarray[Any, Any]) -> Columns | LazyRecords:
    if rows.dtype.kind in _NUMBERS and rows.size:
        return Columns.of_rows(rows)
    return LazyRecords(len(rows), lambda lo, hi: [*each_row(rows[lo:hi])])


def _read_header(file: BinaryIO, schema: SchemaOfFiles | None = None) -> _NpyHeader:
    prefix = file.read(_PREFIX_BYTES)
    try:
        version = np.lib.format.read_magic(io.BytesIO(prefix))
        if version not in _LENGTH_BYTES:
            raise ValueError(f"version {version[0]}.{version[1]} of the format is not known")
        length = file.read(_LENGTH_BYTES[version])
        promised = int.from_bytes(length, "little")
        text = file.read(min(promised, _MAX_HEADER_BYTES))
        size = len(prefix) + len(length) + len(text)
        if len(length) < _LENGTH_BYTES[version] or len(text) < promised:
            raise ValueError(f"its header of {promised} bytes is cut off, or too long to be one")
        head = io.BytesIO(len(text).to_bytes(4, "little") + text)  # version 1 is version 2 with a shorter length
        shape, fortran_order, dtype = np.lib.format.read_array_header_2_0(head, max_header_size=_MAX_HEADER_BYTES)
        if any(isinstance(size, bool) or size < 0 for size in shape):
            raise ValueError(f"the shape {shape} is none")
        if dtype.subdtype is not None:
            raise ValueError(f"its elements are arrays themselves: {dtype}")
        np.empty((0, *shape[1:]), dtype)  # too many dimensions, or too large ones
    except _NOT_A_HEADER as error:
        raise SourceError(f"this is not a .npy file: {error}", offset=0) from error
    if dtype.hasobject:
        raise SourceError(
            f"the array holds Python objects (dtype {dtype}), which are pickled, and unpickling runs code of the file; "
            "save numbers or strings of fixed length instead",
            offset=0,
        )
    if not shape or not dtype.itemsize or 0 in shape[1:]:
        raise SourceError(f"an array of shape {shape} and dtype {dtype.str} has no rows to read", offset=0)
    if fortran_order and len(shape) > 1:
        raise SourceError(
            f"the array of shape {shape} is in Fortran order, so that its rows are spread over the file: save it by "
            "numpy.save(name, numpy.ascontiguousarray(array))",
            offset=0,
        )
    header = _NpyHeader(shape, dtype, size)
    if schema is not None and shape[0]:
        schema.check(header.types)
    return header
