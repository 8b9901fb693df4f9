"""Remote files kept in a local folder, for all processes of a host, so that each is downloaded once.

**One download.** A process that wants a missing file takes the file's lock (``flock``, which the system releases when a
process dies), downloads to a file of another name, and renames it when it is whole. Other processes wait for the lock
as long as a download may take by the filesystem's own time limits. So a file in the folder is always complete; one of
another size, which was cut from outside, is made anew.

**Which content.** The name in the folder is a digest of the file's full name, its size, and its mark (``io``). They are
asked for at each opening. A changed file is downloaded anew. Where the filesystem has no mark, the log says so once.

The folder grows; it may be emptied while nobody downloads, as a process that reads a removed file reads on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, final

from torchdistinput.errors import InputError
from torchdistinput.sources.checks import as_object
from torchdistinput.sources.storage.retry import one_line

_LOG = logging.getLogger("torchdistinput")

_PIECE: Final = 1 << 22


class Remote(NamedTuple):
    """A file of a filesystem that is not this machine's."""

    name: str
    """As the user wrote it, for messages."""
    url: str
    """Its full name, with the protocol."""
    size: int | None
    mark: str
    """See ``io``; empty if there is none."""


@final
class FileCache:
    """A folder with whole copies of remote files. It pickles; nothing is kept open.

    Args:
      folder: a folder on a disk of this host. It is made if it is not there. Nothing else may be in it.

    Raises:
      TypeError: the folder is not a path.
      InputError: this system has no ``flock``.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if not isinstance(as_object(folder), str | os.PathLike):
            raise TypeError(f"cache must be the path of a folder, got {folder!r}")
        try:
            import fcntl  # noqa: F401, PLC0415 - there is none on Windows
        except ImportError as error:
            raise InputError("FileDataset(cache=...) needs flock, which this system does not have") from error
        self._folder = Path(os.path.abspath(folder))
        self._warned_unmarked = False

    def opened(self, remote: Remote, content: Callable[[], AbstractContextManager[BinaryIO]]) -> BinaryIO | None:
        """The copy of a file, open for reading; ``None`` if it has to be read without the folder.

        Args:
          remote: the file.
          content: opens its stored bytes; called if there is no copy yet.

        Raises:
          OSError, EOFError: the folder cannot be written to, or the file ends too early.
        """
        if remote.size is None:
            _LOG.warning("%s: not kept in %s: its size is unknown", one_line(remote.name), self._folder)
            return None
        if not (remote.mark or self._warned_unmarked):
            self._warned_unmarked = True
            _LOG.warning(
                "%s: its filesystem tells no mark of its content: a copy in %s is used until its size changes",
                *(one_line(remote.name), self._folder),
            )
        copy = self._folder / f"{hashlib.sha256(json.dumps(remote[1:]).encode()).hexdigest()[:32]}.data"
        found = _whole(copy, remote.size)
        return self._downloaded(copy, remote.size, content) if found is None else found

    def _downloaded(
        self, copy: Path, size: int, content: Callable[[], AbstractContextManager[BinaryIO]]
    ) -> BinaryIO | None:
        import fcntl  # noqa: PLC0415 - there is none on Windows

        self._folder.mkdir(parents=True, exist_ok=True)
        with copy.with_suffix(".lock").open("ab") as lock:  # closing it releases it
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = _whole(copy, size)  # by another process meanwhile
            if found is None:
                part = copy.with_suffix(".part")  # may be there, of a process that was killed
                with content() as stored, part.open("wb") as file:
                    shutil.copyfileobj(stored, file, _PIECE)
                    missing = size - file.tell()
                    os.fsync(file.fileno())
                if missing:
                    part.unlink()
                    raise EOFError(f"the file ends {missing} bytes before its end")
                part.replace(copy)
                found = _whole(copy, size)
        return found


def _whole(copy: Path, size: int) -> BinaryIO | None:
    """A copy that has all of its bytes, open for reading."""
    try:
        file = copy.open("rb")
    except FileNotFoundError:
        return None
    if os.fstat(file.fileno()).st_size != size:
        file.close()
        return None
    return file
