"""Index files with the offset of each record of a data file, so that a rank reads its share of a batch and no more.

An index is made only if the user gave a folder for it, and lies there, never beside the data. There is one index for
each data file, made by reading the data file once. The index has the name and size of the data file, and the
filesystem's mark of its last change (``io.mark_in``). An index that no longer fits its file is refused, and never
replaced: only the user knows whether a saved state still fits the changed file. An index appears complete or not at
all, so ranks may make the same index at the same time.

**The format**: int64 (little endian), one for each record and one more: the offset of each record, and the end of the
last one; then the facts of the data file, as JSON; then the length of this JSON in bytes, as an int64. The lengths of
the samples (``FileDataset.build_lengths``) have the same format: a length in the place of each offset.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from torchdistinput.errors import SourceError
from torchdistinput.sources.checks import as_object
from torchdistinput.sources.formats.reader_api import Layout, facts_of, named_reader
from torchdistinput.sources.storage.io import OpenedFile
from torchdistinput.sources.storage.retry import one_line, reason

_LOG = logging.getLogger("torchdistinput")

_FORMAT: Final = "torchdistinput offsets 1"
_MAX_HEADER_BYTES: Final = 1 << 16

# An index names its reader by the module that the readers of this library had in version 0.1, wherever they are now.
_FORMATS: Final = "torchdistinput.sources.formats."
_READERS: Final = "torchdistinput.sources.readers"

Offsets = npt.NDArray[np.int64]


@final
class IndexFolder:
    """The indices of the files of one dataset. It pickles; nothing is kept open.

    Args:
      folder: the folder with the indices.
      read: the reader; another reader finds other records, and has indices of its own.

    Raises:
      TypeError: the folder is not a path.
      ValueError: no index can be made for the reader.
    """

    def __init__(self, folder: str | os.PathLike[str], read: Callable[..., Any]) -> None:
        if not isinstance(as_object(folder), str | os.PathLike):
            raise TypeError(f"index_folder must be the path of a folder, got {folder!r}")
        inner, starts = named_reader(read), facts_of(read).starts
        if inner is None or starts is None:
            raise ValueError(
                f"index_folder was given with the reader {read!r:.100}, of which no index can be made: text_lines, "
                "json_lines, tfrecords and webdataset have one; fixed_length_records and npy_rows need none"
            )
        self._folder = os.path.abspath(os.fspath(folder))
        self._starts = starts
        module = inner.__module__
        if module.startswith(_FORMATS):
            module = _READERS
        self._reader = f"{module}.{inner.__qualname__}"

    def has(self, name: str, lengths: str = "") -> bool:
        """Whether there is an index of a file; or of the lengths of this name."""
        return self._path(name, lengths).exists()

    def records(self, name: str, size: int | None) -> int | None:
        """How many records a file has by its index; ``None`` if the index does not say so, or is of a changed file.

        Args:
          name: the file.
          size: its stored size in bytes now.
        """
        try:
            header, _ = _header_of(self._path(name))
        except (OSError, ValueError, RecursionError):  # reading by the index raises the right error
            return None
        match header:
            case {"format": str(form), "size": int(then), "records": int(records)} if (form, then) == (_FORMAT, size):
                return None if isinstance(records, bool) else records
            case _:
                return None

    def build(self, opened: OpenedFile) -> None:
        """Reads a file and makes its index."""
        path = self._path(opened.name)
        try:
            _save(path, opened, self._reader, self._starts(opened.stream))
        except SourceError as error:  # reading the data raises it, at the right step
            _LOG.warning("%s: no index: %s; all ranks will read the whole file", one_line(opened.name), error)
            _save(path, opened, self._reader, None)

    def layout(self, opened: OpenedFile) -> Layout | None:
        """The offsets of the records of a file; ``None`` if the file must be read from start to end.

        Raises:
          SourceError: there is no index, it is damaged, or the file has changed since it was made.
        """
        offsets = _load(self._path(opened.name), opened, self._reader)
        return None if offsets is None else Layout(len(offsets) - 1, lambda record: int(offsets[record]))

    def build_lengths(self, opened: OpenedFile, lengths: str, found: Iterable[Offsets]) -> None:
        """Writes the lengths of the samples of a file, under a name."""
        _save(self._path(opened.name, lengths), opened, f"{self._reader}, {lengths}", found)

    def lengths(self, opened: OpenedFile, lengths: str) -> Offsets:
        """The lengths of the samples of a file.

        Raises:
          SourceError: there are none of this name, they are damaged, or the file has changed since they were made.
        """
        found = _load(self._path(opened.name, lengths), opened, f"{self._reader}, {lengths}", "lengths")
        assert found is not None
        return found[:-1]

    def _path(self, name: str, lengths: str = "") -> Path:
        key = [name, self._reader, *([lengths] if lengths else [])]
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
        return Path(self._folder, f"{digest[:32]}.index")


def _save(path: Path, opened: OpenedFile, reader: str, starts: Iterable[Offsets] | None) -> None:
    """Writes a complete index. Without ``starts`` it says that the file must be read from start to end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.stem}{secrets.token_hex(8)}.part")
    try:
        with temporary.open("xb") as body:  # follows no link; its mode is what the umask says
            for piece in () if starts is None else starts:
                body.write(piece.astype("<i8").tobytes())
            records = None if starts is None else body.tell() // 8
            if starts is not None:
                body.write(opened.size.to_bytes(8, "little"))
            header = json.dumps({**_facts(opened, reader), "records": records}).encode()
            body.write(header + len(header).to_bytes(8, "little"))
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _load(path: Path, opened: OpenedFile, reader: str, kind: str = "index") -> Offsets | None:
    """The numbers that ``_save`` wrote, mapped into memory."""
    name = one_line(opened.name)
    try:
        header, offsets_end = _header_of(path)
    except FileNotFoundError as error:
        raise SourceError(
            f"{name}: its {kind} {path} is not there. Every rank must see the same index_folder; make what is missing "
            f"with FileDataset.build_{kind}() (distribute_dataset makes an index by itself).",
            file=opened.name,
        ) from error
    except PermissionError as error:
        raise SourceError(
            f"{name}: its index {path} cannot be read: {reason(error)}; give it the mode that other users need",
            file=opened.name,
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, opened) from error
    match header:
        case {"records": (int() | None) as records, **facts}:
            found = {key: facts.get(key) for key in ("format", "file", "reader", "size", "changed")}
        case _:
            raise _damaged(path, opened)
    wanted = _facts(opened, reader)
    if found != wanted:
        differing = ", ".join(
            f"{key} {found[key]!r} then, {wanted[key]!r} now" for key in wanted if found[key] != wanted[key]
        )
        raise SourceError(
            f"{name}: the file is not the one of which the index {path} was made ({differing}). Put the file back, or "
            "remove the index; it is made anew then.",
            file=opened.name,
        )
    if records is None:
        return None
    if isinstance(records, bool) or records < 0 or offsets_end != 8 * (records + 1):
        raise _damaged(path, opened)
    return np.memmap(path, "<i8", "r", 0, (records + 1,))


def _header_of(path: Path) -> tuple[Any, int]:
    """The facts of the data file in an index, and the end of its offsets."""
    with path.open("rb") as file:
        end = file.seek(-8, os.SEEK_END)
        length = int.from_bytes(file.read(8), "little")
        file.seek(max(0, end - min(length, _MAX_HEADER_BYTES)))
        return json.loads(file.read(min(length, _MAX_HEADER_BYTES))), end - length


def _facts(opened: OpenedFile, reader: str) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "file": opened.name,
        "reader": reader,
        "size": opened.size,
        "changed": opened.changed,
    }


def _damaged(path: Path, opened: OpenedFile) -> SourceError:
    message = f"{one_line(opened.name)}: its index {path} is damaged; remove it, and it is made anew."
    return SourceError(message, file=opened.name)
