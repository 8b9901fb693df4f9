"""Recursive doubling: sums, gathers and broadcasts over all ranks in about ``log2 W`` rounds of messages.

In round ``k`` each rank exchanges a message with the rank whose number differs in bit ``k``. Where ``W`` is no power of
two, each rank from the largest power of two on has a partner below it, which takes part for it. Every sum has the same
bits on all ranks, also floating-point sums: both ranks of an exchange add the same two numbers.

References: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from torchdistinput.coordination.connections import AbortMessage, Array, Connections, Departed
from torchdistinput.coordination.exchanges import Exchange, Pending

_MAX_VALUE: Final = 1 << 30  # bytes of a value that is merged: no memory is taken for what another rank only claims
_SUMS, _ROWS, _FIRST, _PARTS = 1, 2, 3, 4  # tags


class _Partners(NamedTuple):
    """The ranks that one rank exchanges messages with.

    >>> _Partners.of(1, 6), _Partners.of(5, 6)
    (_Partners(below=None, above=5, peers=[0, 3]), _Partners(below=1, above=None, peers=[]))
    """

    below: int | None
    """The rank that takes part for this one, if this one is beyond the largest power of two."""
    above: int | None
    """The rank for which this one takes part."""
    peers: list[int]
    """The partner of each round."""

    @classmethod
    def of(cls, rank: int, num_ranks: int) -> _Partners:
        rounds = num_ranks.bit_length() - 1
        power = 1 << rounds
        if rank >= power:
            return cls(rank - power, None, [])
        above = rank + power if rank + power < num_ranks else None
        return cls(None, above, [rank ^ 1 << number for number in range(rounds)])


def partners(rank: int, num_ranks: int) -> list[int]:
    """The ranks that this one exchanges messages with.

    >>> partners(1, 6), partners(5, 6)
    ([0, 3, 5], [1])
    """
    below, above, peers = _Partners.of(rank, num_ranks)
    return [*peers, *(other for other in (below, above) if other is not None)]


def sum_up(group: Connections, words: Sequence[int], *, by_max: int = 0) -> Exchange[list[int]]:
    """The element-wise sums of words over the ranks. Collective: every rank of the group calls this.

    Args:
      group: the ranks.
      words: this rank's words, signed, of 64 bits; the same number on all ranks.
      by_max: of how many words at the end the largest of all ranks' is taken instead of their sum.
    """
    mine = np.array(words, np.int64)

    def merge(mine: Array, theirs: Array) -> None:
        largest = np.maximum(mine[-by_max:], theirs[-by_max:])
        mine += theirs
        mine[-by_max:] = largest

    yield from add_up(group, mine, merge if by_max else _add)
    sums: list[int] = mine.tolist()
    return sums


def _add(mine: Array, theirs: Array) -> None:
    mine += theirs


def add_up(group: Connections, mine: Array, add: Callable[[Array, Array], None]) -> Exchange[None]:
    """Overwrites an array with its sum over the ranks. Collective: every rank of the group calls this.

    Args:
      group: the ranks.
      mine: this rank's array, of the same length and type on all ranks.
      add: adds the second array to the first one, in place.
    """
    below, above, peers = _Partners.of(group.rank, group.num_ranks)
    theirs = np.empty_like(mine)
    if below is not None:
        yield group.send(mine, below, _SUMS)
        yield group.recv(mine, below, _SUMS)
        return
    if above is not None:
        yield group.recv(theirs, above, _SUMS)
        add(mine, theirs)
    for peer in peers:
        sent = group.send(mine, peer, _SUMS)
        yield group.recv(theirs, peer, _SUMS)
        yield sent
        add(mine, theirs)
    if above is not None:
        yield group.send(mine, above, _SUMS)


def combine(group: Connections, mine: bytes, merge: Callable[[bytes, bytes], bytes]) -> Exchange[bytes]:
    """One value, merged from those of all ranks, of any length. Collective: every rank of the group calls this.

    Each rank merges ``log2 W`` times, and holds two values at a time. Every merge gets the value of the lower ranks
    first, so all ranks get the same bytes if ``merge`` depends on nothing else.

    Args:
      group: the ranks.
      mine: this rank's value, one byte or more.
      merge: one value from two.
    """
    below, above, peers = _Partners.of(group.rank, group.num_ranks)

    def send(peer: int) -> list[Pending]:
        """Sends this rank's value: first its length, then its content."""
        return [group.send(each, peer, _PARTS) for each in (np.array([len(mine)]), np.frombuffer(mine, np.uint8))]

    def receive(peer: int) -> Exchange[bytes]:
        length = np.zeros(1, np.int64)
        yield group.recv(length, peer, _PARTS)
        if not 0 < length[0] <= _MAX_VALUE:
            raise Departed(
                AbortMessage(peer, f"wants to send a value of {length[0]} bytes, at most {_MAX_VALUE} may be")
            )
        content = np.empty(int(length[0]), np.uint8)
        yield group.recv(content, peer, _PARTS)
        return content.tobytes()

    if below is not None:
        yield from send(below)
        return (yield from receive(below))
    if above is not None:
        mine = merge(mine, (yield from receive(above)))
    for peer in peers:
        sent = send(peer)
        theirs = yield from receive(peer)
        yield from sent
        mine = merge(mine, theirs) if group.rank < peer else merge(theirs, mine)
    if above is not None:
        yield from send(above)
    return mine


def spread(group: Connections, own: Array) -> Exchange[list[Array]]:
    """Every rank's row, by rank. Collective: every rank of the group calls this.

    Args:
      group: the ranks.
      own: this rank's row, of the same length and type on all ranks.
    """
    rank, num_ranks = group.rank, group.num_ranks
    below, above, peers = _Partners.of(rank, num_ranks)
    power = 1 << (num_ranks.bit_length() - 1)
    # The row of a rank lies beside the row of its partner, so that every message is one contiguous part.
    table = np.zeros((power, 2, len(own)), own.dtype)
    table[rank % power, rank // power] = own
    if below is not None:
        yield group.send(table[below, 1], below, _ROWS)
        yield group.recv(table.reshape(-1), below, _ROWS)
    if above is not None:
        yield group.recv(table[rank, 1], above, _ROWS)
    for peer in peers:
        distance = rank ^ peer
        first = rank - rank % distance
        other = first ^ distance
        sent = group.send(table[first : first + distance].reshape(-1), peer, _ROWS)
        yield group.recv(table[other : other + distance].reshape(-1), peer, _ROWS)
        yield sent
    if above is not None:
        yield group.send(table.reshape(-1), above, _ROWS)
    return [table[each % power, each // power] for each in range(num_ranks)]


def broadcast(group: Connections, mine: Array) -> Exchange[None]:
    """Overwrites an array with the first rank's array. Collective: every rank of the group calls this.

    Args:
      group: the ranks.
      mine: the array, of the same length and type on all ranks.
    """
    rank = group.rank
    below, above, peers = _Partners.of(rank, group.num_ranks)
    if below is not None:
        yield group.recv(mine, below, _FIRST)
        return
    if rank:  # from the rank without its highest bit
        yield group.recv(mine, rank ^ 1 << (rank.bit_length() - 1), _FIRST)
    for peer in reversed(peers):  # first the rank that has to pass it on most often
        if rank ^ peer > rank:
            yield group.send(mine, peer, _FIRST)
    if above is not None:
        yield group.send(mine, above, _FIRST)
