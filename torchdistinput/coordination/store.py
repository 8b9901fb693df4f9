"""torch's key-value store, at which the ranks find each other: few requests, and every wait has a bound.

Problem. The store is one process, which answers about 100,000 requests a second. If each of ``W`` ranks asked for one
key of each other rank, these would be ``W**2`` requests: minutes at 4,096 ranks, in which no other request is answered.
It may also hang, or its host may be gone. A request then stays in C++ without a bound, and Ctrl-C does not end it.

Decisions.
- The store is asked only while a strategy is made, for the addresses by which the ranks connect (``meeting.py``): each
  rank asks for one key. Later all messages travel over the ranks' own connections.
- All requests are made on a separate thread (``Asked``). The caller waits for the thread, handles signals, and abandons
  the thread if the store does not answer.
"""

from __future__ import annotations

import atexit
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Generic, Protocol, TypeVar, cast, final

import torch.distributed as dist

from torchdistinput.coordination.failures import OF_RANKS
from torchdistinput.coordination.timeouts import StragglerTimeout
from torchdistinput.errors import RankLost

T = TypeVar("T")

_LOOK_SECONDS: Final = 0.5
_EXIT_SECONDS: Final = 2.0


class Store(Protocol):
    """The methods of a torch store that are used here."""

    def set(self, key: str, value: str) -> None:
        """Writes a value."""

    def get(self, key: str) -> bytes:
        """Reads a value; waits for its key."""

    def check(self, keys: list[str]) -> bool:
        """Whether all the keys are there."""


def prefixed(prefix: str, store: Store) -> Store:
    """The part of a store whose keys begin with a prefix. Local."""
    return cast(Store, cast(Any, dist).PrefixStore(prefix, store))


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


@final
class Asked(Generic[T]):
    """Requests to the store, on a thread that the caller need not wait for.

    Args:
      what: the name of the public call, for messages.
      where: the store's host, for messages.
      ask: makes the requests. Its event is set when the caller no longer waits.
    """

    def __init__(self, what: str, where: str, ask: Callable[[threading.Event], T]) -> None:
        self._what = what
        self._where = where
        self._given_up, self._ended = threading.Event(), threading.Event()
        self._results: list[T | BaseException] = []
        self._began = time.monotonic()

        def run() -> None:
            try:
                self._results.append(ask(self._given_up))
            except BaseException as error:  # noqa: BLE001,RUF100 - it is the result
                self._results.append(error)
            finally:
                self._ended.set()

        try:
            threading.Thread(target=run, name="torchdistinput-store", daemon=True).start()
        except BaseException:  # an interruption, after which the thread may run
            self.leave()
            raise

    def wait(self, seconds: float) -> None:
        """Waits for the end, for at most ``seconds``."""
        self._ended.wait(seconds)  # not `Thread.join`: an interrupted join marks the thread as ended

    def waiting_since(self) -> float | None:
        """See ``timeouts.Awaited``."""
        return self._began

    def missing(self) -> str:
        """See ``timeouts.Awaited``."""
        return f"an answer of the store{self._where}"

    def unreached(self) -> str:
        """See ``timeouts.Awaited``."""
        return (
            "the process that hosts it (rank 0, or the launcher) has not started, stands still, or cannot be reached "
            "at MASTER_ADDR and MASTER_PORT; no rank can be found without it"
        )

    def poll(self) -> bool:
        """Whether there is a result.

        Raises:
          RankLost: the store is gone.
        """
        if not self._ended.is_set():
            return False
        result = self._results[0] if self._results else None
        if isinstance(result, dist.DistError):
            raise RankLost(
                f"{self._what}: the store{self._where} is gone; the process that hosts it (rank 0, or the launcher) "
                "ended or lost its connection. Its own log tells why."
            ) from result
        if isinstance(result, OF_RANKS):
            raise result.with_traceback(None)
        if isinstance(result, BaseException):
            raise result
        return True

    def take(self) -> T | None:
        """The result, the first time."""
        found, self._results = self._results, []
        return cast(T, found[0]) if found else None

    def leave(self) -> None:
        """The caller waits no longer. Idempotent."""
        self._given_up.set()
        if not self._ended.is_set():
            # A thread that returns from C++ while the interpreter is finalized aborts the process.
            atexit.register(self._ended.wait, _EXIT_SECONDS)


def within(seconds: float, what: str, where: str, ask: Callable[[threading.Event], T]) -> T:
    """Calls ``ask`` on a separate thread, waits for it on the caller's thread, and returns its result. Local, bounded.

    See ``Asked`` for the arguments, and for the errors.

    Raises:
      CoordinationTimeout: the store does not answer.
    """
    asked = Asked(what, where, ask)
    patience = StragglerTimeout(asked, seconds, str, what)  # no other rank waits for this one's answer
    try:
        while not asked.poll():
            asked.wait(min(_LOOK_SECONDS, patience.nap_seconds))
            late = patience.check(0.0)
            if late is not None:
                raise late
        return cast(T, asked.take())
    finally:
        asked.leave()
