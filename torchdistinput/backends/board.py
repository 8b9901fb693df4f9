"""The door to process groups, its board: what ranks leave at the store, read in few requests at any number of ranks.

Problem. The store is one process, which answers some 100,000 requests a second. What each of ``W`` ranks asks of each
other one is ``W**2`` requests: at 4,096 ranks minutes, in which nobody else is answered.

Decision. A rank asks for many keys at once. Where few of them are missing these are found by halving. What only a few
ranks have to say (that they end, or why they leave) they number, so that it is read without a look at all the others.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, Final, Protocol, cast

import torch.distributed as dist

from torchdistinput.backends.forks import never_ended_by_forks

__all__ = ["ASK_AGAIN_SECONDS", "Store", "missing", "post", "posted", "prefixed", "values"]

ASK_AGAIN_SECONDS: Final = 10e-6
"""For each rank that asks the same: so all of them leave the store some time for others."""


class Store(Protocol):
    """What is used of a torch store."""

    def set(self, key: str, value: str) -> None:
        """Writes."""

    def get(self, key: str) -> bytes:
        """Reads; waits for the key."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Reads all of these at once; waits for them."""

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter, and returns what it then is."""

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Writes if the key is as expected, ``""`` for not there; returns what it then is."""

    def check(self, keys: list[str]) -> bool:
        """Whether the keys are there."""

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        """Waits for the keys."""

    def delete_key(self, key: str) -> bool:
        """Deletes."""

    def clone(self) -> Store:
        """The same store over another connection."""


def prefixed(prefix: str, store: Store) -> Store:
    """A part of a store with names of its own. Local."""
    part = cast(Any, dist).PrefixStore(prefix, store)
    never_ended_by_forks(part)
    return cast(Store, part)


def missing(store: Store, keys: Sequence[str]) -> list[int]:
    """The places of the keys that are not there: one request, and some ``2 log2 n`` for each of them. Local."""
    if store.check(list(keys)):
        return []
    if len(keys) == 1:
        return [0]
    middle = len(keys) // 2
    return [*missing(store, keys[:middle]), *(middle + place for place in missing(store, keys[middle:]))]


def values(store: Store, keys: Sequence[str]) -> list[bytes | None]:
    """What is at each of these keys; ``None`` if it is not there. One request more than ``missing``. Local."""
    if not keys:
        return []
    absent = set(missing(store, keys))
    found = iter(store.multi_get([key for place, key in enumerate(keys) if place not in absent]))
    return [None if place in absent else next(found) for place in range(len(keys))]


def post(store: Store, list_name: str, text: str) -> None:
    """Adds a text to a list that all ranks may add to. Local."""
    store.set(f"{list_name}/{store.add(list_name, 1)}", text)


def posted(store: Store, list_name: str) -> list[str]:
    """The texts of a list, as they came; without those of ranks that died as they wrote. Local."""
    texts = values(store, [f"{list_name}/{place}" for place in range(1, store.add(list_name, 0) + 1)])
    return [text.decode() for text in texts if text is not None]
