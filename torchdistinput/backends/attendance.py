"""The door to process groups, its porch: ranks sign in at the store before they do something together.

A wait at the store is bounded and interruptible, and who has not signed is known by name; a collective has neither.

With its signature a rank leaves the digest of what it has to say, which each compares with that of the first to sign: a
request of the same cost for any number of ranks. Mostly all say the same, and then nothing has to be sent any more.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast, final

import torch.distributed as dist

from torchdistinput.backends.forks import never_ended_by_forks
from torchdistinput.errors import CoordinationTimeout, InputError, RankLost

__all__ = ["Attendance", "Store", "prefixed"]

_ASK_SECONDS = 1.0
_ASK_AGAIN_SECONDS = 10e-6  # for each rank: a store answers some 100,000 requests a second
_SAME = "same"
_LAST_MOMENT_SECONDS = 0.5  # from the last rank's signature to its word that all have signed


class Store(Protocol):
    """What is used of a torch store."""

    def set(self, key: str, value: str) -> None:
        """Writes."""

    def get(self, key: str) -> bytes:
        """Reads; waits for the key."""

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


@final
class Attendance:
    """Signing in, again and again, in the same order on every rank.

    Args:
      store: a store, or a part of one, for nothing else.
      rank: this rank.
      names: the ranks as users know them, by rank.
    """

    def __init__(self, store: Store, rank: int, names: Sequence[int]) -> None:
        self._store = store
        self._rank = rank
        self._names = names
        self._times = 0
        self._process = os.getpid()

    def wait_for_all(self, what: str, timeout_seconds: float, text: str = "") -> bool:
        """Signs in and waits until every rank has. Collective: every rank calls this.

        Args:
          what: the call that this serves, for messages.
          timeout_seconds: how long to wait.
          text: what this rank has to say.

        Returns:
          Whether the ranks are known to have the same to say; the same on all of them.

        Raises:
          CoordinationTimeout: a rank did not come; it is named. This rank's signature is taken back.
          RankLost: the store is gone.
          InputError: this process is a fork of the rank.
        """
        if os.getpid() != self._process:
            raise InputError(
                f"{what}: this process was forked from rank {self._names[self._rank]}, which is the one that takes "
                "part; a signature from here would count as its. Call this in that process, and let the fork read "
                "with a DataLoader of torch's."
            )
        try:
            return self._sign_and_wait(what, timeout_seconds, text)
        except dist.DistError as error:
            raise RankLost(
                f"{what}: the store is gone; the rank that hosts it (usually rank {self._names[0]}) ended or lost its "
                "connection. Its own log tells why."
            ) from error

    def _sign_and_wait(self, what: str, timeout_seconds: float, text: str) -> bool:
        number, count = self._times + 1, len(self._names)
        self._compare(number, text)
        self._store.set(f"at/{self._rank}", str(number))
        self._times = number
        if self._store.add("signed", 1) == number * count:
            return self._close(number)
        all_signed = False
        absent: list[int] = []
        try:
            all_signed = self._appears(f"all/{number}", timeout_seconds, lambda: self._look_for_gone(what, number))
            if not all_signed:
                absent = [rank for rank in range(count) if not self._has_signed(rank, number)]
        finally:  # also when interrupted: the call may be made again
            all_signed = all_signed or not self._take_back(number)
        if not all_signed:
            names = ", ".join(str(self._names[rank]) for rank in absent) or "unknown"
            raise CoordinationTimeout(
                f"{what}: rank {names} did not come within {timeout_seconds:g} seconds. Every rank of the strategy "
                "calls this, in the same order; if the rank is only slow, raise timeout_seconds."
            )
        return self._store.get(f"all/{number}") == _SAME.encode()

    def _compare(self, number: int, text: str) -> None:
        """Before it signs; a rank that takes its signature back may say something else when it comes again."""
        digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
        if self._store.compare_set(f"said/{number}", "", digest) != digest.encode():
            self._store.set(f"differ/{number}", "")

    def _close(self, number: int) -> bool:
        """The last one to sign tells the others, and clears away what nobody reads any more."""
        same = not self._store.check([f"differ/{number}"])
        self._store.set(f"all/{number}", _SAME if same else "")
        for key in [f"all/{number - 1}", f"said/{number}", *([] if same else [f"differ/{number}"])]:
            self._store.delete_key(key)
        return same

    def _take_back(self, number: int) -> bool:
        """As if this rank had not signed; ``False`` if the last rank signed meanwhile: it counts on us, so we stay."""
        self._store.add("signed", -1)
        if self._appears(f"all/{number}", _LAST_MOMENT_SECONDS):
            self._store.add("signed", 1)
            return False
        self._times = number - 1
        self._store.set(f"at/{self._rank}", str(self._times))
        return True

    def leave(self) -> None:
        """Tells the others that this rank's process ends: nobody needs to wait for it. Local."""
        if os.getpid() != self._process:  # a fork's end is not the rank's
            return
        self._store.set(f"gone/{self._rank}", "")
        self._store.add("gone", 1)

    def _look_for_gone(self, what: str, number: int) -> None:
        if not self._store.check(["gone"]):
            return
        gone = [rank for rank in range(len(self._names)) if self._store.check([f"gone/{rank}"])]
        missing = [str(self._names[rank]) for rank in gone if not self._has_signed(rank, number)]
        if missing:
            raise RankLost(
                f"{what}: rank {', '.join(missing)} ended before it came here. Every rank of the strategy makes "
                "the same calls; its own log tells why it ended."
            )

    def _appears(self, key: str, seconds: float, meanwhile: Callable[[], None] | None = None) -> bool:
        """Whether a key appears in time; ``meanwhile`` is called now and then. A store that is gone raises.

        It asks again and again, ever more slowly: a wait at the store would hold its client, and torch prints a warning
        for each that expires.
        """
        began = time.monotonic()
        asked = began
        while not self._store.check([key]):
            now = time.monotonic()
            if now - began > seconds:
                return False
            if meanwhile is not None and now - asked > _ASK_SECONDS:
                asked = now
                meanwhile()
            time.sleep(min(_ASK_AGAIN_SECONDS * len(self._names) + (now - began) / 10, 0.25))
        return True

    def _has_signed(self, rank: int, number: int) -> bool:
        return bool(self._store.check([f"at/{rank}"])) and int(self._store.get(f"at/{rank}")) >= number
