"""Sums and gathered rows over all ranks of a gloo group, in about ``log2 W`` rounds of point-to-point messages.

Problem. gloo's own all_reduce and all_gather take ``W - 1`` messages and more one after the other, and run on threads
of their own: beside two busy processes, six to nine times the processor time of one message each way.

Decision. Recursive doubling: in round ``k`` each rank exchanges with the one whose number differs in bit ``k``. Ranks
from the largest power of two on have a partner below it, which takes part for them. Each message ends with a *stamp*, a
number that the memory where it arrives did not end with before: gloo's messages are seen by it (``mail.py``).

References: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol, final

import numpy as np
import numpy.typing as npt

from torchdistinput.backends.exchanges import Pending

__all__ = ["Messenger", "Round", "Sums", "Words", "partners", "spread"]

Words = npt.NDArray[np.int64]
"""In one dimension, in one piece."""

_SUMS, _TEXTS = 0, 2  # tags
_UP, _DOWN = 62, 63  # rounds of the ranks from the power of two on, and their partners; the others count from 0


class Messenger(Protocol):
    """What sends and receives arrays of words, each in one piece."""

    def rank(self) -> int:
        """This rank."""

    def size(self) -> int:
        """How many ranks there are."""

    def send(self, words: Words, peer: int, tag: int) -> Pending:
        """To one rank; returns what to wait for before they are written to."""

    def recv(self, words: Words, peer: int, tag: int) -> Pending:
        """From one rank."""


@final
class Round:
    """Messages on their way; see ``exchanges.Pending``.

    Args:
      awaited: the one that is looked at.
      sent: another one.
    """

    def __init__(self, awaited: Pending, sent: Pending | None = None) -> None:
        self._awaited = awaited
        self._sent = sent

    def has_come(self) -> bool:
        """See ``Pending.has_come``."""
        return self._awaited.has_come()

    def wait(self) -> None:
        """See ``Pending.wait``."""
        self._awaited.wait()
        if self._sent is not None:
            self._sent.wait()


def _power_below(num_ranks: int) -> int:
    """The largest power of two that is not above it.

    >>> [_power_below(num_ranks) for num_ranks in (1, 2, 3, 4, 7)]
    [1, 2, 2, 4, 4]
    """
    return 1 << (num_ranks.bit_length() - 1)


def partners(rank: int, num_ranks: int) -> list[int]:
    """The ranks that this one exchanges messages with.

    >>> partners(1, 6), partners(5, 6)
    ([0, 3, 5], [1])
    """
    power = _power_below(num_ranks)
    if rank >= power:
        return [rank - power]
    others = [rank ^ 1 << place for place in range(power.bit_length() - 1)]
    return [*others, rank + power] if rank + power < num_ranks else others


@final
class Sums:
    """Sums over the ranks of words of one length, again and again.

    Args:
      group: the ranks.
      length: how many words; the same on all ranks.
    """

    def __init__(self, group: Messenger, length: int) -> None:
        rank, power = group.rank(), _power_below(group.size())
        self._group = group
        self._stands_for = rank + power if rank + power < group.size() else None
        self._partner = rank - power if rank >= power else None
        # Whom this rank hears, in order, and the places of these rounds in the exchange.
        self._heard: list[tuple[int, int]] = [(rank ^ 1 << place, place) for place in range(power.bit_length() - 1)]
        if self._partner is not None:
            self._heard = [(self._partner, _DOWN)]
        elif self._stands_for is not None:
            self._heard.insert(0, (self._stands_for, _UP))
        self._mine = np.zeros(length + 1, np.int64)  # the last word is for the stamp
        self._content = self._mine[:-1]
        self._theirs = [np.zeros_like(self._mine) for _ in self._heard]
        self._receiving: list[Pending] = []

    @property
    def length(self) -> int:
        """How many words."""
        return len(self._content)

    def expect(self) -> None:
        """Another sum will follow. A message that finds its receiver waiting travels at once. Local."""
        if not self._receiving:
            heard = zip(self._heard, self._theirs, strict=True)
            self._receiving = [self._group.recv(theirs, peer, _SUMS) for (peer, _), theirs in heard]

    def sum_up(self, words: Sequence[int], number: int) -> Generator[Round, None, list[int]]:
        """The sums of these words over the ranks. Collective: every rank of the group calls this.

        Args:
          words: this rank's, signed, of 64 bits.
          number: of the exchange, on all ranks; from 1 on, another one each time.
        """
        self.expect()
        mine = self._mine
        self._content[:] = words
        for (peer, place), receiving, theirs in zip(self._heard, self._receiving, self._theirs, strict=True):
            sent = None
            if place != _UP:  # that one only sends
                sent = self._send(peer, number << 6 | (_UP if place == _DOWN else place))
            yield Round(receiving, sent)
            if place == _DOWN:
                mine[:] = theirs
            else:
                mine += theirs
        self._receiving = []
        if self._stands_for is not None:
            yield Round(self._send(self._stands_for, number << 6 | _DOWN))
        sums: list[int] = self._content.tolist()
        return sums

    def _send(self, peer: int, stamp: int) -> Pending:
        self._mine[-1] = stamp
        return self._group.send(self._mine, peer, _SUMS)


def spread(group: Messenger, own: Words) -> Generator[Round, None, list[Words]]:
    """Every rank's row, by rank. Collective: every rank of the group calls this.

    Args:
      group: the ranks.
      own: this rank's row, of the same length on all ranks; its last word is for the stamp.
    """
    rank, num_ranks = group.rank(), group.size()
    power = _power_below(num_ranks)
    # The row of a rank lies beside that of its partner, so that what is exchanged is always in one piece.
    table = np.zeros((power, 2, len(own)), np.int64)
    seat = rank % power
    table[seat, rank // power] = own
    if rank >= power:
        row = table[seat, 1]
        row[-1] = _UP
        table = np.zeros_like(table)
        awaited = group.recv(table.reshape(-1), seat, _TEXTS)  # first: gloo sends what is awaited
        yield Round(awaited, group.send(row, seat, _TEXTS))
    else:
        stands_in = rank + power < num_ranks
        if stands_in:
            yield Round(group.recv(table[seat, 1], rank + power, _TEXTS))
        distance = 1
        while distance < power:
            first = seat - seat % distance
            other = first ^ distance
            table[first + distance - 1, 1, -1] = distance
            awaited = group.recv(table[other : other + distance].reshape(-1), rank ^ distance, _TEXTS)
            outgoing = table[first : first + distance].reshape(-1)
            yield Round(awaited, group.send(outgoing, rank ^ distance, _TEXTS))
            distance *= 2
        if stands_in:
            table[-1, 1, -1] = _DOWN
            yield Round(group.send(table.reshape(-1), rank + power, _TEXTS))
    return [table[each % power, each // power, :-1] for each in range(num_ranks)]
