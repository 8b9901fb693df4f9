"""A keyed shuffle of ``[0, n)`` for data that is stored in blocks, with random access, computed on demand.

Row groups, chunks of HDF5 and zarr, and members of archives are read a block at a time. In a full shuffle every sample
of a batch is in another block. Here the order is, by the law:

(S1) Blocks. Sample ``i`` is in block ``i // block``; the last block may be short.
(S2) Order. The full blocks come in the order of a keyed permutation; a short block is put in at a keyed place.
(S3) Windows. Each ``window`` consecutive blocks of that order are a window; the last window may have fewer.
(S4) Samples. All samples of a window come in the order of a keyed permutation, before any of the next window.

So a reader that keeps the blocks of one window in memory reads each block once in an epoch. With one window over all
blocks the order is a full shuffle. Positions are found in constant time: only one block is short, and its place is
known.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Final, final

import numpy as np

from torchdistinput.plan.permutation import Ints, Permutation, word

if TYPE_CHECKING:
    from collections.abc import Iterator


_AT_ONCE: Final = 2**12
# The parts of the key that tell the three permutations of an order apart.
_BLOCKS, _SHORT, _SAMPLES = 1, 2, 3


@final
class BlockShuffle:
    """An order of ``[0, n)`` by the law above, chosen by a key. It has the interface of ``Permutation``.

    Args:
      n: how many samples, from 0 to ``2**45``.
      block: samples of a block, at least 1.
      window: blocks of a window, at least 1.
      *key: ints of any size and sign, such as ``seed, epoch``.

    Raises:
      TypeError: if an argument is not an int.
      ValueError: if ``n`` is out of range, or ``block`` or ``window`` is less than 1.
    """

    def __init__(self, n: int, block: int, window: int, *key: int) -> None:
        self._length, self._block, self._window = operator.index(n), operator.index(block), operator.index(window)
        if self._block < 1 or self._window < 1:
            raise ValueError(f"block and window must be at least 1, got block={block} and window={window}")
        self._key = tuple(operator.index(part) for part in key)
        full, self._short = divmod(self._length, self._block)
        self._order = Permutation(full, *self._key, _BLOCKS)
        self._num_blocks = full + bool(self._short)
        # The place of the short block among all; behind all of them if there is none.
        self._place = word(*self._key, _SHORT) % self._num_blocks if self._short else self._num_blocks
        self._last: tuple[int, Ints, Permutation] | None = None

    def __len__(self) -> int:
        """How many samples are shuffled."""
        return self._length

    def __iter__(self) -> Iterator[int]:
        """Yields the samples in their shuffled order, as Python ints."""
        for start in range(0, self._length, _AT_ONCE):
            yield from self.block(start, min(start + _AT_ONCE, self._length)).tolist()

    def block(self, start: int, stop: int) -> Ints:
        """The samples at places ``start`` to ``stop - 1``: int64, of shape ``(stop - start,)``.

        Raises:
          IndexError: unless ``0 <= start <= stop <= n``.
        """
        if not 0 <= start <= stop <= self._length:
            raise IndexError(f"block [{start}, {stop}) is outside of a shuffle of [0, {self._length})")
        found = np.empty(stop - start, np.int64)
        at = start
        while at < stop:
            number = self._window_of(at)
            first, end = self._start_of(number), min(self._start_of(number + 1), stop)
            blocks, samples = self._opened(number)
            which, inside = np.divmod(samples.block(at - first, end - first), self._block)
            found[at - start : end - start] = blocks[which] * self._block + inside
            at = end
        return found

    def _start_of(self, window: int) -> int:
        """The place of the first sample of a window."""
        blocks = min(window * self._window, self._num_blocks)
        return blocks * self._block - (self._block - self._short if blocks > self._place else 0)

    def _window_of(self, place: int) -> int:
        """The window of a place."""
        found = place // (self._window * self._block)
        behind_short = place + self._block - self._short
        return behind_short // (self._window * self._block) if place >= self._start_of(found + 1) else found

    def _opened(self, window: int) -> tuple[Ints, Permutation]:
        """The blocks of a window, a short one last, and the order of its samples."""
        if self._last is None or self._last[0] != window:
            first, end = window * self._window, min((window + 1) * self._window, self._num_blocks)
            has_short = first <= self._place < end
            # The short block takes a place of its own: full blocks behind it are one place further.
            lo = first - (first > self._place)
            blocks = self._order.block(lo, lo + end - first - has_short)
            if has_short:
                blocks = np.append(blocks, np.int64(self._num_blocks - 1))
            size = self._start_of(window + 1) - self._start_of(window)
            self._last = window, blocks, Permutation(size, *self._key, _SAMPLES, window)
        return self._last[1:]
