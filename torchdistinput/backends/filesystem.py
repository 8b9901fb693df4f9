"""The door to files: fsspec's patterns, protocols and compression.

A file is a *name*: what the user wrote, or the user's pattern with its wildcards filled in. So a relative pattern gives
relative names, ``s3://bucket/*.txt`` gives ``s3://bucket/a.txt``, and each name can be given back to ``expand`` and
``open_file``, in this process or another. Filesystem objects are made where they are used: nothing here is held between
calls, so that descriptions of files pickle and forked DataLoader workers make their own connections.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, Protocol, TypeAlias, final, runtime_checkable

from fsspec.compression import compr as _decompressors
from fsspec.core import url_to_fs
from fsspec.utils import infer_compression

from torchdistinput.errors import SourceError

__all__ = ["FileNames", "OpenedFile", "check_compression", "expand", "file_size", "open_file", "skip_to"]

FileNames: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"

_WILDCARD = re.compile(r"[*?\[]")
_BUFFER_BYTES = 1 << 17
_DROPPED_BYTES = 1 << 20


@runtime_checkable
class _Sized(Protocol):
    """A file object that learned its size when it was opened, as those of local files and object stores do."""

    size: int | None


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
    """

    stream: BinaryIO
    stored: Any
    filesystem: Any
    name: str
    path: str

    @cached_property
    def size(self) -> int:
        """The stored size in bytes (compressed, if it is), -1 where the filesystem does not know it. Asked once.

        Raises:
          SourceError: naming the file, if it cannot be asked.
        """
        known = self.stored.size if isinstance(self.stored, _Sized) else None
        if known is None:
            known = _size_of(self.name, self.filesystem, self.path)
        return -1 if known is None else int(known)

    def close(self) -> None:
        """Closes the stream and everything under it; more calls do nothing."""
        self.stream.close()
        self.stored.close()


def expand(files: FileNames, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """Turns a pattern, a name, or a list of both into names of files. Local: no communication.

    A pattern (``*``, ``**``, ``?``, ``[ab]``) becomes the files that it matches, without directories, sorted by name. A
    name stays as it is and is not looked up, unless it contains one of these characters and may be a pattern. A list
    keeps its order and its repetitions. ``~`` is the home directory; ``file://`` is dropped.

    Args:
      files: what to expand, local or with the protocol of any fsspec filesystem (``memory://``, ``s3://``), also
        chained (``simplecache::s3://bucket/*.txt``).
      storage_options: arguments of the filesystem.

    Raises:
      TypeError: if ``files`` is neither a name nor a list of names.
      ValueError: if the list is empty, or a name in it.
      SourceError: if a pattern matches no file, or its filesystem cannot be asked.
    """
    entries = _entries(files)
    return [name for position, entry in enumerate(entries) for name in _expand_entry(position, entry, storage_options)]


def open_file(name: str, compression: str | None, storage_options: Mapping[str, Any] | None = None) -> OpenedFile:
    """Opens a file for reading its uncompressed bytes. Local: no communication.

    Args:
      name: as ``expand`` gives it.
      compression: ``"infer"`` by the end of the name (``.gz``, ``.bz2``, ``.xz``, …), a name that fsspec knows, or
        ``None`` to read the bytes as they are.
      storage_options: arguments of the filesystem.

    Raises:
      SourceError: naming the file, if it is missing or cannot be read; the original is its ``__cause__``.
    """
    stored: Any = None
    try:
        filesystem, path = url_to_fs(name, **(storage_options or {}))
        stored = filesystem.open(path, "rb")
        if isinstance(stored, io.BytesIO):
            # The memory filesystem gives every reader the one object that it stores, with one position for all.
            stored = io.BytesIO(stored.getvalue())
        method = infer_compression(path) if compression == "infer" else compression
        content = stored if method is None else _decompressors[method](stored, mode="r")
        stream = io.BufferedReader(content, _BUFFER_BYTES)
    except Exception as error:
        if stored is not None:
            stored.close()
        raise SourceError(f"{name}: cannot be opened: {_reason(error)}", file=name) from error
    return OpenedFile(stream, stored, filesystem, name, path)


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


def file_size(name: str, storage_options: Mapping[str, Any] | None = None) -> int | None:
    """The stored size of a file in bytes (compressed, if it is), ``None`` where the filesystem does not know it.

    Raises:
      SourceError: naming the file, if it is missing or cannot be asked.
    """
    try:
        filesystem, path = url_to_fs(name, **(storage_options or {}))
    except Exception as error:
        raise _unreadable(name, error) from error
    return _size_of(name, filesystem, path)


def _size_of(name: str, filesystem: Any, path: str) -> int | None:
    try:
        size = filesystem.size(path)
    except Exception as error:
        raise _unreadable(name, error) from error
    return None if size is None else int(size)


def check_compression(compression: str | None) -> None:
    """Refuses what ``open_file`` does not know.

    Raises:
      ValueError: naming the compressions that are there.
    """
    known = sorted(name for name in _decompressors if name is not None)
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


def _expand_entry(position: int, entry: object, storage_options: Mapping[str, Any] | None) -> list[str]:
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
    try:
        names = _glob(name, storage_options or {})
    except Exception as error:
        raise SourceError(f"{name}: the pattern cannot be expanded: {_reason(error)}", file=name) from error
    if not names:
        raise SourceError(
            f"{name}: the pattern matches no file (seen from {os.getcwd()!r}); at least one is needed: check the "
            "path, and that this machine sees the files",
            file=name,
        )
    return names


def _glob(pattern: str, storage_options: Mapping[str, Any]) -> list[str]:
    filesystem, asked = url_to_fs(pattern, **storage_options)
    if filesystem.isfile(asked):  # a wildcard character in the name of a real file, or a url with a query
        return [pattern]
    found = filesystem.glob(asked, detail=True)
    paths = [str(path) for path, about in found.items() if about.get("type") != "directory"]
    return sorted(_as_written(path, asked, pattern, filesystem) for path in paths)


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


def _unreadable(name: str, error: Exception) -> SourceError:
    return SourceError(f"{name}: cannot be read: {_reason(error)}", file=name)


def _reason(error: Exception) -> str:
    """An exception in one line: its kind, and what it says."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
