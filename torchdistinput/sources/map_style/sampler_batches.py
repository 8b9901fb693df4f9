"""Draws or skips batches of the user's sampler; for torch's own samplers without making lists of indices.

If the sampler is exactly one of torch's own (or a ``ShuffleSampler``), its indices are known, and batches are skipped
without being made, at the cost of the random draws. Batches that are taken stay arrays until a list is needed. The
values are torch's, and so are the draws: the same calls on the same generators, at the same ``next()``, including the
extra permutation that a ``RandomSampler`` draws from the user's generator when its indices run out. A subclass may do
anything, so it is iterated as it is, and skipped by iterating.

Batches are drawn further ahead than torch would. A ``RandomSampler`` with a user's generator may draw from it in the
middle of an epoch and at its end. Such a draw is made ahead on a copy of the generator, and on the generator itself
when torch would make it (``catch_up``): so a loop that is left early leaves the generator as torch's loop does.

What torch draws is not promised anywhere. So before the first epoch of a process the orders made here are compared with
those of the installed torch, and given up where they differ: its samplers are then iterated like anybody else's.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from functools import cache, partial
from itertools import chain, islice, repeat
from itertools import count as counting
from typing import Any, Final, NamedTuple, Protocol, TypeVar, cast, final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from torchdistinput.sources.map_style.index_array import IndexArray
from torchdistinput.sources.map_style.shuffle_sampler import ShuffleSampler

_T = TypeVar("_T")

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

    def __next__(self) -> Any:
        """The next batch, as torch yields it."""

    def draw(self) -> Any:
        """The next batch, as an ``IndexArray`` where torch would yield a list of indices from one of its own samplers.

        Raises:
          StopIteration: there is no batch left.
        """

    def skip(self, count: int) -> SkippedBatches:
        """Skips ``count`` batches, and makes the draws that yielding them would make; ``sys.maxsize``: all of them."""

    def catch_up(self, batches: int) -> None:
        """Makes the postponed draws of the first ``batches`` batches, which torch would have drawn by now.

        Until the first call of this method, every draw is made at once.
        """


def size_of(batch: Any) -> int:
    """Samples in an item of a sampler: the length of a list or tuple; any other item is one sample."""
    return len(batch) if isinstance(batch, list | tuple) else 1


def batches_of(batches: Iterable[Any], size: Callable[[Any], int] = size_of) -> Batches:
    """Begins an epoch of a batch sampler, or of a sampler that yields single indices or ready lists. Local.

    Args:
      batches: the user's sampler; an iterable of any kind.
      size: counts the samples of a batch, where batches are counted one by one.
    """
    if type(batches) is BatchSampler and _draws_as_torch():
        return _CutBatches(batches)
    put_off = _PutOff()
    known = _known(batches, put_off)
    return _IteratedBatches(iter(batches), size) if known is None else _Singles(known, put_off)


class _Indices(Protocol):
    """The indices of one epoch, in order."""

    def take(self, count: int) -> IndexArray | list[Any]:
        """The next ``count`` indices; fewer at the end, which is only searched for then."""

    def skip(self, count: int) -> int:
        """Skips ``count`` indices. Returns how many there were."""


_KnownDraws = Callable[[object, "_PutOff"], "_ChunkedIndices | None"]


@final
class _PutOff:
    """Postponed draws: they were made on a copy of the user's generator, as torch would make them later."""

    def __init__(self) -> None:
        self.drawn = 0
        """Batches that were drawn here, including the one that is being drawn."""
        self._due = sys.maxsize  # batches that torch would have drawn by now
        self._draws: deque[tuple[int, Callable[[torch.Generator], object]]] = deque()  # with the number of the batch
        self._generator: torch.Generator | None = None  # the user's
        self._copy: torch.Generator | None = None

    def catch_up(self, batches: int) -> None:
        self._due = batches
        while self._draws and self._draws[0][0] <= self._due and self._generator is not None:
            self._draws.popleft()[1](self._generator)

    def draw(self, generator: torch.Generator, draw: Callable[[torch.Generator], _T]) -> _T:
        """The result of a draw for the current batch."""
        if self.drawn <= self._due:
            return draw(generator)
        if not self._draws:
            self._copy = torch.Generator(generator.device)
            self._copy.set_state(generator.get_state())
        self.draw_unseen(generator, draw)
        return draw(cast(torch.Generator, self._copy))

    def draw_unseen(self, generator: torch.Generator, draw: Callable[[torch.Generator], object]) -> None:
        """Postpones the last draw of an epoch. Only the generator's state after it matters, not its result."""
        if self.drawn <= self._due:
            draw(generator)
            return
        self._generator = generator
        self._draws.append((self.drawn, draw))


@final
class _CutBatches:
    """The batches that ``BatchSampler`` makes from its sampler.

    Args:
      batches: the batch sampler.
      known: gives the indices of a sampler whose order is known.
    """

    def __init__(self, batches: BatchSampler, known: _KnownDraws | None = None) -> None:
        self._batches = batches
        self._known = known or _known
        self._drop_last = False
        self._first_size = 0
        self._indices: _Indices | None = None
        self._ended = False
        self._put_off = _PutOff()
        self.catch_up = self._put_off.catch_up
        # Its order is that of the epoch which begins here, though another one may begin before the first batch.
        self._order = self._known(batches.sampler, self._put_off) if type(batches.sampler) is ShuffleSampler else None

    def __next__(self) -> list[Any]:
        batch = self.draw()
        return batch.tolist() if isinstance(batch, IndexArray) else batch

    def draw(self) -> IndexArray | list[Any]:
        if self._ended:
            raise StopIteration
        self._ended = True  # also after an error, as torch's generator does
        self._put_off.drawn += 1
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
        self._put_off.drawn += count
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
            known = self._order or self._known(sampler, self._put_off)
            self._indices = _IteratedIndices(iter(sampler)) if known is None else known
        return self._indices

    def _size(self) -> int:
        # A new batch size takes effect within an epoch; with drop_last torch has read the size at the start.
        return self._first_size if self._drop_last else self._batches.batch_size


@final
class _Singles:
    """Single indices, each of which is a batch."""

    def __init__(self, indices: _ChunkedIndices, put_off: _PutOff) -> None:
        self._indices = indices
        self._put_off = put_off
        self.catch_up = put_off.catch_up
        self._ended = False

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        self._ended = True  # also after an error, as torch's generator does
        self._put_off.drawn += 1
        taken = self._indices.take(1).tolist()
        if not taken:
            raise StopIteration
        self._ended = False
        return taken[0]

    draw = __next__

    def skip(self, count: int) -> SkippedBatches:
        if self._ended or not count:
            return SkippedBatches(0, 0)
        self._ended = True
        self._put_off.drawn += count
        passed = self._indices.skip(count)
        self._ended = passed < count
        return SkippedBatches(passed, passed)


@final
class _IteratedBatches:
    """Batches of any other iterable, which cannot be predicted."""

    def __init__(self, batches: Iterator[Any], size: Callable[[Any], int]) -> None:
        self._batches = batches
        self._size = size

    def __next__(self) -> Any:
        return next(self._batches)

    draw = __next__

    def skip(self, count: int) -> SkippedBatches:
        passed = counting()
        samples = sum(self._size(batch) for batch, _ in zip(islice(self._batches, count), passed, strict=False))
        return SkippedBatches(next(passed), samples)

    def catch_up(self, batches: int) -> None:
        """See ``Batches.catch_up``. The user's code has made its draws already."""


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


def _known(sampler: object, put_off: _PutOff) -> _ChunkedIndices | None:
    """The indices of an epoch that begins now, if they can be addressed; else ``None``, and nothing has begun."""
    return None if type(sampler) is RandomSampler and not _draws_as_torch() else _addressed(sampler, put_off)


def _addressed(sampler: object, put_off: _PutOff) -> _ChunkedIndices | None:
    """The same, whether or not they are torch's."""
    if type(sampler) is SequentialSampler:
        numbers = range(len(sampler.data_source))
        return _ChunkedIndices(iter([_Chunk(len(numbers), lambda lo, hi: numbers[lo:hi])]))
    if type(sampler) is ShuffleSampler:
        order = sampler.next_order()
        return _ChunkedIndices(iter([_Chunk(len(order), order.block, _BLOCK)]))
    if type(sampler) is RandomSampler:
        return _ChunkedIndices((_replaced if sampler.replacement else _permutations)(sampler, put_off))
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


def _drawing(sampler: RandomSampler, put_off: _PutOff) -> Callable[[Callable[[torch.Generator], _T]], _T]:
    """Begins an epoch: a function that makes draws from its generator: the user's, or a new one with a drawn seed.

    The state of a new one is not visible to the user, so its draws need not be postponed.
    """
    if sampler.generator is not None:
        return partial(put_off.draw, sampler.generator)
    own = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    return lambda draw: draw(own)


def _permutations(sampler: RandomSampler, put_off: _PutOff) -> Iterator[_Chunk]:
    """The draws of ``RandomSampler`` without replacement: permutations, and the start of one more, usually empty."""
    n, draw = len(sampler.data_source), _drawing(sampler, put_off)
    for _ in range(sampler.num_samples // n):
        yield draw(lambda generator: _permutation(generator, n, n))
    rest = sampler.num_samples % n
    if rest:
        yield draw(lambda generator: _permutation(generator, n, rest))
    elif sampler.generator is not None:
        put_off.draw_unseen(sampler.generator, lambda generator: _permutation(generator, n, 0))


def _replaced(sampler: RandomSampler, put_off: _PutOff) -> Iterator[_Chunk]:
    """The draws of ``RandomSampler`` with replacement: groups of 32, and a last group with the rest."""
    n, draw = len(sampler.data_source), _drawing(sampler, put_off)
    groups, rest = divmod(sampler.num_samples, _DRAWN_TOGETHER)
    for size in chain(repeat(_DRAWN_TOGETHER, groups), [rest]):
        yield draw(partial(_random_chunk, n, size))


def _random_chunk(n: int, size: int, generator: torch.Generator) -> _Chunk:
    return _chunk_of_tensor(torch.randint(high=n, size=(size,), dtype=torch.int64, generator=generator))


@cache
def _draws_as_torch() -> bool:
    """Whether this module makes of torch's samplers what the installed torch makes. Looked at once in a process."""
    state = torch.get_rng_state()
    try:
        with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
            same = all(_is_drawn_alike(*settings, state) for settings in _COMPARED)
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


def _is_drawn_alike(
    n: int,
    drawn: int,
    replacement: bool,  # noqa: FBT001
    drop_last: bool,  # noqa: FBT001
    own: bool,  # noqa: FBT001
    state: torch.Tensor,
) -> bool:
    found, left = [], []
    for ours in (False, True):
        torch.set_rng_state(state)
        generator = torch.Generator().manual_seed(n) if own else None
        sampler = RandomSampler(range(n), replacement=replacement, num_samples=drawn, generator=generator)
        batches = BatchSampler(sampler, 3, drop_last)
        found.append(_all_of(_CutBatches(batches, _addressed) if ours else iter(batches)))
        left.append(torch.get_rng_state() if generator is None else generator.get_state())
    return found[0] == found[1] and torch.equal(left[0], left[1])


def _all_of(batches: Any) -> list[Any]:
    found = []
    with suppress(StopIteration):
        while True:
            found.append(next(batches))
    return found
