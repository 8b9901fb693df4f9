"""The door to process groups, its porch: ranks sign in at the store before they do something together.

A wait at the store is bounded and interruptible, and who has not signed is known by name; a collective has neither.

With its signature a rank leaves the digest of what it has to say, which each compares with that of the first to sign: a
request of the same cost for any number of ranks. Mostly all say the same, and then nothing has to be sent any more.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from typing import final

import torch.distributed as dist

from torchdistinput.backends.board import ASK_AGAIN_SECONDS, Store, post, posted, values
from torchdistinput.errors import CoordinationTimeout, InputError, RankLost

__all__ = ["Attendance"]

_ASK_SECONDS = 1.0
_SAME = "same"
_LAST_MOMENT_SECONDS = 0.5  # from the last rank's signature to its word that all have signed


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
                absent = self._not_signed(range(count), number)
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
        post(self._store, "gone", str(self._rank))

    def _look_for_gone(self, what: str, number: int) -> None:
        absent = self._not_signed([int(rank) for rank in posted(self._store, "gone")], number)
        if absent:
            names = ", ".join(str(self._names[rank]) for rank in sorted(absent))
            raise RankLost(
                f"{what}: rank {names} ended before it came here. Every rank of the strategy makes "
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
            time.sleep(min(ASK_AGAIN_SECONDS * len(self._names) + (now - began) / 10, 0.25))
        return True

    def _not_signed(self, ranks: Sequence[int], number: int) -> list[int]:
        """Those of the ranks that have not signed for the call of this number."""
        signed = values(self._store, [f"at/{rank}" for rank in ranks])
        return [rank for rank, at in zip(ranks, signed, strict=True) if at is None or int(at) < number]
