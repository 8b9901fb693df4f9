"""Draws or skips batches of the user's sampler; for torch's own samplers without making lists of indices.

The indices of a ``SequentialSampler``, a ``ShuffleSampler`` and a ``RandomSampler`` of all samples are known as a
whole: batches of them are arrays, and skipping costs nothing. Any other sampler is iterated, and skipped by iterating.

Batches may be drawn further ahead than torch would, and so may the permutation that a ``RandomSampler`` draws from a
user's generator at its end: only with ``prefetch=0`` a loop that is left early leaves the generator as torch's does.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count as counting
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol, cast, final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from torchdistinput.plan.block_shuffle import BlockShuffle
from torchdistinput.plan.permutation import Permutation
from torchdistinput.sources.kernel.index_array import IndexArray
from torchdistinput.sources.map_style.samplers import ShuffleSampler

_BLOCK: Final = 16_384  # indices of a keyed permutation that are evaluated together

_Order = npt.NDArray[np.int64] | range | Permutation | BlockShuffle


class SkippedBatches(NamedTuple):
    """The batches that were skipped."""

    batches: int
    samples: int


class Batches(Protocol):
    """The batches of one epoch."""

    def draw(self) -> Any:
        """The next batch, as an ``IndexArray`` where its indices are known. Raises ``StopIteration`` at the end."""

    def skip(self, count: int) -> SkippedBatches:
        """Skips ``count`` batches, and makes their draws; ``sys.maxsize``: all of them."""


def size_of(batch: Any) -> int:
    """Samples in an item of a sampler: the length of a list or tuple; any other item is one sample."""
    return len(batch) if isinstance(batch, list | tuple) else 1


def batches_of(batches: Iterable[Any], size: Callable[[Any], int] = size_of) -> Batches:
    """Begins an epoch of a batch sampler, or of a sampler that yields single indices or ready lists. Local.

    Args:
      batches: the user's sampler; an iterable of any kind.
      size: counts the samples of a batch, where batches are counted one by one.
    """
    if type(batches) is BatchSampler:
        return _CutBatches(batches)
    if type(batches) is ShuffleSampler:
        return _Singles(_Known(batches.next_order()))
    return _IteratedBatches(iter(batches), size)


@final
class _CutBatches:
    """The batches that ``BatchSampler`` makes from its sampler, which is asked at the first of them, as by torch."""

    def __init__(self, batches: BatchSampler) -> None:
        self._size = batches.batch_size
        self._drop_last = batches.drop_last
        self._sampler = batches.sampler
        self._ended = False
        # A ShuffleSampler counts its epochs: this one's order is fixed when it begins.
        self._indices: _Known | _Iterated | None = None
        if type(self._sampler) is ShuffleSampler:
            self._indices = _Known(self._sampler.next_order())

    def _opened(self) -> _Known | _Iterated:
        if self._indices is None:
            self._indices = _indices_of(self._sampler)
        return self._indices

    def draw(self) -> IndexArray | list[Any]:
        if self._ended:
            raise StopIteration
        self._ended = True  # also after an error, as torch's generator does
        batch = self._opened().take(self._size)
        found = len(batch)
        if found < self._size:  # the order of the epoch is let go of, which a state may outlive
            self._indices = None
        if not found or (self._drop_last and found < self._size):
            raise StopIteration
        self._ended = found < self._size
        return batch

    def skip(self, count: int) -> SkippedBatches:
        if self._ended or not count:
            return SkippedBatches(0, 0)
        wanted = count * self._size
        found = self._opened().skip(wanted)
        self._ended = found < wanted
        full, rest = divmod(found, self._size)
        if self._drop_last:
            return SkippedBatches(full, full * self._size)
        return SkippedBatches(full + (rest > 0), found)


@final
class _Singles:
    """Single indices, each of which is a batch."""

    def __init__(self, indices: _Known) -> None:
        self._indices = indices

    def draw(self) -> int:
        taken = self._indices.take(1).tolist()
        if not taken:
            raise StopIteration
        return taken[0]

    def skip(self, count: int) -> SkippedBatches:
        passed = self._indices.skip(count)
        return SkippedBatches(passed, passed)


@final
class _IteratedBatches:
    """Batches of any other iterable."""

    def __init__(self, batches: Iterator[Any], size: Callable[[Any], int]) -> None:
        self._batches = batches
        self._size = size

    def draw(self) -> Any:
        return next(self._batches)

    def skip(self, count: int) -> SkippedBatches:
        passed = counting()
        samples = sum(self._size(batch) for batch, _ in zip(islice(self._batches, count), passed, strict=False))
        return SkippedBatches(next(passed), samples)


def _indices_of(sampler: Any) -> _Known | _Iterated:
    """The indices of an epoch that begins, with the draws that torch's sampler makes."""
    if type(sampler) is SequentialSampler:
        return _Known(range(len(sampler.data_source)))
    if type(sampler) is not RandomSampler or sampler.replacement or sampler.num_samples != len(sampler.data_source):
        return _Iterated(iter(sampler))
    generator: torch.Generator | None = sampler.generator
    if generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        return _Known(_permutation(sampler.num_samples, torch.Generator().manual_seed(seed)))
    again = partial(_permutation, sampler.num_samples, generator)
    return _Known(again(), at_end=again)  # torch draws another one at the end, and uses nothing of it


def _permutation(n: int, generator: torch.Generator) -> npt.NDArray[np.int64]:
    # A default device may have drawn the numbers.
    return cast("npt.NDArray[np.int64]", torch.randperm(n, generator=generator).numpy(force=True))


@final
class _Known:
    """Indices that are known.

    Args:
      order: an array or a range; or a permutation, which is evaluated in blocks.
      at_end: called when an index past the last one is asked for.
    """

    def __init__(self, order: _Order, at_end: Callable[[], object] | None = None) -> None:
        self._order = order
        self._at_end = at_end
        self._at = 0
        self._ready: npt.NDArray[np.int64] | range = range(0)
        self._begin = 0  # the place of the first ready index
        if isinstance(order, range | np.ndarray):
            self._ready = order

    def take(self, count: int) -> IndexArray:
        lo = self._at
        hi = lo + self.skip(count)
        if hi > self._begin + len(self._ready) and not isinstance(self._order, range | np.ndarray):
            stop = min(lo + max(count, _BLOCK - _BLOCK % count), len(self._order))
            self._ready, self._begin = self._order.block(lo, stop), lo
        return IndexArray(self._ready[lo - self._begin : hi - self._begin])

    def skip(self, count: int) -> int:
        step = min(count, len(self._order) - self._at)
        self._at += step
        if step < count and self._at_end is not None:
            self._at_end()
            self._at_end = None
        return step


@final
class _Iterated:
    """Indices of any other iterable."""

    def __init__(self, indices: Iterator[Any]) -> None:
        self._indices = indices

    def take(self, count: int) -> list[Any]:
        return [*islice(self._indices, count)]

    def skip(self, count: int) -> int:
        passed = counting()
        deque(zip(islice(self._indices, min(count, sys.maxsize)), passed, strict=False), maxlen=0)
        return next(passed)
