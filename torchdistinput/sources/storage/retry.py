"""Requests that fail for a moment are made again; a file that is being read goes on at the byte that it had reached.

**Which failures are transient.** Remote stores drop connections, time out, answer that they are busy, and close a
connection with half of the bytes sent. Asking again helps there, and only there: a file that is missing stays missing.
The clients of the stores have exceptions of their own, so what is known is what lasts; all else is tried again.

**A stall.** A request that is never answered cannot be interrupted from outside. The filesystem's own time limit must
end it, and then it counts as a transient failure. It is set by ``storage_options``, for example
``{"config_kwargs": {"connect_timeout": 10, "read_timeout": 60}}`` for ``s3``,
``{"client_kwargs": {"timeout": aiohttp.ClientTimeout(sock_read=60)}}`` for ``http``, ``{"requests_timeout": 60}`` for
``gs``, which has no limit by default. The default of several is minutes.

**Whether it is the same file.** One that is opened again must have the size that it had; a file that was replaced by
another one of the same size meanwhile is not noticed.
"""

from __future__ import annotations

import errno
import io
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import sleep
from typing import Any, BinaryIO, Final, TypeVar, final

from torchdistinput.errors import InputError, SourceError

T = TypeVar("T")

_LOG = logging.getLogger("torchdistinput")
_DROPPED_BYTES: Final = 1 << 20
_MAX_REASON: Final = 500

_WAITS: Final = (0.1, 0.2, 0.4, 0.8)
"""Seconds of waiting after each failure but the last. Clients of object stores try several times by themselves."""
_PERMANENT: Final = (
    FileNotFoundError,
    PermissionError,  # expired credentials too: their owner has to act
    IsADirectoryError,
    NotADirectoryError,
    FileExistsError,
    io.UnsupportedOperation,
)
_PERMANENT_NUMBERS: Final = {errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOSPC}
_MAX_CAUSES: Final = 9
_BUSY_STATUS: Final = {408, 425, 429}  # of HTTP: too slow, too early, too many requests


def _decisive(error: BaseException) -> tuple[BaseException, int]:
    """The cause with an HTTP status, if there is one, and the status; else the error and 0.

    fsspec says of a server that is busy that the file is missing.
    """
    cause = error
    for _ in range(_MAX_CAUSES):
        told = (vars(cause).get(name) for name in ("status", "code", "status_code"))  # classes of aiohttp have a code
        if status := next((each for each in told if isinstance(each, int) and 400 <= each < 600), 0):
            return cause, status
        cause = cause.__cause__ or cause
    return error, 0


def is_transient(error: BaseException) -> bool:
    """Whether a request that failed so may succeed when it is made again.

    The HTTP status decides, if there is one. Those of Python itself last, as a ``ValueError`` does; those of the system
    do not, and no end that came too early. Those of the clients pass.
    """
    if status := _decisive(error)[1]:
        return status >= 500 or status in _BUSY_STATUS
    if isinstance(error, OSError):
        refused = error.errno is None and str(error).startswith("Forbidden: ")  # of gcsfs, which has no other sign
        return not (refused or isinstance(error, _PERMANENT) or error.errno in _PERMANENT_NUMBERS)
    return next(cls for cls in type(error).__mro__ if cls.__module__ == "builtins") in {Exception, EOFError}


def is_missing(error: SourceError) -> bool:
    """Whether a request of ``retried`` failed because there is no such file."""
    cause = error.__cause__
    return isinstance(cause, FileNotFoundError) and not is_transient(cause)


def retried(action: Callable[[], T], name: str, problem: str, *, named: bool) -> T:
    """The result of an action, which is called again while its failures are transient: five times at most.

    Args:
      action: what to do.
      name: the file.
      problem: what cannot be done if it fails, for messages.
      named: whether the error's text begins with the name; where the caller adds it, it must not.

    Raises:
      SourceError: it failed for good, or too often; the original is the ``__cause__``.
    """
    for number, wait in enumerate((*_WAITS, None), 1):
        try:
            return action()
        except InputError:
            raise
        except Exception as error:
            what, why = f"{one_line(name)}: {problem}", reason(_decisive(error)[0])
            text = what if named else problem
            if not is_transient(error):
                raise SourceError(f"{text}: {why}", file=name) from error
            if wait is None:
                raise SourceError(
                    f"{text}, tried {number} times: {why}; look at the filesystem and the way to it, then go on from "
                    "the last saved state",
                    file=name,
                ) from error
            _LOG.warning("%s (try %d of %d, the next one in %g s): %s", what, number, len(_WAITS) + 1, wait, why)
        sleep(wait)
    raise AssertionError("the last try returns or raises")


def drop(file: BinaryIO, count: int) -> int:
    """Reads bytes and drops them. Returns how many there were."""
    missing = count
    while missing and (piece := file.read(min(missing, _DROPPED_BYTES))):
        missing -= len(piece)
    return count - missing


def known_size(file: object) -> int | None:
    """The size in bytes that a file object states, as files of object stores do; ``None`` if it states none."""
    size = getattr(file, "size", None)
    return size if isinstance(size, int) and size >= 0 else None


@final
class RetryingFile(io.RawIOBase):
    """The stored bytes of a remote file. A reading that fails is made again, on the file opened anew.

    It is a ``RawIOBase`` because buffers and decompressors ask for one. It seeks always: where the filesystem cannot,
    bytes are read and dropped.

    Args:
      name: the file, for messages.
      first: the file as it was opened.
      reopen: opens it again.
      ask_size: its size in bytes, or ``None``; asked at the end of a file that does not know its own.
      plain: whether the stored bytes are the content, so that an offset in them is one in the content.
    """

    def __init__(
        self, name: str, first: Any, reopen: Callable[[], Any], ask_size: Callable[[], int | None], *, plain: bool
    ) -> None:
        super().__init__()
        self._name, self._file, self._reopen, self._ask_size, self._plain = name, first, reopen, ask_size, plain
        self._at = 0  # of the file that is open
        self._offset = self._reached = 0  # of the reader, and the furthest byte that it got
        self.size = known_size(first)
        self._tells = hasattr(first, "size")  # one that has a size, and does not know it, is a stream

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Goes somewhere; nothing is asked of the filesystem before the next read, unless the end must be known."""
        start: int | None = 0 if whence == io.SEEK_SET else self._offset
        if whence == io.SEEK_END:
            start = self._request(self._known)
        if start is None:
            raise io.UnsupportedOperation(f"{one_line(self._name)}: the filesystem does not tell where the file ends")
        self._offset = max(0, start + offset)
        return self._offset

    def readinto(self, buffer: Any, /) -> int:
        """Reads what is there, up to the size of the buffer; 0 bytes at the end of the file only.

        Raises:
          SourceError: the file cannot be read any more, or is another one by now.
        """
        view = memoryview(buffer).cast("B")
        try:
            data = self._request(partial(self._read, len(view)))
        except SourceError as error:
            if self._plain and error.offset is None:
                error.offset = self._offset
            raise
        view[: len(data)] = data
        self._offset += len(data)
        self._reached = max(self._reached, self._offset)
        return len(data)

    def close(self) -> None:
        """Closes the file that is open; more calls do nothing."""
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        finally:
            super().close()

    def _request(self, action: Callable[[], T]) -> T:
        problem = f"reading failed at byte {self._offset} of what is stored"
        return retried(action, self._name, problem, named=False)

    def _read(self, count: int) -> bytes:
        """Up to so many bytes from the reader's offset on."""
        try:
            if self._file is None:
                self._open()
            if self._at != self._offset:
                self._go()
            data: bytes = self._file.read(count)
            self._at += len(data)
            if count and not data and self._at < (size := self._known() or self._reached):
                raise EOFError(f"the file ends at byte {self._at}, but has {size} bytes")
        except BaseException:  # nobody knows where it stands now
            file, self._file = self._file, None
            if file is not None:
                with suppress(Exception):  # it failed before, which is told; closing it is only to be polite
                    file.close()
            raise
        return data

    def _open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        self._file, self._at = self._reopen(), 0
        if self._tells and (size := known_size(self._file)) != self.size:
            raise SourceError(
                f"the file had {self.size} bytes, and has {size} now: it was replaced while it was read; leave files "
                "that are being read in place",
                file=self._name,
            )

    def _go(self) -> None:
        """To the reader's offset; or to the end of the file, if that comes before."""
        try:
            self._file.seek(self._offset)
            self._at = self._offset
        except (ValueError, NotImplementedError):  # a stream; some of them say that they could
            if self._offset < self._at:
                self._file.close()
                self._open()
            self._at += drop(self._file, self._offset - self._at)

    def _known(self) -> int | None:
        if self.size is None and not self._tells:
            size = self._ask_size()
            self.size = None if size is None else int(size)
        return self.size


def one_line(text: str) -> str:
    """A text that shows in one line of a message: as it is, or quoted if it has control characters or no proper ones.

    Names of files may hold anything but a zero byte and a slash, line ends and bytes that are no UTF-8 too.
    """
    return text if text.isprintable() else repr(text)


def reason(error: BaseException) -> str:
    """An exception in one line: its kind, and what it says."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {one_line(text):.{_MAX_REASON}}" if text else type(error).__name__
