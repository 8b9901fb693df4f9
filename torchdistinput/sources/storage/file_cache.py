"""Remote files kept in a local folder, for all processes of a host, so that each is downloaded once.

**One download.** A process that wants a missing file takes the file's lock (``flock``, which the system releases when a
process dies), downloads to a file of another name, and renames it when it is whole. So a file in the folder is always
complete; one of another size, which was cut from outside, is made anew. Other processes wait for the lock, as long as
the download gets on; else they read the remote file without the folder.

**Which content.** The name in the folder is a digest of the file's full name, its size, and its mark (``io``). They are
asked for at each opening. A changed file is downloaded anew. Where the filesystem has no mark, the log says so once.

**Other users.** Copies and locks get the modes that the umask says. A whole copy that can be read is used, whoever made
it, on a disk without writing too. Links in the folder are not followed.

**Room.** Before a download the files that were not opened for the longest time are removed until there is room. A
process that reads a removed file reads on: the system keeps the content until it is closed. A file that alone has more
bytes than there is room is read without the folder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, final

from torchdistinput.errors import InputError
from torchdistinput.sources.checks import as_object, checked_int
from torchdistinput.sources.storage.retry import one_line

_LOG = logging.getLogger("torchdistinput")

_PIECE: Final = 1 << 22
_POLL_SECONDS: Final = 0.02
_STALLED_SECONDS: Final = 60.0
_WHOLE, _PART, _LOCK = ".data", ".part", ".lock"
_ROOM: Final = "room"


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
      max_bytes: how many bytes the copies may have together; ``None``: no limit.

    Raises:
      TypeError, ValueError: the folder is not a path, or the limit is not a positive int.
      InputError: this system has no ``flock``.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int | None = None) -> None:
        if not isinstance(as_object(folder), str | os.PathLike):
            raise TypeError(f"cache must be the path of a folder, got {folder!r}")
        try:
            import fcntl  # noqa: F401, PLC0415 - there is none on Windows
        except ImportError as error:
            raise InputError("FileDataset(cache=...) needs flock, which this system does not have") from error
        self._folder = os.path.abspath(os.fspath(folder))
        self._max_bytes = None if max_bytes is None else checked_int("cache_bytes", max_bytes, at_least=1)
        self._warned_unmarked = False

    def opened(self, remote: Remote, content: Callable[[], AbstractContextManager[BinaryIO]]) -> BinaryIO | None:
        """The copy of a file, open for reading; ``None`` if it has to be read without the folder.

        Args:
          remote: the file.
          content: opens its stored bytes; called if there is no copy yet.

        Raises:
          OSError, EOFError: the folder cannot be written to, or the file ends too early.
        """
        if remote.size is None or (self._max_bytes is not None and remote.size > self._max_bytes):
            _LOG.warning("%s: not kept in %s: %s", one_line(remote.name), self._folder, _why_not(remote))
            return None
        if not (remote.mark or self._warned_unmarked):
            self._warned_unmarked = True
            _LOG.warning(
                "%s: its filesystem tells no mark of its content: a copy in %s is used until its size changes",
                *(one_line(remote.name), self._folder),
            )
        key = hashlib.sha256(json.dumps(remote[1:]).encode()).hexdigest()[:32]
        while (found := self._there(key, remote.size)) is None:
            os.makedirs(self._folder, exist_ok=True)
            with self._locked(key) as is_mine:
                if not is_mine:
                    _LOG.warning(
                        "%s: another process has downloaded nothing for %g s; read without %s",
                        *(one_line(remote.name), _STALLED_SECONDS, self._folder),
                    )
                    return None
                if (found := self._there(key, remote.size)) is not None:
                    break
                with content() as stored:
                    self._download(key, remote.size, stored)
        return found

    def _there(self, key: str, size: int) -> BinaryIO | None:
        path = self._path(key, _WHOLE)
        try:
            file = os.fdopen(_opened_itself(path, os.O_RDONLY), "rb")
        except OSError as error:
            if error.errno not in {errno.ENOENT, errno.ELOOP}:
                raise
            return None
        if os.fstat(file.fileno()).st_size != size:
            file.close()
            return None
        with suppress(OSError):  # it was removed meanwhile, but is open; or is another user's
            os.utime(path, ns=(time.time_ns(), time.time_ns()), follow_symlinks=False)  # finer than the disk's clock
        return file

    def _download(self, key: str, size: int, content: BinaryIO) -> None:
        part = self._path(key, _PART)
        part.unlink(missing_ok=True)  # of a process that was killed
        with self._locked(_ROOM):
            self._make_room(size)
            file = part.open("xb")
            file.truncate(size)  # so that others count it
        try:
            with file:
                left = size
                while left and (piece := content.read(min(_PIECE, left))):
                    file.write(piece)
                    file.flush()
                    left -= len(piece)
                os.fsync(file.fileno())
            if left:
                raise EOFError(f"the file ends {left} bytes before its end")
            part.replace(self._path(key, _WHOLE))
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def _make_room(self, wanted: int) -> None:
        if self._max_bytes is None:
            return
        files = []
        for entry in os.scandir(self._folder):
            with suppress(FileNotFoundError):
                if entry.name.endswith((_WHOLE, _PART)):
                    about = entry.stat(follow_symlinks=False)
                    files.append((entry.name.endswith(_WHOLE), about.st_mtime_ns, about.st_size, Path(entry.path)))
        held = sum(size for _, _, size, _ in files)
        for is_whole, _, size, path in sorted(files):
            if held + wanted <= self._max_bytes:
                return
            if is_whole or self._is_left(path):
                path.unlink(missing_ok=True)
                held -= size

    def _is_left(self, part: Path) -> bool:
        """Whether the process that downloaded a part was killed."""
        with self._lock_of(part.stem) as lock:
            return _try_lock(lock)

    def _path(self, key: str, kind: str) -> Path:
        return Path(self._folder, key + kind)

    @contextmanager
    def _lock_of(self, key: str) -> Iterator[int]:
        path = self._path(key, _LOCK)
        try:
            lock = _opened_itself(path, os.O_RDWR | os.O_CREAT)
        except PermissionError:  # another user's, which a reader may lock too
            lock = _opened_itself(path, os.O_RDONLY)
        try:
            yield lock
        finally:
            os.close(lock)  # which releases it

    @contextmanager
    def _locked(self, key: str) -> Iterator[bool]:
        """Holds a lock. Waits while the process that has it gets on; then says that it has not got the lock."""
        part = self._path(key, _PART)
        with self._lock_of(key) as lock:
            seen, since = None, time.monotonic()
            while not (is_mine := _try_lock(lock)):
                now = _changed(part)
                if now != seen:
                    seen, since = now, time.monotonic()
                if time.monotonic() - since > _STALLED_SECONDS:
                    break
                time.sleep(_POLL_SECONDS)
            yield is_mine


def _opened_itself(path: str | Path, flags: int) -> int:
    """Opens a file, and not what a link in its place leads to."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _why_not(remote: Remote) -> str:
    return "its size is unknown" if remote.size is None else f"its {remote.size} bytes are more than cache_bytes"


def _try_lock(lock: int) -> bool:
    import fcntl  # noqa: PLC0415 - there is none on Windows

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
