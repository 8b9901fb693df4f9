"""What a walk took, turn by turn or in whole rounds of turns, and records that are read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, final

from torchdistinput.sources.lanes import Lane

__all__ = ["Reserved", "Rounds", "Taken", "Turn", "taken_turns", "woven"]

Turn: TypeAlias = tuple[Lane, int, int]
"""A lane, and the range of its records that a turn yielded, counted as they are yielded."""


class Rounds(NamedTuple):
    """Rounds in which each of some lanes had a turn of the same length. Told of turn by turn only if that is asked."""

    lanes: Sequence[Lane]
    """In the order of their turns."""
    firsts: Sequence[int]
    """The first record of each."""
    rounds: int
    """How many rounds."""
    length: int
    """How many records a turn has."""

    def turns(self) -> Iterator[Turn]:
        """Each turn, in order."""
        for start in range(0, self.rounds * self.length, self.length):
            for lane, first in zip(self.lanes, self.firsts, strict=True):
                yield lane, first + start, first + start + self.length


Taken: TypeAlias = Turn | Rounds


def taken_turns(taken: Sequence[Taken]) -> Iterator[Turn]:
    """The turns one by one."""
    for each in taken:
        if isinstance(each, Rounds):
            yield from each.turns()
        else:
            yield each


def woven(parts: Sequence[list[Any]], length: int) -> list[Any]:
    """Records in the order of rounds: ``length`` of the first part, as many of the second, and so on, then again.

    No Python code runs for a record: there are as many slices as the lesser of rounds and length, for each part.

    >>> woven([["a", "b", "c", "d"], ["A", "B", "C", "D"]], 2)
    ['a', 'b', 'A', 'B', 'c', 'd', 'C', 'D']

    Args:
      parts: the records of each lane, equally many, a multiple of ``length``.
      length: records of a turn.
    """
    size, step = len(parts[0]), len(parts) * length
    if length * length > size:
        mixed: list[Any] = []
        for start in range(0, size, length):
            for part in parts:
                mixed += part[start : start + length]
        return mixed
    mixed = [None] * (len(parts) * size)
    for number, part in enumerate(parts):
        for place in range(length):
            mixed[number * length + place :: step] = part[place::length]
    return mixed


@final
class Reserved:
    """Records of a walk that are read as slices of them are asked for.

    Args:
      parts: in order, records that were read already, or turns of which they are to be read.
    """

    def __init__(self, parts: Sequence[list[Any] | Turn]) -> None:
        self._parts = parts
        self._sizes = [len(part) if isinstance(part, list) else part[2] - part[1] for part in parts]
        self._size = sum(self._sizes)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, wanted: slice) -> list[Any]:
        """The records of a slice without a step. What a lane has of them is read at once.

        Raises:
          SourceError: naming the file.
        """
        lo, hi, _ = wanted.indices(self._size)
        found: list[list[Any] | Turn] = []
        ranges: dict[Lane, tuple[int, int]] = {}
        for part, size in zip(self._parts, self._sizes, strict=True):
            a, b = max(lo, 0), min(hi, size)
            lo, hi = lo - size, hi - size  # as the next part counts
            if a >= b:
                continue
            if isinstance(part, list):
                found.append(part[a:b])
            else:
                lane, first, _ = part
                found.append((lane, first + a, first + b))
                ranges[lane] = (ranges[lane][0] if lane in ranges else first + a, first + b)
        read = {lane: lane.read_range(a, b) for lane, (a, b) in ranges.items()}
        whole: list[Any] = []
        for piece in found:
            if isinstance(piece, list):
                whole += piece
            else:
                lane, a, b = piece
                first = ranges[lane][0]
                whole += read[lane][a - first : b - first]
        return whole
