"""Readers: functions that take a binary file object and yield the records in it, for ``FileDataset(files, read)``.

``text_lines``, ``json_lines``, ``csv_rows``, ``npy_rows`` and ``tfrecords`` are such functions, and
``fixed_length_records(num_bytes)`` makes one; a reader of your own is any function of the same kind. A reader sees the
uncompressed content, reads it once from front to back in bounded pieces (also if the file lies about its lengths), and
delivers the good records in front of a bad one. Content that is corrupt or cut off is a ``SourceError`` with the
``offset`` at which the bad record starts; ``FileDataset`` adds the name of the file. Where it is certain at which byte
the next record starts, the error says so (``resume_at``), and with ``on_error="skip"`` reading goes on there: after a
bad line, a bad row in one line whose quotes are even in number, a TFRecord whose payload does not fit its checksum. It
is not after a corrupt length or in a file that is cut off. A reader of your own in blocks may say so too.

All of these can be entered again in the middle of a file, so that a resumed run seeks there; ``in_blocks`` makes a
reader of your own that can. The functions below yield the blocks of such a reader, from an ``offset`` that they yielded
before; what their names stand for takes the file alone, and yields the records.
"""

from __future__ import annotations

import codecs
import io
import json
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from operator import itemgetter, ne
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from torchdistinput.errors import SourceError
from torchdistinput.sources.files.checks import checked_int
from torchdistinput.sources.files.exact_reads import read_pieces
from torchdistinput.sources.files.formats.crc32c import masked_crc32c, masked_crcs32c
from torchdistinput.sources.files.formats.csv import csv_rows
from torchdistinput.sources.files.formats.npy import npy_rows
from torchdistinput.sources.files.io import skip_to
from torchdistinput.sources.files.reader_api import BLOCK_BYTES, Block, Layout, grouped, in_blocks, located

__all__ = [
    "csv_rows",
    "fixed_length_records",
    "in_blocks",
    "json_lines",
    "npy_rows",
    "skip_to",
    "text_lines",
    "tfrecords",
]

_BOM: Final = codecs.BOM_UTF8.decode()
_SCANNED_BYTES: Final = 1 << 20
_STARTS: Final = 4096

_decode_json: Final = json.JSONDecoder().raw_decode
_first_of, _second_of = itemgetter(0), itemgetter(1)


def _starts_of_lines(file: BinaryIO) -> Iterator[npt.NDArray[np.int64]]:
    offset, start = 0, 0  # of the content; of the line that is read
    while chunk := file.read(_SCANNED_BYTES):
        after = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + (offset + 1)
        offset += len(chunk)
        if len(after):
            yield np.concatenate(([start], after[:-1]))
            start = int(after[-1])
    if start < offset:
        yield np.array([start])


@located(starts=_starts_of_lines, records="strings")
def text_lines(file: BinaryIO, offset: int) -> Iterator[Block[str]]:
    r"""Yields the lines of a UTF-8 text, without their ends (``\n`` or ``\r\n``) and without a byte order mark.

    The last line needs no end. Only these two ends separate lines: a lone ``\r`` and other separators of Unicode stay.

    Raises:
      SourceError: at a line that is not UTF-8, naming the byte.
    """
    for start, block in _blocks_of_lines(file, offset):
        yield from _decoded(block, start)


def _blocks_of_lines(file: BinaryIO, offset: int) -> Iterator[tuple[int, bytes]]:
    """The whole lines in one chunk of the file at a time: handling many at once costs a fraction of one by one."""
    skip_to(file, offset)
    rest: list[bytes] = []
    while chunk := file.read(BLOCK_BYTES):
        cut = chunk.rfind(b"\n") + 1
        if not cut:
            rest.append(chunk)
            continue
        block = b"".join((*rest, memoryview(chunk)[:cut]))  # copied once
        yield offset, block
        offset += len(block)
        rest = [chunk[cut:]]
    if last := b"".join(rest):
        yield offset, last


def _decoded(block: bytes, offset: int) -> Iterator[Block[str]]:
    """The lines of a block, up to the first that is not UTF-8."""
    good, problem = len(block), None
    try:
        text = block.decode()
    except UnicodeDecodeError as error:
        problem = error
        good = block.rfind(b"\n", 0, error.start) + 1
        text = block[:good].decode()
    if not offset:
        text = text.removeprefix(_BOM)
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    yield offset, lines
    if problem is not None:
        line = block[good : block.find(b"\n", good) + 1] or block[good:]
        raise _not_utf8(line, offset + good, problem.start - good, offset + good + len(line)) from problem


def _not_utf8(line: bytes, offset: int, position: int, end: int) -> SourceError:
    return SourceError(
        f"the line at byte {offset} is not UTF-8: byte {offset + position} is 0x{line[position]:02x}; convert the file "
        "to UTF-8, or read it as bytes with a reader of your own",
        offset=offset,
        resume_at=end,
    )


def _starts_of_json(file: BinaryIO) -> Iterator[npt.NDArray[np.int64]]:
    for offset, block in _blocks_of_lines(file, 0):
        starts, start = [], offset
        for line in block.split(b"\n"):
            if line.strip():
                starts.append(start)
            start += len(line) + 1
        yield np.array(starts, np.int64)


@located(starts=_starts_of_json)
def json_lines(file: BinaryIO, offset: int) -> Iterator[Block[Any]]:
    """Yields the value of each line of a JSON Lines file; blank lines are passed over.

    Raises:
      SourceError: at a line that is not one JSON value in UTF-8.
    """
    for start, block in _blocks_of_lines(file, offset):
        yield from _plain_json(block, start) or grouped(_json_values(block, start), start)


def _plain_json(block: bytes, offset: int) -> list[Block[Any]]:
    """What ``_json_values`` gives, grouped, where each line is a value and nothing else; else nothing: look closer."""
    found: list[Block[Any]] = []
    start = 0
    while start < len(block):
        end = block.find(b"\n", start + BLOCK_BYTES - 1) + 1 or len(block)
        try:
            text = block[start:end].decode()
            lines = (text if offset + start else text.removeprefix(_BOM)).removesuffix("\n").split("\n")
            values = list(map(_decode_json, lines))
        except (ValueError, RecursionError):
            return []
        if any(map(ne, map(_second_of, values), map(len, lines))):
            return []
        found.append((offset + start, list(map(_first_of, values))))
        start = end
    return found


def _json_values(block: bytes, offset: int) -> Iterator[tuple[int, Any]]:
    """The values of the lines of a block, each with the offset at which its line ends."""
    last = offset + len(block)
    for line in block.split(b"\n"):
        end = min(offset + len(line) + 1, last)  # the last line needs no end
        if line.strip():
            try:
                text = line.decode()
                value = json.loads(text if offset else text.removeprefix(_BOM))
            except UnicodeDecodeError as error:
                raise _not_utf8(line, offset, error.start, end) from error
            except (ValueError, RecursionError) as error:
                message = f"the line at byte {offset} is not JSON: {error}"
                raise SourceError(message, offset=offset, resume_at=end) from error
            yield end, value
        offset = end


@lru_cache(maxsize=4096)  # files repeat few lengths
def _length_in(head: bytes) -> tuple[int, bool]:
    """The length that a header tells, and whether its checksum fits."""
    length, checksum = struct.unpack("<QI", head)
    return length, masked_crc32c(head[:8]) == checksum


def _starts_of_tfrecords(file: BinaryIO) -> Iterator[npt.NDArray[np.int64]]:
    """Goes from length to length; payloads are not read."""
    starts: list[int] = []
    size, offset = file.seek(0, io.SEEK_END), 0
    while offset < size:
        file.seek(offset)
        head = file.read(12)
        if len(head) < 12:
            raise _cut_off(offset, 12, len(head), "header")
        length = _checked_length(head, offset)
        if offset + 16 + length > size:
            raise _cut_off(offset, 16 + length, size - offset, "record")
        starts.append(offset)
        offset += 16 + length
        if len(starts) == _STARTS:
            yield np.array(starts)
            starts = []
    yield np.array(starts, np.int64)


@located(starts=_starts_of_tfrecords)
def tfrecords(file: BinaryIO, offset: int) -> Iterator[Block[bytes]]:
    """Yields the payloads of a TFRecord file, as bytes; both checksums of every record are verified.

    A record is its length (uint64, little endian), the masked CRC-32C of the length, the payload and its masked CRC-32C
    (https://www.tensorflow.org/tutorials/load_data/tfrecord). A length is believed only as far as the file has bytes.

    Raises:
      SourceError: at a record that is cut off or whose checksums do not fit.
    """
    skip_to(file, offset)
    for start, found in grouped(_unchecked(file, offset), offset):
        payloads = [payload for payload, _ in found]
        checksums = np.frombuffer(b"".join([footer for _, footer in found]), "<u4")
        bad = np.flatnonzero(masked_crcs32c(payloads) != checksums)[:1].tolist()
        problem = None
        if bad:
            payloads, length = payloads[: bad[0]], len(payloads[bad[0]])
            problem = _corrupt(start + sum(16 + len(payload) for payload in payloads), length)
        yield start, payloads
        del found, payloads  # before the next block is read
        if problem is not None:
            raise problem


def _corrupt(offset: int, length: int) -> SourceError:
    return SourceError(
        f"the record at byte {offset} is corrupt: the checksum of its {length} bytes does not fit",
        offset=offset,
        resume_at=offset + 16 + length,
    )


def _unchecked(file: BinaryIO, offset: int) -> Iterator[tuple[int, tuple[bytes, bytes]]]:
    """The payload of each record and its checksum as stored, and the offset at which the record ends."""
    data, at = b"", 0  # read and not yielded yet: what is behind ``at``
    while True:
        if len(data) - at < 12:
            data, at = data[at:] + read_pieces(file, BLOCK_BYTES), 0
            if not data:
                return
            if len(data) < 12:
                raise _cut_off(offset, 12, len(data), "header")
        length = _checked_length(data[at : at + 12], offset)
        end = at + 16 + length
        if len(data) < end:
            data, at, end = data[at:], 0, end - at
            data += read_pieces(file, max(BLOCK_BYTES, end - len(data)))
            if len(data) < end:
                raise _cut_off(offset, end, len(data), "record")
        offset += 16 + length
        record = data[at + 12 : end - 4], data[end - 4 : end]
        data, at = (b"", 0) if end == len(data) else (data, end)  # a large record is not held twice
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


def fixed_length_records(num_bytes: int) -> Callable[[BinaryIO], Iterator[bytes]]:
    """Makes a reader of records that all have ``num_bytes`` bytes; it pickles.

    Its ``SourceError`` is a last record that is shorter.

    Raises:
      TypeError: if ``num_bytes`` is not an int.
      ValueError: if it is less than 1.
    """
    return partial(_fixed_length, num_bytes=checked_int("num_bytes", num_bytes, at_least=1))


def _fixed_layout(file: BinaryIO, size: int, *, num_bytes: int) -> Layout | None:
    if size % num_bytes:
        return None  # which the reader refuses, at the step to which it belongs
    return Layout(size // num_bytes, lambda record: record * num_bytes, partial(_read_fixed, num_bytes))


def _read_fixed(num_bytes: int, file: BinaryIO, lo: int, hi: int) -> list[bytes]:
    file.seek(lo * num_bytes)
    block = read_pieces(file, (hi - lo) * num_bytes)
    return _of_length(num_bytes, block)


def _of_length(num_bytes: int, block: bytes) -> list[bytes]:
    """The whole records in some bytes."""
    whole = len(block) // num_bytes
    if whole < 2 or num_bytes > BLOCK_BYTES:
        return [block[start : start + num_bytes] for start in range(0, whole * num_bytes, num_bytes)]
    records: list[bytes] = np.frombuffer(block, f"V{num_bytes}", whole).tolist()
    return records


@located(layout=_fixed_layout)
def _fixed_length(file: BinaryIO, offset: int, *, num_bytes: int) -> Iterator[Block[bytes]]:
    skip_to(file, offset)
    wanted = max(1, BLOCK_BYTES // num_bytes) * num_bytes
    while block := read_pieces(file, wanted):
        whole = len(block) // num_bytes * num_bytes
        yield offset, _of_length(num_bytes, block)
        if whole < len(block):
            raise _cut_off(offset + whole, num_bytes, len(block) - whole, "record")
        offset += whole


def _cut_off(offset: int, needed: int, found: int, what: str) -> SourceError:
    return SourceError(
        f"the file is cut off: the {what} at byte {offset} needs {needed} bytes, {found} are left", offset=offset
    )
