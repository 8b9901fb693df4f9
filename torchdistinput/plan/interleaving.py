"""The order of the records of interleaved files, where the number of records of each is known.

(V1) ``cycle_length`` slots have turns in a fixed order. A turn yields up to ``block_length`` records of its file.
(V2) A file that yields less than that in a turn has ended; its slot takes the next file at its next turn. So a file of
    ``n`` records has ``n // block_length + 1`` turns, the last of which may be empty.
(V3) One slot alone has one turn without end: file after file.

These are the rules by which ``sources.readers.interleave`` reads, from TensorFlow's ``interleave``. The turns are
walked through in order, from the first one on, or from where the last walk stopped.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import final

_Turn = tuple[int, int, int]


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
        self._counts = counts
        self._num_slots, self._block = min(cycle_length, len(counts)), block_length
        # Where ``between`` stopped: the place, the turn there, and those after it. A loop over the steps goes on there.
        self._walk: tuple[int, Sequence[_Turn], Iterator[_Turn]] = 0, (), self._turns()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many records there are."""
        return sum(self._counts)

    def _turns(self) -> Iterator[_Turn]:
        """The file of each turn, the first of its records, and the one after the last."""
        if self._num_slots < 2:
            yield from ((file, 0, count) for file, count in enumerate(self._counts))
            return
        fresh = iter(range(len(self._counts)))
        slots: list[tuple[int, int] | None] = [None] * self._num_slots  # the file of each, and its next record
        more = True
        while more:
            more = False
            for slot, found in enumerate(slots):
                file, start = found or (next(fresh, -1), 0)
                if file < 0:
                    continue
                more, stop = True, min(start + self._block, self._counts[file])
                yield file, start, stop
                slots[slot] = (file, stop) if stop - start == self._block else None

    def between(self, lo: int, hi: int) -> list[tuple[int, int]]:
        """The file, by its place among the files, and the record in it, at places ``lo`` to ``hi - 1``."""
        found: list[tuple[int, int]] = []
        with self._lock:
            at, rest, turns = self._walk
            self._walk = 0, (), self._turns()  # if this is interrupted
            if at > lo:
                at, rest, turns = 0, (), self._turns()
            for turn in chain(rest, turns):
                file, start, stop = turn
                found += [(file, record) for record in range(max(start, start + lo - at), min(stop, start + hi - at))]
                rest = (turn,)
                if at + stop - start >= hi:
                    break
                at += stop - start
            else:
                rest = ()
            self._walk = at, rest, turns
        return found

    def place_of(self, file: int, record: int) -> int:
        """The place of a record.

        Raises:
          IndexError: there is no such record.
        """
        at = 0
        for each, start, stop in self._turns():
            if each == file and start <= record < stop:
                return at + record - start
            at += stop - start
        raise IndexError(f"there is no record {record} of file {file}")
