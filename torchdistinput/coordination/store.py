"""torch's key-value store, at which all ranks sign in: few requests at any number of ranks, and every wait has a bound.

Problem. The store is one process, which answers about 100,000 requests a second. If each of ``W`` ranks asked for one
key of each other rank, these would be ``W**2`` requests: minutes at 4,096 ranks, in which no other request is answered.
The store may also hang, or its host may be gone. A request then stays in C++ without a bound, and Ctrl-C does not end
it.

Decisions.
- A rank asks for many keys in one request. Where a few keys are missing, they are found by halving the list.
- The store is asked only while a strategy is made. Later all messages travel over the ranks' own connections.
- Ranks sign in at a barrier (``StoreBarrier``), before they connect to each other. Its wait can be interrupted, and
  tells which ranks did not come; torch's own rendezvous does neither.
- All requests are made on a separate thread (``within``). The caller waits for the thread, handles signals, and
  abandons the thread if the store does not answer.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar, cast, final

import torch.distributed as dist

from torchdistinput.coordination.fork_safety import keep_alive_in_forks
from torchdistinput.errors import CoordinationTimeout, RankLost

T = TypeVar("T")

_ASK_AGAIN_SECONDS: Final = 10e-6  # between two polls, for each rank that polls the same key: the store has other work
_LAST_MOMENT_SECONDS: Final = 0.5  # for a rank that sees all signatures, to write that all have signed
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
    keep_alive_in_forks(part)
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


def did_not_come(what: str, names: str, timeout_seconds: float) -> CoordinationTimeout:
    """The error of a call that not all ranks have made in time; ``names``: the late ones. Local."""
    return CoordinationTimeout(
        f"{what}: rank {names} did not come within {timeout_seconds:g} seconds. Every rank of the strategy calls this, "
        "in the same order; if the rank is only slow, raise timeout_seconds."
    )


@final
class StoreBarrier:
    """A barrier that all ranks pass once; a rank that gave up may try again.

    Args:
      store: a store, or a part of a store, that is used for this barrier only.
      rank: this rank.
      names: the ranks as users know them, by rank.
    """

    def __init__(self, store: Store, rank: int, names: Sequence[int]) -> None:
        self._store = store
        self._rank = rank
        self._names = names

    def wait_for_all(self, what: str, timeout_seconds: float, text: str, given_up: threading.Event) -> None:
        """Signs in with a text, and waits until every rank has. Collective: every rank calls this.

        Args:
          what: the name of the public call, for messages.
          timeout_seconds: how long to wait.
          text: this rank's text for the other ranks; see ``texts``.
          given_up: is set when the caller no longer waits.

        Raises:
          CoordinationTimeout: a rank did not come; it is named. This rank's signature is taken back.
        """
        self._store.set(f"at/{self._rank}", text)
        self._store.add("signed", 1)
        self._store.set(f"in/{self._rank}", "")  # after the count: a rank that ends between the two is named
        all_signed = self._holds(self._have_all_signed, timeout_seconds, given_up)
        absent = [] if all_signed else missing(self._store, [f"in/{rank}" for rank in range(len(self._names))])
        if not all_signed and self._take_back():
            names = ", ".join(str(self._names[rank]) for rank in absent) or "unknown"
            raise did_not_come(what, names, timeout_seconds)

    def texts(self, ranks: Sequence[int]) -> list[bytes]:
        """The texts with which these ranks signed in, once all ranks have. Local."""
        return self._store.multi_get([f"at/{rank}" for rank in ranks]) if ranks else []

    def _take_back(self) -> bool:
        """Takes this rank's signature back. ``False`` if the last rank signed meanwhile: the signature stays then."""
        self._store.add("signed", -1)
        if self._holds(lambda: self._store.check(["all"]), _LAST_MOMENT_SECONDS, threading.Event()):
            return False
        # Some stores cannot delete. Another rank that gives up then does not name this rank among the absent ones.
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(f"in/{self._rank}")
        return True

    def _have_all_signed(self) -> bool:
        """Whether all have signed. Each rank that sees it writes it down, as the last rank to sign may die before."""
        if self._store.add("signed", 0) < len(self._names):
            return False
        self._store.set("all", "")
        return True

    def _holds(self, condition: Callable[[], bool], seconds: float, given_up: threading.Event) -> bool:
        """Whether a condition becomes true in time. Raises if the store is gone.

        Polls, ever more rarely: a blocking wait would hold the store's client, and torch prints a warning for each wait
        that expires.
        """
        began = time.monotonic()
        while not condition():
            now = time.monotonic()
            if now - began > seconds or given_up.is_set():
                return False
            time.sleep(min(_ASK_AGAIN_SECONDS * len(self._names) + (now - began) / 10, 0.25))
        return True
