"""Ranks sign in at a store, with what others want to know of them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch.distributed as dist

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
        assert told.startswith("the call: rank 10, ")
        assert "12" in told
        assert "did not come within 0.2 seconds" in told
    assert met(found, [3, 2, 0, 1], 10.0) == [""] * 4


def test_the_last_rank_to_sign_may_die_before_it_says_that_all_have() -> None:
    store = cast(Any, dist).HashStore()
    first = StoreBarrier(cast(Store, store), 0, range(2))
    store.set("at/1", "died here")
    store.add("signed", 1)
    assert come(first, 0, 10.0) == ""
    assert first.texts([1]) == [b"died here"]


def test_a_rank_that_ends_before_it_counts_is_named() -> None:
    store = cast(Any, dist).HashStore()
    first = StoreBarrier(cast(Store, store), 0, range(10, 13))
    store.set("at/1", "interrupted here")
    store.set("at/2", "interrupted one line later")
    store.add("signed", 1)
    assert "rank 11, 12 did not come" in come(first, 0, 0.2)


def test_whoever_is_given_up_stops_asking() -> None:
    given_up = threading.Event()
    (attendance, _) = attendances(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(attendance.wait_for_all, "the call", 60.0, "", given_up)
        given_up.set()
        with pytest.raises(CoordinationTimeout):
            waiting.result(timeout=10.0)
