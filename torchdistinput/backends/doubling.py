"""Sums and gathered rows over all ranks of a gloo group, in about ``log2 W`` rounds of point-to-point messages.

Problem. gloo's own all_reduce and all_gather take ``W - 1`` messages and more one after the other, and run on threads
of their own: beside two busy processes, six to nine times the processor time of one message each way.

Decision. Recursive doubling: in round ``k`` each rank exchanges with the one whose number differs in bit ``k``. Ranks
from the largest power of two on have a partner below it, which takes part for them. torch tells of a message only to
those who wait for it, so each message ends with a *stamp*, a number that its memory did not end with before: who sees
it there knows that waiting takes no time. Nothing depends on it but that.

References: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
"""

from __future__ import annotations

import datetime
from collections.abc import Generator, Sequence
from typing import Any, Final, Protocol, cast, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["STAMP_BYTES", "Messenger", "Round", "Sums", "power_below", "spread"]

STAMP_BYTES: Final = 8
_FOREVER: Final = datetime.timedelta(days=365)
_SUMS, _TEXTS = 0, 2  # tags
_UP, _DOWN = 62, 63  # rounds of the ranks from the power of two on, and their partners; the others count from 0

Words = npt.NDArray[np.int64]


class Messenger(Protocol):
    """What sends and receives."""

    def rank(self) -> int:
        """This rank."""

    def size(self) -> int:
        """How many ranks there are."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """To one rank; returns a work to wait for."""

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """From one rank; returns a work to wait for."""


@final
class Round:
    """Messages on their way; see ``exchanges.Pending``.

    Args:
      works: torch's, of each message.
      stamped: the last word of what is received.
      stamp: what it will be.
    """

    def __init__(self, works: list[Any], stamped: Words, stamp: int) -> None:
        self._works = works
        self._stamped = stamped
        self._stamp = stamp

    def has_come(self) -> bool:
        """See ``Pending.has_come``."""
        return bool(self._stamped[-1] == self._stamp)

    def wait(self) -> None:
        """See ``Pending.wait``."""
        for work in self._works:
            work.wait(_FOREVER)


def power_below(num_ranks: int) -> int:
    """The largest power of two that is not above it.

    >>> [power_below(num_ranks) for num_ranks in (1, 2, 3, 4, 7)]
    [1, 2, 2, 4, 4]
    """
    return 1 << (num_ranks.bit_length() - 1)


@final
class Sums:
    """Sums over the ranks of words of one length, again and again.

    Args:
      group: the ranks.
      length: how many words; the same on all ranks.
    """

    def __init__(self, group: Messenger, length: int) -> None:
        rank, power = group.rank(), power_below(group.size())
        self._group = group
        self._stands_for = rank + power if rank + power < group.size() else None
        self._partner = rank - power if rank >= power else None
        # Whom this rank hears, in order, and the places of these rounds in the exchange.
        self._heard: list[tuple[int, int]] = [(rank ^ 1 << place, place) for place in range(power.bit_length() - 1)]
        if self._partner is not None:
            self._heard = [(self._partner, _DOWN)]
        elif self._stands_for is not None:
            self._heard.insert(0, (self._stands_for, _UP))
        self._mine = torch.zeros(length + 1, dtype=torch.int64)  # the last word is for the stamp
        self._theirs = [torch.zeros_like(self._mine) for _ in self._heard]
        self._receiving: list[Any] = []

    @property
    def length(self) -> int:
        """How many words."""
        return len(self._mine) - 1

    def expect(self) -> None:
        """Another sum will follow. A message that finds its receiver waiting travels at once. Local."""
        if not self._receiving:
            heard = zip(self._heard, self._theirs, strict=True)
            self._receiving = [self._group.recv([theirs], peer, _SUMS) for (peer, _), theirs in heard]

    def sum_up(self, words: Sequence[int], number: int) -> Generator[Round, None, list[int]]:
        """The sums of these words over the ranks. Collective: every rank of the group calls this.

        Args:
          words: this rank's, signed, of 64 bits.
          number: of the exchange, on all ranks; from 1 on, another one each time.
        """
        self.expect()
        mine = self._mine.numpy()
        mine[:-1] = words
        for (peer, place), receiving, theirs in zip(self._heard, self._receiving, self._theirs, strict=True):
            works = [receiving]
            if place != _UP:  # that one only sends
                works.append(self._send(peer, number << 6 | (_UP if place == _DOWN else place)))
            yield Round(works, theirs.numpy(), number << 6 | place)
            if place == _DOWN:
                mine[:] = theirs.numpy()
            else:
                mine += theirs.numpy()
        self._receiving = []
        if self._stands_for is not None:
            sending = [self._send(self._stands_for, number << 6 | _DOWN)]
            yield Round(sending, mine, number << 6 | _DOWN)
        return cast("list[int]", mine[:-1].tolist())

    def _send(self, peer: int, stamp: int) -> Any:
        self._mine[-1] = stamp
        return self._group.send([self._mine], peer, _SUMS)


def spread(group: Messenger, own: Tensor) -> Generator[Round, None, list[Tensor]]:
    """Every rank's row, by rank. Collective: every rank of the group calls this.

    Args:
      group: the ranks.
      own: this rank's row, of bytes, of the same length on all ranks, a multiple of 8; its last 8 are for the stamp.
    """
    rank, num_ranks = group.rank(), group.size()
    power = power_below(num_ranks)
    # The row of a rank lies beside that of its partner, so that what is exchanged is always in one piece.
    table = torch.zeros((power, 2, len(own)), dtype=torch.uint8)
    words = table.view(torch.int64).numpy()
    seat = rank % power
    table[seat, rank // power] = own
    if rank >= power:
        words[seat, 1, -1] = _UP
        sending = group.send([table[seat, 1]], seat, _TEXTS)
        received = torch.zeros_like(table)
        stamped = received.view(torch.int64).numpy()[-1, 1]
        yield Round([sending, group.recv([received], seat, _TEXTS)], stamped, _DOWN)
        table = received
    else:
        stands_in = rank + power < num_ranks
        if stands_in:
            yield Round([group.recv([table[seat, 1]], rank + power, _TEXTS)], words[seat, 1], _UP)
        distance = 1
        while distance < power:
            first = seat - seat % distance
            other = first ^ distance
            words[first + distance - 1, 1, -1] = distance
            incoming, outgoing = table[other : other + distance], table[first : first + distance]
            works = [group.recv([incoming], rank ^ distance, _TEXTS), group.send([outgoing], rank ^ distance, _TEXTS)]
            yield Round(works, words[other + distance - 1, 1], distance)
            distance *= 2
        if stands_in:
            words[-1, 1, -1] = _DOWN
            yield Round([group.send([table], rank + power, _TEXTS)], words[-1, 1], _DOWN)
    return [table[each % power, each // power, :-STAMP_BYTES] for each in range(num_ranks)]
