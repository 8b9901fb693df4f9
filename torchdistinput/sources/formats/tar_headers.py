"""Reads the headers of tar archives: the name and size of each member.

A member has a header of 512 bytes. *Extended* headers with contents of their own may stand in front of it: pax records
(Python writes them for times with fractions, so in front of each member) and the long names of GNU tar. Ordinary
headers, alone or with pax records, are read here, in a tenth of the time that ``tarfile`` needs. ``tarfile`` reads all
others. The format is described in the standard of ``pax``
(https://pubs.opengroup.org/onlinepubs/9799919799/utilities/pax.html).
"""

from __future__ import annotations

import io
import re
import struct
import tarfile
import zlib
from collections.abc import Sequence
from typing import Final, NamedTuple, final

from torchdistinput.errors import SourceError

BLOCK_SIZE: Final = 512
"""The size of a header; contents are padded to a multiple of it."""

_FIELDS: Final = struct.Struct("100s24x12s12x8sc100x6s82x155s12x")  # name, size, checksum, kind, magic, prefix
_MAGICS: Final = (b"ustar\0", b"ustar ")
_FILE: Final = b"0"
_PAX: Final = b"x"
_EXTENDED: Final = tuple(b"xgXLK")
_MAX_EXTENDED: Final = 1 << 20
_PAX_RECORD: Final = re.compile(rb"(\d{1,9}) ([^=\n]+)=")
_UNREADABLE: Final = (tarfile.TarError, ValueError, LookupError, ArithmeticError)  # for damaged headers


@final
class TarHeader(NamedTuple):
    """The content of the headers of a member."""

    name: str
    size: int
    """The number of bytes of content that follow."""
    is_file: bool
    """Whether the member is a file, or a link to a file."""
    lacks: str
    """The reason why the archive lacks the content of the file; empty if it has the content."""


def padded(size: int) -> int:
    """The size of a content, with its padding."""
    return -(-size // BLOCK_SIZE) * BLOCK_SIZE


def extended_size(head: bytes, start: int) -> int | None:
    """The padded size of the content of an extended header; ``None`` if the header is the last one of its member.

    Args:
      head: the header.
      start: the offset of the member, for messages.

    Raises:
      SourceError: the header is damaged.
    """
    if head[156] not in _EXTENDED:
        return None
    plain = _plain(head)
    try:
        size = tarfile.TarInfo.frombuf(head, "utf-8", "backslashreplace").size if plain is None else plain[2]
        if not 0 <= size <= _MAX_EXTENDED:
            raise tarfile.ReadError(f"an extended header of {size} bytes")
    except _UNREADABLE as error:
        raise _unreadable(start, error) from error
    return padded(size)


def read_header(headers: Sequence[bytes], start: int) -> TarHeader:
    """Reads the headers of one member.

    Args:
      headers: its extended headers, each with its content appended as a separate part; then the last header.
      start: the offset of the first header, for messages.

    Raises:
      SourceError: the headers are damaged, or are no headers.
    """
    found = _ordinary(headers)
    if found is not None:
        return TarHeader(*found, is_file=True, lacks="")
    archive = io.BytesIO(b"".join(headers))
    try:
        with tarfile.open(fileobj=archive, mode="r:", encoding="utf-8", errors="backslashreplace") as opened:
            about = opened.next()
        if about is None or about.size < 0:
            raise tarfile.ReadError("no member, or one of a negative size")
    except _UNREADABLE as error:
        raise _unreadable(start, error) from error
    lacks = _what_lacks(about)
    # Links and folders have no content, whatever size their header gives.
    has_content = about.isreg() or about.type not in tarfile.SUPPORTED_TYPES
    return TarHeader(about.name, about.size if has_content else 0, about.isreg() or bool(lacks), lacks)


def _unreadable(start: int, error: Exception) -> SourceError:
    return SourceError(
        f"the header at byte {start} cannot be read: {error}; the file is damaged here, or not a tar archive (a "
        'compressed one needs compression="gzip", or a name that ends in .gz)',
        offset=start,
    )


def _what_lacks(about: tarfile.TarInfo) -> str:
    if about.islnk() or about.issym():
        return "a link; make the archive with tar --dereference --hard-dereference"
    return "a sparse file; make the archive without --sparse" if about.issparse() else ""


def _plain(head: bytes) -> tuple[bytes, bytes, int] | None:
    """The kind, name and size in a header of the usual form; ``None`` if ``tarfile`` must read it."""
    name, size, checksum, kind, magic, prefix = _FIELDS.unpack(head)
    size, stored = size.strip(b" \0"), checksum.strip(b" \0")
    if magic not in _MAGICS or not (size.isdigit() and stored.isdigit()):
        return None
    # The sum of all bytes, with spaces in place of the checksum. The lower half of Adler-32 is 1 plus the sum of the
    # bytes, modulo 65521.
    total = (zlib.adler32(head) & 0xFFFF) - 1 - sum(checksum) + 8 * ord(" ")
    try:
        if (total - int(stored, 8)) % 65521:
            return None
        length = int(size, 8)
    except ValueError:  # the digits are not octal
        return None
    name = name.partition(b"\0")[0]
    return kind, prefix.partition(b"\0")[0] + b"/" + name if prefix[0] else name, length


def _ordinary(headers: Sequence[bytes]) -> tuple[str, int] | None:
    """The name and size of an ordinary file, with pax records or without; ``None`` if ``tarfile`` must read it."""
    plain = _plain(headers[-1])
    if plain is None or plain[0] != _FILE:
        return None
    _, name, size = plain
    if len(headers) > 1:
        if len(headers) > 3 or headers[0][156:157] != _PAX:
            return None
        records = _pax_records(headers[1])
        if records is None:
            return None
        name = records.get(b"path", name)
        written = records.get(b"size", b"")
        if written and not written.isdigit():
            return None
        size = int(written or size)
    return name.decode("utf-8", "backslashreplace"), size


def _pax_records(content: bytes) -> dict[bytes, bytes] | None:
    """The pax records, each ``length key=value`` and a line end; ``None`` if they mean more than names and sizes."""
    records: dict[bytes, bytes] = {}
    at = 0
    while content[at : at + 1] not in (b"", b"\0"):
        found = _PAX_RECORD.match(content, at)
        if found is None:
            return None
        key, end = found[2], at + int(found[1])
        if content[end - 1 : end] != b"\n" or end <= found.end() or key == b"hdrcharset" or key.startswith(b"GNU."):
            return None
        records[key] = content[found.end() : end - 1]
        at = end
    return records
