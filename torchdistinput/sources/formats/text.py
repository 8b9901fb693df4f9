"""Reads lines: ``text_lines``, ``csv_rows``, ``json_lines``. See ``readers`` for what a reader is."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, BinaryIO, Final

from torchdistinput.errors import SourceError
from torchdistinput.sources.formats.reader_api import BLOCK_BYTES, Block, grouped, in_blocks
from torchdistinput.sources.storage.io import skip_to

BOM: Final = codecs.BOM_UTF8.decode()
_FIRST_SCANNED_BYTES: Final = 1 << 12


def next_line(file: BinaryIO, offset: int) -> int:
    """See ``in_blocks``: the start of the first line that starts at or behind an offset, or the end of the file."""
    if not offset:
        return 0
    at, size = offset - 1, _FIRST_SCANNED_BYTES
    file.seek(at)
    while chunk := file.read(size):
        found = chunk.find(b"\n")
        if found >= 0:
            return at + found + 1
        at += len(chunk)
        size = min(2 * size, BLOCK_BYTES)
    return at


@in_blocks(next_start=next_line, records="strings")
def text_lines(file: BinaryIO, offset: int) -> Iterator[Block[str]]:
    r"""Yields the lines of a UTF-8 text, without their ends (``\n`` or ``\r\n``) and without a byte order mark.

    The last line may lack its end. Only these two ends separate lines: a lone ``\r`` and other Unicode separators stay.

    >>> list(tdi.readers.text_lines(io.BytesIO(b"one\ntwo\r\nthree")))
    ['one', 'two', 'three']

    Raises:
      SourceError: at a line that is not UTF-8, naming the byte.
    """
    for start, block in blocks_of_lines(file, offset):
        yield from _decoded(block, start)


def blocks_of_lines(file: BinaryIO, offset: int) -> Iterator[tuple[int, bytes]]:
    """The whole lines of one chunk of the file at a time: one by one they would take several times as long."""
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
    """The lines of a block, up to the first one that is not UTF-8."""
    good, problem = len(block), None
    try:
        text = block.decode()
    except UnicodeDecodeError as error:
        problem = error
        good = block.rfind(b"\n", 0, error.start) + 1
        text = block[:good].decode()
    if not offset:
        text = text.removeprefix(BOM)
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    yield offset, lines
    if problem is not None:
        line = block[good : block.find(b"\n", good) + 1] or block[good:]
        raise not_utf8(line, offset + good, problem.start - good, offset + good + len(line)) from problem


def not_utf8(line: bytes, offset: int, position: int, end: int) -> SourceError:
    """The error for a line that is not UTF-8.

    Args:
      line: its bytes.
      offset: where it starts in the file.
      position: its first byte that is not UTF-8.
      end: where the next line starts.
    """
    return SourceError(
        f"the line at byte {offset} is not UTF-8: byte {offset + position} is 0x{line[position]:02x}; convert the file "
        "to UTF-8, or read it as bytes with a reader of your own",
        offset=offset,
        resume_at=end,
    )


def csv_rows(file: BinaryIO, *, delimiter: str = ",") -> Iterator[dict[str, str]]:
    r"""Yields the rows of a CSV file (RFC 4180, UTF-8) as dicts; the first row has the names of the columns.

    Fields may be quoted and then hold delimiters and line ends. Blank lines are skipped; an empty file has no rows. A
    resumed run reads its open files again from their front, and decodes nothing again.

    >>> list(tdi.readers.csv_rows(io.BytesIO(b"word,count\ncat,2\n")))
    [{'word': 'cat', 'count': '2'}]

    Args:
      file: the content.
      delimiter: the character between fields; ``functools.partial(csv_rows, delimiter="\t")`` reads TSV.

    Raises:
      SourceError: at a row with more or fewer fields than the header, a quote that does not end, text that is not
        UTF-8, or a header that has a name twice.
    """
    rows = csv.reader(chain(_first_line(file), map(bytes.decode, file)), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    try:
        for row in filter(None, rows):
            if header is None:
                header = row
                if len(set(header)) < len(header):
                    raise SourceError(f"the header has a column name twice: {header!r:.200}")
            elif len(row) != len(header):
                raise SourceError(
                    f"the row that ends in line {rows.line_num} has {len(row)} fields, the header has {len(header)}: "
                    f"{header!r:.200}"
                )
            else:
                yield dict(zip(header, row, strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise SourceError(f"line {rows.line_num + 1} is not CSV in UTF-8: {error}") from error


def _first_line(file: BinaryIO) -> Iterator[str]:
    """The line that may have a byte order mark in front."""
    return (line.decode("utf-8-sig") for line in islice(file, 1))


@in_blocks(next_start=next_line)
def json_lines(file: BinaryIO, offset: int) -> Iterator[Block[Any]]:
    """Yields the value of each line of a JSON Lines file; blank lines are skipped.

    >>> list(tdi.readers.json_lines(io.BytesIO(b'{"a": 1}')))
    [{'a': 1}]

    Raises:
      SourceError: at a line that is not one JSON value in UTF-8.
    """
    for start, block in blocks_of_lines(file, offset):
        yield from grouped(_json_values(block, start), start)


def _json_values(block: bytes, offset: int) -> Iterator[tuple[int, Any]]:
    """The values of the lines of a block, each with the offset at which its line ends."""
    last = offset + len(block)
    for line in block.split(b"\n"):
        end = min(offset + len(line) + 1, last)  # the last line may lack its line end
        if (line if offset else line.removeprefix(BOM.encode())).strip():
            try:
                text = line.decode()
                value = json.loads(text if offset else text.removeprefix(BOM))
            except UnicodeDecodeError as error:
                raise not_utf8(line, offset, error.start, end) from error
            except (ValueError, RecursionError) as error:
                message = f"the line at byte {offset} is not JSON: {error}"
                raise SourceError(message, offset=offset, resume_at=end) from error
            yield end, value
        offset = end
