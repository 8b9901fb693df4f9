"""Readers: functions that take a binary file object and yield the records in it, for ``FileDataset(files, read)``.

``text_lines``, ``json_lines``, ``csv_rows``, ``npy_rows`` and ``tfrecords`` are such functions, and
``fixed_length_records(num_bytes)`` makes one; a reader of your own is any function of the same kind. A reader sees the
uncompressed content, reads it once from front to back in bounded pieces (also if the file lies about its lengths), and
delivers the good records in front of a bad one. Content that is corrupt or cut off is a ``SourceError`` with the
``offset`` at which the bad record starts; ``FileDataset`` adds the name of the file.
"""

from __future__ import annotations

import codecs
import csv
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, BinaryIO, Final, final

from torchdistinput.errors import SourceError
from torchdistinput.sources.crc32c import masked_crc32c
from torchdistinput.sources.npy import npy_rows
from torchdistinput.sources.pieces import read_pieces

__all__ = ["csv_rows", "fixed_length_records", "json_lines", "npy_rows", "text_lines", "tfrecords"]

_CHUNK: Final = 1 << 16
_BOM: Final = codecs.BOM_UTF8.decode()


def text_lines(file: BinaryIO) -> Iterator[str]:
    r"""Yields the lines of a UTF-8 text, without their ends (``\n`` or ``\r\n``) and without a byte order mark.

    The last line needs no end. Only these two ends separate lines: a lone ``\r`` and other separators of Unicode stay.

    Raises:
      SourceError: at a line that is not UTF-8, naming the byte.
    """
    return chain.from_iterable(_blocks_of_lines(file))


def _blocks_of_lines(file: BinaryIO) -> Iterator[list[str]]:
    """The lines of one chunk of the file at a time: decoding many at once costs a fraction of one by one."""
    offset, rest = 0, []
    while chunk := file.read(_CHUNK):
        cut = chunk.rfind(b"\n") + 1
        if not cut:
            rest.append(chunk)
            continue
        block = b"".join((*rest, chunk[:cut]))
        yield from _decoded(block, offset)
        offset += len(block)
        rest = [chunk[cut:]]
    yield from _decoded(b"".join(rest), offset)


def _decoded(block: bytes, offset: int) -> Iterator[list[str]]:
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
    yield lines
    if problem is not None:
        raise _not_utf8(block[good:], offset + good, problem.start - good) from problem


def _not_utf8(line: bytes, offset: int, position: int) -> SourceError:
    return SourceError(
        f"the line at byte {offset} is not UTF-8: byte {offset + position} is 0x{line[position]:02x}; convert the file "
        "to UTF-8, or read it as bytes with a reader of your own",
        offset=offset,
    )


def json_lines(file: BinaryIO) -> Iterator[Any]:
    """Yields the value of each line of a JSON Lines file; blank lines are passed over.

    Raises:
      SourceError: at a line that is not one JSON value in UTF-8.
    """
    offset = 0
    for line in file:
        if line.strip():
            try:
                text = line.decode()
                value = json.loads(text if offset else text.removeprefix(_BOM))
            except UnicodeDecodeError as error:
                raise _not_utf8(line, offset, error.start) from error
            except (ValueError, RecursionError) as error:
                raise SourceError(f"the line at byte {offset} is not JSON: {error}", offset=offset) from error
            yield value
        offset += len(line)


@final
class _DecodedLines:
    """The lines of a text with their ends, as ``csv.reader`` wants them, and where the next one starts."""

    def __init__(self, file: BinaryIO) -> None:
        self._lines = iter(file)
        self.offset = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        text = line.decode()
        text = text.removeprefix(_BOM) if not self.offset else text
        self.offset += len(line)
        return text


def csv_rows(file: BinaryIO, *, delimiter: str = ",") -> Iterator[dict[str, str]]:
    r"""Yields the rows of a CSV file (RFC 4180, UTF-8) as dicts; the first row has the names of the columns.

    Fields may be quoted and then hold delimiters and line ends. Blank lines are passed over; an empty file has no rows.

    Args:
      file: the content.
      delimiter: what separates fields; ``functools.partial(csv_rows, delimiter="\t")`` reads TSV.

    Raises:
      SourceError: at a row with more or fewer fields than the header, a quote that does not end, a line that is not
        UTF-8, or a header that has a name twice.
    """
    lines = _DecodedLines(file)
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        offset = lines.offset
        try:
            row = next(rows, None)
        except (csv.Error, UnicodeDecodeError) as error:
            raise SourceError(f"the row at byte {offset} is not CSV in UTF-8: {error}", offset=offset) from error
        if row is None:
            return
        if not row:
            continue
        if not header:
            header = row
            if len(set(header)) < len(header):
                raise SourceError(f"the header has a column name twice: {header}", offset=offset)
        elif len(row) != len(header):
            raise SourceError(
                f"the row at byte {offset} has {len(row)} fields, the header has {len(header)}: {header}", offset=offset
            )
        else:
            yield dict(zip(header, row, strict=True))


@lru_cache(maxsize=4096)
def _checksum_of_length(length: bytes) -> int:
    return masked_crc32c(length)  # files repeat few lengths


def tfrecords(file: BinaryIO) -> Iterator[bytes]:
    """Yields the payloads of a TFRecord file, as bytes; both checksums of every record are verified.

    A record is its length (uint64, little endian), the masked CRC-32C of the length, the payload and its masked CRC-32C
    (https://www.tensorflow.org/tutorials/load_data/tfrecord). A length is believed only as far as the file has bytes.

    Raises:
      SourceError: at a record that is cut off or whose checksums do not fit.
    """
    offset = 0
    while head := file.read(12):
        if len(head) < 12:
            raise _cut_off(offset, 12, len(head), "header")
        length, checksum = struct.unpack("<QI", head)
        if _checksum_of_length(head[:8]) != checksum:
            raise SourceError(
                f"the record at byte {offset} is corrupt: the checksum of its length ({length}) does not fit; "
                "the file is damaged here, or not a TFRecord file (a compressed one needs compression=)",
                offset=offset,
            )
        payload = read_pieces(file, length)
        footer = file.read(4) if len(payload) == length else b""
        if len(footer) < 4:
            raise _cut_off(offset, 16 + length, 12 + len(payload) + len(footer), "record")
        if masked_crc32c(payload) != int.from_bytes(footer, "little"):
            raise SourceError(
                f"the record at byte {offset} is corrupt: the checksum of its {length} bytes does not fit",
                offset=offset,
            )
        yield payload
        offset += 16 + length


def fixed_length_records(num_bytes: int) -> Callable[[BinaryIO], Iterator[bytes]]:
    """Makes a reader of records that all have ``num_bytes`` bytes; it pickles.

    Its ``SourceError`` is a last record that is shorter.

    Raises:
      TypeError: if ``num_bytes`` is not an int.
      ValueError: if it is less than 1.
    """
    given: object = num_bytes
    if isinstance(given, bool) or not isinstance(given, int):
        raise TypeError(f"num_bytes must be an int, got {num_bytes!r}")
    if num_bytes < 1:
        raise ValueError(f"num_bytes must be at least 1, got {num_bytes}")
    return _FixedLengthRecords(num_bytes)


@final
@dataclass(frozen=True)
class _FixedLengthRecords:
    num_bytes: int

    def __call__(self, file: BinaryIO) -> Iterator[bytes]:
        return chain.from_iterable(self._blocks(file))

    def _blocks(self, file: BinaryIO) -> Iterator[list[bytes]]:
        size = self.num_bytes
        wanted = max(1, _CHUNK // size) * size
        offset, block = 0, b""
        while len(block := read_pieces(file, wanted)) == wanted:
            yield [block[start : start + size] for start in range(0, wanted, size)]
            offset += wanted
        whole = len(block) // size * size
        yield [block[start : start + size] for start in range(0, whole, size)]
        if whole < len(block):
            raise _cut_off(offset + whole, size, len(block) - whole, "record")


def _cut_off(offset: int, needed: int, found: int, what: str) -> SourceError:
    return SourceError(
        f"the file is cut off: the {what} at byte {offset} needs {needed} bytes, {found} are left", offset=offset
    )
