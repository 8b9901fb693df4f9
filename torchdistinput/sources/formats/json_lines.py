"""Reads JSON Lines files: ``json_lines``. See ``readers`` for what a reader is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from torchdistinput.errors import SourceError
from torchdistinput.sources.formats.reader_api import Block, grouped, in_blocks
from torchdistinput.sources.formats.text import BOM, blocks_of_lines, next_line, not_utf8


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
