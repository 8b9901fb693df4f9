"""Ranks sign in at a store, and learn with it whether all have the same to say."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch.distributed as dist

from torchdistinput.backends.attendance import Attendance
from torchdistinput.backends.board import Store, posted
from torchdistinput.errors import CoordinationTimeout, InputError

WORLDS = [1, 2, 5]


class Ranks:
    """Ranks of one process over one store."""

    def __init__(self, world: int) -> None:
        self.store = cast(Any, dist).HashStore()
        self._attendances = [Attendance(cast(Store, self.store), rank, range(world)) for rank in range(world)]

    def say(self, texts: Sequence[str | None], seconds: float = 10.0) -> list[bool | str | None]:
        """What each rank hears; with no text it does not come."""

        def come(attendance: Attendance, text: str | None) -> bool | str | None:
            try:
                return None if text is None else attendance.wait_for_all("the call", seconds, text)
            except CoordinationTimeout as error:
                return str(error)

        with ThreadPoolExecutor(len(texts)) as pool:
            return list(pool.map(come, self._attendances, texts))


@pytest.mark.parametrize("world", WORLDS)
def test_the_same_words_are_known_to_be_the_same(world: int) -> None:
    ranks = Ranks(world)
    for text in ("", "a", "a", "x" * 100_000, "naïve \udcff"):
        assert ranks.say([text] * world) == [True] * world


@pytest.mark.parametrize("different", range(5))
def test_one_rank_that_says_something_else_is_noticed_by_all(different: int) -> None:
    ranks = Ranks(5)
    for other in ("", "A", "a "):
        assert ranks.say([other if rank == different else "a" for rank in range(5)]) == [False] * 5
        assert ranks.say(["a"] * 5) == [True] * 5


def test_who_comes_again_may_say_something_else() -> None:
    """What a rank said counts no more when it has taken its signature back, but for that all compare anew."""
    ranks = Ranks(3)
    for texts, same in ((["b"] * 3, False), (["a"] * 3, True)):  # the first one left "a" in its first attempt
        missed = ranks.say(["a", None, None], 0.1)
        assert "rank 1, 2 did not come" in str(missed[0])
        assert ranks.say(texts) == [same] * 3
    missed = ranks.say(["a", "b", None], 0.1)
    assert all("did not come" in str(each) for each in missed[:2])
    assert ranks.say(["a", "a", "b"]) == [False] * 3
    assert ranks.say(["b", "b", "b"]) == [True] * 3


def test_the_store_does_not_grow() -> None:
    ranks = Ranks(3)
    sizes = []
    for turn in range(6):
        ranks.say([f"{turn} {rank * (turn % 2)}" for rank in range(3)])
        sizes.append(ranks.store.num_keys())
    assert len(set(sizes)) == 1


def test_a_fork_neither_ends_for_its_rank_nor_signs_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """User code that forks inherits what runs at the rank's exit."""
    store = cast(Any, dist).HashStore()
    attendance = Attendance(cast(Store, store), 0, range(2))
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", os.getppid)
        attendance.leave()
        with pytest.raises(InputError, match="reduce: this process was forked from rank 0"):
            attendance.wait_for_all("reduce", 1.0)
    assert posted(store, "gone") == []
    assert not store.check(["signed"])
    attendance.leave()
    assert posted(store, "gone") == ["0"]
