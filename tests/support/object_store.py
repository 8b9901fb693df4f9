"""An S3 server of moto on a free port of the loopback, in a thread, that notes its requests and fails by orders."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

SECRET = "never-to-be-shown"


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
    """The server, as a test sees it."""

    url: str
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and range of each request."""
    faults: list[Fault] = field(default_factory=list)
    stall_seconds: float = 3.0

    def options(self, **config: Any) -> dict[str, Any]:
        """The storage options of a client; ``config`` is that of botocore."""
        kwargs = {"endpoint_url": self.url}
        return {"key": "tester", "secret": SECRET, "client_kwargs": kwargs, "config_kwargs": config}

    def filesystem(self) -> Any:
        """A client."""
        return import_module("fsspec").filesystem("s3", **self.options())

    def bytes_got(self, path: str) -> int:
        """How many bytes of an object were asked for by ranges."""
        found = 0
        for method, asked, span in self.requests:
            if method == "GET" and path in asked and span:
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


Start = Callable[..., Any]


def _failing(store: ObjectStore, inner: Callable[[dict[str, Any], Start], Iterable[bytes]]) -> Any:
    lock = threading.Lock()

    def answer(environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        with lock:
            store.requests.append((method, path, environ.get("HTTP_RANGE", "")))
            fault = store.fault(method, path)
        if fault in {"500", "503", "403"}:
            start(f"{fault} told to fail", [("Content-Type", "application/xml"), ("Retry-After", "1")])
            code = "AccessDenied" if fault == "403" else "SlowDown"
            return [] if method == "HEAD" else [f"<Error><Code>{code}</Code></Error>".encode()]
        if fault == "stall":
            time.sleep(store.stall_seconds)
        body = inner(environ, start)
        if fault == "cut":
            whole = b"".join(body)
            return [whole[: len(whole) // 2]]
        return body

    return answer


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A server with an empty bucket ``data``."""
    moto_server, serving = import_module("moto.server"), import_module("werkzeug.serving")
    app = moto_server.DomainDispatcherApplication(moto_server.create_backend_app)
    store = ObjectStore("")
    import_module("logging").getLogger("werkzeug").setLevel("ERROR")
    server = serving.make_server("127.0.0.1", 0, _failing(store, app), threaded=True)
    store.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        urllib.request.urlopen(f"{store.url}/moto-api/reset", b"").close()  # its buckets are those of the process
        store.filesystem().mkdir("data")
        store.requests.clear()
        yield store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
