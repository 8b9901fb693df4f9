"""The door to files: fsspec's patterns, protocols and compression.

A file is a *name*: what the user wrote, or the user's pattern with its wildcards filled in. So a relative pattern gives
relative names, ``s3://bucket/*.txt`` gives ``s3://bucket/a.txt``, and each name can be given back to ``expand`` and
``open_file``, in this process or another. Filesystem objects are made where they are used: nothing here is held between
calls, so that descriptions of files pickle and forked DataLoader workers make their own connections.

Whatever is asked of a filesystem is asked again if it fails in passing, and a remote file is read on where it failed:
see ``retrying``, also for how to bound the time that a filesystem may take to answer. Local files have nothing between
them and the reader.

fsspec is loaded by the first use of files, as it takes a seventh of the time that the whole library does: by
``check_compression``, which whoever describes files asks, on the thread that does so, and not first in one that reads
while another thread forks.
"""

# ruff: noqa: PLC0415 - fsspec is imported where it is used, see above

from __future__ import annotations

import fnmatch
import io
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, BinaryIO, Final, TypeAlias, cast, final

from torchdistinput.backends.retrying import (
    BACKOFF,
    Backoff,
    RetryingFile,
    is_passing,
    known_size,
    one_line,
    reason,
    retried,
)
from torchdistinput.errors import SourceError

__all__ = ["FileNames", "OpenedFile", "check_compression", "expand", "file_size", "open_file", "skip_to"]

FileNames: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"

_LOG = logging.getLogger("torchdistinput")

_WILDCARD = re.compile(r"[*?\[]")
_BUFFER_BYTES = 1 << 16  # what readers ask for at a time, which so comes without another copy
_DROPPED_BYTES = 1 << 20

# What Python itself reads from this machine's disks or memory.
_PLAIN: Final = (io.BufferedReader, io.FileIO, io.BytesIO)

# Under which name a filesystem tells of the last change of a file, the best one first.
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

# Stores that list a whole tree at once, where a folder is a prefix; the others are asked for folder after folder.
_LIST_TREES: Final = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl"}


@final
@dataclass(frozen=True)
class OpenedFile:
    """A file that is open for reading.

    Args:
      stream: its uncompressed content: binary, buffered.
      stored: the file under it, as the filesystem opened it; a decompressor leaves it open.
      filesystem: kept as long as the file: an archive closes its members when it goes.
      name: the name that it was opened by.
      path: what the filesystem calls it.
      backoff: how often to ask for its size, and for its last change.
      plain: whether the stored bytes are the content.
    """

    stream: BinaryIO
    stored: Any
    filesystem: Any
    name: str
    path: str
    backoff: Backoff
    plain: bool

    @cached_property
    def size(self) -> int:
        """The stored size in bytes (compressed, if it is), -1 where the filesystem does not know it. Asked once.

        Raises:
          SourceError: naming the file, if it cannot be asked.
        """
        known = known_size(self.stored)
        if known is None:
            ask = partial(self.filesystem.size, self.path)
            known = retried(ask, self.name, "cannot be read", self.backoff, named=True)
        return -1 if known is None else int(known)

    @cached_property
    def exact(self) -> BinaryIO:
        """The stored bytes without a buffer that would read more of them than is asked for. Seek before each read.

        Of this and ``stream``, only one may be read.
        """
        return cast(BinaryIO, _unwrapped(self.stored) if _is_local(self.stored) else self.stored)

    @cached_property
    def changed(self) -> str:
        """What the filesystem tells of the last change of the file; empty where it tells nothing. Asked once.

        Raises:
          SourceError: naming the file, if it cannot be asked.
        """
        ask = partial(self.filesystem.info, self.path)
        about = retried(ask, self.name, "cannot be read", self.backoff, named=True)
        return next((f"{key} {about[key]}" for key in _CHANGES if about.get(key)), "")

    def close(self) -> None:
        """Closes the stream and everything under it; more calls do nothing."""
        self.stream.close()
        self.stored.close()


def expand(files: FileNames, storage_options: Mapping[str, Any] | None = None, backoff: Backoff = BACKOFF) -> list[str]:
    """Turns a pattern, a name, or a list of both into names of files. Local: no communication.

    A pattern (``*``, ``**``, ``?``, ``[ab]``) becomes the files that it matches, without directories, sorted by name. A
    name stays as it is and is not looked up, unless it contains one of these characters and may be a pattern. A list
    keeps its order and its repetitions. ``~`` is the home directory; ``file://`` is dropped. A folder that cannot be
    listed is an error, so that no file is left out; one that may not be listed is passed over, as in a shell, with a
    warning.

    Args:
      files: what to expand, local or with the protocol of any fsspec filesystem (``memory://``, ``s3://``), also
        chained (``simplecache::s3://bucket/*.txt``).
      storage_options: arguments of the filesystem.
      backoff: how often to ask it.

    Raises:
      TypeError: if ``files`` is neither a name nor a list of names.
      ValueError: if the list is empty, or a name in it.
      SourceError: if a pattern matches no file, or its filesystem cannot be asked.
    """
    options = storage_options or {}
    entries = enumerate(_entries(files))
    return [name for position, entry in entries for name in _expand_entry(position, entry, options, backoff)]


def open_file(
    name: str,
    compression: str | None,
    storage_options: Mapping[str, Any] | None = None,
    backoff: Backoff = BACKOFF,
) -> OpenedFile:
    """Opens a file for reading its uncompressed bytes. Local: no communication.

    Args:
      name: as ``expand`` gives it.
      compression: ``"infer"`` by the end of the name (``.gz``, ``.bz2``, ``.xz``, …), a name that fsspec knows, or
        ``None`` to read the bytes as they are.
      storage_options: arguments of the filesystem.
      backoff: how often to open the file, and to read on from each of its bytes, and after which waits.

    Raises:
      SourceError: naming the file, if it is missing or cannot be read; the original is its ``__cause__``. Reading
        raises one too, whose text leaves the name to the caller, when a remote file cannot be read any more.
    """
    from fsspec.compression import compr
    from fsspec.utils import infer_compression

    ask = partial(_open_stored, name, storage_options or {})
    filesystem, path, stored = retried(ask, name, "cannot be opened", backoff, named=True)
    try:
        method = infer_compression(path) if compression == "infer" else compression
        content = stored
        if isinstance(stored, io.BytesIO):
            # The memory filesystem gives every reader the one object that it stores, with one position for all.
            content = stored = io.BytesIO(stored.getvalue())
        elif _is_local(stored):
            content = _unwrapped(stored)
        elif not isinstance(stored, _PLAIN):  # else there is nothing to try again
            reopen, ask_size = partial(filesystem.open, path, "rb"), partial(filesystem.size, path)
            content = stored = RetryingFile(name, stored, reopen, ask_size, backoff, plain=method is None)
        if method is not None:
            # Some decompressors believe that a read which gives less than was asked for is the last one.
            whole = io.BufferedReader(stored, _BUFFER_BYTES) if isinstance(stored, RetryingFile) else stored
            content = compr[method](whole, mode="r")
        stream = io.BufferedReader(content, _BUFFER_BYTES)
    except Exception as error:
        stored.close()
        raise _failed(name, "cannot be opened", error) from error
    return OpenedFile(stream, stored, filesystem, name, path, backoff, method is None)


def _unwrapped(stored: Any) -> io.FileIO:
    """The file without fsspec's methods and a second buffer around it, which take longer than the reading."""
    return io.FileIO(stored.fileno(), closefd=False)


def _open_stored(name: str, storage_options: Mapping[str, Any]) -> tuple[Any, str, Any]:
    """The filesystem, what it calls the file, and the file as it opens it."""
    filesystem, path = _filesystem_of(name, storage_options)
    return filesystem, path, filesystem.open(path, "rb")


def _filesystem_of(name: str, storage_options: Mapping[str, Any]) -> tuple[Any, str]:
    """The filesystem, and what it calls the file."""
    from fsspec.core import url_to_fs

    return cast("tuple[Any, str]", url_to_fs(name, **storage_options))


def _is_local(stored: Any) -> bool:
    """Whether the file is one that fsspec opened on this machine's disks."""
    from fsspec.implementations.local import LocalFileOpener

    return isinstance(stored, LocalFileOpener)


def skip_to(file: BinaryIO, offset: int, at: int = 0) -> None:
    """Goes forward in a binary file. Where it cannot seek, what is between is read and dropped in bounded pieces.

    Args:
      file: the content.
      offset: where to go, in bytes from its front.
      at: where the file is now.

    Raises:
      SourceError: if the content ends before, as far as that shows without reading.
    """
    if offset == at:
        return
    try:
        reached = file.seek(offset)
    except (OSError, ValueError, NotImplementedError):  # some, as those of web servers, say that they can, and cannot
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
    """Reads bytes and forgets them; how many there were."""
    missing = count
    while missing and (piece := file.read(min(missing, _DROPPED_BYTES))):
        missing -= len(piece)
    return count - missing


def file_size(name: str, storage_options: Mapping[str, Any] | None = None, backoff: Backoff = BACKOFF) -> int | None:
    """The stored size of a file in bytes (compressed, if it is), ``None`` where the filesystem does not know it.

    Raises:
      SourceError: naming the file, if it is missing or cannot be asked.
    """
    size = retried(partial(_ask_size, name, storage_options or {}), name, "cannot be read", backoff, named=True)
    return None if size is None else int(size)


def _ask_size(name: str, storage_options: Mapping[str, Any]) -> Any:
    filesystem, path = _filesystem_of(name, storage_options)
    return filesystem.size(path)


def check_compression(compression: str | None) -> None:
    """Refuses what ``open_file`` does not know.

    Raises:
      ValueError: naming the compressions that are there.
    """
    from fsspec.compression import compr

    known = sorted(name for name in compr if name is not None)
    if compression not in {None, "infer", *known}:
        raise ValueError(f"compression must be 'infer', None or one of {', '.join(known)}; got {compression!r}")


def _entries(files: object) -> Sequence[object]:
    if isinstance(files, (str, os.PathLike)):
        return [files]
    if isinstance(files, (bytes, bytearray)) or not isinstance(files, Sequence):
        raise TypeError(
            f"files must be a name, a pattern or a list of them, got {type(files).__name__}: {files!r:.100}; "
            "an unordered or one-time collection has no order that all ranks share (use a sorted list)"
        )
    if not files:
        raise ValueError("files is an empty list: at least one file is needed")
    return files


def _expand_entry(position: int, entry: object, options: Mapping[str, Any], backoff: Backoff) -> list[str]:
    name = os.fspath(entry) if isinstance(entry, os.PathLike) else entry
    if not isinstance(name, str):
        raise TypeError(f"file {position} of the list must be a str or a path, got {type(entry).__name__}: {entry!r}")
    if not name:
        raise ValueError(f"file {position} of the list is an empty string: a name or a pattern is needed")
    if name.startswith("file://") and "::" not in name:
        name = name.removeprefix("file://")
    name = os.path.expanduser(name)
    if not _WILDCARD.search(name):
        return [name]
    if "://" not in name and "::" not in name:
        name = re.sub("//+", "/", name)  # fsspec's glob finds nothing behind an empty folder name
    names = retried(partial(_glob, name, options), name, "the pattern cannot be expanded", backoff, named=True)
    if not names:
        raise SourceError(
            f"{one_line(name)}: the pattern matches no file (seen from {os.getcwd()!r}); at least one is needed: check "
            "the path, and that this machine sees the files",
            file=name,
        )
    return names


def _glob(pattern: str, storage_options: Mapping[str, Any]) -> list[str]:
    filesystem, asked = _filesystem_of(pattern, storage_options)
    if _is_file(filesystem, asked):  # a wildcard character in the name of a real file, or a url with a query
        return [pattern]
    if "**" in asked and _LIST_TREES & set(_protocols(filesystem)):
        found = filesystem.glob(asked, detail=True)
        paths = [str(path) for path, about in found.items() if about.get("type") != "directory"]
    else:
        cut = asked.rfind("/", 0, _WILDCARD.search(asked).start())  # type: ignore[union-attr] # it has one
        folder = asked[: max(cut, 0)] or ("/" if cut == 0 else "")
        paths = list(dict.fromkeys(_matching(filesystem, folder, asked[cut + 1 :].split("/"))))
    return sorted(_as_written(path, asked, pattern, filesystem) for path in paths)


def _protocols(filesystem: Any) -> Sequence[str]:
    return [filesystem.protocol] if isinstance(filesystem.protocol, str) else filesystem.protocol


def _is_file(filesystem: Any, path: str) -> bool:
    try:
        return bool(filesystem.info(path)["type"] == "file")
    except Exception as error:
        # Whatever a filesystem raises for a name that it cannot have; but one that did not answer is asked again.
        if is_passing(error):
            raise
        return False


def _matching(filesystem: Any, folder: str, pattern: Sequence[str]) -> Iterator[str]:
    """The files under a folder that match, part by part.

    fsspec's own ``glob`` takes a folder that it cannot list for an empty one, so that files would be missing without a
    word.
    """
    part, *rest = pattern
    if part == "**":
        yield from _matching(filesystem, folder, rest or ["*"])
        for path, kind in _entries_of(filesystem, folder):
            if kind == "directory":
                yield from _matching(filesystem, path, pattern)
    elif rest and not _WILDCARD.search(part):
        yield from _matching(filesystem, f"{folder.rstrip('/')}/{part}" if folder else part, rest)
    else:
        fits = re.compile(fnmatch.translate(part)).match
        for path, kind in _entries_of(filesystem, folder):
            if fits(path.rpartition("/")[2]):
                if not rest and kind != "directory":
                    yield path
                elif rest and kind == "directory":
                    yield from _matching(filesystem, path, rest)


def _entries_of(filesystem: Any, folder: str) -> list[tuple[str, str]]:
    """What is in a folder, each with its type; nothing if there is no such folder."""
    try:
        listed = filesystem.ls(folder, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError as error:
        _LOG.warning("%s: the folder is left out of the pattern: %s", one_line(folder), reason(error))
        return []
    found = [(str(about["name"]).rstrip("/"), str(about["type"])) for about in listed]
    # Some list the folder itself, or a file that is asked for as a folder; a web page links to other places.
    return [(path, kind) for path, kind in found if path.rpartition("/")[0].strip("/") == folder.strip("/")]


def _as_written(path: str, asked: str, pattern: str, filesystem: Any) -> str:
    """The name of a found file in the words of the pattern: its part before the wildcards, and what they stood for.

    Args:
      path: the file, as the filesystem calls it.
      asked: the pattern, as the filesystem calls it: the same end as the user's, but perhaps another beginning.
      pattern: the pattern as the user wrote it; in a chain, the first link with a wildcard is the one in question.
      filesystem: where it was found.
    """
    links = pattern.split("::")
    position = next(k for k, link in enumerate(links) if _WILDCARD.search(link))
    link = links[position]
    cut = link.rfind("/", 0, _WILDCARD.search(link).start()) + 1  # type: ignore[union-attr] # it has one
    folder = asked.removesuffix(link[cut:])
    if asked.endswith(link[cut:]) and path.startswith(folder):
        links[position] = link[:cut] + path.removeprefix(folder)
    else:
        links[position] = str(filesystem.unstrip_protocol(path)).removeprefix("file://")
    return "::".join(links)


def _failed(name: str, problem: str, error: Exception) -> SourceError:
    return SourceError(f"{one_line(name)}: {problem}: {reason(error)}", file=name)
