"""The door to process groups, its mail: messages from rank to rank, over gloo or, to neighbours, through memory.

torch tells of a message only to those who wait for it. So the messages of ``doubling.py`` end with a stamp, a number
that the memory where they arrive did not end with before: who sees another one there knows that waiting takes no time.
Nothing depends on it but that.

A receive cannot be cancelled, but a second receive on the same group that expires closes all its connections, which
releases the first and, through closed connections, every other rank. That is how ``close`` ends the waits over gloo.

*Where gloo is silent* (its transport of macOS and Windows, libuv) who waits hears of messages only: not of connections
that are closed, nor of waits that expire, which close none. There a wait is made of short ones, between which it sees
whether it was closed here; that another rank has closed is seen at the store (``channels.Watch``).

References: gloo ``tcp::UnboundBuffer::waitRecv`` (an expired wait signals the context), ``uv::UnboundBuffer::waitRecv``
(it does not), ``uv::Pair::onEnd`` (nor does the end of a connection).
"""

from __future__ import annotations

import contextlib
import datetime
import sys
import time
from collections.abc import Iterable
from typing import Any, Final, Protocol, final

import torch
from torch import Tensor

from torchdistinput.backends.doubling import Words, partners
from torchdistinput.backends.exchanges import Pending
from torchdistinput.backends.neighbours import meet

__all__ = ["Gloo", "Mail"]

_SILENT: Final = sys.platform != "linux"
_FOREVER: Final = datetime.timedelta(days=365)
_SLICE: Final = datetime.timedelta(milliseconds=50)  # of a wait where gloo is silent
_CLOSING: Final = 1  # a tag that nobody sends with


class Gloo(Protocol):
    """What is used of ``ProcessGroupGloo``, which torch's types leave out. Messages return a work to wait for."""

    def rank(self) -> int:
        """This rank."""

    def size(self) -> int:
        """How many ranks there are."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """To one rank."""

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """From one rank."""

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Any:
        """From all, to all."""

    def allreduce(self, tensors: list[Tensor]) -> Any:
        """The sum, to all."""

    def broadcast(self, tensor: Tensor, root: int) -> Any:
        """From one, to all."""


class _Wait(Protocol):
    """How to wait for what gloo does."""

    def __call__(self, work: Any, /) -> None:
        """Raises ``RuntimeError`` if it cannot come any more, or does not come in time."""

    def close(self, group: Gloo, connected: Iterable[int], /) -> None:
        """Ends all waits of this rank, and closes its connections where that can be. Any thread."""


@final
class _HeardWait:
    """Where gloo tells whoever waits that a connection was closed.

    Args:
      patience: how long to wait.
    """

    def __init__(self, patience: datetime.timedelta) -> None:
        self._patience = patience

    def __call__(self, work: Any, /) -> None:
        """See ``_Wait``."""
        work.wait(self._patience)

    def close(self, group: Gloo, connected: Iterable[int], /) -> None:
        """See ``_Wait``."""
        # A receive from a rank that has gone fails at once and closes nothing, so every other one is tried. From a rank
        # without a connection it would wait for one.
        for peer in connected:
            with contextlib.suppress(RuntimeError):  # it expires: that is its purpose
                closing = group.recv([torch.empty(1, dtype=torch.int64, device="cpu")], peer, _CLOSING)
                closing.wait(datetime.timedelta(milliseconds=1))


@final
class _SilentWait:
    """Where it does not.

    Args:
      patience: how long to wait.
    """

    def __init__(self, patience: datetime.timedelta) -> None:
        self._seconds = patience.total_seconds()
        self._closed = False

    def __call__(self, work: Any, /) -> None:
        """See ``_Wait``."""
        until = time.monotonic() + self._seconds
        while not self._closed:
            began = time.monotonic()
            try:
                work.wait(_SLICE)
            except RuntimeError:
                now = time.monotonic()
                if now > until or now < began + _SLICE.total_seconds() / 2:  # it did not expire, but fail
                    raise
            else:
                return
        raise RuntimeError("the connections were closed")

    def close(self, group: Gloo, connected: Iterable[int], /) -> None:
        """See ``_Wait``."""
        self._closed = True


def _wait_for(patience: datetime.timedelta) -> _Wait:
    return _SilentWait(patience) if _SILENT else _HeardWait(patience)


@final
class _Sent:
    """What was given to gloo; see ``exchanges.Pending``. It depends on nothing that another rank does now."""

    def __init__(self, work: Any, wait: _Wait) -> None:
        self._work = work
        self._wait = wait

    def has_come(self) -> bool:
        """See ``Pending.has_come``."""
        return True

    def wait(self) -> None:
        """See ``Pending.wait``."""
        self._wait(self._work)


@final
class _Written:
    """What was sent by writing it; see ``exchanges.Pending``."""

    def has_come(self) -> bool:
        """See ``Pending.has_come``."""
        return True

    def wait(self) -> None:
        """See ``Pending.wait``."""


@final
class _Stamped:
    """A message over gloo that ends with a stamp; see ``exchanges.Pending``."""

    def __init__(self, work: Any, words: Words, before: int, wait: _Wait) -> None:
        self._work = work
        self._words = words
        self._before = before
        self._wait = wait

    def has_come(self) -> bool:
        """See ``Pending.has_come``."""
        return bool(self._words[-1] != self._before)

    def wait(self) -> None:
        """See ``Pending.wait``."""
        self._wait(self._work)


@final
class _OverGloo:
    """All messages over gloo; see ``doubling.Messenger``.

    Args:
      group: the ranks.
      wait: how to wait for a message.

    Attributes:
      connected: ranks that there are connections with, as something was to be received from them.
    """

    def __init__(self, group: Gloo, wait: _Wait) -> None:
        self._group = group
        self._wait = wait
        self.connected: set[int] = set()
        self.rank = group.rank
        self.size = group.size

    def send(self, words: Words, peer: int, tag: int) -> Pending:
        """See ``Messenger.send``."""
        return _Sent(self._group.send([torch.from_numpy(words)], peer, tag), self._wait)

    def recv(self, words: Words, peer: int, tag: int) -> Pending:
        """See ``Messenger.recv``."""
        before = int(words[-1])
        work = self._group.recv([torch.from_numpy(words)], peer, tag)
        self.connected.add(peer)
        return _Stamped(work, words, before, self._wait)

    def close(self) -> None:
        """Ends all waits. Any thread."""
        self._wait.close(self._group, self.connected)


@final
class Mail:
    """Sends and receives; see ``doubling.Messenger``.

    Collective: every rank of the group makes one, while nothing else is under way there.

    Args:
      group: the ranks.
      timeout_seconds: how long a rank may take to make one.

    Attributes:
      is_silent: whether the other ranks do not hear of it when this one closes.

    Raises:
      RuntimeError: a rank went away meanwhile, or did not come; all connections are closed.
    """

    def __init__(self, group: Gloo, timeout_seconds: float) -> None:
        self.rank = group.rank
        self.size = group.size
        self.is_silent = _SILENT
        greeting = _OverGloo(group, _wait_for(datetime.timedelta(seconds=timeout_seconds)))
        try:
            self._neighbours = meet(greeting, partners(group.rank(), group.size()))
        except RuntimeError:
            greeting.close()
            raise
        self._over_gloo = _OverGloo(group, _wait_for(_FOREVER))
        self._over_gloo.connected.update(greeting.connected)
        self._written = _Written()

    def send(self, words: Words, peer: int, tag: int) -> Pending:
        """See ``Messenger.send``."""
        if not self._neighbours.reaches(peer, words):
            return self._over_gloo.send(words, peer, tag)
        self._neighbours.send(words, peer)
        return self._written

    def recv(self, words: Words, peer: int, tag: int) -> Pending:
        """See ``Messenger.recv``."""
        if not self._neighbours.reaches(peer, words):
            return self._over_gloo.recv(words, peer, tag)
        return self._neighbours.recv(words, peer)

    def close(self) -> None:
        """Ends all waits, here and on other ranks; only here where gloo is silent. Local: any thread."""
        self._neighbours.leave()
        self._over_gloo.close()
