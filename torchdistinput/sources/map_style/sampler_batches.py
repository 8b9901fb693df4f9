"""Draws or skips batches of the user's sampler; for torch's own samplers without making lists of indices.

If the sampler is exactly one of torch's own (or a ``ShuffleSampler``), its indices are known, and batches are skipped
without being made, at the cost of the random draws. Batches that are taken stay arrays until a list is needed. The
values are torch's, and so are the draws: the same calls on the same generators, at the same ``next()``, including the
extra permutation that a ``RandomSampler`` draws from the user's generator when its indices run out. A subclass may do
anything, so it is iterated as it is, and skipped by iterating.

Batches may be drawn further ahead than torch would, and so may the draws that a ``RandomSampler`` makes from a user's
generator in the middle of an epoch and at its end: only with ``prefetch=0`` a loop that is left early leaves the
generator as torch's loop does.

What torch draws is not promised anywhere. So before the first epoch of a process the orders made here are compared with
those of the installed torch, and given up where they differ: its samplers are then iterated like anybody else's.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from functools import cache
from itertools import chain, islice, repeat
from itertools import count as counting
from typing import Any, Final, NamedTuple, Protocol, cast, final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from torchdistinput.sources.kernel.index_array import IndexArray
from torchdistinput.sources.map_style.shuffle_sampler import ShuffleSampler

_LOG = logging.getLogger("torchdistinput")

_BLOCK: Final = 16_384  # indices that are evaluated (keyed permutation) or widened (drawn permutation) together
_MOST_NARROW: Final = 2**31 - 1
_DRAWN_TOGETHER: Final = 32  # indices that a RandomSampler with replacement draws together


class SkippedBatches(NamedTuple):
    """The batches that were skipped."""

    batches: int
    samples: int


class Batches(Protocol):
    """The batches of one epoch."""

    def draw(self) -> Any:
        """The next batch, as an ``IndexArray`` where torch would yield a list of indices from one of its own samplers.

        Raises:
          StopIteration: there is no batch left.
        """

    def skip(self, count: int) -> SkippedBatches:
        """Skips ``count`` batches, and makes the draws that yielding them would make; ``sys.maxsize``: all of them."""


def size_of(batch: Any) -> int:
    """Samples in an item of a sampler: the length of a list or tuple; any other item is one sample."""
    return len(batch) if isinstance(batch, list | tuple) else 1


def batches_of(batches: Iterable[Any], size: Callable[[Any], int] = size_of) -> Batches:
    """Begins an epoch of a batch sampler, or of a sampler that yields single indices or ready lists. Local.

    Args:
      batches: the user's sampler; an iterable of any kind.
      size: counts the samples of a batch, where batches are counted one by one.
    """
    if _draws_as_torch():
        if type(batches) is BatchSampler:
            return _CutBatches(batches)
        known = _known(batches)
        if known is not None:
            return _Singles(known)
    return _IteratedBatches(iter(batches), size)


class _Indices(Protocol):
    """The indices of one epoch, in order."""

    def take(self, count: int) -> IndexArray | list[Any]:
        """The next ``count`` indices; fewer at the end, which is only searched for then."""

    def skip(self, count: int) -> int:
        """Skips ``count`` indices. Returns how many there were."""


@final
class _CutBatches:
    """The batches that ``BatchSampler`` makes from its sampler.

    Args:
      batches: the batch sampler.
    """

    def __init__(self, batches: BatchSampler) -> None:
        self._batches = batches
        self._drop_last = False
        self._first_size = 0
        self._indices: _Indices | None = None
        self._ended = False
        # Its order is that of the epoch which begins here, though another one may begin before the first batch.
        self._order = _known(batches.sampler) if type(batches.sampler) is ShuffleSampler else None

    def draw(self) -> IndexArray | list[Any]:
        if self._ended:
            raise StopIteration
        self._ended = True  # also after an error, as torch's generator does
        indices = self._indices or self._opened()
        size = self._size()
        batch = indices.take(size)
        found = len(batch)
        if found < size and (not found or self._drop_last):
            raise StopIteration
        self._ended = False
        return batch

    def skip(self, count: int) -> SkippedBatches:
        if self._ended or not count:
            return SkippedBatches(0, 0)
        self._ended = True
        indices = self._opened()
        size = self._size()
        samples = indices.skip(count * size)
        if samples == count * size:
            self._ended = False
            return SkippedBatches(count, samples)
        full, rest = divmod(samples, size)
        return SkippedBatches(full, full * size) if self._drop_last else SkippedBatches(full + bool(rest), samples)

    def _opened(self) -> _Indices:
        """The indices; torch's generator asks its sampler for them at its first ``next()``."""
        if self._indices is None:
            self._drop_last, self._first_size = self._batches.drop_last, self._batches.batch_size
            sampler = self._batches.sampler
            known = self._order or _known(sampler)
            self._indices = _IteratedIndices(iter(sampler)) if known is None else known
        return self._indices

    def _size(self) -> int:
        # A new batch size takes effect within an epoch; with drop_last torch has read the size at the start.
        return self._first_size if self._drop_last else self._batches.batch_size


@final
class _Singles:
    """Single indices, each of which is a batch."""

    def __init__(self, indices: _ChunkedIndices) -> None:
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
    """Batches of any other iterable, which cannot be predicted."""

    def __init__(self, batches: Iterator[Any], size: Callable[[Any], int]) -> None:
        self._batches = batches
        self._size = size

    def draw(self) -> Any:
        return next(self._batches)

    def skip(self, count: int) -> SkippedBatches:
        passed = counting()
        samples = sum(self._size(batch) for batch, _ in zip(islice(self._batches, count), passed, strict=False))
        return SkippedBatches(next(passed), samples)


@final
class _IteratedIndices:
    """Indices of any other iterable, which cannot be predicted."""

    def __init__(self, indices: Iterator[Any]) -> None:
        self._indices = indices

    def take(self, count: int) -> list[Any]:
        return [*islice(self._indices, count)]

    def skip(self, count: int) -> int:
        passed = counting()
        deque(zip(islice(self._indices, min(count, sys.maxsize)), passed, strict=False), maxlen=0)
        return next(passed)


class _Chunk(NamedTuple):
    """Determined indices: their number, those at positions ``lo`` to ``hi - 1``, and how many to read at a time."""

    length: int
    between: Callable[[int, int], npt.NDArray[np.int64] | range]
    together: int = sys.maxsize


def _known(sampler: object) -> _ChunkedIndices | None:
    """The indices of an epoch that begins now, if they can be addressed; else ``None``, and nothing has begun."""
    if type(sampler) is SequentialSampler:
        numbers = range(len(sampler.data_source))
        return _ChunkedIndices(iter([_Chunk(len(numbers), lambda lo, hi: numbers[lo:hi])]))
    if type(sampler) is ShuffleSampler:
        order = sampler.next_order()
        return _ChunkedIndices(iter([_Chunk(len(order), order.block, _BLOCK)]))
    if type(sampler) is RandomSampler:
        return _ChunkedIndices((_replaced if sampler.replacement else _permutations)(sampler))
    return None


@final
class _ChunkedIndices:
    """Indices that are drawn in chunks; inside of a chunk, skipping costs nothing.

    Args:
      chunks: draws the chunks.
    """

    def __init__(self, chunks: Iterator[_Chunk]) -> None:
        self._chunks = chunks
        self._chunk = _NOTHING
        self._place = 0  # the position in the chunk after the ready indices
        self._ready: npt.NDArray[np.int64] | range = range(0)
        self._used = 0  # how many of the ready indices were used

    def take(self, count: int) -> IndexArray:
        used = self._used
        if used + count <= len(self._ready):
            self._used = used + count
            return IndexArray(self._ready[used : used + count])
        drawn = IndexArray(self._ready[used:])
        self._used = len(self._ready)
        # A copy, as a view would keep the whole permutation while the next one is drawn.
        parts = [drawn.array().copy()] if len(drawn) else []
        left = count - len(drawn)
        while left and self._reach():
            chunk = self._chunk
            stop = min(self._place + max(left, chunk.together - chunk.together % left), chunk.length)
            self._ready = chunk.between(self._place, stop)
            self._place, self._used = stop, min(left, len(self._ready))
            first = IndexArray(self._ready[: self._used])
            if self._used == count:
                return first
            parts.append(first.array())
            left -= self._used
        return IndexArray(np.concatenate(parts) if parts else range(0))

    def skip(self, count: int) -> int:
        step = min(count, len(self._ready) - self._used)
        self._used += step
        left = count - step
        while left and self._reach():
            step = min(left, self._chunk.length - self._place)
            self._place += step
            left -= step
        return count - left

    def _reach(self) -> bool:
        """Whether there is another index; draws its chunk."""
        while self._place == self._chunk.length:
            # Frees a permutation before the next one is drawn.
            self._chunk, self._place, self._ready, self._used = _NOTHING, 0, range(0), 0
            chunk = next(self._chunks, None)
            if chunk is None:
                return False
            self._chunk = chunk
        return True


_NOTHING: Final = _Chunk(0, range)


def _chunk_of_tensor(numbers: torch.Tensor) -> _Chunk:
    array = cast("npt.NDArray[np.int64]", numbers.numpy(force=True))  # a default device may have drawn the numbers
    return _Chunk(len(array), lambda lo, hi: array[lo:hi])


def _permutation(generator: torch.Generator, n: int, first: int) -> _Chunk:
    """The ``first`` indices of the permutation of ``n`` that ``torch.randperm`` draws.

    With 32-bit indices, if they suffice, torch makes the same swaps with the same draws in half the memory. This takes
    half the time, which is mostly spent waiting for memory. On the CPU only: other devices draw in their own way.
    """
    if n > _MOST_NARROW or torch.get_default_device().type != "cpu":
        return _chunk_of_tensor(_start(torch.randperm(n, generator=generator), first))
    narrow = _start(torch.randperm(n, generator=generator, dtype=torch.int32), first).numpy()
    return _Chunk(first, lambda lo, hi: narrow[lo:hi].astype(np.int64), _BLOCK)


def _start(permutation: torch.Tensor, first: int) -> torch.Tensor:
    """The ``first`` numbers of the permutation; a copy if they are not all, so that the rest is freed."""
    return permutation if first == len(permutation) else permutation[:first].clone()


def _generator_of(sampler: RandomSampler) -> torch.Generator:
    """The generator of an epoch that begins: the user's, or a new one with a drawn seed."""
    if sampler.generator is not None:
        own: torch.Generator = sampler.generator
        return own
    return torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))


def _permutations(sampler: RandomSampler) -> Iterator[_Chunk]:
    """The draws of ``RandomSampler`` without replacement: permutations, and the start of one more, usually empty.

    The last one matters to the user's generator only, if it is empty.
    """
    n, generator = len(sampler.data_source), _generator_of(sampler)
    full, rest = divmod(sampler.num_samples, n)
    for _ in range(full):
        yield _permutation(generator, n, n)
    if rest or sampler.generator is not None:
        yield _permutation(generator, n, rest)


def _replaced(sampler: RandomSampler) -> Iterator[_Chunk]:
    """The draws of ``RandomSampler`` with replacement: groups of 32, and a last group with the rest."""
    n, generator = len(sampler.data_source), _generator_of(sampler)
    groups, rest = divmod(sampler.num_samples, _DRAWN_TOGETHER)
    for size in chain(repeat(_DRAWN_TOGETHER, groups), [rest]):
        yield _chunk_of_tensor(torch.randint(high=n, size=(size,), dtype=torch.int64, generator=generator))


@cache
def _draws_as_torch() -> bool:
    """Whether this module makes of torch's samplers what the installed torch makes. Looked at once in a process."""
    state = torch.get_rng_state()
    try:
        with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
            same = all(_epoch(case, state, ours=True) == _epoch(case, state, ours=False) for case in _COMPARED)
    except Exception as error:  # whatever is new in it
        _LOG.debug("while the orders of samplers were compared: %r", error)
        same = False
    finally:
        torch.set_rng_state(state)
    if not same:
        _LOG.warning(
            "torch %s draws the order of a RandomSampler, or cuts it into batches, in another way than known: its "
            "samplers are iterated. The batches are torch's; to resume in the middle of an epoch takes longer.",
            torch.__version__,
        )
    return same


_COMPARED: Final = (
    (5, 12, False, False, False),
    (5, 12, False, True, True),
    (4, 4, False, False, True),
    (40, 70, True, True, False),
    (40, 64, True, False, True),
)
"""What is compared: samples, how many are drawn, with replacement, ``drop_last``, with a generator of the user's."""


def _epoch(case: tuple[int, int, bool, bool, bool], state: torch.Tensor, *, ours: bool) -> tuple[list[Any], list[int]]:
    """The batches of such a case, from a default random state on, and the random state after them."""
    n, drawn, replacement, drop_last, own = case
    torch.set_rng_state(state)
    generator = torch.Generator().manual_seed(n) if own else None
    batches = BatchSampler(RandomSampler(range(n), replacement, drawn, generator), 3, drop_last)
    found = _all_of(_CutBatches(batches)) if ours else list(batches)
    return found, (torch.get_rng_state() if generator is None else generator.get_state()).tolist()


def _all_of(batches: _CutBatches) -> list[Any]:
    found = []
    with suppress(StopIteration):
        while True:
            found.append(cast(IndexArray, batches.draw()).tolist())
    return found
