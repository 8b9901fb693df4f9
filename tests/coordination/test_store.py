"""The store: few requests by a thousand ranks, a silent one is left; and ranks that sign in there."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch.distributed as dist

from torchdistinput.coordination import store as store_module
from torchdistinput.coordination.private_names import another_connection
from torchdistinput.coordination.store import Store, StoreBarrier, missing, prefixed, within
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


NOBODY = threading.Event()


def attendances(world: int) -> list[StoreBarrier]:
    store = cast(Store, cast(Any, dist).HashStore())
    return [StoreBarrier(store, rank, range(10, 10 + world)) for rank in range(world)]


def come(attendance: StoreBarrier, rank: int, seconds: float) -> str:
    try:
        attendance.wait_for_all("the call", seconds, f"text {rank}", NOBODY)
    except CoordinationTimeout as error:
        return str(error)
    return ""


def met(found: list[StoreBarrier], ranks: list[int], seconds: float) -> list[str]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: come(found[rank], rank, seconds), ranks))


@pytest.mark.parametrize("world", [1, 2, 5])
def test_all_learn_what_the_others_signed_in_with(world: int) -> None:
    found = attendances(world)
    assert met(found, [*range(world)], 10.0) == [""] * world
    for each in found:
        assert each.texts(range(world)) == [f"text {rank}".encode() for rank in range(world)]
        assert each.texts([]) == []


def test_ranks_that_do_not_come_are_named_and_the_others_may_come_again() -> None:
    found = attendances(4)
    for told in met(found, [1, 3], 0.2):
        assert told.startswith("the call: rank 10 did not come within 0.2 seconds")
    for told in met(found, [0, 1], 0.2):
        assert "12, 13 did not come within 0.2 seconds" in told
    assert met(found, [3, 2, 0, 1], 10.0) == [""] * 4


def test_a_rank_that_gave_up_counts_as_absent() -> None:
    found = attendances(3)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(come, found[0], 0, 3.0)
        assert "did not come within 1 seconds" in come(found[1], 1, 1.0)
        third = pool.submit(come, found[2], 2, 3.0)
        assert "rank 11 did not come" in first.result()
        assert "rank 11 did not come" in third.result() or "10, 11" in third.result()


TOKEN = "0123456789abcdef"
"""Of a process that is none of this test's."""


def sign(store: Any, meeting: int, *ranks: int) -> None:
    """What other processes leave in a store."""
    for rank in ranks:
        store.set(f"{meeting}/at/{rank}", f"{TOKEN}text of old")
        store.add(f"{meeting}/signed", 1)
        store.set(f"{meeting}/in/{rank}", "")


def test_a_rank_may_die_right_after_it_counted() -> None:
    store = cast(Any, dist).HashStore()
    first = StoreBarrier(cast(Store, store), 0, range(2))
    store.set("1/at/1", f"{TOKEN}died here")
    store.add("1/signed", 1)
    assert come(first, 0, 10.0) == ""
    assert first.texts([1]) == [b"died here"]


def test_a_rank_that_ends_before_it_counts_is_named() -> None:
    store = cast(Any, dist).HashStore()
    first = StoreBarrier(cast(Store, store), 0, range(10, 13))
    store.set("1/at/1", "interrupted here")
    store.set("1/at/2", "interrupted one line later")
    store.add("1/signed", 1)
    assert "rank 11, 12 did not come" in come(first, 0, 0.2)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
@pytest.mark.parametrize("before", [[], [0], [1], [0, 2], [1, 2], [0, 1, 2]])
def test_ranks_meet_in_a_store_with_the_keys_of_others_before_a_restart(before: list[int], order: list[int]) -> None:
    store = cast(Any, dist).HashStore()
    store.add("newest", 2)
    sign(store, 1, 0, 1, 2)
    store.set("1/closed", "")
    sign(store, 2, *before)
    if len(before) == 3:
        store.set("2/closed", "")
    found = [StoreBarrier(cast(Store, store), rank, range(3)) for rank in range(3)]
    for times in (1, 2):
        with ThreadPoolExecutor(3) as pool:
            coming = []
            for rank in order:
                coming.append(pool.submit(come, found[rank], rank, 10.0))
                time.sleep(0.05)
            assert [each.result() for each in coming] == [""] * 3
        assert [each.meeting for each in found] == [2 + times] * 3
        assert found[1].texts([0, 2]) == [b"text 0", b"text 2"]


def test_ranks_that_are_awaited_are_named_in_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "WARN_SECONDS", 0.5)
    found = attendances(3)
    met(found, [0, 2], 2.0)
    met(found, [2], 2.0)
    told = [record.getMessage() for record in caplog.records]
    assert told.count("the call: waiting for rank 11 for 1 seconds") == 2
    assert told.count("the call: waiting for rank 10, 11 for 1 seconds") == 1


def test_whoever_is_given_up_stops_asking() -> None:
    given_up = threading.Event()
    (attendance, _) = attendances(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(attendance.wait_for_all, "the call", 60.0, "", given_up)
        given_up.set()
        with pytest.raises(CoordinationTimeout):
            waiting.result(timeout=10.0)


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
