"""The store: one that is silent is left, one that is gone is told."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from typing import Any, cast

import pytest
import torch.distributed as dist

from torchdistinput.coordination.private_names import another_connection
from torchdistinput.coordination.store import prefixed, within
from torchdistinput.errors import CoordinationTimeout, RankLost


def test_requests_give_their_result_or_raise_their_error() -> None:
    assert within(10.0, "the call", "", lambda _: 3) == 3

    def fails(_: threading.Event) -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        within(10.0, "the call", "", fails)


def test_a_store_that_does_not_answer_is_left_and_named() -> None:
    told = threading.Event()

    def silent(given_up: threading.Event) -> None:
        given_up.wait(60.0)
        told.set()

    with pytest.raises(CoordinationTimeout, match="the call: an answer of the store at host 7 did not come within 0.2"):
        within(0.2, "the call", " at host 7", silent)
    assert told.wait(10.0)


def test_a_store_that_is_gone_is_told() -> None:
    def gone(_: threading.Event) -> None:
        raise dist.DistNetworkError("connection reset")

    with pytest.raises(RankLost, match=r"the call: the store at host 7 is gone"):
        within(10.0, "the call", " at host 7", gone)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="this system sends no signals to threads")
def test_a_signal_ends_the_wait_for_a_store() -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    ended = threading.Event()

    def silent(given_up: threading.Event) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        given_up.wait(60.0)
        ended.set()

    before = signal.signal(signal.SIGALRM, interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            within(60.0, "the call", "", silent)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ended.wait(30.0)


def test_an_interruption_of_the_start_of_the_requests_gives_them_up(monkeypatch: pytest.MonkeyPatch) -> None:
    start, ended = threading.Thread.start, threading.Event()

    def started_and_interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    def silent(given_up: threading.Event) -> None:
        given_up.wait(60.0)
        ended.set()

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", started_and_interrupted)
        with pytest.raises(KeyboardInterrupt):
            within(60.0, "the call", "", silent)
    assert ended.wait(30.0)


def test_interrupted_requests_are_waited_for_at_exit() -> None:
    """A thread that comes back from C++ while the interpreter is finalized would end the process by an abort."""
    script = """
import signal, threading, time
from torchdistinput.coordination.store import within

def ask(given_up):
    threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
    given_up.wait(30.0)
    time.sleep(0.5)
    print("came back", flush=True)

within(30.0, "the call", "", ask)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == -signal.SIGINT, run.stderr
    assert run.stdout == "came back\n"


def test_a_store_that_has_just_ended_is_not_waited_for_beyond_the_bound() -> None:
    """A thread that is still there when Python exits would abort the process."""
    host = cast(Any, dist).TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = cast(Any, dist).TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False)
    usual = store.timeout
    del host
    began = time.monotonic()
    with pytest.raises(dist.DistError):
        another_connection(prefixed("part", store), 6.0)
    assert time.monotonic() - began < 30.0  # torch's own timeout is 5 minutes
    assert store.timeout == usual


class Once:
    """A store, whose connection finds its time over the first time, as in a process that stood still meanwhile."""

    def __init__(self, store: Any) -> None:
        self.store, self.tried = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def clone(self) -> Any:
        self.tried += 1
        if self.tried == 1:
            raise dist.DistNetworkError("timed out")
        return self.store.clone()


def test_a_process_that_stood_still_while_it_connected_tries_again() -> None:
    store = cast(Any, dist).TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    another = another_connection(Once(store), 60.0)
    store.set("found", "here")
    assert another.get("found") == b"here"
    assert another.timeout == store.timeout
