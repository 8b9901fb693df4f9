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
from collections.abc import Iterator
from typing import Any, Final, Protocol, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["STAMP_BYTES", "Messenger", "Round", "power_below", "spread", "sum_up"]

STAMP_BYTES: Final = 8
_FOREVER: Final = datetime.timedelta(days=365)
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


def sum_up(group: Messenger, mine: Tensor, theirs: Tensor, number: int) -> Iterator[Round]:
    """Makes ``mine`` the sum over the ranks, element by element. Collective: every rank of the group calls this.

    Args:
      group: the ranks.
      mine: this rank's words, int64, and one more for the stamp.
      theirs: room for as many.
      number: of the exchange, on all ranks; from 1 on, another one each time that ``theirs`` is used.
    """
    rank, power = group.rank(), power_below(group.size())
    own, other = mine.numpy(), theirs.numpy()

    def send(peer: int, place: int) -> Any:
        own[-1] = number << 6 | place
        return group.send([mine], peer, 0)

    def receive(peer: int) -> Any:
        return group.recv([theirs], peer, 0)

    if rank >= power:
        sending = send(rank - power, _UP)
        yield Round([sending, receive(rank - power)], other, number << 6 | _DOWN)
        own[:] = other
        return
    stands_in = rank + power < group.size()
    if stands_in:
        yield Round([receive(rank + power)], other, number << 6 | _UP)
        own += other
    for place in range(power.bit_length() - 1):
        peer = rank ^ 1 << place
        yield Round([receive(peer), send(peer, place)], other, number << 6 | place)
        own += other
    if stands_in:
        sending = send(rank + power, _DOWN)
        yield Round([sending], own, number << 6 | _DOWN)


def spread(group: Messenger, own: Tensor, rows: list[Tensor]) -> Iterator[Round]:
    """Puts every rank's row into ``rows``, by rank. Collective: every rank of the group calls this.

    Args:
      group: the ranks.
      own: this rank's row, of bytes, of the same length on all ranks, a multiple of 8; its last 8 are for the stamp.
      rows: is filled.
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
        sending = group.send([table[seat, 1]], seat, 0)
        received = torch.zeros_like(table)
        stamped = received.view(torch.int64).numpy()[-1, 1]
        yield Round([sending, group.recv([received], seat, 0)], stamped, _DOWN)
        table = received
    else:
        stands_in = rank + power < num_ranks
        if stands_in:
            yield Round([group.recv([table[seat, 1]], rank + power, 0)], words[seat, 1], _UP)
        distance = 1
        while distance < power:
            first = seat - seat % distance
            other = first ^ distance
            words[first + distance - 1, 1, -1] = distance
            incoming, outgoing = table[other : other + distance], table[first : first + distance]
            works = [group.recv([incoming], rank ^ distance, 0), group.send([outgoing], rank ^ distance, 0)]
            yield Round(works, words[other + distance - 1, 1], distance)
            distance *= 2
        if stands_in:
            words[-1, 1, -1] = _DOWN
            yield Round([group.send([table], rank + power, 0)], words[-1, 1], _DOWN)
    rows += [table[each % power, each // power, :-STAMP_BYTES] for each in range(num_ranks)]
