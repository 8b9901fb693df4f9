"""Reads records of one length: ``fixed_length_records``. See ``readers`` for what a reader is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import BinaryIO

import numpy as np

from torchdistinput.sources.checks import checked_int
from torchdistinput.sources.formats.reader_api import BLOCK_BYTES, Block, Layout, in_blocks
from torchdistinput.sources.storage.io import read_pieces, skip_to, truncated


def fixed_length_records(num_bytes: int) -> Callable[[BinaryIO], Iterator[bytes]]:
    """Makes a reader of records that all have ``num_bytes`` bytes. The reader can be pickled.

    The reader raises ``SourceError`` for a last record that is shorter.

    >>> list(tdi.readers.fixed_length_records(2)(io.BytesIO(b"aabb")))
    [b'aa', b'bb']

    Raises:
      TypeError: if ``num_bytes`` is not an int.
      ValueError: if it is less than 1.
    """
    return partial(_fixed_length, num_bytes=checked_int("num_bytes", num_bytes, at_least=1))


def _fixed_layout(file: BinaryIO, size: int, *, num_bytes: int) -> Layout | None:
    if size % num_bytes:
        return None  # the reader raises the error, at the step to which it belongs
    return Layout(size // num_bytes, lambda record: record * num_bytes, partial(_read_fixed, num_bytes))


def _read_fixed(num_bytes: int, file: BinaryIO, lo: int, hi: int) -> list[bytes]:
    file.seek(lo * num_bytes)
    block = read_pieces(file, (hi - lo) * num_bytes)
    return _of_length(num_bytes, block)


def _of_length(num_bytes: int, block: bytes) -> list[bytes]:
    """The records that are whole in a block of bytes."""
    whole = len(block) // num_bytes
    if whole < 2 or num_bytes > BLOCK_BYTES:
        return [block[start : start + num_bytes] for start in range(0, whole * num_bytes, num_bytes)]
    records: list[bytes] = np.frombuffer(block, f"V{num_bytes}", whole).tolist()
    return records


@in_blocks(layout=_fixed_layout)
def _fixed_length(file: BinaryIO, offset: int, *, num_bytes: int) -> Iterator[Block[bytes]]:
    skip_to(file, offset)
    wanted = max(1, BLOCK_BYTES // num_bytes) * num_bytes
    while block := read_pieces(file, wanted):
        whole = len(block) // num_bytes * num_bytes
        yield offset, _of_length(num_bytes, block)
        if whole < len(block):
            raise truncated(offset + whole, num_bytes, len(block) - whole, "record")
        offset += whole
