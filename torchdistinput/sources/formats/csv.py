"""Reads CSV files: ``csv_rows``. See ``readers`` for what a reader is."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator
from typing import BinaryIO, Final, final

from torchdistinput.errors import SourceError
from torchdistinput.sources.formats.reader_api import Block, grouped, in_blocks
from torchdistinput.sources.storage.io import skip_to

_BOM: Final = codecs.BOM_UTF8.decode()


@final
class _DecodedLines:
    """The lines of a text with their line ends, as ``csv.reader`` needs them, and the offset of the next line."""

    def __init__(self, file: BinaryIO, offset: int) -> None:
        self._lines = iter(file)
        self.offset = offset
        self._last = b""

    def next_row_after(self, start: int) -> int | None:
        """The offset of the row after a bad row, if certain: the bad row is one line with an even number of quotes."""
        last = self._last
        return self.offset if self.offset - start == len(last) and last.count(b'"') % 2 == 0 else None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._last = next(self._lines)
        start, self.offset = self.offset, self.offset + len(line)
        text = line.decode()
        return text if start else text.removeprefix(_BOM)


@in_blocks
def csv_rows(file: BinaryIO, offset: int, *, delimiter: str = ",") -> Iterator[Block[dict[str, str]]]:
    r"""Yields the rows of a CSV file (RFC 4180, UTF-8) as dicts; the first row has the names of the columns.

    Fields may be quoted and then hold delimiters and line ends. Blank lines are skipped; an empty file has no rows.

    >>> list(tdi.readers.csv_rows(io.BytesIO(b"word,count\ncat,2\n")))
    [{'word': 'cat', 'count': '2'}]

    Args:
      file: the content.
      offset: see ``readers``; not an argument of the reader.
      delimiter: the character between fields; ``functools.partial(csv_rows, delimiter="\t")`` reads TSV.

    Raises:
      SourceError: at a row with more or fewer fields than the header, a quote that does not end, a line that is not
        UTF-8, or a header that has a name twice.
    """
    lines = _DecodedLines(file, 0)
    try:
        start, header = next(_fields(lines, delimiter), (0, []))
    except SourceError as error:
        error.resume_at = None  # without a header nothing can be read
        raise
    if len(set(header)) < len(header):
        raise SourceError(f"the header has a column name twice: {header!r:.200}", offset=start)
    if offset > lines.offset:
        skip_to(file, offset, lines.offset)
        lines = _DecodedLines(file, offset)
    yield from grouped(_dicts(lines, delimiter, header), lines.offset)


def _fields(lines: _DecodedLines, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The fields of each row that is not blank, and the offset at which the row starts."""
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        offset = lines.offset
        try:
            row = next(rows, None)
        except (csv.Error, UnicodeDecodeError) as error:
            message = f"the row at byte {offset} is not CSV in UTF-8: {error}"
            raise SourceError(message, offset=offset, resume_at=lines.next_row_after(offset)) from error
        if row is None:
            return
        if row:
            yield offset, row


def _dicts(lines: _DecodedLines, delimiter: str, header: list[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Each row as a dict by the names in the header, and the offset at which the row ends."""
    for offset, row in _fields(lines, delimiter):
        if len(row) != len(header):
            raise SourceError(
                f"the row at byte {offset} has {len(row)} fields, the header has {len(header)}: {header!r:.200}",
                offset=offset,
                resume_at=lines.next_row_after(offset),
            )
        yield lines.offset, dict(zip(header, row, strict=True))
