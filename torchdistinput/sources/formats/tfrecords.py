"""Reads TFRecord files: ``tfrecords``. See ``readers`` for what a reader is."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import BinaryIO

import numpy as np

from torchdistinput.errors import InputError, SourceError
from torchdistinput.sources.formats.reader_api import BLOCK_BYTES, Block, grouped, in_blocks
from torchdistinput.sources.storage.exact_reads import read_pieces, truncated
from torchdistinput.sources.storage.io import skip_to


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
    word = _crc32c()(data)
    return ((word >> 15 | word << 17) + 0xA282EAD8) & 0xFFFFFFFF


@lru_cache(maxsize=4096)  # files repeat few lengths
def _length_in(head: bytes) -> tuple[int, bool]:
    """The length in a header, and whether the header's checksum matches."""
    length, checksum = struct.unpack("<QI", head)
    return length, masked_crc32c(head[:8]) == checksum


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
    for start, found in grouped(_unchecked(file, offset), offset):
        payloads = [payload for payload, _ in found]
        checksums = np.frombuffer(b"".join([footer for _, footer in found]), "<u4")
        found_sums = np.fromiter(map(masked_crc32c, payloads), "<u4", len(payloads))
        bad = np.flatnonzero(found_sums != checksums)[:1].tolist()
        problem = None
        if bad:
            payloads, length = payloads[: bad[0]], len(payloads[bad[0]])
            problem = _corrupt(start + sum(16 + len(payload) for payload in payloads), length)
        yield start, payloads
        del found, payloads  # frees them before the next block is read
        if problem is not None:
            raise problem


def _corrupt(offset: int, length: int) -> SourceError:
    return SourceError(
        f"the record at byte {offset} is corrupt: the checksum of its {length} bytes does not fit",
        offset=offset,
        resume_at=offset + 16 + length,
    )


def _unchecked(file: BinaryIO, offset: int) -> Iterator[tuple[int, tuple[bytes, bytes]]]:
    """The payload of each record with its stored checksum, and the offset at which the record ends."""
    data, at = b"", 0  # bytes that were read; those from ``at`` on were not yielded yet
    while True:
        if len(data) - at < 12:
            data, at = data[at:] + read_pieces(file, BLOCK_BYTES), 0
            if not data:
                return
            if len(data) < 12:
                raise truncated(offset, 12, len(data), "header")
        length = _checked_length(data[at : at + 12], offset)
        end = at + 16 + length
        if len(data) < end:
            data, at, end = data[at:], 0, end - at
            data += read_pieces(file, max(BLOCK_BYTES, end - len(data)))
            if len(data) < end:
                raise truncated(offset, end, len(data), "record")
        offset += 16 + length
        record = data[at + 12 : end - 4], data[end - 4 : end]
        data, at = (b"", 0) if end == len(data) else (data, end)  # frees a large record that was yielded
        yield offset, record


def _checked_length(head: bytes, offset: int) -> int:
    length, fits = _length_in(head)
    if not fits:
        raise SourceError(
            f"the record at byte {offset} is corrupt: the checksum of its length ({length}) does not fit; "
            "the file is damaged here, or not a TFRecord file (a compressed one needs compression=)",
            offset=offset,
        )
    return length
