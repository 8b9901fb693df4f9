"""Remote files that fail in passing are read to the last byte, each byte once; those that fail for good say so."""

from __future__ import annotations

import errno
import ftplib
import gzip
import http.client
import http.server
import io
import logging
import random
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import torchdistinput as tdi
from tests.support import failing_filesystem
from tests.support.cells import cells
from tests.support.formats import FORMATS, same, until_failure
from torchdistinput import readers
from torchdistinput.errors import SourceError
from torchdistinput.sources.storage import glob
from torchdistinput.sources.storage import io as filesystem
from torchdistinput.sources.storage.retry import is_transient

FLAVOURS = ("buffered", "bare", "stream")


@pytest.fixture(autouse=True)
def flicker() -> Iterator[None]:
    failing_filesystem.register()
    failing_filesystem.FlickeringFileSystem.clear_instance_cache()
    yield
    failing_filesystem.FlickeringFileSystem.clear_instance_cache()


class Waits:
    """What would have been waited, in seconds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Nobody waits between tries, in forked loader workers too."""
    found = Waits()
    monkeypatch.setattr("torchdistinput.sources.storage.retry.sleep", found.seconds.append)
    return found


def options(script: str = "", flavour: str = "buffered") -> dict[str, Any]:
    return {"script": script, "flavour": flavour}


def content_of(size: int = 300_000) -> bytes:
    return np.random.default_rng(size).bytes(size)


def stored(folder: Path, content: bytes, name: str = "a.bin") -> str:
    (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return f"flicker://{folder}/{name}"


def read_all(name: str, given: dict[str, Any], count: int = 50_000) -> bytes:
    opened = filesystem.open_file(name, "infer", given)
    try:
        return b"".join(iter(partial(opened.stream.read, count), b""))
    finally:
        opened.close()


def test_every_reader_gives_each_record_once_whatever_fails_in_passing(
    tmp_path: Path, waits: Waits, all_cells: bool
) -> None:
    settings = {"flavour": FLAVOURS, "ending": ("", ".gz"), "seed": (0, 1)}
    for kind, setting in cells([*FORMATS, *FORMATS], settings, everything=all_cells):
        read, content = FORMATS[kind].read, FORMATS[kind].large()[:300_000]
        name = stored(tmp_path, content, f"{kind}.bin{setting['ending']}")
        given = options(failing_filesystem.random_script(setting["seed"], setting["flavour"]), setting["flavour"])
        opened = filesystem.open_file(name, "infer", given)
        found, error = until_failure(read(opened.stream))
        opened.close()
        expected, cut_off = until_failure(read(io.BytesIO(content)))  # most end in the middle of a record
        assert str(error) == str(cut_off)
        assert same(found, expected), (kind, setting)
        assert failing_filesystem.instance(given).failed["read"] > 0
        assert failing_filesystem.instance(given).open_files == 0
        failing_filesystem.FlickeringFileSystem.clear_instance_cache()
    assert waits.seconds


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_seeking_goes_to_the_byte_whatever_fails(flavour: str, ending: str, tmp_path: Path) -> None:
    content = content_of()
    name = stored(tmp_path, content, f"a{ending}")
    given = options(failing_filesystem.random_script(5, flavour), flavour)
    opened = filesystem.open_file(name, "infer", given)
    rng = random.Random(5)
    for _ in range(12):
        offset, count = rng.randrange(len(content) + 10), rng.randrange(1, 50_000)
        assert opened.stream.seek(offset) == offset or ending  # a decompressor stops at the end
        assert opened.stream.read(count) == content[offset : offset + count]
    opened.close()
    assert failing_filesystem.instance(given).open_files == 0


def test_the_end_is_where_the_filesystem_says_it_is(tmp_path: Path) -> None:
    name = stored(tmp_path, b"0123456789")
    for flavour in ("buffered", "bare"):
        opened = filesystem.open_file(name, "infer", options("info=R", flavour))
        assert opened.stream.seek(-3, io.SEEK_END) == 7
        assert opened.stream.read() == b"789"
        assert opened.size == 10
        opened.close()
    opened = filesystem.open_file(name, "infer", options("", "stream"))
    with pytest.raises(io.UnsupportedOperation, match="does not tell where the file ends"):
        opened.stream.seek(-3, io.SEEK_END)
    assert opened.stream.read() == b"0123456789"
    opened.close()


def test_each_try_is_logged_once_with_file_byte_and_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = stored(tmp_path, content_of(300_000))
    with caplog.at_level(logging.WARNING, "torchdistinput"):
        read_all(name, options("open=T,read=.R", "bare"))
    assert [record.getMessage() for record in caplog.records] == [
        f"{name}: cannot be opened (try 1 of 5, the next one in 0.1 s): TimeoutError: no answer",
        f"{name}: reading failed at byte 65536 of what is stored (try 1 of 5, the next one in 0.1 s): "
        "ConnectionResetError: [Errno 104] Connection reset by peer",
    ]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_file_that_fails_for_good_is_named_with_byte_and_tries(
    flavour: str, ending: str, tmp_path: Path, waits: Waits
) -> None:
    name = stored(tmp_path, content_of(), f"a{ending}")
    given = options("read=.." + "R" * 100, flavour)
    opened = filesystem.open_file(name, "infer", given)
    with pytest.raises(
        SourceError, match=r"reading failed at byte \d+ of what is stored, tried 5 times: Conn"
    ) as caught:
        opened.stream.read()
    opened.close()
    assert caught.value.file == name
    assert isinstance(caught.value.__cause__, ConnectionResetError)
    if ending:
        assert caught.value.offset is None  # bytes of the content are others
    else:
        assert f"at byte {caught.value.offset} of" in str(caught.value)
    assert waits.seconds == [0.1, 0.2, 0.4, 0.8]
    assert failing_filesystem.instance(given).open_files == 0


@pytest.mark.parametrize("letter", ["P", "N", "V"])
def test_what_lasts_is_not_tried_again(letter: str, tmp_path: Path, waits: Waits) -> None:
    name = stored(tmp_path, b"abc")
    kind = type(failing_filesystem.FAULTS[letter]())
    asked: dict[str, Callable[[dict[str, Any]], object]] = {
        "open": lambda given: read_all(name, given),
        "read": lambda given: read_all(name, given),
        "info": lambda given: filesystem.stat_facts(name, given),
    }
    for call, ask in asked.items():
        with pytest.raises(SourceError) as caught:
            ask(options(f"{call}={letter}"))
        assert caught.value.file == name
        assert isinstance(caught.value.__cause__, kind)
        assert "times:" not in str(caught.value)
    assert not waits.seconds


@pytest.mark.parametrize("flavour", ["buffered", "bare"])
def test_a_file_that_is_shorter_than_it_says_is_no_end(
    flavour: str, tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = stored(tmp_path, content_of(200_000))
    assert len(read_all(name, options("read=SS.SS", flavour))) == 200_000
    assert waits.seconds
    real = failing_filesystem.FlickeringFileSystem._about
    monkeypatch.setattr(
        failing_filesystem.FlickeringFileSystem, "_about", lambda self, path: {**real(self, path), "size": 200_005}
    )
    with pytest.raises(SourceError, match=r"byte 200000 .* 5 times: EOFError: .* at byte 200000, but has 200005 bytes"):
        read_all(name, options("", flavour))


def test_a_file_that_was_replaced_is_not_read_on(tmp_path: Path) -> None:
    name = stored(tmp_path, content_of(300_000))
    opened = filesystem.open_file(name, "infer", options("read=.R"))
    opened.stream.read(1)
    (tmp_path / "a.bin").write_bytes(content_of(300_001))
    with pytest.raises(SourceError, match="had 300000 bytes, and has 300001 now") as caught:
        opened.stream.read()
    assert caught.value.file == name
    opened.close()


@pytest.mark.parametrize("script", ["ls=R", "ls=.T", "ls=..B", "ls=...F", "info=RR,ls=.R.T"])
def test_a_folder_that_cannot_be_listed_at_once_leaves_no_file_out(script: str, tmp_path: Path, waits: Waits) -> None:
    names = ["a.txt", "x/b.txt", "x/y/c.txt", "z/d.txt"]
    for each in names:
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).touch()
    given = options(script)
    found = glob.expand(f"flicker://{tmp_path}/**/*.txt", given)
    assert found == [f"flicker://{tmp_path}/{each}" for each in names]
    assert sum(failing_filesystem.instance(given).failed.values()) == len(waits.seconds) > 0


def test_a_pattern_that_cannot_be_expanded_is_named_with_the_tries(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored(tmp_path, b"")
    pattern = f"flicker://{tmp_path}/*.bin"
    with pytest.raises(SourceError, match="the pattern cannot be expanded, tried 5 times: Connection") as caught:
        glob.expand(pattern, options("ls=" + "R" * 9))
    assert caught.value.file == pattern
    caplog.clear()
    (tmp_path / "x").mkdir()
    stored(tmp_path / "x", b"")
    found = glob.expand(f"flicker://{tmp_path}/**", options("ls=...P"))  # the root's two, then x's
    assert found == [f"flicker://{tmp_path}/a.bin", f"flicker://{tmp_path}/x/a.bin"]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [f"{tmp_path}/x"]


def _class(path: str, base: type[Exception] = Exception) -> type[Exception]:
    module, _, name = path.rpartition(".")
    return type(name, (base,), {"__module__": module})


def _with_status(name: str, status: int, base: type[Exception] = Exception) -> Exception:
    error = base("answer")
    setattr(error, name, status)
    return error


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionRefusedError(), True),
        (BrokenPipeError(), True),
        (TimeoutError(), True),
        (OSError("of a store, translated"), True),
        (OSError("Forbidden: https://storage.googleapis.com/b/data/o/x\nno access"), False),  # as gcsfs tells of 403
        (OSError(errno.EIO, "io"), True),
        (http.client.IncompleteRead(b""), True),
        (ftplib.error_temp("421"), True),
        (zipfile.BadZipFile(), True),  # an archive of which bytes are missing
        (ValueError("of a client"), False),
        (OSError(errno.ENAMETOOLONG, "name"), False),
        (OSError(errno.ENOSPC, "full"), False),
        (IsADirectoryError(), False),
        (NotADirectoryError(), False),
        (io.UnsupportedOperation("seek"), False),
        (RuntimeError("a bug"), False),
        (_class("aiohttp.client_exceptions.ClientPayloadError")(), True),
        (type("CutOff", (_class("aiohttp.http_exceptions.BadHttpMessage"),), {"code": 400})(), True),
        (_class("somewhere.Refused", ValueError)(), False),
        (_with_status("status", 503), True),
        (_with_status("status", 404), False),
        (_with_status("code", 429), True),
        (_with_status("code", 403, OSError), False),
        (_with_status("status_code", 500, OSError), True),
        (_with_status("code", 7, OSError), True),
        (_caused(FileNotFoundError("x"), _with_status("status", 503)), True),  # as fsspec tells of a web server
        (_caused(FileNotFoundError("x"), _caused(ValueError(), _with_status("code", 429))), True),
        (_caused(FileNotFoundError("x"), _with_status("status", 404)), False),
        (_caused(FileNotFoundError("x"), OSError("a cause without a status")), False),
    ],
)
def test_which_failures_pass(error: Exception, passes: bool) -> None:
    assert is_transient(error) == passes


class Busy(http.server.BaseHTTPRequestHandler):
    """Says that it is busy, at the first requests of each file."""

    asked: ClassVar[Counter[str]] = Counter()

    def do_GET(self) -> None:
        self.asked[self.path] += 1
        status = 200 if self.asked[self.path] > 6 else int(self.path[1:4])
        content = b"" if status != 200 or self.command == "HEAD" else b"a\nb\n"
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_HEAD = do_GET  # noqa: N815 - the name that the class looks for

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.mark.parametrize("status", [503, 429, 500])
def test_a_web_server_that_is_busy_is_asked_again(status: int, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("aiohttp")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert [*tdi.FileDataset([f"{url}/{status}.txt"], readers.text_lines)] == ["a", "b"]
        assert f"(try 1 of 5, the next one in 0.1 s): ClientResponseError: {status}" in caplog.text
        with pytest.raises(SourceError, match="cannot be opened: .*404"):
            [*tdi.FileDataset([f"{url}/404.txt"], readers.text_lines)]
        server.shutdown()


# Datasets
