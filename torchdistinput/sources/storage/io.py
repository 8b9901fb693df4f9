"""Opens files by name: fsspec's protocols, compression, and sizes.

A file's *name* is the text of the user, or a result of ``glob.expand``. Filesystem objects are made when they are used:
nothing is kept between calls, so descriptions of files pickle, and forked loader workers make connections of their own.

**The mark of a file** is a text that changes with its content. Ranks compare it, a state has it, ``cache=`` is bound to
it. A remote file's mark is what its filesystem tells: the best of an ETag, a digest, a time, by
whatever name. It comes with the listing of a pattern, so a million files cost no request each. The mark of a local
file, or of one in this process's memory, is a digest of its first and last block: copies of one file on several nodes,
or on the machine where a run is resumed, have other times. A change in the middle that keeps the size does not show in
it. Where a filesystem tells nothing, the log says that changes are not noticed.

A request to a filesystem that fails for a moment is repeated, and a remote file is read on at the byte of the failure:
see ``retry``, also for how to limit the time of a filesystem's answer. Local files are read directly, without such a
layer.

fsspec takes a seventh of the import time of the whole library, so it is imported at the first use of files: by
``check_compression``, which every description of files calls, on the thread that makes it. An import on a reading
thread could happen while another thread forks.
"""

# ruff: noqa: PLC0415 - fsspec is imported where it is used, see above

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any, BinaryIO, Final, NamedTuple, cast, final

from torchdistinput.errors import SourceError
from torchdistinput.sources.storage.file_cache import FileCache, Remote
from torchdistinput.sources.storage.retry import (
    RetryingFile,
    drop,
    known_size,
    one_line,
    reason,
    retried,
)

_BUFFER_BYTES = 1 << 16  # the size of the readers' requests, which are then served without another copy

# File classes of Python itself, on this machine's disks or in memory.
_PLAIN: Final = (io.BufferedReader, io.FileIO, io.BytesIO)

# What the names of a file's marks have in them, the best mark first. Filesystems have no common name for one.
_MARKS: Final = ("etag", "md5", "blobid", "sha", "hash", "hex", "crc", "digest", "checksum")
_TIMES: Final = ("mtime", "modif", "updated", "datetime", "created")
_END_BYTES: Final = 4096


class FileFacts(NamedTuple):
    """What is known of a file without reading it."""

    size: int | None = None
    """The stored size in bytes; ``None`` if it is not known."""
    mark: str = ""
    """The mark, in words; empty if it is not known, or there is none."""

    @property
    def key(self) -> str:
        """The mark as a short text for a state; empty if there is none."""
        return self.mark and blake2b(self.mark.encode(errors="surrogatepass"), digest_size=4).hexdigest()


@final
@dataclass(frozen=True)
class OpenedFile:
    """A file that is open for reading.

    Args:
      stream: its uncompressed content: binary, buffered.
      exact: the file under it, without a buffer that would read more bytes than requested; a decompressor leaves it
        open. Read either this or ``stream``, not both; seek before each read.
      filesystem: kept as long as the file: an archive closes its members when it is freed.
      name: the name with which the file was opened.
      path: the filesystem's path of the file.
      plain: whether the stored bytes are the content.
    """

    stream: BinaryIO
    exact: Any
    filesystem: Any
    name: str
    path: str
    plain: bool

    @cached_property
    def size(self) -> int:
        """The stored (perhaps compressed) size in bytes, -1 if the filesystem does not know it. Requested once.

        Raises:
          SourceError: naming the file, if the request fails.
        """
        known = known_size(self.exact)
        if known is None:
            ask = partial(self.filesystem.size, self.path)
            known = retried(ask, self.name, "cannot be read", named=True)
        return -1 if known is None else int(known)

    def where(self) -> tuple[int | None, str]:
        """How many bytes of the content were read, if that is known; and the same as text, for messages."""
        try:
            offset = self.stream.tell()
        except (OSError, ValueError):
            return None, ""  # a stream without a position: the message has the name only
        return offset, f" near byte {offset}"

    def close(self) -> None:
        """Closes the stream and everything under it; more calls do nothing."""
        self.exact.close()  # first: a decompressor leaves it open, which Python warns of
        self.stream.close()


def open_file(
    name: str,
    compression: str | None,
    storage_options: Mapping[str, Any] | None = None,
    *,
    in_ranges: bool = False,
    cache: FileCache | None = None,
) -> OpenedFile:
    """Opens a file for reading its uncompressed bytes. Local: no communication.

    Args:
      name: a name from ``glob.expand``.
      compression: ``"infer"`` by the end of the name (``.gz``, ``.tgz``, ``.bz2``, ``.xz``, …), a name that fsspec
        knows, or ``None`` to read the bytes as they are.
      storage_options: arguments of the filesystem.
      in_ranges: whether parts of it are read here and there. Then the stream of an uncompressed file has no buffer, and
        nothing is read ahead of a remote file.
      cache: keeps remote files on this host; they are read from there.

    Raises:
      SourceError: naming the file, if it is missing or cannot be read; the original is its ``__cause__``. Reading
        raises one too, whose text leaves the name to the caller, when a remote file cannot be read any more.
    """
    from fsspec.compression import compr

    ask = partial(_open_stored, name, storage_options or {}, in_ranges=in_ranges)
    kept = None if cache is None else _kept(cache, name, storage_options or {})
    filesystem, path, stored = kept or retried(ask, name, "cannot be opened", named=True)
    try:
        method = _method_of(path, compression)
        content = stored
        if isinstance(stored, io.BytesIO):
            # The memory filesystem gives every reader the same object, with one position for all.
            content = stored = io.BytesIO(stored.getvalue())
        elif not isinstance(stored, _PLAIN):  # plain files need no retries
            reopen = partial(_opened_by, filesystem, path, in_ranges=in_ranges)
            ask_size = partial(filesystem.size, path)
            content = stored = RetryingFile(name, stored, reopen, ask_size, plain=method is None)
        if method is not None:
            # Some decompressors take a short read for the last one.
            whole = io.BufferedReader(stored, _BUFFER_BYTES) if isinstance(stored, io.RawIOBase) else stored
            content = compr[method](whole, mode="r")
        stream = io.BufferedReader(content, _BUFFER_BYTES) if method is not None or not in_ranges else content
    except Exception as error:
        stored.close()
        raise _failed(name, "cannot be opened", error) from error
    return OpenedFile(stream, stored, filesystem, name, path, method is None)


_Stored = tuple[Any, str, Any]
"""The filesystem, its path of a file, and the open file."""


def _kept(cache: FileCache, name: str, storage_options: Mapping[str, Any]) -> _Stored | None:
    """A remote file, with the open copy of it; ``None`` if there is to be no copy."""
    if is_local(filesystem_of(name, storage_options)[0]):
        return None
    filesystem, path, about = _asked(name, storage_options)
    remote = Remote(name, filesystem.unstrip_protocol(path), _size_in(about), mark_in(about))
    try:
        file = cache.opened(remote, lambda: closing(open_file(name, None, storage_options).stream))
    except (OSError, EOFError) as error:
        raise _failed(name, "no copy of it can be made in the folder of cache=", error) from error
    return None if file is None else (filesystem, path, file)


def _asked(name: str, storage_options: Mapping[str, Any]) -> tuple[Any, str, Mapping[str, Any]]:
    """The filesystem of a file, its path of it, and what it tells of it."""

    def ask() -> tuple[Any, str, Mapping[str, Any]]:
        filesystem, path = filesystem_of(name, storage_options)
        return filesystem, path, filesystem.info(path)

    return retried(ask, name, "cannot be read", named=True)


def facts_in(about: Mapping[str, Any], filesystem: Any) -> FileFacts:
    """What a filesystem tells of a file; no mark of one whose bytes are here."""
    return FileFacts(_size_in(about), "" if is_here(filesystem) else mark_in(about))


def _size_in(about: Mapping[str, Any]) -> int | None:
    """The size in what a filesystem tells of a file; some tell none."""
    size = about.get("size")
    return int(size) if isinstance(size, int | float) else None


def mark_in(about: Mapping[str, Any]) -> str:
    """The mark in what a filesystem tells of a file, with its name; empty if there is none."""
    known = {key: value for key, value in about.items() if value and not isinstance(value, bool | list | dict)}
    names = {key: re.sub("[^a-z]", "", key.lower()) for key in sorted(known)}
    found = (key for word in (*_MARKS, *_TIMES) for key, plain in names.items() if word in plain)
    return next((f"{key} {known[key]}" for key in found), "")


def _mark_of_ends(file: Any) -> str:
    """The mark of an open file whose bytes are here; empty for one that cannot seek, such as a pipe."""
    found = blake2b(digest_size=8)
    with suppress(OSError):
        end = file.seek(0, io.SEEK_END)
        for start in sorted({0, max(0, end - _END_BYTES)}):
            file.seek(start)
            found.update(file.read(_END_BYTES))
        return f"first and last block {found.hexdigest()}"
    return ""


def _open_stored(name: str, storage_options: Mapping[str, Any], *, in_ranges: bool) -> _Stored:
    filesystem, path = filesystem_of(name, storage_options)
    return filesystem, path, _opened_by(filesystem, path, in_ranges=in_ranges)


def _opened_by(filesystem: Any, path: str, *, in_ranges: bool) -> Any:
    if is_local(filesystem):
        return io.FileIO(path)  # fsspec's methods and the buffer around it take longer than the reading
    if in_ranges:
        try:
            return filesystem.open(path, "rb", cache_type="none")
        except TypeError:  # its files know no such argument: they may read ahead
            pass
    return filesystem.open(path, "rb")


def filesystem_of(name: str, storage_options: Mapping[str, Any]) -> tuple[Any, str]:
    """The filesystem of a name or pattern, and its path of the file. Local."""
    from fsspec import available_protocols, filesystem
    from fsspec.core import url_to_fs

    if "::" in name and "://" not in name and name.partition("::")[0] not in available_protocols():
        return filesystem("file", **storage_options), os.path.abspath(name)  # not a chain of filesystems
    return cast("tuple[Any, str]", url_to_fs(name, **storage_options))


def is_local(filesystem: Any) -> bool:
    """Whether the filesystem is that of this machine's disks."""
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(filesystem, LocalFileSystem)


def is_here(filesystem: Any) -> bool:
    """Whether the bytes of the filesystem are on this machine's disks or in this process's memory."""
    from fsspec.implementations.memory import MemoryFileSystem

    return is_local(filesystem) or isinstance(filesystem, MemoryFileSystem)


def skip_to(file: BinaryIO, offset: int, at: int = 0) -> None:
    """Goes forward in a binary file. If it cannot seek, the bytes up to the offset are read and dropped in pieces.

    Args:
      file: the content.
      offset: where to go, in bytes from its front.
      at: where the file is now.

    Raises:
      SourceError: if the content ends before the offset, and this is noticed (a seek beyond the end may not fail).
    """
    if offset == at:
        return
    try:
        reached = file.seek(offset)
    except (OSError, ValueError, NotImplementedError):  # some files, as those of web servers, claim that they can seek
        if offset < at:
            raise
        reached = at + drop(file, offset - at)
    if reached < offset:
        raise SourceError(
            f"the content ends at byte {reached}, but is to be read from byte {offset} on: the file is cut off, or not "
            "the one that was read before",
            offset=reached,
        )


def stat_facts(name: str, storage_options: Mapping[str, Any] | None = None) -> FileFacts:
    """What the filesystem of a file tells of it: the stored (perhaps compressed) size, and the mark of a remote file.

    Raises:
      SourceError: naming the file, if it is missing or the request fails.
    """
    filesystem, _, about = _asked(name, storage_options or {})
    return facts_in(about, filesystem)


def file_facts(name: str, storage_options: Mapping[str, Any] | None = None) -> FileFacts:
    """The size and the mark of a file as they are now; one whose bytes are here is opened for it.

    Raises:
      SourceError: naming the file, if it is missing or the request fails.
    """
    filesystem, _, about = _asked(name, storage_options or {})
    facts = facts_in(about, filesystem)
    if is_here(filesystem):
        with closing(open_file(name, None, storage_options)) as opened:
            facts = facts._replace(mark=_mark_of_ends(opened.exact))
    return facts


def is_plain(name: str, compression: str | None) -> bool:
    """Whether a file of this name is stored as it is, by its name alone. Local."""
    return _method_of(name, compression) is None


def _method_of(name: str, compression: str | None) -> str | None:
    from fsspec.utils import infer_compression

    if compression == "infer":
        return "gzip" if name.endswith(".tgz") else cast("str | None", infer_compression(name))
    return compression


def check_compression(compression: str | None) -> None:
    """Refuses a compression that ``open_file`` does not know.

    Raises:
      TypeError: the compression is not a name.
      ValueError: naming the known compressions.
    """
    from fsspec.compression import compr

    if not isinstance(compression, str | None):
        raise TypeError(f"compression must be a name, 'infer' or None, got {compression!r}")
    known = sorted(name for name in compr if name is not None)
    if compression not in {None, "infer", *known}:
        raise ValueError(f"compression must be 'infer', None or one of {', '.join(known)}; got {compression!r}")


def _failed(name: str, problem: str, error: Exception) -> SourceError:
    return SourceError(f"{one_line(name)}: {problem}: {reason(error)}", file=name)


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
