"""A store of objects on a free port of the loopback, of S3's or Google's protocol, which fails by orders.

The servers are moto's and ``gcp_storage_emulator``'s. Requests go through a proxy, which notes them, and makes some
fail.
"""

from __future__ import annotations

import asyncio
import fcntl
import http.client
import logging
import os
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import fsspec
import numpy as np
import pytest

import torchdistinput as tdi
from tests.support.platforms import package
from torchdistinput import readers
from torchdistinput.sources.storage import file_cache
from torchdistinput.sources.storage.io import open_file
from torchdistinput.testing import check_source, run_ranks

SECRET = "never-to-be-shown"

Protocol = Literal["s3", "gs"]


@dataclass
class Fault:
    """What happens to the next requests.

    Args:
      kind: ``500``, ``503``, ``403``, ``cut`` (half of the body comes) or ``stall``.
      method: of HTTP.
      path: a part of the path.
      times: to how many of them.
    """

    kind: str
    method: str = "GET"
    path: str = ""
    times: int = 1


@dataclass
class ObjectStore:
    """The store, as a test sees it. A rank is sent a copy."""

    protocol: Protocol
    url: str = ""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and range of each request."""
    faults: list[Fault] = field(default_factory=list)
    stall_seconds: float = 3.0

    def options(self) -> dict[str, Any]:
        """The storage options of a client. For Google's store, it is called in each process before it imports gcsfs."""
        if self.protocol == "gs":
            os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # else it asks Google for the kind of the bucket
            token = import_module("google.oauth2.credentials").Credentials(SECRET)
            return {"token": token, "endpoint_url": self.url, "project": "test"}
        return {"key": "tester", "secret": SECRET, "client_kwargs": {"endpoint_url": self.url}}

    def impatient_options(self) -> dict[str, Any]:
        """Options of a client that waits for a second, and, where it can be told so, does not ask again by itself."""
        if self.protocol == "gs":
            return {**self.options(), "requests_timeout": 1}
        waits = {"read_timeout": 1, "connect_timeout": 5, "retries": {"max_attempts": 1}}
        return {**self.options(), "config_kwargs": waits}

    def filesystem(self) -> Any:
        """A client."""
        return import_module("fsspec").filesystem(self.protocol, **self.options())

    def content_of(self, name: str) -> str:
        """The path of the requests for the content of an object of the bucket ``data``."""
        return f"/data/{name}" if self.protocol == "s3" else f"/download/storage/v1/b/data/o/{name}"

    def bytes_got(self, name: str) -> int:
        """How many bytes of an object were asked for by ranges."""
        found = 0
        for method, asked, span in self.requests:
            if method == "GET" and asked == self.content_of(name) and span:
                lo, hi = span.removeprefix("bytes=").split("-")
                found += int(hi) - int(lo) + 1
        return found

    def fault(self, method: str, path: str) -> str:
        """What is to happen to a request; empty for nothing."""
        for fault in self.faults:
            if fault.times and fault.method == method and fault.path in path:
                fault.times -= 1
                return fault.kind
        return ""


class _Proxy(BaseHTTPRequestHandler):
    """Answers with what the server answers, or fails."""

    protocol_version = "HTTP/1.1"  # a client may wait for "100 Continue" before it sends a body
    lock = threading.Lock()

    def __init__(self, store: ObjectStore, port: int, *args: Any) -> None:
        self.store, self.port = store, port
        super().__init__(*args)

    def answer(self) -> None:
        """Answers one request."""
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        with self.lock:
            self.store.requests.append((self.command, path, self.headers.get("Range", "")))
            fault = self.store.fault(self.command, path)
        if fault in {"500", "503", "403"}:
            code = "AccessDenied" if fault == "403" else "SlowDown"
            body = f"<Error><Code>{code}</Code></Error>".encode()
            self.respond(int(fault), {"Content-Type": "application/xml", "Retry-After": "1"}, body)
            return
        if fault == "stall":
            time.sleep(self.store.stall_seconds)
        server = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            headers = {name: value for name, value in self.headers.items() if name not in {"Expect", "Connection"}}
            server.request(self.command, self.path, sent, headers)
            answer = server.getresponse()
            body, headers = answer.read(), dict(answer.headers)
        finally:
            server.close()
        self.respond(answer.status, headers, body[: len(body) // 2] if fault == "cut" else body)

    def respond(self, status: int, headers: dict[str, str], body: bytes) -> None:
        """Sends an answer; the length of a body that is cut is told as that of the whole."""
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in {"connection", "transfer-encoding"}:
                self.send_header(name, value)
        self.send_header("Connection", "close")
        self.close_connection = True
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer  # noqa: N815 - the names of the base class

    def log_message(self, *args: Any) -> None:
        """Says nothing."""


@contextmanager
def object_store(protocol: Protocol = "s3") -> Iterator[ObjectStore]:
    """A store with an empty bucket ``data``."""
    with _moto() if protocol == "s3" else _emulator() as port:
        store = ObjectStore(protocol)
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Proxy, store, port))
        store.url = f"http://127.0.0.1:{server.server_port}"
        with _served(server):
            if protocol == "s3":
                store.filesystem().mkdir("data")
            store.requests.clear()
            yield store


@contextmanager
def _served(server: Any) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def _moto() -> Iterator[int]:
    moto_server, serving = import_module("moto.server"), import_module("werkzeug.serving")
    app = moto_server.DomainDispatcherApplication(moto_server.create_backend_app)
    logging.getLogger("werkzeug").setLevel("ERROR")
    server = serving.make_server("127.0.0.1", 0, app, threaded=True)
    with _served(server):
        # Its buckets are those of the process.
        urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/moto-api/reset", b"").close()
        yield server.server_port


@contextmanager
def _emulator() -> Iterator[int]:
    logging.getLogger("gcp_storage_emulator").setLevel("ERROR")
    create_server = import_module("gcp_storage_emulator.server").create_server
    with create_server("127.0.0.1", 0, in_memory=True, default_bucket="data") as server:
        yield server._api._httpd.server_port


pa, pq = package("pyarrow"), package("pyarrow.parquet")

SIZES, BATCH = (30, 11, 42), 10
LINES = sum(SIZES)
KINDS = ("text", "parquet")

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # gcsfs does so


@pytest.fixture(scope="module", params=["s3", "gs"])
def bucket(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    if request.param == "gs":
        pytest.importorskip("gcp_storage_emulator")
    with object_store(request.param) as store:
        files, first = store.filesystem(), 0
        for number, size in enumerate(SIZES):
            numbers = range(first, first + size)
            files.pipe(f"data/text/{number}.txt", "".join(f"{each}\n" for each in numbers).encode())
            with files.open(f"data/parquet/{number}.parquet", "wb") as file:
                pq.write_table(pa.table({"x": [*numbers], "other": ["text"] * size}), file, row_group_size=10)
            first += size
        wide = pa.table({name: np.random.default_rng(0).random(100_000) for name in "abcd"})
        with files.open("data/wide.parquet", "wb") as file:
            pq.write_table(wide, file, row_group_size=25_000, compression="none", use_dictionary=False)
        yield store


async def at_once(seconds: float) -> None:
    """The wait of a client before it asks again."""
    await asyncio.sleep(0)


@pytest.fixture
def store(bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The server without orders to fail. gcsfs asks six times, and waits for half a minute between."""
    if bucket.protocol == "gs":
        monkeypatch.setattr("gcsfs.retry.asyncio", SimpleNamespace(sleep=at_once))
    bucket.requests.clear()
    bucket.faults.clear()
    return bucket


def number_of(line: str) -> int:
    return int(line)


def dataset(kind: str, store: ObjectStore, options: dict[str, Any] | None = None, **order: Any) -> tdi.FileDataset:
    options = options or store.options()
    folder = f"{store.protocol}://data/{kind}"
    if kind == "parquet":
        return tdi.FileDataset(f"{folder}/*.parquet", readers.parquet(["x"]), storage_options=options, **order)
    order = {"map_fn": number_of, **order}
    return tdi.FileDataset(f"{folder}/*.txt", readers.text_lines, storage_options=options, **order)


def steps(loader: tdi.DistributedDataset) -> list[list[int]]:
    return [(part["x"] if isinstance(part, dict) else part).tolist() for part in loader]


def loader_of(
    kind: str, policy: str, store: ObjectStore, options: dict[str, Any] | None = None
) -> tdi.DistributedDataset:
    chosen = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy[policy])
    files = dataset(kind, store, options)
    return tdi.Strategy(["cpu"]).distribute_dataset(files, chosen, global_batch_size=BATCH)


def test_each_record_of_a_bucket_comes_once_and_a_resume_goes_on_at_another_world_size(
    store: ObjectStore, all_cells: bool
) -> None:
    kinds = KINDS if all_cells else KINDS[:1]
    check_source({kind: partial(dataset, kind, store) for kind in kinds}, worlds=(2, 1))
    for kind in KINDS:
        assert [*chain.from_iterable(steps(loader_of(kind, "FILE", store)))] == [*range(LINES)]


def test_only_the_wanted_columns_are_asked_for_in_few_requests(store: ObjectStore) -> None:
    name = f"{store.protocol}://data/wide.parquet"
    files = tdi.FileDataset(name, readers.parquet(["b"]), storage_options=store.options())
    loader = tdi.Strategy(["cpu"]).distribute_dataset(files, global_batch_size=1000)
    assert sum(len(batch["b"]) for batch in loader) == 100_000
    column = 100_000 * 8
    assert column <= store.bytes_got("wide.parquet") < 1.2 * column
    asked = [each for each in store.requests if each[:2] == ("GET", store.content_of("wide.parquet"))]
    assert len(asked) <= 4 * 2 + 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["500", "503", "cut", "stall"])
def test_what_passes_is_asked_again_and_nothing_is_lost(fault: str, kind: str, store: ObjectStore) -> None:
    store.faults.append(Fault(fault, path=store.content_of(f"{kind}/1"), times=2))
    loader = loader_of(kind, "FILE", store, store.impatient_options())
    assert [*chain.from_iterable(steps(loader))] == [*range(LINES)]
    assert store.faults[0].times == 0


def test_refused_credentials_are_told_at_once_without_the_secret(
    store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    files = dataset("text", store)
    store.requests.clear()
    store.faults += [Fault("403", method, "text/0", times=100) for method in ("GET", "HEAD")]
    with pytest.raises(tdi.SourceError, match=r"://data/text/0\.txt: .*(PermissionError|Forbidden)") as caught:
        steps(tdi.Strategy(["cpu"]).distribute_dataset(files, global_batch_size=BATCH))
    assert SECRET not in f"{caught.value}{caplog.text}{caught.value.__cause__}"
    assert len(store.requests) == 1


def test_a_store_that_does_not_come_back_is_an_error_that_names_the_file(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    store.faults.append(Fault("cut", path=store.content_of("text/1"), times=10_000))
    with pytest.raises(tdi.SourceError, match=r"://data/text/1\.txt: .*tried 5 times"):
        steps(loader_of("text", "FILE", store, store.impatient_options()))


def test_a_pattern_that_matches_nothing_in_a_bucket_is_refused(store: ObjectStore) -> None:
    none = f"{store.protocol}://data/none/*.txt"
    with pytest.raises(tdi.SourceError, match=r"://data/none/\*\.txt: the pattern matches no file") as caught:
        tdi.FileDataset(none, readers.text_lines, storage_options=store.options())
    assert "seen from" not in str(caught.value)


def test_an_object_that_is_gone_is_told(store: ObjectStore) -> None:
    gone = tdi.FileDataset([f"{store.protocol}://data/text/9.txt"], readers.text_lines, storage_options=store.options())
    with pytest.raises(tdi.SourceError, match=r"://data/text/9\.txt: .*FileNotFoundError"):
        steps(tdi.Strategy(["cpu"]).distribute_dataset(gone, global_batch_size=BATCH))


SIZE = 1000


@pytest.fixture
def remote() -> Iterator[Any]:
    """Five files of 1,000 bytes that are not on this machine's disks."""
    files = fsspec.filesystem("memory")
    files.mkdirs("/far", exist_ok=True)
    for number in range(5):
        files.pipe(f"/far/{number}.txt", f"{number}\n".encode() * (SIZE // 2))
    yield files
    files.rm("/far", recursive=True)


def read(folder: Path, number: int) -> bytes:
    cache = file_cache.FileCache(folder)
    with closing(open_file(f"memory://far/{number}.txt", "infer", cache=cache)) as opened:
        assert opened.size == SIZE
        return opened.stream.read()


def content(number: int) -> bytes:
    return f"{number}\n".encode() * (SIZE // 2)


def copies(folder: Path) -> list[int]:
    """The numbers of the files whose copies are there."""
    assert not [*folder.glob("*.part")]
    return sorted(int(path.read_bytes()[:1]) for path in folder.glob("*.data"))


def test_a_file_is_read_from_its_copy(remote: Any, tmp_path: Path) -> None:
    for _ in range(2):
        assert read(tmp_path, 3) == content(3)
    (copy,) = tmp_path.glob("*.data")
    copy.write_bytes(b"x" * SIZE)
    assert read(tmp_path, 3) == b"x" * SIZE


def test_a_changed_file_is_copied_anew(remote: Any, tmp_path: Path) -> None:
    assert read(tmp_path, 1) == content(1)
    time.sleep(0.01)
    remote.pipe("/far/1.txt", content(4))
    assert read(tmp_path, 1) == content(4)
    assert copies(tmp_path) == [1, 4]


@pytest.mark.parametrize("size", [0, SIZE - 10, SIZE + 10])
def test_a_copy_of_another_size_is_made_anew(remote: Any, tmp_path: Path, size: int) -> None:
    read(tmp_path, 3)
    (copy,) = tmp_path.glob("*.data")
    os.truncate(copy, size)
    assert read(tmp_path, 3) == content(3)
    assert copy.stat().st_size == SIZE


def test_a_download_that_fails_leaves_nothing_and_is_named(
    remote: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = file_cache.FileCache(tmp_path)
    remote.store["/far/1.txt"].truncate(10)
    about = {**remote.info("/far/1.txt"), "size": SIZE}
    monkeypatch.setattr(type(remote), "info", lambda *_, **__: about)
    with pytest.raises(tdi.SourceError, match=r"far/1\.txt: no copy .* ends 990"):
        open_file("memory://far/1.txt", "infer", cache=cache)
    assert copies(tmp_path) == []


def test_a_process_waits_for_the_download_of_another(remote: Any, tmp_path: Path) -> None:
    read(tmp_path, 2)
    (copy,) = tmp_path.glob("*.data")
    hidden = copy.rename(tmp_path / "hidden")
    with copy.with_suffix(".lock").open("ab") as lock, ThreadPoolExecutor(1) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as one that downloads
        reading = pool.submit(read, tmp_path, 2)
        hidden.write_bytes(b"x" * SIZE)
        hidden.rename(copy)
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert reading.result(60) == b"x" * SIZE


def test_the_folder_may_be_emptied(remote: Any, tmp_path: Path) -> None:
    cache = file_cache.FileCache(tmp_path / "copies")
    with closing(open_file("memory://far/1.txt", "infer", cache=cache)) as opened:
        shutil.rmtree(tmp_path / "copies")
        assert opened.stream.read() == content(1)
    assert read(tmp_path / "copies", 1) == content(1)


def test_files_of_this_machine_are_not_copied(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1\n2\n")
    folder = tmp_path / "cache"
    assert [*tdi.FileDataset(str(tmp_path / "*.txt"), readers.text_lines, cache=folder)] == ["1", "2"]
    assert not folder.exists()


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cache must be the path"):
        tdi.FileDataset("memory://x", readers.text_lines, cache=3)  # type: ignore[arg-type] # that is the test


# --------------------------------------------------------------------------------------------- with many processes


@pytest.fixture(scope="module")
def many_lines() -> Iterator[ObjectStore]:
    with object_store() as made:
        files = made.filesystem()
        for number in range(6):
            files.pipe(f"data/{number}.txt", "".join(f"{number * 100 + each}\n" for each in range(100)).encode() * 50)
        yield made


def lines(options: dict[str, Any], folder: str, *, epochs: int) -> list[list[int]]:
    """One rank: the lines of each epoch."""
    files = tdi.FileDataset("s3://data/*.txt", readers.text_lines, storage_options=options, cache=folder)
    chosen = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.DATA)
    loader = tdi.Strategy(["cpu"]).distribute_dataset(files, chosen, global_batch_size=500)
    return [[int(line) for batch in loader for line in batch] for _ in range(epochs)]


def two_epochs(options: dict[str, Any], folder: str) -> list[list[int]]:
    return lines(options, folder, epochs=2)


def test_each_file_is_downloaded_once_for_all_ranks_and_epochs(many_lines: ObjectStore, tmp_path: Path) -> None:
    many_lines.requests.clear()
    ranks = run_ranks(3, two_epochs, many_lines.options(), str(tmp_path))
    for epoch in range(2):
        assert sorted(line for rank in ranks for line in rank[epoch]) == sorted([*range(600)] * 50)
    got = [path for method, path, _ in many_lines.requests if method == "GET" and path.endswith(".txt")]
    assert sorted(got) == [f"/data/{number}.txt" for number in range(6)]


def killed(options: dict[str, Any], folder: str, number: int) -> None:
    """A process that ends itself in the middle of a download."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: os.kill(os.getpid(), signal.SIGKILL))
        open_file(f"s3://data/{number}.txt", None, options, cache=file_cache.FileCache(folder))


def test_a_process_that_is_killed_in_a_download_leaves_a_folder_that_serves(
    many_lines: ObjectStore, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="rank 0"):
        run_ranks(1, killed, many_lines.options(), str(tmp_path), 2)
    assert len([*tmp_path.glob("*.part")]) == 1
    (epoch,) = lines(many_lines.options(), str(tmp_path), epochs=1)
    assert sorted(epoch) == sorted([*range(600)] * 50)
    assert len([*tmp_path.glob("*.data")]) == 6
    assert not [*tmp_path.glob("*.part")]
