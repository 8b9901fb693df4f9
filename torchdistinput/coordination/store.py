"""Access to torch's key-value store: few requests at any number of ranks, and every wait has a bound.

Problem. The store is one process, which answers about 100,000 requests a second. If each of ``W`` ranks asked for one
key of each other rank, these would be ``W**2`` requests: minutes at 4,096 ranks, in which no other request is answered.
The store may also hang, or its host may be gone. A request then stays in C++ without a bound, and Ctrl-C does not end
it.

Decisions.
- A rank asks for many keys in one request. Where a few keys are missing, they are found by halving the list.
- The store is asked only while a strategy is made. Later all messages travel over the ranks' own connections.
- All requests are made on a separate thread (``within``). The caller waits for the thread, handles signals, and
  abandons the thread if the store does not answer.
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

__all__ = ["ASK_AGAIN_SECONDS", "Store", "missing", "prefixed", "within"]

T = TypeVar("T")

ASK_AGAIN_SECONDS: Final = 10e-6
"""Wait between two polls, for each rank that polls the same key: leaves the store time for other requests."""

_LOOK_SECONDS: Final = 0.5
_EXIT_SECONDS: Final = 2.0


class Store(Protocol):
    """The methods of a torch store that are used here."""

    def set(self, key: str, value: str) -> None:
        """Writes a value."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Reads several values at once; waits for their keys."""

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter, and returns its new value."""

    def check(self, keys: list[str]) -> bool:
        """Whether all the keys are there."""

    def delete_key(self, key: str) -> bool:
        """Deletes a key."""


def prefixed(prefix: str, store: Store) -> Store:
    """The part of a store whose keys begin with a prefix. Local."""
    part = cast(Any, dist).PrefixStore(prefix, store)
    never_ended_by_forks(part)
    return cast(Store, part)


def missing(store: Store, keys: Sequence[str]) -> list[int]:
    """The positions of the missing keys: one request, and about ``2 log2 n`` more for each missing key. Local."""
    if store.check(list(keys)):
        return []
    if len(keys) == 1:
        return [0]
    middle = len(keys) // 2
    return [*missing(store, keys[:middle]), *(middle + place for place in missing(store, keys[middle:]))]


def within(seconds: float, what: str, where: str, ask: Callable[[threading.Event], T]) -> T:
    """Calls ``ask`` on a separate thread, waits for it on the caller's thread, and returns its result. Local, bounded.

    Args:
      seconds: how long to wait. ``ask`` should have a bound of its own that is a little shorter.
      what: the name of the public call, for messages.
      where: the store's host, for messages.
      ask: makes requests to the store. Its event is set when the caller no longer waits.

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
        # Not `Thread.join`: an interrupted join marks the thread as ended.
        while not ended.is_set() and time.monotonic() < until:
            ended.wait(_LOOK_SECONDS)
    finally:
        given_up.set()
        if not ended.is_set():
            # Also after an interruption. A thread that returns from C++ while the interpreter is finalized aborts the
            # process.
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
