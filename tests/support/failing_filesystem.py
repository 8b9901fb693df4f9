"""A filesystem that fails, breaks off and stalls by a script: ``flicker:///path`` is the local file ``/path``.

The script is a storage option, so that loader workers have it too: ``"read=..R.S,open=T"`` lets the third read fail by
a reset connection, the fifth end too early, and the first opening time out. Each process runs the script from its
beginning; calls after the end of it succeed.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
from fsspec.asyn import FSTimeoutError
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

STALL_SECONDS = 0.005

FAULTS: dict[str, Callable[[], Exception]] = {
    "R": lambda: ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    "T": lambda: TimeoutError("no answer"),
    "F": lambda: FSTimeoutError(None),
    "B": lambda: OSError(errno.EBUSY, "Please reduce your request rate"),
    "E": lambda: EOFError(None),
    "P": lambda: PermissionError(errno.EACCES, "Access Denied"),
    "N": lambda: FileNotFoundError(errno.ENOENT, "No such key"),
    "V": lambda: ValueError("not of this world"),
}
"""What a letter of a script raises; ``S`` lets a read end too early, ``H`` lets it give half of what is there."""


class FlickeringFileSystem(AbstractFileSystem):  # type: ignore[misc] # fsspec has no types
    """The local files, by a script.

    Args:
      script: see the top; the calls are ``open``, ``read``, ``info`` (sizes too) and ``ls``.
      flavour: what its files are: ``buffered`` (of fsspec's own kind, as most stores have them), ``bare`` (they know no
        size, but the filesystem does) or ``stream`` (no size, no seeking, as of a web server).
    """

    protocol = "flicker"
    root_marker = "/"

    def __init__(self, script: str = "", flavour: str = "buffered", **more: Any) -> None:
        super().__init__(**more)
        pairs = (part.split("=") for part in script.split(",") if part)
        self.faults = {kind: iter(letters) for kind, letters in pairs}
        self.flavour = flavour
        self.calls: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.open_files = 0

    def meet(self, kind: str) -> str:
        """One call: fails as the script says, or tells what the script says of a read."""
        self.calls[kind] += 1
        letter = next(self.faults.get(kind, iter(())), ".")
        if letter != ".":
            self.failed[kind] += 1
        if letter in "TF":
            time.sleep(STALL_SECONDS)
        if letter in FAULTS:
            error = FAULTS[letter]()
            raise error
        return letter

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self.meet("info")
        return self._about(self._strip_protocol(path))

    def _about(self, path: str) -> dict[str, Any]:
        about = os.stat(path)
        kind = "directory" if os.path.isdir(path) else "file"
        return {"name": path, "size": about.st_size, "type": kind}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        self.meet("ls")
        path = self._strip_protocol(path)
        names = [f"{path.rstrip('/')}/{name}" for name in os.listdir(path)]
        return [self._about(name) for name in names] if detail else names

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        self.meet("open")
        if self.flavour == "buffered":
            return BufferedFile(self, path, mode, size=self._about(path)["size"], block_size=1 << 12)
        return BareFile(self, path) if self.flavour == "bare" else StreamFile(self, path)


class BufferedFile(AbstractBufferedFile):  # type: ignore[misc]
    """A file of fsspec's own kind."""

    def __init__(self, fs: FlickeringFileSystem, path: str, mode: str, **more: Any) -> None:
        super().__init__(fs, path, mode, **more)
        fs.open_files += 1

    def _fetch_range(self, start: int, end: int) -> bytes:
        letter = self.fs.meet("read")
        with open(self.path, "rb") as file:
            file.seek(start)
            data = file.read(end - start)
        return {"S": b"", "H": data[: (len(data) + 1) // 2]}.get(letter, data)

    def close(self) -> None:
        self.fs.open_files -= not self.closed
        super().close()


class BareFile:
    """A file with what a reader needs, and no more."""

    def __init__(self, fs: FlickeringFileSystem, path: str) -> None:
        self._fs = fs
        self._file = open(path, "rb")  # noqa: SIM115 - closed by close
        fs.open_files += 1

    def read(self, count: int = -1) -> bytes:
        letter = self._fs.meet("read")
        data = self._file.read(count)
        return {"S": b"", "H": data[: (len(data) + 1) // 2]}.get(letter, data)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._fs.open_files -= not self._file.closed
        self._file.close()


class StreamFile(BareFile):
    """A stream, as of a web server that tells no size; like the one of fsspec it says that it could seek."""

    size = None

    def read(self, count: int = -1) -> bytes:
        letter = self._fs.meet("read")
        assert letter not in "SH", "without a size, nobody can tell an early end from the end"
        return self._file.read(count)

    def seek(self, offset: int, whence: int = 0) -> int:
        raise ValueError("Cannot seek streaming file")

    def seekable(self) -> bool:
        return True


def register() -> None:
    """Makes ``flicker://`` known, here and in processes forked from here."""
    fsspec.register_implementation("flicker", FlickeringFileSystem, clobber=True)


def instance(options: dict[str, Any]) -> FlickeringFileSystem:
    """The filesystem that these storage options stand for, in this process and thread."""
    found = fsspec.filesystem("flicker", **options)
    assert isinstance(found, FlickeringFileSystem)
    return found


def random_script(seed: int, flavour: str, length: int = 2000) -> str:
    """A script under which five tries are always enough.

    At most two reads in a row fail, and one opening; so a read fails four times at most: read, open, read, open.
    """
    rng = random.Random(seed)
    letters = "RTFBE" if flavour == "stream" else "RTFBESS"
    return f"read={_letters(rng, letters, length, 2)},open={_letters(rng, 'RTFBE', length, 1)},info=R.T..B"


def _letters(rng: random.Random, letters: str, length: int, in_a_row: int) -> str:
    def written() -> Iterator[str]:
        while True:
            yield "".join(rng.choices(letters, k=rng.randint(1, in_a_row))) + "." * rng.randint(3, 8)

    text, more = "", written()
    while len(text) < length:
        text += next(more)
    return text
