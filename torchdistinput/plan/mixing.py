"""The order of a mixture: which source and which of its samples stands at a position, from weights and a key alone.

The law, for sources with sizes and weights (whose sum is 1):

(M1) Blocks. Positions are taken in blocks of ``B``: at least 256, and enough for each source to come in each block.
(M2) Shares. After ``k`` blocks a source has come ``k * B * weight`` times, by largest remainder, ties to the earlier
  source. So no share is off by one sample or more, at any number of blocks.
(M3) Places. Inside a block, the places of the sources are in the order of a keyed permutation.
(M4) Samples. The samples of a source come in its own order, epoch after epoch; each epoch has each sample once.
(M5) Ends. ``"first"``: the mixture ends where a source would begin a second epoch. ``"all"``: there this source is left
  out, and a new segment begins with the weights of the others; so each sample comes once. ``"repeat"``: sources go on.
(M6) Changes. Weights that change at a position begin a new segment there; each source goes on where it was.

A position is found in ``O(log)`` of the number of segments, and the work of one block.

References: largest remainder is Hamilton's method of apportionment.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Final, Literal, TypeAlias, final

import numpy as np

from torchdistinput.plan.arrays import Ints
from torchdistinput.plan.permutation import Permutation

Stop: TypeAlias = Literal["first", "all", "repeat"]

_BLOCK: Final = 256
_LARGEST: Final = 2**22
_KEPT: Final = 4  # blocks


def shares(weights: Sequence[float], temperature: float | None = None) -> list[Fraction]:
    """Weights as fractions of 1, exactly; a float counts as the decimal number that Python prints for it.

    Args:
      weights: 0 or more each, and not all 0.
      temperature: the weights are raised to the power ``1 / temperature`` first.

    Raises:
      ValueError: a weight is negative or not finite, or all are 0; the temperature is not positive; a weight is so
        small that a source would not come in each block.
    """
    if temperature is not None and not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature={temperature}; it must be positive.")
    for place, weight in enumerate(weights):
        if not (weight >= 0 and math.isfinite(weight)):
            raise ValueError(f"weight {place} is {weight}; weights must be 0 or more.")
    raised = [weight if temperature is None or not weight else weight ** (1 / temperature) for weight in weights]
    exact = [Fraction(str(weight)) for weight in raised]
    total = sum(exact, Fraction())
    if not total:
        raise ValueError("all weights are 0; one source at least must come.")
    found = [each / total for each in exact]
    smallest = min(each for each in found if each)
    if smallest * _LARGEST < 1:
        raise ValueError(f"a weight is {float(smallest):.3g} of all; it must be {1 / _LARGEST:.3g} at least, or 0.")
    return found


def _counts(weights: Sequence[Fraction], positions: int) -> list[int]:
    """The law M2: how often each source comes in so many positions, at the end of a block."""
    quotas = [each * positions for each in weights]
    found = [math.floor(each) for each in quotas]
    rest = positions - sum(found)
    order = sorted(range(len(found)), key=lambda source: (found[source] - quotas[source], source))
    for source in order[:rest]:
        found[source] += 1
    return found


@final
@dataclass(frozen=True)
class _Segment:
    """Positions under the same weights.

    Args:
      start: its first position.
      weights: the share of each source.
      before: how many samples of each source came before.
      block: the size of its blocks.
    """

    start: int
    weights: tuple[Fraction, ...]
    before: tuple[int, ...]
    block: int

    @classmethod
    def begin(cls, start: int, weights: Sequence[Fraction], before: Sequence[int]) -> _Segment:
        smallest = min(each for each in weights if each)
        block = max(_BLOCK, math.ceil(1 / smallest))
        return cls(start, tuple(weights), tuple(before), block)

    def counts(self, blocks: int) -> list[int]:
        """How many samples of each source came before a block of the segment, also in earlier segments."""
        return [a + b for a, b in zip(self.before, _counts(self.weights, blocks * self.block), strict=True)]

    def block_of(self, source: int, index: int) -> int:
        """The block in which this sample of a source comes."""
        wanted = index - self.before[source]
        # By M2 the share of a source is off by less than one sample, so it cannot come before this block.
        found = max(0, math.floor((wanted - 1) / self.weights[source]) // self.block - 1)
        while self.counts(found + 1)[source] <= index:
            found += 1
        return found


@final
class MixedOrder:
    """The order of a mixture, by the law above.

    Args:
      sizes: samples of each source.
      changes: from which position on which weights hold (see ``shares``); the first from position 0.
      stop: when the mixture ends.
      key: ints that choose the order.
      length: how many positions there are, for ``"repeat"``; for the others at most.

    Raises:
      ValueError: changes are not in order, or ``"repeat"`` has no length.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        changes: Sequence[tuple[int, Sequence[Fraction]]],
        stop: Stop,
        key: Sequence[int],
        length: int | None = None,
    ) -> None:
        self.sizes, self._key = list(sizes), tuple(key)
        if not changes or changes[0][0] != 0 or any(a[0] >= b[0] for a, b in pairwise(changes)):
            raise ValueError(f"weights change at {[at for at, _ in changes]}; rising positions from 0 on are needed.")
        if stop == "repeat" and length is None:
            raise ValueError('a mixture that repeats its sources has no end; stop="repeat" needs a number of samples.')
        self._blocks: dict[tuple[int, int], tuple[Ints, Ints]] = {}
        self._segments, self._length = self._planned(changes, stop, length)
        self._starts = [segment.start for segment in self._segments]

    def __len__(self) -> int:
        """How many positions there are."""
        return self._length

    def _planned(
        self, changes: Sequence[tuple[int, Sequence[Fraction]]], stop: Stop, length: int | None
    ) -> tuple[list[_Segment], int]:
        """All segments, and the length."""
        segments: list[_Segment] = []
        start, before = 0, [0] * len(self.sizes)
        ends = [*(at if length is None else min(at, length) for at, _ in changes[1:]), length]
        for (_, weights), until in zip(changes, ends, strict=True):
            while until is None or start < until:
                alive = list(weights) if stop != "all" else self._alive(weights, before)
                total = sum(alive, Fraction())
                if not total:
                    break  # all sources of these weights have ended
                number, segment = len(segments), _Segment.begin(start, [each / total for each in alive], before)
                segments.append(segment)
                end = None if stop == "repeat" else self._first_end(segment, number)
                start = min(each for each in (end, until) if each is not None)
                before = self._counted(segment, number, start)
                if start == end != until and stop == "first":  # else the next weights may not ask for the source
                    return segments, start
        return segments, start

    def _alive(self, weights: Sequence[Fraction], before: Sequence[int]) -> list[Fraction]:
        """The weights of the sources that have samples left."""
        left = [size - done for size, done in zip(self.sizes, before, strict=True)]
        return [weight if rest > 0 else Fraction(0) for weight, rest in zip(weights, left, strict=True)]

    def _first_end(self, segment: _Segment, number: int) -> int:
        """The first position of the segment at which a source would begin another epoch."""
        block = min(segment.block_of(source, size) for source, size in enumerate(self.sizes) if segment.weights[source])
        sources, indices = self._block(segment, number, block)
        over = indices >= np.array(self.sizes)[sources]
        return segment.start + block * segment.block + int(np.flatnonzero(over)[0])

    def _counted(self, segment: _Segment, number: int, position: int) -> list[int]:
        """How many samples of each source come before a position of the segment."""
        block, place = divmod(position - segment.start, segment.block)
        sources, _ = self._block(segment, number, block)
        inside = np.bincount(sources[:place], minlength=len(self.sizes)).tolist()
        return [a + b for a, b in zip(segment.counts(block), inside, strict=True)]

    def _block(self, segment: _Segment, number: int, block: int) -> tuple[Ints, Ints]:
        """The sources at the places of a block, and which of their samples come there (M3)."""
        found = self._blocks.get((number, block))
        if found is None:
            first, after = segment.counts(block), segment.counts(block + 1)
            counts = [b - a for a, b in zip(first, after, strict=True)]
            in_order = np.repeat(np.arange(len(counts)), counts)
            sources = in_order[Permutation(segment.block, *self._key, number, block).block(0, segment.block)]
            # The samples of a source come in order: its n-th place in the block has the n-th one.
            by_source = np.argsort(sources, kind="stable")
            indices = np.empty(segment.block, np.int64)
            offsets = np.concatenate([np.arange(a, b) for a, b in zip(first, after, strict=True)])
            indices[by_source] = offsets
            found = sources.astype(np.int64), indices
            if len(self._blocks) >= _KEPT:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[number, block] = found
        return found

    def sources(self, position: int, count: int) -> Ints:
        """The sources of the next ``count`` positions; fewer at the end."""
        parts = [np.empty(0, np.int64)]
        count = min(count, self._length - position)
        while count > 0:
            number = bisect_right(self._starts, position) - 1
            segment = self._segments[number]
            until = self._starts[number + 1] if number + 1 < len(self._starts) else self._length
            block, place = divmod(position - segment.start, segment.block)
            some = min(count, segment.block - place, until - position)
            parts.append(self._block(segment, number, block)[0][place : place + some])
            position, count = position + some, count - some
        return np.concatenate(parts)

    def count_of(self, source: int) -> int:
        """How many samples of a source come in all."""
        if not self._segments or not self._length:
            return 0
        return self._counted(self._segments[-1], len(self._segments) - 1, self._length)[source]

    def place_of(self, source: int, index: int) -> int | None:
        """The position of a sample of a source, the inverse of ``at``; ``None`` where it does not come."""
        number = bisect_right(self._segments, index, key=lambda each: each.before[source]) - 1
        if number < 0 or not self._segments[number].weights[source]:
            return None
        segment = self._segments[number]
        block = segment.block_of(source, index)
        sources, indices = self._block(segment, number, block)
        place = int(np.flatnonzero((sources == source) & (indices == index))[0])
        position = segment.start + block * segment.block + place
        until = self._starts[number + 1] if number + 1 < len(self._starts) else self._length
        return position if position < until else None

    def counted_on(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The sources with a share in the segments that start in a range, each with the samples that it must have."""
        segments = [each for each in self._segments if start <= each.start < stop]
        return [
            (source, each.before[source] + 1) for each in segments for source, share in enumerate(each.weights) if share
        ]

    def at(self, positions: Sequence[int] | Ints) -> tuple[Ints, Ints]:
        """The sources at positions, and which of their samples: ``epoch * size + index`` of the source's own order.

        Raises:
          IndexError: a position is outside of ``[0, len)``.
        """
        wanted = np.asarray(positions, np.int64)
        outside = wanted[(wanted < 0) | (wanted >= self._length)]
        if len(outside):
            raise IndexError(f"position {outside[0]} is outside of a mixture of {self._length} samples")
        sources, indices = np.empty(len(wanted), np.int64), np.empty(len(wanted), np.int64)
        numbers = np.searchsorted(self._starts, wanted, side="right") - 1
        for number in set(numbers.tolist()):
            segment, rows = self._segments[number], np.flatnonzero(numbers == number)
            blocks, places = np.divmod(wanted[rows] - segment.start, segment.block)
            for block in set(blocks.tolist()):
                here = blocks == block
                of_block = self._block(segment, number, block)
                sources[rows[here]], indices[rows[here]] = of_block[0][places[here]], of_block[1][places[here]]
        return sources, indices
