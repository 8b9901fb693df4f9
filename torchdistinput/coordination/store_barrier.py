"""A barrier over torch's key-value store: all ranks sign in before they connect to each other.

The wait is bounded and interruptible, and the ranks that did not sign in are known by number; torch's own rendezvous
offers neither. The requests run on a separate thread (``store.within``), because a request to a store that does not
answer cannot be cancelled.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, final

from torchdistinput.coordination.store import ASK_AGAIN_SECONDS, Store, missing
from torchdistinput.errors import CoordinationTimeout

__all__ = ["StoreBarrier", "did_not_come"]

_LAST_MOMENT_SECONDS: Final = 0.5  # for a rank that sees all signatures, to write that all have signed


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
          text: this rank's text for the other ranks; see ``told``.
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

    def told(self, ranks: Sequence[int]) -> list[bytes]:
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
            time.sleep(min(ASK_AGAIN_SECONDS * len(self._names) + (now - began) / 10, 0.25))
        return True
