"""Recursive doubling: sums, gathers and broadcasts over all ranks in about ``log2 W`` rounds of messages.

In round ``k`` each rank exchanges a message with the rank whose number differs in bit ``k``. Where ``W`` is no power of
two, each rank from the largest power of two on has a partner below it, which takes part for it. Every sum has the same
bits on all ranks, also floating-point sums: both ranks of an exchange add the same two numbers.

References: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from torchdistinput.coordination.connections import Array, Connections
from torchdistinput.coordination.exchanges import Exchange, Pending

_SUMS, _ROWS, _FIRST, _PARTS = 1, 2, 3, 4  # tags


def _power_below(num_ranks: int) -> int:
    """The largest power of two that is at most ``num_ranks``.

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


def sum_up(group: Connections, words: Sequence[int]) -> Exchange[list[int]]:
    """The element-wise sums of words over the ranks. Collective: every rank of the group calls this.

    Args:
      group: the ranks.
      words: this rank's words, signed, of 64 bits; the same number on all ranks.
    """
    mine = np.array(words, np.int64)
    yield from add_up(group, mine, _add)
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
    rank, num_ranks = group.rank, group.num_ranks
    power = _power_below(num_ranks)
    theirs = np.empty_like(mine)
    if rank >= power:
        yield group.send(mine, rank - power, _SUMS)
        yield group.recv(mine, rank - power, _SUMS)
        return
    stands_for = rank + power if rank + power < num_ranks else None
    if stands_for is not None:
        yield group.recv(theirs, stands_for, _SUMS)
        add(mine, theirs)
    distance = 1
    while distance < power:
        peer = rank ^ distance
        sent = group.send(mine, peer, _SUMS)
        yield group.recv(theirs, peer, _SUMS)
        yield sent
        add(mine, theirs)
        distance *= 2
    if stands_for is not None:
        yield group.send(mine, stands_for, _SUMS)


def combine(group: Connections, mine: bytes, merge: Callable[[bytes, bytes], bytes]) -> Exchange[bytes]:
    """One value, merged from those of all ranks, of any length. Collective: every rank of the group calls this.

    Each rank merges ``log2 W`` times, and holds two values at a time. Every merge gets the value of the lower ranks
    first, so all ranks get the same bytes if ``merge`` depends on nothing else.

    Args:
      group: the ranks.
      mine: this rank's value, one byte or more.
      merge: one value from two.
    """
    rank, num_ranks = group.rank, group.num_ranks
    power = _power_below(num_ranks)

    def send(peer: int) -> list[Pending]:
        """Sends this rank's value: first its length, then its content."""
        return [group.send(each, peer, _PARTS) for each in (np.array([len(mine)]), np.frombuffer(mine, np.uint8))]

    def receive(peer: int) -> Exchange[bytes]:
        length = np.zeros(1, np.int64)
        yield group.recv(length, peer, _PARTS)
        content = np.empty(int(length[0]), np.uint8)
        yield group.recv(content, peer, _PARTS)
        return content.tobytes()

    if rank >= power:
        yield from send(rank - power)
        return (yield from receive(rank - power))
    stands_for = rank + power if rank + power < num_ranks else None
    if stands_for is not None:
        mine = merge(mine, (yield from receive(stands_for)))
    distance = 1
    while distance < power:
        sent = send(rank ^ distance)
        theirs = yield from receive(rank ^ distance)
        yield from sent
        mine = merge(mine, theirs) if rank < rank ^ distance else merge(theirs, mine)
        distance *= 2
    if stands_for is not None:
        yield from send(stands_for)
    return mine


def spread(group: Connections, own: Array) -> Exchange[list[Array]]:
    """Every rank's row, by rank. Collective: every rank of the group calls this.

    Args:
      group: the ranks.
      own: this rank's row, of the same length and type on all ranks.
    """
    rank, num_ranks = group.rank, group.num_ranks
    power = _power_below(num_ranks)
    # The row of a rank lies beside the row of its partner, so that every message is one contiguous part.
    table = np.zeros((power, 2, len(own)), own.dtype)
    seat = rank % power
    table[seat, rank // power] = own
    if rank >= power:
        yield group.send(table[seat, 1], seat, _ROWS)
        yield group.recv(table.reshape(-1), seat, _ROWS)
    else:
        stands_in = rank + power < num_ranks
        if stands_in:
            yield group.recv(table[seat, 1], rank + power, _ROWS)
        distance = 1
        while distance < power:
            first = seat - seat % distance
            other = first ^ distance
            outgoing = table[first : first + distance].reshape(-1)
            sent = group.send(outgoing, rank ^ distance, _ROWS)
            yield group.recv(table[other : other + distance].reshape(-1), rank ^ distance, _ROWS)
            yield sent
            distance *= 2
        if stands_in:
            yield group.send(table.reshape(-1), rank + power, _ROWS)
    return [table[each % power, each // power] for each in range(num_ranks)]


def broadcast(group: Connections, mine: Array) -> Exchange[None]:
    """Overwrites an array with the first rank's array. Collective: every rank of the group calls this.

    Args:
      group: the ranks.
      mine: the array, of the same length and type on all ranks.
    """
    rank, num_ranks = group.rank, group.num_ranks
    power = _power_below(num_ranks)
    if rank >= power:
        yield group.recv(mine, rank - power, _FIRST)
        return
    highest = 1 << (rank.bit_length() - 1) if rank else 0
    if rank:  # from the rank without its highest bit
        yield group.recv(mine, rank ^ highest, _FIRST)
    distance = max(1, 2 * highest)
    others = [rank + power] if rank + power < num_ranks else []
    while distance < power:
        others.append(rank ^ distance)
        distance *= 2
    for peer in reversed(others):  # first the rank that has to pass it on most often
        yield group.send(mine, peer, _FIRST)
