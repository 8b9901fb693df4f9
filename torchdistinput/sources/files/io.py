"""Opens files by name: fsspec's protocols, compression, and sizes.

A file's *name* is the text of the user, or a result of ``glob.expand``. Filesystem objects are made when they are used:
nothing is kept between calls, so descriptions of files pickle, and forked loader workers make connections of their own.

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
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, BinaryIO, Final, cast, final

from torchdistinput.errors import SourceError
from torchdistinput.sources.files.file_cache import FileCache, Remote
from torchdistinput.sources.files.retry import (
    RetryingFile,
    known_size,
    one_line,
    reason,
    retried,
)

_BUFFER_BYTES = 1 << 16  # the size of the readers' requests, which are then served without another copy
_DROPPED_BYTES = 1 << 20

# File classes of Python itself, on this machine's disks or in memory.
_PLAIN: Final = (io.BufferedReader, io.FileIO, io.BytesIO)

# The keys under which filesystems report the last change of a file, the best one first.
_CHANGES: Final = (
    "ETag",
    "etag",
    "md5Hash",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "modified",
    "created",
)


@final
@dataclass(frozen=True)
class OpenedFile:
    """A file that is open for reading.

    Args:
      stream: its uncompressed content: binary, buffered.
      stored: the file under it, as the filesystem opened it; a decompressor leaves it open.
      filesystem: kept as long as the file: an archive closes its members when it is freed.
      name: the name with which the file was opened.
      path: the filesystem's path of the file.
      plain: whether the stored bytes are the content.
    """

    stream: BinaryIO
    stored: Any
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
        known = known_size(self.stored)
        if known is None:
            ask = partial(self.filesystem.size, self.path)
            known = retried(ask, self.name, "cannot be read", named=True)
        return -1 if known is None else int(known)

    @cached_property
    def exact(self) -> BinaryIO:
        """The stored bytes, without a buffer that would read more bytes than requested. Seek before each read.

        Read either this or ``stream``, not both.
        """
        return cast(BinaryIO, _unwrapped(self.stored) if _is_local(self.stored) else self.stored)

    @cached_property
    def changed(self) -> str:
        """The filesystem's mark of the last change of the file; empty if it has none. Requested once.

        Raises:
          SourceError: naming the file, if the request fails.
        """
        ask = partial(self.filesystem.info, self.path)
        about = retried(ask, self.name, "cannot be read", named=True)
        return _change_in(about)

    def where(self) -> tuple[int | None, str]:
        """See ``open_file.Opened``."""
        try:
            offset = self.stream.tell()
        except (OSError, ValueError):
            return None, ""  # a stream without a position: the message has the name only
        return offset, f" near byte {offset}"

    def rewind(self) -> bool:
        """See ``open_file.Opened``."""
        try:
            return self.stream.seek(0) == 0
        except (OSError, ValueError, NotImplementedError):  # a stream: then the bad record is raised
            return False

    def close(self) -> None:
        """Closes the stream and everything under it; more calls do nothing."""
        self.stream.close()
        self.stored.close()


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
        elif _is_local(stored):
            content = _unwrapped(stored)
        elif not isinstance(stored, _PLAIN):  # plain files need no retries
            reopen = partial(_opened_by, filesystem, path, in_ranges=in_ranges)
            ask_size = partial(filesystem.size, path)
            content = stored = RetryingFile(name, stored, reopen, ask_size, plain=method is None)
        if method is not None:
            # Some decompressors take a short read for the last one.
            whole = io.BufferedReader(stored, _BUFFER_BYTES) if isinstance(stored, RetryingFile) else stored
            content = compr[method](whole, mode="r")
        stream = io.BufferedReader(content, _BUFFER_BYTES) if method is not None or not in_ranges else content
    except Exception as error:
        stored.close()
        raise _failed(name, "cannot be opened", error) from error
    return OpenedFile(stream, stored, filesystem, name, path, method is None)


def _kept(cache: FileCache, name: str, storage_options: Mapping[str, Any]) -> tuple[Any, str, Any] | None:
    """The filesystem, its path of a remote file, and the open copy of it; ``None`` if there is to be no copy."""
    from fsspec.implementations.local import LocalFileSystem

    filesystem, path = filesystem_of(name, storage_options)
    if isinstance(filesystem, LocalFileSystem):
        return None
    about = retried(partial(filesystem.info, path), name, "cannot be read", named=True)
    size = about.get("size")
    remote = Remote(name, filesystem.unstrip_protocol(path), None if size is None else int(size), _change_in(about))
    try:
        file = cache.opened(remote, lambda: closing(open_file(name, None, storage_options).stream))
    except (OSError, EOFError) as error:
        raise _failed(name, "no copy of it can be made in the folder of cache=", error) from error
    return None if file is None else (filesystem, path, file)


def _change_in(about: Mapping[str, Any]) -> str:
    """The mark of the last change in what a filesystem says of a file; empty if there is none."""
    return next((f"{key} {about[key]}" for key in _CHANGES if about.get(key)), "")


def _unwrapped(stored: Any) -> io.FileIO:
    """The file without fsspec's methods and a second buffer around it, which take longer than the reading."""
    return io.FileIO(stored.fileno(), closefd=False)


def _open_stored(name: str, storage_options: Mapping[str, Any], *, in_ranges: bool) -> tuple[Any, str, Any]:
    """The filesystem, its path of the file, and the open file."""
    filesystem, path = filesystem_of(name, storage_options)
    return filesystem, path, _opened_by(filesystem, path, in_ranges=in_ranges)


def _opened_by(filesystem: Any, path: str, *, in_ranges: bool) -> Any:
    if in_ranges:
        try:
            return filesystem.open(path, "rb", cache_type="none")
        except TypeError:  # its files know no such argument: they may read ahead
            pass
    return filesystem.open(path, "rb")


def filesystem_of(name: str, storage_options: Mapping[str, Any]) -> tuple[Any, str]:
    """The filesystem of a name or pattern, and its path of the file. Local."""
    from fsspec.core import url_to_fs

    return cast("tuple[Any, str]", url_to_fs(name, **storage_options))


def _is_local(stored: Any) -> bool:
    """Whether the file is one that fsspec opened on this machine's disks."""
    from fsspec.implementations.local import LocalFileOpener

    return isinstance(stored, LocalFileOpener)


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
        reached = at + _drop(file, offset - at)
    if reached < offset:
        raise SourceError(
            f"the content ends at byte {reached}, but is to be read from byte {offset} on: the file is cut off, or not "
            "the one that was read before",
            offset=reached,
        )


def _drop(file: BinaryIO, count: int) -> int:
    """Reads bytes and drops them. Returns how many there were."""
    missing = count
    while missing and (piece := file.read(min(missing, _DROPPED_BYTES))):
        missing -= len(piece)
    return count - missing


def file_size(name: str, storage_options: Mapping[str, Any] | None = None) -> int | None:
    """The stored (perhaps compressed) size of a file in bytes, ``None`` if the filesystem does not know it.

    Raises:
      SourceError: naming the file, if it is missing or the request fails.
    """
    size = retried(partial(_ask_size, name, storage_options or {}), name, "cannot be read", named=True)
    return None if size is None else int(size)


def _ask_size(name: str, storage_options: Mapping[str, Any]) -> Any:
    filesystem, path = filesystem_of(name, storage_options)
    return filesystem.size(path)


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
