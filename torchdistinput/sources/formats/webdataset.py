"""Reads tar archives in the layout of WebDataset: ``webdataset``. See ``readers`` for what a reader is.

**Samples.** A member of the archive is a file ``folder/name.extension``: its *key* is the folder and the name up to the
first dot, its *extension* is the rest, in lower case (https://github.com/webdataset/webdataset). A sample is a run of
members with the same key. Members without a name or a dot (``README``, ``.hidden``), folders, and names that begin with
``__name__`` (metadata) belong to no sample.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, BinaryIO, Final, NamedTuple, TypeAlias, final

from torchdistinput.errors import SourceError
from torchdistinput.sources.checks import as_object
from torchdistinput.sources.formats.reader_api import Block, BoundedFile, grouped, in_blocks
from torchdistinput.sources.formats.tar_headers import BLOCK_SIZE, extended_size, padded, read_header
from torchdistinput.sources.storage.exact_reads import read_pieces, truncated
from torchdistinput.sources.storage.io import skip_to

Sample: TypeAlias = dict[str, Any]

_KEY: Final = "__key__"
_METADATA: Final = re.compile(r"__[^/]*__(?:$|/)")

_ZEROS: Final = bytes(BLOCK_SIZE)
_MAX_EXTENDED: Final = 16
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
      file: the archive, at its start; or a ``Part`` of an archive, with whole members.
      offset: the offset of the header at which reading begins.
    """

    def __init__(self, file: BinaryIO, offset: int) -> None:
        skip_to(file, offset)
        self._file = file
        self._is_part = isinstance(as_object(file), BoundedFile)
        self._begun = offset
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
        if not head and (self._is_part or self.end == self._begun > 0):  # the index has seen the end mark
            return None
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
            if len(headers) > 2 * _MAX_EXTENDED:
                message = f"the member at byte {start} has more than {_MAX_EXTENDED} extended headers: it is damaged"
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
