"""Reads tar archives in the layout of WebDataset: ``webdataset``. See ``readers`` for what a reader is.

**Samples.** A member of the archive is a file ``folder/name.extension``: its *key* is the folder and the name up to the
first dot, its *extension* is the rest, in lower case (https://github.com/webdataset/webdataset). A sample is a run of
members with the same key. Members without a name or a dot (``README``, ``.hidden``), folders, and names that begin with
``__name__`` (metadata) belong to no sample.

**Headers.** A member has a header of 512 bytes. *Extended* headers with contents of their own may stand in front of
it: pax records (Python writes them for times with fractions, so in front of each member) and the long names of GNU tar.
Ordinary headers, alone or with pax records, are read here, in a tenth of the time that ``tarfile`` needs. ``tarfile``
reads all others. The format is described in the standard of ``pax``
(https://pubs.opengroup.org/onlinepubs/9799919799/utilities/pax.html).
"""

from __future__ import annotations

import io
import re
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, BinaryIO, Final, NamedTuple, TypeAlias, final

from torchdistinput.errors import SourceError
from torchdistinput.sources.checks import as_object
from torchdistinput.sources.formats.reader_api import Block, grouped, in_blocks
from torchdistinput.sources.storage.io import read_pieces, skip_to, truncated

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


Sample: TypeAlias = dict[str, Any]

_KEY: Final = "__key__"
_METADATA: Final = re.compile(r"__[^/]*__(?:$|/)")

_ZEROS: Final = bytes(BLOCK_SIZE)
_MOST_EXTENDED: Final = 16
_DROPPED_BYTES: Final = 1 << 20


def webdataset(keys: Sequence[str] | None = None) -> Callable[[BinaryIO], Iterator[Sample]]:
    """Makes a reader of tar archives in the layout of WebDataset. The reader can be pickled.

    A sample is a dict: ``"__key__"`` is its key, and each extension has the content of its member, as bytes; a
    ``map_fn`` decodes them. A key that occurs again after members of another key begins another sample, so the members
    of a sample must follow each other (``tar --sort=name``).

    Args:
      keys: the extensions of a sample, in this order. A sample that lacks one of them is a ``SourceError``; members of
        other extensions are skipped without being read. ``None`` takes all members of a sample.

    The reader raises ``SourceError`` for an archive that is damaged, cut off, or without an end mark. It raises one
    with ``resume_at`` for a sample that has an extension twice, lacks one of ``keys``, or has a link or a sparse file,
    whose content is elsewhere.

    Raises:
      TypeError: ``keys`` is no list of extensions.
      ValueError: ``keys`` is empty or has an extension twice.
    """
    if keys is not None:
        if isinstance(as_object(keys), str) or not all(isinstance(as_object(key), str) for key in keys):
            raise TypeError(f'keys must be a list of extensions, as ["jpg", "cls"], got {keys!r:.200}')
        keys = tuple(key.removeprefix(".").lower() for key in keys)
        if not keys or len(set(keys)) < len(keys):
            raise ValueError(f"keys must be one or more extensions, each once, got {keys!r:.200}")
    return partial(_samples_of_tar, keys=keys)


@in_blocks
def _samples_of_tar(file: BinaryIO, offset: int, *, keys: Sequence[str] | None) -> Iterator[Block[Sample]]:
    yield from grouped(_samples(file, offset, keys), offset)


def _samples(file: BinaryIO, offset: int, keys: Sequence[str] | None) -> Iterator[tuple[int, Sample]]:
    """The samples from an offset on, not decoded, each with the offset at which the next sample starts."""
    members = _SampleMembers(file, offset)
    wanted = None if keys is None else frozenset(keys)
    sample: Sample = {}
    start, problem = offset, ""
    for member in members:
        if sample and sample[_KEY] != member.key:
            yield member.start, _whole(sample, start, member.start, problem, keys)
            sample = {}
        if not sample:
            sample, start, problem = {_KEY: member.key}, member.start, ""
        if wanted is not None and member.extension not in wanted:
            continue
        if member.lacks:
            problem = f"{member.extension!r} is {member.lacks}"
        elif member.extension in sample:
            problem = f"{member.extension!r} comes twice"
        else:
            sample[member.extension] = members.content(member)
    if sample:
        yield members.end, _whole(sample, start, members.end, problem, keys)
    members.check_nothing_follows()


def _whole(sample: Sample, start: int, end: int, problem: str, keys: Sequence[str] | None) -> Sample:
    """The sample with its extensions in the order of ``keys``.

    Raises:
      SourceError: the sample has a problem, or lacks an extension.
    """
    missing = [] if keys is None else [key for key in keys if key not in sample]
    if missing and not problem:
        problem = (
            f"{missing[0]!r} of keys={keys!r:.100} is not there; the members of a sample must follow each other in the "
            "archive (tar --sort=name)"
        )
    if problem:
        raise SourceError(f"the sample {sample[_KEY]!r:.100} at byte {start}: {problem}", offset=start, resume_at=end)
    return sample if keys is None else {key: sample[key] for key in (_KEY, *keys)}


# ------------------------------------------------------------------------------------------------------------ members


class _Member(NamedTuple):
    """A file in an archive that belongs to a sample."""

    key: str
    extension: str
    start: int
    """The offset of its first header, in bytes."""
    data: int
    """The offset of its content."""
    size: int
    lacks: str
    """The reason why the archive lacks its content; empty if it has the content."""


@final
class _SampleMembers:
    """The members of an archive that belong to samples, in order. A content is read only when it is requested.

    Args:
      file: the archive, at its start.
      offset: the offset of the header at which reading begins.
    """

    def __init__(self, file: BinaryIO, offset: int) -> None:
        skip_to(file, offset)
        self._file = file
        self._at = offset  # the position of the file object
        self.end = offset
        """The offset of the next header; after the last member, the end of the members."""

    def __iter__(self) -> Iterator[_Member]:
        """The members.

        Raises:
          SourceError: the archive is damaged or cut off.
        """
        while (head := self._read_head()) is not None:
            start = self.end
            name, size, is_file, lacks = read_header(self._with_extended(head, start), start)
            data = self._at
            self.end = data + padded(size)
            place = _key_of(name) if is_file else None
            if place is not None:
                yield _Member(*place, start, data, size, lacks)

    def content(self, member: _Member) -> bytes:
        """The content of the member that was yielded last.

        Raises:
          SourceError: the archive is cut off in it.
        """
        content = read_pieces(self._file, member.size)
        self._at += len(content)
        if len(content) < member.size:
            what = f"member {member.key}.{member.extension}"
            raise truncated(member.start, member.data - member.start + member.size, self._at - member.start, what)
        return content

    def _read_head(self) -> bytes | None:
        """The header at the offset ``end``; ``None`` at the end of the members."""
        before = self.end - self._at
        if before >= BLOCK_SIZE:
            skip_to(self._file, self.end, self._at)
            before, self._at = 0, self.end
        head = read_pieces(self._file, before + BLOCK_SIZE)[before:]
        self._at = self.end + len(head)
        if head == _ZEROS:
            return None
        if len(head) == BLOCK_SIZE:
            return head
        if head:
            raise truncated(self.end, BLOCK_SIZE, len(head), "header")
        raise SourceError(
            f"the archive ends at byte {self.end} without its end mark (a block of zeros): the file is cut off, was "
            "not closed by its writer, or is not a tar archive; write it again",
            offset=self.end,
        )

    def _with_extended(self, head: bytes, start: int) -> list[bytes]:
        """The headers of a member, from its first header and its offset: see ``read_header``."""
        headers = [head]
        while (size := extended_size(headers[-1], start)) is not None:
            more = read_pieces(self._file, size + BLOCK_SIZE)
            self._at += len(more)
            if len(more) < size + BLOCK_SIZE:
                raise truncated(start, self._at - len(more) + size + BLOCK_SIZE - start, self._at - start, "header")
            headers += more[:size], more[size:]
            if len(headers) > 2 * _MOST_EXTENDED:
                message = f"the member at byte {start} has more than {_MOST_EXTENDED} extended headers: it is damaged"
                raise SourceError(message, offset=start)
        return headers

    def check_nothing_follows(self) -> None:
        """Checks, at the end of the archive, that nothing follows in the file.

        Raises:
          SourceError: further bytes follow.
        """
        while piece := self._file.read(_DROPPED_BYTES):
            if piece.count(0) < len(piece):
                raise SourceError(
                    f"the archive ends at byte {self.end}, but the file goes on: it may be several archives in one "
                    "file; join them with tar --concatenate, or give each as a file of its own",
                    offset=self.end,
                )


def _key_of(name: str) -> tuple[str, str] | None:
    """The key and the extension; ``None`` if the member belongs to no sample."""
    folder, slash, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    if not (stem and dot) or _METADATA.match(name):
        return None
    return folder + slash + stem, extension.lower()
