"""Reads a number of bytes that a file claims to have; a false claim does not allocate memory."""

from __future__ import annotations

from typing import BinaryIO, Final

from torchdistinput.errors import SourceError

_PIECE: Final = 1 << 20


def read_pieces(file: BinaryIO, count: int) -> bytes:
    """Reads ``count`` bytes, or what is left if that is less.

    ``file.read(count)`` would first allocate ``count`` bytes, which a damaged length can make petabytes; here memory
    grows with what the file really has.
    """
    first = file.read(min(count, _PIECE))
    if len(first) == count:
        return first
    pieces, missing = [first], count - len(first)
    while missing and pieces[-1]:
        pieces.append(file.read(min(missing, _PIECE)))
        missing -= len(pieces[-1])
    return b"".join(pieces)


def truncated(offset: int, needed: int, found: int, what: str) -> SourceError:
    """The message for a record or header at an offset that has fewer bytes than it needs."""
    return SourceError(
        f"the file is cut off: the {what} at byte {offset} needs {needed} bytes, {found} are left", offset=offset
    )
