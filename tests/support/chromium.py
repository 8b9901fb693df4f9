"""A headless Chromium, which is told over a pipe (its DevTools protocol) what to do. It reaches this host only."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, final

import pytest

LIMIT_SECONDS = 120


def chromium() -> str:
    """The program; without one, the test is skipped."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium is installed (chromium or google-chrome on the PATH)")
    return found


@final
class Page:
    """A page of a browser that lives as long as the ``with``."""

    def __init__(self, folder: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        given = [fcntl.fcntl(end, fcntl.F_DUPFD, 50) for end in (to_browser, from_browser)]  # not 3 and 4 themselves
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        options += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={folder}"]
        command = f"exec 3<&{given[0]} 4>&{given[1]}; exec {shlex.join([chromium(), *options, 'about:blank'])}"
        limited = ["timeout", "--signal=KILL", str(LIMIT_SECONDS), "bash", "-c", command]
        self._process = subprocess.Popen(limited, pass_fds=given, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        for end in (to_browser, from_browser, *given):
            os.close(end)
        self._number = 0
        self._rest = b""
        self._session: dict[str, str] = {}

    def __enter__(self) -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def call(self, method: str, **params: Any) -> Any:
        """Calls a method of the protocol, and waits for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        left = memoryview(json.dumps(message).encode() + b"\0")
        while left:
            left = left[os.write(self._out, left) :]
        while True:
            while b"\0" not in self._rest:
                read = os.read(self._in, 1 << 16)
                assert read, "the browser ended"
                self._rest += read
            one, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(one)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript, awaited if it is a promise."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, url: str, width: int, height: int = 900) -> None:
        """Opens a page in a window of a size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=url)
        loaded = (
            "new Promise(done => document.readyState == 'complete' ? done(1) : addEventListener('load', () => done(1)))"
        )
        self.evaluate(loaded)

    def picture(self, path: Path) -> None:
        """Writes what the page shows, all of it, as a PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))
