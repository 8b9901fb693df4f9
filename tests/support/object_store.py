"""A store of objects on a free port of the loopback, of S3's or Google's protocol, which fails by orders.

The servers are moto's and ``gcp_storage_emulator``'s. Requests go through a proxy, which notes them, and makes some
fail.
"""

from __future__ import annotations

import http.client
import logging
import os
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

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
