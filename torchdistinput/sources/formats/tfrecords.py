"""Reads TFRecord files: ``tfrecords``. See ``readers`` for what a reader is."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import BinaryIO, Final

from torchdistinput.errors import InputError, SourceError
from torchdistinput.sources.formats.reader_api import Block, grouped, in_blocks
from torchdistinput.sources.storage.io import read_pieces, skip_to, truncated

_HEAD: Final = struct.Struct("<QI")  # the length and its checksum


@lru_cache(maxsize=1)
def _crc32c() -> Callable[[bytes], int]:
    try:
        import google_crc32c  # noqa: PLC0415 - an extra, and only for these files
    except ImportError as error:
        raise InputError(
            "readers.tfrecords needs google-crc32c, which is not installed: pip install torchdistinput[tfrecord]"
        ) from error
    value: Callable[[bytes], int] = google_crc32c.value
    return value


def masked_crc32c(data: bytes) -> int:
    """The CRC-32C as TFRecord stores it: rotated and shifted, so that checksums of checksums stay useful. Local."""
    return _masked(_crc32c()(data))


def _masked(word: int) -> int:
    return ((word >> 15 | word << 17) + 0xA282EAD8) & 0xFFFFFFFF


@in_blocks
def tfrecords(file: BinaryIO, offset: int) -> Iterator[Block[bytes]]:
    """Yields the payloads of a TFRecord file, as bytes; both checksums of every record are verified.

    A record is its length (uint64, little endian), the masked CRC-32C of the length, the payload and its masked CRC-32C
    (https://www.tensorflow.org/tutorials/load_data/tfrecord). A length larger than the rest of the file is an error.
    It needs google-crc32c: ``pip install torchdistinput[tfrecord]``.

    Raises:
      SourceError: a record is cut off, or a checksum does not match.
    """
    skip_to(file, offset)
    yield from grouped(_payloads(file, offset), offset)


def _payloads(file: BinaryIO, offset: int) -> Iterator[tuple[int, bytes]]:
    """The payload of each record, with the offset at which the record ends."""
    crc, head = _crc32c(), read_pieces(file, 12)
    while head:
        if len(head) < 12:
            raise truncated(offset, 12, len(head), "header")
        length, checksum = _HEAD.unpack(head)
        if _masked(crc(head[:8])) != checksum:
            raise SourceError(
                f"the record at byte {offset} is corrupt: the checksum of its length ({length}) does not fit; "
                "the file is damaged here, or not a TFRecord file (a compressed one needs compression=)",
                offset=offset,
            )
        data = read_pieces(file, length + 16)  # with the next header: half as many reads
        if len(data) < length + 4:
            raise truncated(offset, length + 16, 12 + len(data), "record")
        payload, end, head = data[:length], offset + length + 16, data[length + 4 :]
        if _masked(crc(payload)) != int.from_bytes(data[length : length + 4], "little"):
            raise SourceError(
                f"the record at byte {offset} is corrupt: the checksum of its {length} bytes does not fit",
                offset=offset,
                resume_at=end,
            )
        offset = end
        yield end, payload
