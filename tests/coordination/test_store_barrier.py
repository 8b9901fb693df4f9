"""Ranks sign in at a store, with what others want to know of them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch.distributed as dist

from torchdistinput.coordination import store as store_module
from torchdistinput.coordination.store import Store, StoreBarrier
from torchdistinput.errors import CoordinationTimeout

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
