"""What ranks leave at the store is read in few requests, also by a thousand of them: who is late, left, or died."""

from __future__ import annotations

import math
import random
from typing import Any, cast

import pytest
import torch.distributed as dist

from torchdistinput.backends.attendance import Attendance
from torchdistinput.backends.board import Store, missing, post, posted, values
from torchdistinput.backends.channels import ProcessGroupChannel
from torchdistinput.backends.exchanges import conclude
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


@pytest.mark.parametrize("length", [0, 1, 2, 7, 64, 100])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.9, 1.0])
def test_keys_that_are_missing_are_found(length: int, share: float) -> None:
    dice = random.Random(f"{length} {share}")
    store: Any = Counting()
    absent = {place for place in range(length) if dice.random() < share}
    for place in set(range(length)) - absent:
        store.set(f"key/{place}", f"value {place}")
    keys = [f"key/{place}" for place in range(length)]
    assert missing(store, keys) == sorted(absent)
    found = values(store, keys)
    assert found == [None if place in absent else f"value {place}".encode() for place in range(length)]


@pytest.mark.parametrize("absent", [0, 1, 3])
def test_few_keys_that_are_missing_take_few_requests(absent: int) -> None:
    store: Any = Counting()
    for place in range(MANY):
        if place % 300 or place // 300 >= absent:
            store.set(f"key/{place}", "")
    store.requests = 0
    assert missing(store, [f"key/{place}" for place in range(MANY)]) == [0, 300, 600][:absent]
    assert store.requests <= 1 + absent * 2 * math.ceil(math.log2(MANY))


def test_a_list_keeps_the_order_and_leaves_out_what_was_never_written() -> None:
    store: Any = Counting()
    assert posted(store, "names") == []
    for text in ("b", "a", "", "b"):
        post(store, "names", text)
    store.add("names", 1)  # by one who died then
    post(store, "names", "last")
    assert posted(store, "names") == ["b", "a", "", "b", "last"]
    assert posted(store, "others") == []


def the_first_of_many(store: Any, absent: set[int]) -> Attendance:
    """That rank, which comes last; the absent ones do not come."""
    for rank in set(range(1, MANY)) - absent:
        store.set(f"at/{rank}", "1")
    store.add("signed", MANY - 1 - len(absent))
    return Attendance(cast(Store, store), 0, range(MANY))


def test_of_a_thousand_ranks_the_one_that_did_not_come_is_named_in_few_requests() -> None:
    store: Any = Counting()
    attendance = the_first_of_many(store, {7})
    store.requests = 0
    with pytest.raises(CoordinationTimeout, match=r"the call: rank 7 did not come within 0.1 seconds"):
        attendance.wait_for_all("the call", 0.1)
    assert store.requests < FEW_REQUESTS


def test_of_a_thousand_ranks_the_one_that_ended_is_named_in_few_requests() -> None:
    store: Any = Counting()
    for rank in range(1, MANY):
        Attendance(cast(Store, store), rank, range(MANY)).leave()
    attendance = the_first_of_many(store, {7, 512})
    store.requests = 0
    with pytest.raises(RankLost, match=r"the call: rank 7, 512 ended before it came here"):
        attendance.wait_for_all("the call", 30.0)
    assert store.requests < 2 * FEW_REQUESTS  # it begins to look for them after a second


class Broken:
    """The mail of a rank that has lost a connection."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return MANY

    def send(self, *_: Any) -> Any:
        raise RuntimeError("the connection was closed")

    def recv(self, *_: Any) -> Any:
        raise RuntimeError("the connection was closed")

    def close(self) -> None: ...


class Nobody:
    """Watches nothing."""

    def add(self, channel: Any) -> None: ...

    def remove(self, channel: Any) -> None: ...


def kept(*, reusable: bool) -> None:
    """The channel is this test's."""


def channel_at(store: Any) -> ProcessGroupChannel:
    return ProcessGroupChannel(cast(Any, Broken()), store, cast(Any, Nobody()), kept, range(100, 100 + MANY))


def test_of_a_thousand_ranks_the_late_ones_are_named_in_few_requests() -> None:
    store: Any = Counting()
    for rank in range(1, MANY):
        store.set(f"waiting/{rank}", "4")
    store.set("waiting/33", "3")
    store.delete_key("waiting/900")
    channel = channel_at(store)
    channel._sequence = 4
    store.requests = 0
    assert channel.late() == [33, 900]
    assert store.requests < FEW_REQUESTS


@pytest.mark.parametrize(("died", "left"), [((3,), ()), ((), (5, 17)), ((3, 4, 800), (900,))])
def test_of_a_thousand_ranks_those_that_died_or_left_are_named_in_few_requests(
    died: tuple[int, ...], left: tuple[int, ...]
) -> None:
    store: Any = Counting()
    for rank in range(1, MANY):
        if rank in left:
            channel = channel_at(store)
            channel.rank = rank
            channel.abort("had enough")
        elif rank not in died:
            store.set(f"left/{rank}", "lost the connection")
            store.add("left", 1)
    store.requests = 0
    with pytest.raises(RankLost) as caught:
        conclude(channel_at(store).exchange([1]))
    if left:
        told = "; ".join(f"rank {100 + rank} had enough" for rank in left)
        assert str(caught.value) == f"{told}. Every rank must read the same number of steps."
    else:
        assert str(caught.value) == "rank 103 died or lost its connection; see its own log for the reason."
    assert store.requests < 2 * FEW_REQUESTS  # it asks for more than a second whether the others have signed
