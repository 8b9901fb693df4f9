"""Names of files: a pattern becomes the files that it matches, under names that can be opened.

A name is what the user wrote, or the user's pattern with its wildcards filled in. So a relative pattern gives relative
names, ``s3://bucket/*.txt`` gives ``s3://bucket/a.txt``, and each name can be given back to ``expand`` and to
``io.open_file``, in this process or another. A name that was listed, or that a local file has, is no pattern, whatever
characters are in it.

Links to folders are followed, as in a shell. fsspec's own ``glob`` does not, and takes a folder inside of another one
that it cannot list for an empty one, whatever ``on_error`` says, so that files would be missing without a word.
Python's ``glob`` does not end where two links lead to folders that they are in.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias, final

from torchdistinput.errors import SourceError
from torchdistinput.sources.storage.io import FileFacts, facts_in, filesystem_of, is_local
from torchdistinput.sources.storage.retry import is_transient, one_line, reason, retried

FileNames: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"

_LOG = logging.getLogger("torchdistinput")

MOST_NAMES: Final = 1 << 20

_WILDCARD = re.compile(r"[*?\[]")
_BRACES = re.compile(r"\{([^{}]*)\}")
_BRACES_IN_BRACES = re.compile(r"\{[^{}]*(\{[^{}]*\}[^{}]*)+\}")
_RANGE = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})")

# Stores that list a whole tree at once, where a folder is a prefix; the others are asked for folder after folder.
_LIST_TREES: Final = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl"}


@final
class ListedName(str):
    """The name of a file that was listed: it is never expanded again."""

    __slots__ = ()


@final
class Listed(NamedTuple):
    """A file of a pattern or of a list of names."""

    name: str
    facts: FileFacts = FileFacts()
    """What the listing of its folder tells; nothing for a name that was not looked up."""


def expand(files: FileNames, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """The names of ``listed``."""
    return [each.name for each in listed(files, storage_options)]


def listed(files: FileNames, storage_options: Mapping[str, Any] | None = None) -> list[Listed]:
    """Turns a pattern, a name, or a list of both into names of files. Local: no communication.

    Braces (``{000..012}``, ``{a,b}``) become names or patterns, in the order as written. A pattern
    (``*``, ``**``, ``?``, ``[ab]``) becomes the files that it matches, without directories, sorted by name. A name
    stays as it is and is not looked up, unless it contains one of these characters and may be a pattern. A list keeps
    its order and its repetitions. ``~`` is the home directory; ``file://`` is dropped. A folder that cannot be
    listed is an error, so that no file is left out; one that may not be listed is passed over, as in a shell, with a
    warning.

    Args:
      files: what to expand, local or with the protocol of any fsspec filesystem (``memory://``, ``s3://``), also
        chained (``simplecache::s3://bucket/*.txt``).
      storage_options: arguments of the filesystem.

    Raises:
      TypeError: if ``dataset`` is neither a name nor a list of names.
      ValueError: if the list is empty, or a name in it, or braces stand for too many names.
      SourceError: if a pattern matches no file, or its filesystem cannot be asked.
    """
    options = storage_options or {}
    entries = enumerate(_entries(files))
    return [each for position, entry in entries for each in _expand_entry(position, entry, options)]


def expand_braces(pattern: str) -> list[str]:
    """The names or patterns that a brace pattern stands for; the pattern alone if it has no braces to expand.

    ``{first..last}`` are ints, with the zeros in front that one of the two has; ``{a,b}`` are alternatives. The names
    come in the order as written, the last braces changing fastest. Other braces stay. Nothing is looked up, so remote
    files are named without listing a folder.

    Raises:
      ValueError: braces are in braces, or they stand for more than ``MOST_NAMES`` names.
    """
    if _BRACES_IN_BRACES.search(pattern):
        raise ValueError(f"{pattern!r:.200} has braces in braces; write the names, or several patterns, as a list")
    choices: list[Iterable[str]] = []
    at, count = 0, 1
    for found in _BRACES.finditer(pattern):
        ends, texts = _RANGE.fullmatch(found[1]), found[1].split(",")
        if ends is None and len(texts) == 1:
            continue
        numbers = range(0) if ends is None else _numbers(int(ends[1]), int(ends[2]))
        count *= len(numbers) or len(texts)
        if count > MOST_NAMES:
            raise ValueError(
                f"the braces of {pattern!r:.200} stand for {count} names or more; {MOST_NAMES} is the most"
            )
        width = 0 if ends is None else _width(*ends.groups())
        choices += [[pattern[at : found.start()]], [f"{number:0{width}d}" for number in numbers] or texts]
        at = found.end()
    return list(map("".join, product(*choices, [pattern[at:]])))


def _numbers(first: int, last: int) -> range:
    return range(first, last + 1) if first <= last else range(first, last - 1, -1)


def _width(*ends: str) -> int:
    """The digits of numbers that are filled up with zeros, as one of the ends is; 0 if none is."""
    is_padded = any(re.match(r"-?0\d", end) for end in ends)
    return max(map(len, ends)) if is_padded else 0


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


def _expand_entry(position: int, entry: object, options: Mapping[str, Any]) -> list[Listed]:
    name = os.fspath(entry) if isinstance(entry, os.PathLike) else entry
    if not isinstance(name, str):
        raise TypeError(f"file {position} of the list must be a str or a path, got {type(entry).__name__}: {entry!r}")
    if not name:
        raise ValueError(f"file {position} of the list is an empty string: a name or a pattern is needed")
    if name.startswith("file://") and "::" not in name:
        name = name.removeprefix("file://")
    if isinstance(entry, ListedName):
        return [Listed(name)]
    name = os.path.expanduser(name)
    names = [name] if "{" in name and os.path.isfile(name) else expand_braces(name)
    return [each for one in names for each in _expand_wildcards(one, options)]


def _expand_wildcards(name: str, options: Mapping[str, Any]) -> list[Listed]:
    if not name:
        raise ValueError("a brace pattern stands for an empty name; a file needs one")
    if not _WILDCARD.search(name):
        return [Listed(name)]
    found = retried(partial(_glob, name, options), name, "the pattern cannot be expanded", named=True)
    if not found:
        is_relative = not ("://" in name or "::" in name or os.path.isabs(name))
        seen_from = f" (seen from {os.getcwd()!r})" if is_relative else ""
        raise SourceError(
            f"{one_line(name)}: the pattern matches no file{seen_from}; at least one is needed: check the path, and "
            "that this machine sees the files",
            file=name,
        )
    return found


def _glob(pattern: str, storage_options: Mapping[str, Any]) -> list[Listed]:
    if "://" not in pattern:
        pattern = re.sub("//+", "/", pattern)  # as the filesystem calls it
    filesystem, asked = filesystem_of(pattern, storage_options)
    if _is_file(filesystem, asked):  # a wildcard character in the name of a real file, or a url with a query
        return [Listed(pattern)]
    if "**" in asked and _LIST_TREES & set(_protocols(filesystem)):
        entries = (_entry_of(filesystem, path, about) for path, about in filesystem.glob(asked, detail=True).items())
        found: Iterator[_FolderEntry] = (entry for entry in entries if entry.kind != "directory")
    else:
        list_folder = _local_entries if is_local(filesystem) else partial(_entries_of, filesystem)
        found = _matching(list_folder, *_divided(asked, pattern))
    by_path = {path: facts for path, _, facts in found}
    names = ((_as_written(path, asked, pattern, filesystem), facts) for path, facts in by_path.items())
    return sorted((Listed(name, facts) for name, facts in names), key=itemgetter(0))


def _protocols(filesystem: Any) -> Sequence[str]:
    return [filesystem.protocol] if isinstance(filesystem.protocol, str) else filesystem.protocol


def _is_file(filesystem: Any, path: str) -> bool:
    try:
        return bool(filesystem.info(path)["type"] == "file")
    except Exception as error:
        # Whatever a filesystem raises for a name that it cannot have; but one that did not answer is asked again.
        if is_transient(error):
            raise
        return False


class _FolderEntry(NamedTuple):
    """An entry of a folder."""

    path: str
    kind: str
    """``file``, ``directory``, or another word; ``loop`` for a link to a folder that the link is in."""
    facts: FileFacts


def _wildcard_part(pattern: str) -> int:
    """Where the part of a pattern with its first wildcard begins, behind a slash."""
    return pattern.rfind("/", 0, _WILDCARD.search(pattern).start()) + 1  # type: ignore[union-attr] # it has one


def _first_link(pattern: str) -> tuple[list[str], int]:
    """The links of a chain of filesystems, and the number of the first one with a wildcard."""
    links = pattern.split("::")
    return links, next(number for number, link in enumerate(links) if _WILDCARD.search(link))


def _divided(asked: str, pattern: str) -> tuple[str, list[str]]:
    """The folder in front of the first wildcard, and the parts of the pattern from there on; see ``_as_written``."""
    links, number = _first_link(pattern)
    wanted = links[number][_wildcard_part(links[number]) :]
    if not f"/{asked}".endswith(f"/{wanted}"):
        wanted = asked[_wildcard_part(asked) :]
    folder = asked.removesuffix(wanted)  # it may have the name of a pattern, where the user's pattern is relative
    return folder.rstrip("/") or folder[:1], wanted.split("/")


def _matching(
    entries: Callable[[str], Iterable[_FolderEntry]], folder: str, pattern: Sequence[str]
) -> Iterator[_FolderEntry]:
    """The files under a folder that match, part by part."""
    part, *rest = pattern
    if part == "**":
        yield from _matching(entries, folder, rest or ["*"])
        for entry in _readable(entries, folder):
            if entry.kind == "directory":
                yield from _matching(entries, entry.path, pattern)
            elif entry.kind == "loop":
                _LOG.warning("%s: a link to a folder that it is in is passed over", one_line(entry.path))
    elif rest and not _WILDCARD.search(part):
        yield from _matching(entries, f"{folder.rstrip('/')}/{part}" if folder else part, rest)
    else:
        fits = re.compile(fnmatch.translate(part)).match
        for entry in _readable(entries, folder):
            if fits(entry.path.rpartition("/")[2]):
                is_folder = entry.kind in {"directory", "loop"}
                if not rest and not is_folder:
                    yield entry
                elif rest and is_folder:
                    yield from _matching(entries, entry.path, rest)


def _readable(entries: Callable[[str], Iterable[_FolderEntry]], folder: str) -> list[_FolderEntry]:
    """The entries of a folder; none if there is no such folder, or it may not be listed."""
    try:
        return [*entries(folder)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError as error:
        _LOG.warning("%s: the folder is left out of the pattern: %s", one_line(folder), reason(error))
        return []


def _local_entries(folder: str) -> Iterator[_FolderEntry]:
    with os.scandir(folder) as entries:
        for each in entries:
            kind, facts = "file", FileFacts()
            if each.is_dir():
                kind = "loop" if each.is_symlink() and _is_loop(each.path) else "directory"
            else:
                with suppress(OSError):  # a link that leads nowhere: reading it is an error that names it
                    facts = FileFacts(each.stat().st_size)
            yield _FolderEntry(each.path, kind, facts)


def _is_loop(link: str) -> bool:
    """Whether a link leads to one of the folders in its path."""
    leads_to, path = os.path.realpath(link), link
    while path != (path := os.path.dirname(path)):
        if os.path.realpath(path) == leads_to:
            return True
    return False


def _entry_of(filesystem: Any, path: str, about: Mapping[str, Any]) -> _FolderEntry:
    return _FolderEntry(path.rstrip("/"), str(about["type"]), facts_in(about, filesystem))


def _entries_of(filesystem: Any, folder: str) -> list[_FolderEntry]:
    found = [_entry_of(filesystem, str(about["name"]), about) for about in filesystem.ls(folder, detail=True)]
    # Some list the folder itself, or a file that is asked for as a folder; a web page links to other places.
    return [each for each in found if each.path.rpartition("/")[0].strip("/") == folder.strip("/")]


def _as_written(path: str, asked: str, pattern: str, filesystem: Any) -> str:
    """The name of a found file in the words of the pattern: its part before the wildcards, and what they stood for.

    Args:
      path: the file, as the filesystem calls it.
      asked: the pattern, as the filesystem calls it: the same end as the user's, but perhaps another beginning.
      pattern: the pattern as the user wrote it; in a chain, the first link with a wildcard is the one in question.
      filesystem: where it was found.
    """
    links, position = _first_link(pattern)
    link = links[position]
    cut = _wildcard_part(link)
    folder = asked.removesuffix(link[cut:])
    if asked.endswith(link[cut:]) and path.startswith(folder):
        links[position] = link[:cut] + path.removeprefix(folder)
    else:
        links[position] = str(filesystem.unstrip_protocol(path)).removeprefix("file://")
    return "::".join(links)
