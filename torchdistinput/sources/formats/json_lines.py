"""Reads JSON Lines files: ``json_lines``. See ``readers`` for what a reader is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from operator import itemgetter, ne
from typing import Any, BinaryIO, Final

from torchdistinput.errors import SourceError
from torchdistinput.sources.formats.reader_api import BLOCK_BYTES, Block, grouped, in_blocks
from torchdistinput.sources.formats.text import BOM, blocks_of_lines, next_line, not_utf8

_decode_json: Final = json.JSONDecoder().raw_decode
_first_of, _second_of = itemgetter(0), itemgetter(1)
_SPACES: Final = " \t\r"  # that may stand behind a value: lines may end with ``\r\n``


@in_blocks(next_start=next_line)
def json_lines(file: BinaryIO, offset: int) -> Iterator[Block[Any]]:
    """Yields the value of each line of a JSON Lines file; blank lines are skipped.

    >>> list(tdi.readers.json_lines(io.BytesIO(b'{"a": 1}')))
    [{'a': 1}]

    Raises:
      SourceError: at a line that is not one JSON value in UTF-8.
    """
    for start, block in blocks_of_lines(file, offset):
        yield from _plain_json(block, start) or grouped(_json_values(block, start), start)


def _plain_json(block: bytes, offset: int) -> list[Block[Any]]:
    """The values of a block in one group, if each line begins with its only value; else see ``_json_values``."""
    found: list[Block[Any]] = []
    start = 0
    while start < len(block):
        end = block.find(b"\n", start + BLOCK_BYTES - 1) + 1 or len(block)
        try:
            text = block[start:end].decode()
            lines = (text if offset + start else text.removeprefix(BOM)).removesuffix("\n").split("\n")
            values = list(map(_decode_json, lines))
        except (ValueError, RecursionError):
            return []
        if any(map(ne, map(_second_of, values), map(len, lines))) and any(
            line[end:].strip(_SPACES) for line, (_, end) in zip(lines, values, strict=True)
        ):
            return []
        found.append((offset + start, list(map(_first_of, values))))
        start = end
    return found


def _json_values(block: bytes, offset: int) -> Iterator[tuple[int, Any]]:
    """The values of the lines of a block, each with the offset at which its line ends."""
    last = offset + len(block)
    for line in block.split(b"\n"):
        end = min(offset + len(line) + 1, last)  # the last line may lack its line end
        if line.strip():
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
