"""The store: what ranks leave there, read in few requests at any number of ranks, and never waited for without a bound.

Problem. The store is one process, which answers some 100,000 requests a second. What each of ``W`` ranks asks of each
other one is ``W**2`` requests: at 4,096 ranks minutes, in which nobody else is answered. And it may stand still, or its
host may be gone: a request to it stays in C++ without a bound, where Ctrl-C does not reach it.

Decisions.
- A rank asks for many keys at once. Where few of them are missing these are found by halving.
- The store is asked while a strategy is made, and never again: later whatever ranks tell each other goes over their own
  connections.
- All requests are made on a thread of their own (``within``). The caller waits for it, sees signals, and leaves it
  behind if the store does not answer.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar, cast

import torch.distributed as dist

from torchdistinput.coordination.fork_safety import never_ended_by_forks
from torchdistinput.errors import CoordinationTimeout, RankLost

__all__ = ["ASK_AGAIN_SECONDS", "Store", "missing", "prefixed", "values", "within"]

T = TypeVar("T")

ASK_AGAIN_SECONDS: Final = 10e-6
"""For each rank that asks the same: so all of them leave the store some time for others."""

_LOOK_SECONDS: Final = 0.5
_EXIT_SECONDS: Final = 2.0


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

    def check(self, keys: list[str]) -> bool:
        """Whether the keys are there."""

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


def within(seconds: float, what: str, where: str, ask: Callable[[threading.Event], T]) -> T:
    """What a conversation with the store comes to, waited for on the caller's thread. Local, bounded.

    Args:
      seconds: how long to wait. The conversation should have a bound of its own that is a little shorter.
      what: the call that this serves, for messages.
      where: the store's host.
      ask: the conversation, on a thread of its own. Its event is set when nobody waits for it any more.

    Raises:
      CoordinationTimeout: the store does not answer.
      RankLost: the store is gone.
    """
    given_up, ended = threading.Event(), threading.Event()
    results: list[T | BaseException] = []

    def run() -> None:
        try:
            results.append(ask(given_up))
        except BaseException as error:  # noqa: BLE001,RUF100 - it is the result
            results.append(error)
        finally:
            ended.set()

    threading.Thread(target=run, name="torchdistinput-store", daemon=True).start()
    until = time.monotonic() + seconds
    try:
        # Not by its join: one that is interrupted takes the thread for ended.
        while not ended.is_set() and time.monotonic() < until:
            ended.wait(_LOOK_SECONDS)
    finally:
        given_up.set()
        if not ended.is_set():
            # Also after an interruption. A thread that comes back from C++ while the interpreter is finalized ends the
            # process by an abort.
            atexit.register(ended.wait, _EXIT_SECONDS)
    if not results:
        raise CoordinationTimeout(
            f"{what}: the store{where} did not answer within {seconds:g} seconds. The process that hosts it (rank 0, "
            "or the launcher) stands still, or its host cannot be reached; no rank can be found without it."
        )
    (result,) = results
    if isinstance(result, dist.DistError):
        raise RankLost(
            f"{what}: the store{where} is gone; the process that hosts it (rank 0, or the launcher) ended or lost its "
            "connection. Its own log tells why."
        ) from result
    if isinstance(result, BaseException):
        raise result
    return result
