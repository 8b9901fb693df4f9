"""Reads CSV files: ``csv_rows``. See ``readers`` for what a reader is."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import chain, islice
from typing import BinaryIO

from torchdistinput.errors import SourceError


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
