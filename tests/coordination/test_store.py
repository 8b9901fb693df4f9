"""What ranks leave at the store is read in few requests, also by a thousand of them; a silent store is left."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import threading
from typing import Any, cast

import pytest
import torch.distributed as dist

from torchdistinput.coordination.store import Store, StoreBarrier, missing, within
from torchdistinput.errors import CoordinationTimeout, RankLost

MANY = 1000
FEW_REQUESTS = 60  # 2 log2 1000 for a rank that is to be found, and some that ask again until the time is over


class Counting:
    """A store of one process, and how often it was asked."""

    def __init__(self) -> None:
        self._store = cast(Any, dist).HashStore()
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        asked = getattr(self._store, name)

        def ask(*args: Any) -> Any:
            self.requests += 1
            return asked(*args)

        return ask


@pytest.mark.parametrize("absent", [0, 1, 3])
def test_few_keys_that_are_missing_take_few_requests(absent: int) -> None:
    store: Any = Counting()
    for place in range(MANY):
        if place % 300 or place // 300 >= absent:
            store.set(f"key/{place}", "")
    store.requests = 0
    assert missing(store, [f"key/{place}" for place in range(MANY)]) == [0, 300, 600][:absent]
    assert store.requests <= 1 + absent * 2 * math.ceil(math.log2(MANY))


def test_of_a_thousand_ranks_the_one_that_did_not_come_is_named_in_few_requests() -> None:
    store: Any = Counting()
    for rank in set(range(1, MANY)) - {7}:
        store.set(f"1/in/{rank}", "")
    store.add("1/signed", MANY - 2)
    attendance = StoreBarrier(cast(Store, store), 0, range(MANY))
    store.requests = 0
    with pytest.raises(CoordinationTimeout, match=r"the call: rank 7 did not come within 0.1 seconds"):
        attendance.wait_for_all("the call", 0.1, "", threading.Event())
    assert store.requests < FEW_REQUESTS


def test_a_conversation_gives_its_result_or_raises_its_error() -> None:
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

    with pytest.raises(CoordinationTimeout, match=r"the call: the store at host 7 did not answer within 0.2 seconds"):
        within(0.2, "the call", " at host 7", silent)
    assert told.wait(10.0)


def test_a_store_that_is_gone_is_told() -> None:
    def gone(_: threading.Event) -> None:
        raise dist.DistNetworkError("connection reset")

    with pytest.raises(RankLost, match=r"the call: the store at host 7 is gone"):
        within(10.0, "the call", " at host 7", gone)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers that send signals")
def test_a_signal_ends_the_wait_for_a_store() -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    ended = threading.Event()

    def silent(given_up: threading.Event) -> None:
        given_up.wait(60.0)
        ended.set()

    before = signal.signal(signal.SIGALRM, interrupted)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            within(60.0, "the call", "", silent)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert ended.wait(10.0)


def test_an_interrupted_conversation_is_waited_for_at_exit() -> None:
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
