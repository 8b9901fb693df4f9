"""The order of the records of interleaved files, from either end, where the number of records of each is known.

(V1) ``cycle_length`` slots have turns in a fixed order. A turn yields up to ``block_length`` records of its file.
(V2) A file that yields less than that in a turn has ended; its slot takes the next file at its next turn. So a file of
    ``n`` records has ``n // block_length + 1`` turns, the last of which may be empty.
(V3) One slot alone has one turn without end: file after file.

These are the rules by which ``sources.readers.interleave`` reads, from TensorFlow's ``interleave``. As each slot has
one turn in each *round*, a file is known by its slot and first round, a record by the rounds and slots before its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from typing import final

import numpy as np

from torchdistinput.plan.arrays import Ints


@final
class InterleavedOrder:
    """The records of some files, in order.

    Args:
      counts: how many records each file has, in the order in which the files are opened.
      cycle_length: slots.
      block_length: records of a turn.

    >>> InterleavedOrder([3, 1, 2], 2, 1).between(0, 6)
    [(0, 0), (1, 0), (0, 1), (0, 2), (2, 0), (2, 1)]
    """

    def __init__(self, counts: Sequence[int], cycle_length: int = 1, block_length: int = 1) -> None:
        self._counts: Ints = np.array(counts, np.int64)
        self._ends: Ints = self._counts.cumsum()
        slots, self._block = min(cycle_length, len(counts)), block_length
        self._in_turns = slots > 1
        if not self._in_turns:
            return
        turns = self._counts // block_length + 1
        free = [(0, slot) for slot in range(slots)]  # a heap: when each slot takes a file
        starts = []
        for count in turns.tolist():
            starts.append(free[0])
            heapreplace(free, (free[0][0] + count, free[0][1]))
        self._rounds, self._slots = np.array(starts, np.int64).T
        self._stops = self._rounds + turns

    def __len__(self) -> int:
        """How many records there are."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def _before(self, number: int, slot: int = 0) -> int:
        """How many records come before the turn of a slot in a round."""
        turns = np.maximum(number - self._rounds + (self._slots < slot), 0)
        return int(np.minimum(turns * self._block, self._counts).sum())

    def between(self, lo: int, hi: int) -> list[tuple[int, int]]:
        """The file, by its place among the files, and the record in it, at places ``lo`` to ``hi - 1``."""
        if lo >= hi:
            return []
        if not self._in_turns:
            places = np.arange(lo, hi)
            files = np.searchsorted(self._ends, places, side="right")
            records = places - (self._ends - self._counts)[files]
            return list(zip(files.tolist(), records.tolist(), strict=True))
        first, last = 0, int(self._stops.max())
        while first < last - 1:  # the last round that does not begin after ``lo``
            middle = (first + last) // 2
            first, last = (middle, last) if self._before(middle) <= lo else (first, middle)
        found: list[tuple[int, int]] = []
        at = self._before(first)
        number = first
        while at < hi:
            open_now = np.flatnonzero((self._rounds <= number) & (number < self._stops))
            for file in open_now[np.argsort(self._slots[open_now])].tolist():
                start = (number - int(self._rounds[file])) * self._block
                stop = min(start + self._block, int(self._counts[file]))
                found += [(file, record) for record in range(max(start, start + lo - at), min(stop, start + hi - at))]
                at += stop - start
            number += 1
        return found

    def place_of(self, file: int, record: int) -> int:
        """The place of a record."""
        if not self._in_turns:
            return int(self._ends[file] - self._counts[file]) + record
        turn, inside = divmod(record, self._block)
        return self._before(int(self._rounds[file]) + turn, int(self._slots[file])) + inside
