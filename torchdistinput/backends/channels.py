"""The door to process groups, its back room: the messages of one live iterator.

Problem. Ranks exchange a few numbers for every step, on a background thread or in ``next``, beside a training loop
whose own collectives may not be disturbed; no wait may last for ever or stay anonymous.

Decisions.
- Each live iterator has a gloo group of its own (a *channel*). gloo matches messages by order, so two threads on one
  group mix up sums.
- An exchange takes ``log2 W`` rounds of messages of one fixed size (``doubling.py``), which one thread may begin and
  look after, and another one wait for (``exchanges.py``).
- So do texts, in rows that the longest one of the last time would have filled by half or more, of 256 bytes to 2 KiB;
  only where one is longer than that, a second time, in rows of its length.
- Between ranks of one host they go through memory (``mail.py``, ``neighbours.py``).
- ``abort``, from any thread, closes all connections of this rank, which ends its own wait and that of every other rank.
- A rank that waits long says so at the store every half second (the *watch*), so that the one that is late can be told
  from those that wait with us. When a connection breaks, every survivor signs the store: who has not signed is dead.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, TypeVar, final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchdistinput.backends.board import ASK_AGAIN_SECONDS, Store, missing, post, posted, values
from torchdistinput.backends.doubling import Messenger, Round, Sums, Words, spread
from torchdistinput.backends.exchanges import Exchange
from torchdistinput.backends.mail import Gloo, Mail
from torchdistinput.errors import InputError, RankLost

__all__ = ["ProcessGroupChannel", "Watch", "all_gather", "gather_texts", "not_met", "plain_message"]

T = TypeVar("T")

_WATCH_SECONDS = 0.5
_SIGN_SECONDS = 1.5
_MAX_TEXT = 1 << 30  # of one rank in one exchange, in bytes
_LEAST_ROW, _MOST_ROW = 256, 2048  # bytes that a rank sends at first in an exchange of texts
_WORD = 8  # bytes; the first one of a row says how long the text is, the last one is for the stamp
_DISCONNECTED = "lost the connection"


def gather_texts(group: Gloo, text: str) -> list[str]:
    """Every rank's text, by rank. Collective: every rank of the group calls this.

    Raises:
      InputError: a rank sent what is no text, or too long.
    """
    data = text.encode(errors="surrogatepass")  # names of files may hold what is no proper unicode
    told = all_gather(group, torch.tensor([len(data)], device="cpu"))
    sizes = [_checked(int(size), rank) for rank, size in enumerate(told)]
    padded = torch.frombuffer(bytearray(data.ljust(max(*sizes, 1))), dtype=torch.uint8)  # never empty
    parts = all_gather(group, padded)
    texts = [part[:size].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]
    return [_text_of(text, rank) for rank, text in enumerate(texts)]


def _checked(size: int, rank: int) -> int:
    if not 0 <= size <= _MAX_TEXT:
        raise InputError(f"rank {rank} of the group wants to send {size} bytes; {_SAME_LIBRARY}")
    return size


def _text_of(data: bytes, rank: int) -> str:
    try:
        return data.decode(errors="surrogatepass")
    except UnicodeDecodeError as error:
        raise InputError(f"rank {rank} of the group sent no text ({error.reason}); {_SAME_LIBRARY}") from error


_SAME_LIBRARY = "every rank must run the same version of torchdistinput, on a network that loses nothing"


def plain_message(text: str) -> dict[str, Any]:
    """What a rank said, as the mapping that it is. Local.

    Raises:
      InputError: it is none.
    """
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"another rank sent {text!r:.100}, which is no message ({error}); {_SAME_LIBRARY}") from error
    if not isinstance(told, dict):
        raise InputError(f"another rank sent {text!r:.100}, which is no message; {_SAME_LIBRARY}")
    return told


def all_gather(group: Gloo, tensor: Tensor) -> list[Tensor]:
    """Every rank's tensor, by rank; all of one shape. Collective: every rank of the group calls this."""
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    group.allgather([parts], [tensor]).wait()
    return parts


class GiveBack(Protocol):
    """What a channel calls when it is no longer in use."""

    def __call__(self, *, reusable: bool) -> None: ...


@final
class ProcessGroupChannel:
    """A channel over a gloo group of its own. Made by ``ProcessGroupRanks.open_channel``."""

    def __init__(
        self,
        mail: Mail,
        store: Store,
        watch: Watch,
        give_back: GiveBack,
        names: Sequence[int],
    ) -> None:
        self._mails = [mail]  # emptied when the interpreter exits
        self.rank: int = mail.rank()
        self.num_ranks: int = mail.size()
        self._store = store
        self._watch = watch
        self._give_back = give_back
        self._names = names
        self._lock = threading.Lock()
        self._sums: Sums | None = None
        self._row = _LEAST_ROW  # the same on all ranks, as each hears the same
        self._sequence = 0
        self._since: float | None = None
        self._dead: str | None = None
        self._released = False
        watch.add(self)

    def exchange(self, words: Sequence[int]) -> Exchange[list[int]]:
        """See ``Channel.exchange``."""
        length = len(words)
        return (yield from self._collective(lambda group, number: self._sums_of(group, length).sum_up(words, number)))

    def _sums_of(self, group: Messenger, length: int) -> Sums:
        if self._sums is None or self._sums.length != length:
            self._sums = Sums(group, length)
        return self._sums

    def expect(self) -> None:
        """See ``Channel.expect``."""
        if self._sums is not None and self._dead is None:
            with contextlib.suppress(RuntimeError):  # it broke: the exchange will tell
                self._sums.expect()

    def gather(self, text: str) -> Exchange[list[str]]:
        """See ``Channel.gather``."""
        data = text.encode(errors="surrogatepass")
        rows = yield from self._spread(data, self._row)
        sizes = [_checked(int(row[0]), rank) for rank, row in enumerate(rows)]
        needed = _WORD * (2 - -max(sizes) // _WORD)
        if needed > self._row:
            rows = yield from self._spread(data, needed)
        self._row = min(max(1 << (needed - 1).bit_length(), _LEAST_ROW), _MOST_ROW)
        return [
            _text_of(row[1:].tobytes()[:size], rank) for rank, (row, size) in enumerate(zip(rows, sizes, strict=True))
        ]

    def _spread(self, data: bytes, length: int) -> Exchange[list[Words]]:
        """The first bytes of what every rank brings, with its size in front, in rows of so many bytes. Collective."""
        content = len(data).to_bytes(_WORD, sys.byteorder) + data[: length - 2 * _WORD]
        own = np.frombuffer(content.ljust(length), np.int64)
        return (yield from self._collective(lambda mail, _: spread(mail, own)))

    def waiting_since(self) -> float | None:
        """See ``Channel.waiting_since``."""
        return self._since

    def late(self) -> list[int]:
        """See ``Channel.late``."""
        sequence = self._sequence
        others = [rank for rank in range(self.num_ranks) if rank != self.rank]
        with contextlib.suppress(dist.DistError, RuntimeError):  # no store, no names: the wait ends all the same
            waiting = values(self._store, [f"waiting/{rank}" for rank in others])
            return [rank for rank, at in zip(others, waiting, strict=True) if at is None or int(at) < sequence]
        return []

    def say_waiting(self) -> None:
        """Tells the others, through the store, in which exchange this rank waits. The watch calls this."""
        self._store.set(f"waiting/{self.rank}", str(self._sequence))

    def look_for_leavers(self) -> None:
        """Ends the wait if another rank has left, where nothing else tells of that. The watch calls this."""
        for mail in self._mails:
            if mail.is_silent and self._store.add("left", 0):
                mail.close()

    def abort(self, reason: str) -> None:
        """See ``Channel.abort``."""
        with self._lock:
            if self._dead is not None or self._released:
                return
            self._dead = reason
        with contextlib.suppress(dist.DistError, RuntimeError):  # the store may be gone; the closing below still tells
            _sign(self._store, self.rank, reason.encode(errors="backslashreplace").decode())
        for mail in self._mails:
            mail.close()
        self._end(reusable=False)

    def release(self) -> None:
        """See ``Channel.release``."""
        with self._lock:
            if self._dead is not None or self._released:
                return
            self._released = True
        self._end(reusable=True)

    @property
    def is_dead(self) -> bool:
        """Whether the channel was aborted, here or by another rank."""
        return self._dead is not None

    def _end(self, *, reusable: bool) -> None:
        self._watch.remove(self)
        self._give_back(reusable=reusable)

    def drop(self) -> None:
        """Lets go of the group: its threads must not outlive the interpreter."""
        self._mails.clear()
        self._sums = None

    def _mail(self) -> Mail:
        if not self._mails:
            raise RuntimeError("the interpreter is exiting")
        return self._mails[0]

    def reopen(self) -> None:
        """Makes a released channel ready for another iterator."""
        self._released = False
        self._watch.add(self)

    def _collective(self, rounds: Callable[[Messenger, int], Generator[Round, None, T]]) -> Exchange[T]:
        self._sequence += 1
        self._since = time.monotonic()
        try:
            if self._dead is not None:
                raise RankLost(f"rank {self._names[self.rank]} cannot go on: {self._dead}.")
            return (yield from rounds(self._mail(), self._sequence))
        except RuntimeError as error:
            raise self._lost(error) from error
        finally:
            self._since = None

    def _lost(self, error: RuntimeError) -> RankLost:
        """Closes the channel, and tells who is lost."""
        mine = self._dead
        self.abort(_DISCONNECTED)
        if mine is not None:
            return RankLost(f"rank {self._names[self.rank]} cannot go on: {mine}.")
        return _lost(self._store, self.rank, self._names, error)

    def __repr__(self) -> str:
        return f"ProcessGroupChannel(rank={self.rank} of {self.num_ranks}, exchange {self._sequence})"


def not_met(store: Store, rank: int, names: Sequence[int], error: RuntimeError) -> RankLost:
    """What to raise where a channel could not be made, for this error; its connections are closed. Local."""
    with contextlib.suppress(dist.DistError, RuntimeError):  # no store: that is told
        _sign(store, rank, _DISCONNECTED)
    return _lost(store, rank, names, error)


def _sign(store: Store, rank: int, reason: str) -> None:
    """Says that this rank is alive, and why it left."""
    store.set(f"left/{rank}", reason)
    if reason != _DISCONNECTED:
        post(store, "reasons", str(rank))
    store.add("left", 1)


def _lost(store: Store, rank: int, names: Sequence[int], error: RuntimeError) -> RankLost:
    """Waits until the survivors have signed, and names the rest."""
    try:
        return RankLost(_roll_call(store, rank, names))
    except (dist.DistError, RuntimeError) as gone:
        return RankLost(
            "the connection to the other ranks broke, and the rank that hosts the store (usually rank 0) is gone "
            f"too. Its own error tells why; here it was {type(gone).__name__} after {type(error).__name__}."
        )


def _roll_call(store: Store, this: int, names: Sequence[int]) -> str:
    deadline = time.monotonic() + _SIGN_SECONDS
    others = [rank for rank in range(len(names)) if rank != this]
    while store.add("left", 0) < len(names) and time.monotonic() < deadline:
        time.sleep(max(0.02, ASK_AGAIN_SECONDS * len(names)))
    leavers = sorted({int(rank) for rank in posted(store, "reasons")} - {this})
    if leavers:
        reasons = store.multi_get([f"left/{rank}" for rank in leavers])
        told = [f"rank {names[rank]} {why.decode()}" for rank, why in zip(leavers, reasons, strict=True)]
        return f"{'; '.join(told)}. Every rank must read the same number of steps."
    dead = [str(names[others[place]]) for place in missing(store, [f"left/{rank}" for rank in others])]
    if dead:
        return f"rank {', '.join(dead)} died or lost its connection; see its own log for the reason."
    return "the connection between the ranks broke, though all of them are alive. Look at the network between them."


@final
class Watch:
    """Says at the store, twice a second, in which exchange this rank waits. One thread while any channel is in use.

    It also looks for ranks that left, where gloo does not tell.
    """

    def __init__(self) -> None:
        # Reentrant: the garbage collector may close a dropped iterator on a thread that is in here.
        self._lock = threading.RLock()
        self._channels: set[ProcessGroupChannel] = set()
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def add(self, channel: ProcessGroupChannel) -> None:
        """A channel comes into use."""
        with self._lock:
            self._channels.add(channel)
            if self._thread is None:
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._stop,), name="torchdistinput-watch", daemon=True
                )
                self._thread.start()

    def remove(self, channel: ProcessGroupChannel) -> None:
        """A channel goes out of use."""
        with self._lock:
            self._channels.discard(channel)
            if self._channels or self._thread is None or self._stop is None:
                return
            thread, self._thread = self._thread, None
            self._stop.set()
        if thread is not threading.current_thread():
            thread.join()

    def _run(self, stop: threading.Event) -> None:
        said: dict[ProcessGroupChannel, float] = {}
        while not stop.wait(_WATCH_SECONDS):
            with self._lock:
                channels = list(self._channels)
            for channel in channels:
                since = channel.waiting_since()
                if since is None or time.monotonic() - since <= _WATCH_SECONDS:
                    continue
                with contextlib.suppress(dist.DistError, RuntimeError):  # no store, no news: the waits stay bounded
                    if said.get(channel) != since:
                        said[channel] = since
                        channel.say_waiting()
                    channel.look_for_leavers()
