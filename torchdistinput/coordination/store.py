"""torch's key-value store, at which all ranks sign in: few requests at any number of ranks, and every wait has a bound.

Problem. The store is one process, which answers about 100,000 requests a second. If each of ``W`` ranks asked for one
key of each other rank, these would be ``W**2`` requests: minutes at 4,096 ranks, in which no other request is answered.
The store may also hang, or its host may be gone. A request then stays in C++ without a bound, and Ctrl-C does not end
it.

Decisions.
- A rank asks for many keys in one request. Where a few keys are missing, they are found by halving the list.
- The store is asked only while a strategy is made. Later all messages travel over the ranks' own connections.
- Ranks sign in at a barrier (``StoreBarrier``), before they connect to each other. Its wait can be interrupted, and
  tells which ranks did not come; torch's own rendezvous does neither. At its exit, each process writes to the store
  that it has ended.
- All requests are made on a separate thread (``within``). The caller waits for the thread, handles signals, and
  abandons the thread if the store does not answer.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import takewhile
from typing import Any, Final, Protocol, TypeVar, cast, final

import torch.distributed as dist

from torchdistinput.coordination.failures import OF_RANKS
from torchdistinput.coordination.fork_safety import keep_alive_in_forks
from torchdistinput.errors import CoordinationTimeout, RankLost

_LOG = logging.getLogger("torchdistinput")

T = TypeVar("T")

_ASK_AGAIN_SECONDS: Final = 20e-6  # between two polls, for each rank that polls the same key: the store has other work
_LAST_MOMENT_SECONDS: Final = 0.5  # for the first rank, if it has seen all signatures, to write it down
_LOOK_SECONDS: Final = 0.5
_FIRST_LOOK_SECONDS: Final = 1.0  # until a rank asks which ranks are absent, and whether they have ended
_LOOK_SECONDS_EACH: Final = 2e-3  # longer between two such questions, for each rank that asks
WARN_SECONDS: Final = 5.0
_TOKEN_LENGTH: Final = 16
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


def _at_port(store: Any) -> Any:
    """The ``TCPStore`` itself; ``None`` for one in a file, which its last user removes, or in this process."""
    while isinstance(store, cast(Any, dist).PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, cast(Any, dist).TCPStore) else None


def refuse_ended(store: Store) -> None:
    """Raises torch's error for a store that is gone, if its port refuses a connection. Local, bounded.

    Torch itself tries to connect for more than twice its timeout, in C++, and a thread that returns from there while
    Python exits aborts the process.
    """
    known = _at_port(store)
    if known is not None:
        try:
            socket.create_connection((known.host, known.port), _LOOK_SECONDS).close()
        except ConnectionRefusedError as error:
            raise dist.DistNetworkError(str(error)) from error
        except OSError:  # it may be slow: torch has the time to try
            return


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

    until = time.monotonic() + seconds
    try:
        threading.Thread(target=run, name="torchdistinput-store", daemon=True).start()
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
    if isinstance(result, OF_RANKS):
        raise result.with_traceback(None)
    if isinstance(result, BaseException):
        raise result
    return result


def did_not_come(what: str, names: str, timeout_seconds: float) -> CoordinationTimeout:
    """The error of a call that not all ranks have made in time; ``names``: the late ones. Local."""
    return CoordinationTimeout(
        f"{what}: rank {names} did not come within {round(timeout_seconds, 1):g} seconds. Every rank of the strategy "
        "calls this, in the same order; if the rank is only slow, raise timeout_seconds."
    )


def ended_before(ranks: str) -> RankLost:
    """The error of a call that a rank did not make before its process ended. Local."""
    return RankLost(
        f"{ranks} ended before it came here. Every rank of the strategy makes the same calls; its own log tells why it "
        "ended."
    )


@final
class StoreBarrier:
    """A barrier at which all ranks meet, any number of times; a rank that gave up may try again.

    Each time is a *meeting* with a number. The first rank opens a new one, and the others sign in at the newest. The
    first rank closes it once all have signed. A store may outlive its ranks: under torchelastic it holds the keys of
    those before a restart, and no number of the restart is known to all, as each host counts for itself. Such keys do
    no harm. Nobody closes a meeting that a former rank left open, and the present first rank opens a newer one. In a
    closed meeting the place of this rank is taken, so this rank waits for a newer one.

    Args:
      store: a store, or a part of a store, that is used for this barrier only.
      rank: this rank.
      names: the ranks as users know them, by rank.
      place: names the part of the store among all parts that are used.
    """

    def __init__(self, store: Store, rank: int, names: Sequence[int], place: str = "") -> None:
        self._store = store
        self._rank = rank
        self._names = names
        self._place = place
        self._meeting = 0  # the number of the meeting at which this rank signed in
        self._taken = 0  # the number of a meeting at which this rank cannot sign in

    @property
    def meeting(self) -> int:
        """The number of the meeting at which this rank signed in last, the same on all ranks. Local."""
        return self._meeting

    def wait_for_all(self, what: str, timeout_seconds: float, text: str, given_up: threading.Event) -> None:
        """Signs in with a text, and waits until every rank has. Collective: every rank calls this.

        Logs a warning that names the absent ranks after some seconds.

        Args:
          what: the name of the public call, for messages.
          timeout_seconds: how long to wait.
          text: this rank's text for the other ranks; see ``texts``.
          given_up: is set when the caller no longer waits.

        Raises:
          CoordinationTimeout: a rank did not come; it is named. This rank's signature is taken back.
          RankLost: a rank that had met this one before has ended.
        """
        self._meeting = self._taken = 0
        if self._rank == 0:
            self._store.add("newest", 1)
        absent: list[int] = []
        warned, look_at = False, _FIRST_LOOK_SECONDS
        polls = _polls(timeout_seconds, _ASK_AGAIN_SECONDS * len(self._names))
        for waited in takewhile(lambda _: not given_up.is_set(), polls):
            if self._have_all_signed(text):
                break
            if waited > look_at:
                look_at = waited + _FIRST_LOOK_SECONDS + _LOOK_SECONDS_EACH * len(self._names)
                absent = _still(absent, self._absent())
                self._raise_if_ended(what, absent)
            if waited > WARN_SECONDS and not warned and absent:
                warned = True
                _LOG.warning("%s: waiting for rank %s for %.0f seconds", what, self._named(absent), waited)
        else:
            absent = _still(absent, self._absent())
            if self._take_back():
                raise did_not_come(what, self._named(absent), timeout_seconds)
        if _at_port(self._store) is not None:
            _MET[self._place] = (self._store, os.getpid())

    def texts(self, ranks: Sequence[int]) -> list[bytes]:
        """The texts with which these ranks signed in, once all ranks have. Local."""
        return [each[_TOKEN_LENGTH:] for each in self._signatures(self._meeting, ranks)]

    def _signatures(self, meeting: int, ranks: Sequence[int]) -> list[bytes]:
        return self._store.multi_get([f"{meeting}/at/{rank}" for rank in ranks]) if ranks else []

    def _named(self, ranks: Sequence[int]) -> str:
        return ", ".join(str(self._names[rank]) for rank in ranks)

    def _have_all_signed(self, text: str) -> bool:
        """Signs in at the newest meeting if this rank has not; whether the meeting is closed."""
        if self._meeting > 0 and self._rank > 0 and self._store.check([f"{self._meeting}/closed"]):
            return True
        newest = self._store.add("newest", 0)
        if newest not in (0, self._meeting, self._taken):
            if not self._may_sign(newest):
                self._taken = newest
                return False
            self._meeting = newest
            self._store.set(f"{newest}/at/{self._rank}", _token(os.getpid()) + text)
            self._store.add(f"{newest}/signed", 1)
            # After the count: a rank that ends between the two is named.
            self._store.set(f"{newest}/in/{self._rank}", "")
        if self._rank > 0 or self._store.add(f"{self._meeting}/signed", 0) < len(self._names):
            return False
        self._store.set(f"{self._meeting}/closed", "")
        return True

    def _may_sign(self, meeting: int) -> bool:
        """Whether no other process signed in for this rank, or this process did, and took its signature back."""
        if not self._store.check([f"{meeting}/at/{self._rank}"]):
            return True
        return self._is_mine(meeting) and not self._store.check([f"{meeting}/closed"])

    def _is_mine(self, meeting: int) -> bool:
        (signature,) = self._signatures(meeting, [self._rank])
        return signature.startswith(_token(os.getpid()).encode())

    def _absent(self) -> list[int]:
        """The ranks that have not signed in; only the first one where the meeting is not open yet."""
        if self._meeting == 0:
            return [0]
        keys = [f"{self._meeting}/in/{rank}" for rank in range(len(self._names))]
        return missing(self._store, keys) or [0]  # the first rank is another one where it does not close the meeting

    def _raise_if_ended(self, what: str, absent: Sequence[int]) -> None:
        """Raises for an absent rank whose process has ended, as it wrote down at its exit.

        The processes are those of the meeting before, if this process was there.
        """
        before = max(self._meeting - 1, self._taken)
        if not absent or before < 1 or not self._store.check([f"{before}/closed"]) or not self._is_mine(before):
            return
        tokens = (each[:_TOKEN_LENGTH].decode() for each in self._signatures(before, absent))
        ended = [rank for rank, token in zip(absent, tokens, strict=True) if self._store.check([f"ended/{token}"])]
        if ended:
            raise ended_before(f"{what}: rank {self._named(ended)}")

    def _take_back(self) -> bool:
        """Takes this rank's signature back. ``False`` if the meeting was closed meanwhile: the signature stays then."""
        if self._meeting == 0:
            return True
        self._store.add(f"{self._meeting}/signed", -1)
        closed = [f"{self._meeting}/closed"]
        if self._rank > 0 and any(self._store.check(closed) for _ in _polls(_LAST_MOMENT_SECONDS, 0.0)):
            return False
        # Some stores cannot delete: there this rank does not count as absent for those that still wait.
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(f"{self._meeting}/in/{self._rank}")
        return True


def _still(before: Sequence[int], now: Sequence[int]) -> list[int]:
    """The ranks that are absent now, and were before; all that are absent now, if none was.

    A rank that came and gave up is absent, too, but it was not late.
    """
    return [rank for rank in now if rank in before] or list(now)


def _polls(seconds: float, first_pause: float) -> Iterator[float]:
    """The seconds waited so far at each poll, until the time is over; at least one poll. Local.

    Polls ever more rarely: a blocking wait would hold the store's client, and torch prints a warning for each wait that
    expires.
    """
    began = time.monotonic()
    waited = 0.0
    while waited <= seconds:
        yield waited
        time.sleep(min(first_pause + 1e-4 + (time.monotonic() - began) / 10, 0.25))
        waited = time.monotonic() - began


_MET: Final[dict[str, tuple[Store, int]]] = {}
"""Where this process met other ranks: the part of a store by its name, and the process that met them there."""


@cache
def _token(process: int) -> str:
    """A text that tells this process from all others; the argument is its number, which a fork changes. Local."""
    return secrets.token_hex(_TOKEN_LENGTH // 2)


def _write_end() -> None:
    """Writes down that this process has ended, for ranks that may wait for it later. Runs at exit."""
    for store, process in _MET.values():
        if process == os.getpid():
            with contextlib.suppress(RuntimeError):  # the store is gone
                store.set(f"ended/{_token(process)}", "")


atexit.register(_write_end)
