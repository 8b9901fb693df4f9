"""The door to process groups, its mail: messages from rank to rank, over gloo or, to neighbours, through memory.

torch tells of a message only to those who wait for it. So the messages of ``doubling.py`` end with a stamp, a number
that the memory where they arrive did not end with before: who sees another one there knows that waiting takes no time.
Nothing depends on it but that.

A receive cannot be cancelled, but a second receive on the same group that expires closes all its connections, which
releases the first and, through closed connections, every other rank. That is how ``close`` ends the waits over gloo.

References: gloo ``UnboundBuffer::waitRecv`` (an expired wait signals the context).
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterable
from typing import Any, Final, Protocol, final

import torch
from torch import Tensor

from torchdistinput.backends.doubling import Words, partners
from torchdistinput.backends.exchanges import Pending
from torchdistinput.backends.neighbours import meet

__all__ = ["Gloo", "Mail"]

_FOREVER: Final = datetime.timedelta(days=365)
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


@final
class _Sent:
    """What was given to gloo; see ``exchanges.Pending``. It depends on nothing that another rank does now."""

    def __init__(self, work: Any, patience: datetime.timedelta) -> None:
        self._work = work
        self._patience = patience

    def has_come(self) -> bool:
        """See ``Pending.has_come``."""
        return True

    def wait(self) -> None:
        """See ``Pending.wait``."""
        self._work.wait(self._patience)


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

    def __init__(self, work: Any, words: Words, before: int, patience: datetime.timedelta) -> None:
        self._work = work
        self._words = words
        self._before = before
        self._patience = patience

    def has_come(self) -> bool:
        """See ``Pending.has_come``."""
        return bool(self._words[-1] != self._before)

    def wait(self) -> None:
        """See ``Pending.wait``."""
        self._work.wait(self._patience)


@final
class _OverGloo:
    """All messages over gloo; see ``doubling.Messenger``.

    Args:
      group: the ranks.
      patience: how long to wait for a message.

    Attributes:
      connected: ranks that there are connections with, as something was to be received from them.
    """

    def __init__(self, group: Gloo, patience: datetime.timedelta) -> None:
        self._group = group
        self._patience = patience
        self.connected: set[int] = set()
        self.rank = group.rank
        self.size = group.size

    def send(self, words: Words, peer: int, tag: int) -> Pending:
        """See ``Messenger.send``."""
        return _Sent(self._group.send([torch.from_numpy(words)], peer, tag), self._patience)

    def recv(self, words: Words, peer: int, tag: int) -> Pending:
        """See ``Messenger.recv``."""
        before = int(words[-1])
        work = self._group.recv([torch.from_numpy(words)], peer, tag)
        self.connected.add(peer)
        return _Stamped(work, words, before, self._patience)


@final
class Mail:
    """Sends and receives; see ``doubling.Messenger``.

    Collective: every rank of the group makes one, while nothing else is under way there.

    Args:
      group: the ranks.
      timeout_seconds: how long a rank may take to make one.

    Raises:
      RuntimeError: a rank went away meanwhile, or did not come; all connections are closed.
    """

    def __init__(self, group: Gloo, timeout_seconds: float) -> None:
        self._group = group
        self.rank = group.rank
        self.size = group.size
        self._over_gloo = _OverGloo(group, _FOREVER)
        greeting = _OverGloo(group, datetime.timedelta(seconds=timeout_seconds))
        try:
            self._neighbours = meet(greeting, partners(group.rank(), group.size()))
        except RuntimeError:
            _close(group, greeting.connected)
            raise
        self._connected = greeting.connected
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
        """Ends all waits, here and on other ranks. Local: any thread."""
        self._neighbours.leave()
        _close(self._group, self._connected)


def _close(group: Gloo, connected: Iterable[int]) -> None:
    """Closes all connections of this rank."""
    # A receive from a rank that has gone fails at once and closes nothing, so every other one is tried. From a rank
    # without a connection it would wait for one.
    for peer in connected:
        with contextlib.suppress(RuntimeError):  # it expires: that is its purpose
            closing = group.recv([torch.empty(1, dtype=torch.int64, device="cpu")], peer, _CLOSING)
            closing.wait(datetime.timedelta(milliseconds=1))
