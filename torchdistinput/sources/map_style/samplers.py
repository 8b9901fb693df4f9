"""Samplers for any torch loader: a shuffle in constant memory, batches by length, one replica's part of each batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import pairwise
from typing import Any, Final, Literal, TypeAlias, final

from torch.utils.data import BatchSampler, Sampler

from torchdistinput.plan.batching import check_replica, distinct_steps, refuse_empty_pieces, split
from torchdistinput.plan.block_shuffle import BlockShuffle
from torchdistinput.plan.permutation import Permutation
from torchdistinput.sources.checks import checked_int
from torchdistinput.sources.set_epoch import epoch_of, tell_epoch

_MAX_LENGTH: Final = 2**45
_WINDOW: Final = 16


@final
class ShuffleSampler(Sampler[int]):
    """Shuffles ``[0, n)`` anew in each epoch, in constant memory, and can start anywhere in the order at once.

    The order of an epoch is a function of ``(n, seed, epoch)``, the same on every rank and machine and in every
    version; no random state is read or moved. torch's ``RandomSampler`` draws the whole order first: with 10**9 samples
    8 GB and minutes, here nothing. Each ``iter()`` is the next epoch, starting from 0 or from what ``set_epoch`` said.
    Local: no communication.

    >>> list(torch.utils.data.DataLoader(range(10), batch_size=8, sampler=tdi.ShuffleSampler(10, seed=1)))
    [tensor([8, 2, 1, 3, 4, 9, 7, 0]), tensor([5, 6])]

    **Data that is stored in blocks**, such as row groups, or chunks of HDF5 and zarr: with ``block`` whole blocks are
    shuffled, and the samples of each ``window`` consecutive blocks among each other; see ``plan.block_shuffle``. A
    dataset that keeps the last ``window`` blocks that it read, for example by ``functools.lru_cache``, then reads each
    block once in an epoch. Under policy DATA each rank has a part of each batch, and so reads the blocks too.

    Args:
      n: how many samples, from 0 to ``2**45``.
      seed: an int of any size and sign, the same on every rank.
      block: samples of a block as the data is stored; ``None``: the order is a full shuffle.
      window: blocks whose samples are mixed; with ``block`` only.

    Raises:
      TypeError: an argument is not an int.
      ValueError: ``n`` is out of range; ``block`` or ``window`` is less than 1; there is a ``window`` without a
        ``block``.
    """

    def __init__(self, n: int, seed: int = 0, *, block: int | None = None, window: int | None = None) -> None:
        length = checked_int("n", n)
        if not 0 <= length <= _MAX_LENGTH:
            raise ValueError(f"n is {length}; a ShuffleSampler needs 0 <= n <= 2**45, the number of samples.")
        self._length = length
        self._seed = checked_int("seed", seed)
        if block is None and window is not None:
            raise ValueError(f"window={window!r} was given without block, the number of samples of a block")
        self._block = None if block is None else checked_int("block", block, at_least=1)
        self._window = checked_int("window", _WINDOW if window is None else window, at_least=1)
        self._epoch = 0

    @property
    def seed(self) -> int:
        """The seed of all epochs. Local."""
        return self._seed

    @property
    def epoch(self) -> int:
        """The epoch of the next ``iter()``. Local."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next ``iter()``; later ones follow. Local.

        Raises:
          TypeError: ``epoch`` is not an int.
        """
        self._epoch = checked_int("epoch", epoch)

    @property
    def key(self) -> int | str:
        """What the orders of all epochs follow from, with ``n``: the seed, and the blocks. Local."""
        return self._seed if self._block is None else f"{self._seed}, blocks of {self._block}, {self._window} a window"

    def order(self, epoch: int) -> Permutation | BlockShuffle:
        """The order of an epoch, for looking up any position in it. Local."""
        if self._block is None:
            return Permutation(self._length, self._seed, epoch)
        return BlockShuffle(self._length, self._block, self._window, self._seed, epoch)

    def next_order(self) -> Permutation | BlockShuffle:
        """Begins the next epoch, as ``iter()`` does, and returns its order. Local."""
        order = self.order(self._epoch)
        self._epoch += 1
        return order

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        """The samples of the next epoch."""
        return iter(self.next_order())


Lengths: TypeAlias = Sequence[int] | Callable[[int], int]
"""An array with the length of each sample, or a function of the index."""


def length_reader(lengths: Lengths) -> Callable[[int], int]:
    """The length of a sample by its index; a negative one is a ``ValueError``."""
    of = lengths if callable(lengths) else lengths.__getitem__

    def length_of(index: int) -> int:
        found = int(of(index))
        if found < 0:
            raise ValueError(f"the length of sample {index} is {found}; it must be 0 or more.")
        return found

    return length_of


@final
class TokenBatchSampler(Sampler[list[int]]):
    """Batches of at most so many tokens, in the order of a sampler. Local: no communication.

    Give it to any loader as ``batch_sampler``; under policy DATA a batch is the global one.

    >>> list(tdi.TokenBatchSampler(range(6), lengths=[1, 9, 2, 8, 1, 7], max_tokens=10, padded=False))
    [[0, 1], [2, 3], [4, 5]]

    Args:
      sampler: the order of the samples; its ``set_epoch`` and generator are used as in torch.
      lengths: tokens of each sample: an array, or a function of the index. No sample is read for it.
      max_tokens: tokens of a batch at most.
      padded: whether all samples of a batch count with the length of the longest one, as they do once padded.
      max_samples: samples of a batch at most; ``None`` for any number.
      too_long: what is done with a sample of more than ``max_tokens``: ``"error"``, or ``"drop"``, which leaves it out
        and counts it in ``dropped``.
      drop_last: whether the last batch, which others could have filled up, is left out.

    Raises:
      ValueError: an argument is less than 1, or another word; while it is iterated: a sample is too long (named), or a
        length is negative.
    """

    def __init__(
        self,
        sampler: Iterable[int],
        lengths: Lengths,
        max_tokens: int,
        *,
        padded: bool = False,
        max_samples: int | None = None,
        too_long: Literal["error", "drop"] = "error",
        drop_last: bool = False,
    ) -> None:
        if too_long not in ("error", "drop"):
            raise ValueError(f"too_long is {too_long!r}; it must be 'error' or 'drop'.")
        self.sampler = sampler
        self.drop_last = drop_last
        self.dropped = 0
        """Samples that were too long, in the epoch that was begun last."""
        self._length_of = length_reader(lengths)
        self._max_tokens = checked_int("max_tokens", max_tokens, at_least=1)
        self._max_samples = None if max_samples is None else checked_int("max_samples", max_samples, at_least=1)
        self._padded, self._too_long = padded, too_long

    @property
    def epoch(self) -> int | None:
        """The epoch that the sampler shows; ``None`` where it shows none. Local."""
        return epoch_of(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the sampler, if it has epochs. Local."""
        tell_epoch(epoch, self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of an epoch: lists of indices."""
        self.dropped = 0
        batch: list[int] = []
        total = longest = 0
        for index in self.sampler:
            length = self._length_of(index)
            if length > self._max_tokens:
                if self._too_long == "error":
                    raise ValueError(
                        f"sample {index} has {length} tokens, more than max_tokens={self._max_tokens}: no batch can "
                        'hold it. too_long="drop" leaves such samples out.'
                    )
                self.dropped += 1
                continue
            tokens = max(longest, length) * (len(batch) + 1) if self._padded else total + length
            if batch and (tokens > self._max_tokens or len(batch) == self._max_samples):
                yield batch
                batch, total, longest = [], 0, 0
            batch.append(index)
            total, longest = total + length, max(longest, length)
        if batch and not self.drop_last:
            yield batch


@final
class BucketBatchSampler(Sampler[list[int]]):
    """Batches of samples of similar length: a batch is filled from one bucket. Local: no communication.

    Buckets hold the samples that wait for a full batch; at the end of an epoch they are emptied in their order. All
    ranks are in one bucket at a step, which tf.data calls coordinated reads.

    >>> lengths = [1, 9, 2, 8, 1, 7]
    >>> list(tdi.BucketBatchSampler(range(6), lengths, boundaries=[5], batch_size=2))
    [[0, 2], [1, 3], [4], [5]]

    Args:
      sampler: the order of the samples; see ``TokenBatchSampler``.
      lengths: see ``TokenBatchSampler``.
      boundaries: rising lengths: bucket ``i`` has the samples of ``boundaries[i - 1] <= length < boundaries[i]``.
      batch_size: samples of a batch, or one number for each of the ``len(boundaries) + 1`` buckets.
      drop_last: whether short batches at the end of an epoch are left out.

    Raises:
      ValueError: the boundaries do not rise, or there is another number of batch sizes; a batch size is less than 1.
    """

    def __init__(
        self,
        sampler: Iterable[int],
        lengths: Lengths,
        boundaries: Sequence[int],
        batch_size: int | Sequence[int],
        *,
        drop_last: bool = False,
    ) -> None:
        self.sampler = sampler
        self.drop_last = drop_last
        self._length_of = length_reader(lengths)
        self._boundaries = list(boundaries)
        if any(low >= high for low, high in pairwise(self._boundaries)):
            raise ValueError(f"boundaries={self._boundaries}; rising lengths are needed.")
        count = len(self._boundaries) + 1
        sizes = [batch_size] * count if isinstance(batch_size, int) else list(batch_size)
        if len(sizes) != count:
            raise ValueError(f"{len(sizes)} batch sizes for {count} buckets; give one number, or {count} of them.")
        self._sizes = [checked_int("batch_size", size, at_least=1) for size in sizes]

    @property
    def epoch(self) -> int | None:
        """The epoch that the sampler shows; ``None`` where it shows none. Local."""
        return epoch_of(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the sampler, if it has epochs. Local."""
        tell_epoch(epoch, self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of an epoch: lists of indices."""
        waiting: list[list[int]] = [[] for _ in self._sizes]
        for index in self.sampler:
            bucket = bisect_right(self._boundaries, self._length_of(index))
            waiting[bucket].append(index)
            if len(waiting[bucket]) == self._sizes[bucket]:
                batch, waiting[bucket] = waiting[bucket], []
                yield batch
        if not self.drop_last:
            yield from (batch for batch in waiting if batch)


@final
class DistributedBatchSampler(Sampler[list[Any]]):
    """One replica's part of each batch of a batch sampler, for a plain torch ``DataLoader``.

    The batches of all replicas put together, in order, are the batches of ``batch_sampler``: nothing is padded,
    dropped or repeated (law B1). A plain ``DataLoader`` cannot make an empty batch, so a piece may not be empty; use
    ``Strategy.distribute_dataset`` where that may happen. Local: no communication.

    >>> batches = torch.utils.data.BatchSampler(range(7), batch_size=4, drop_last=False)
    >>> [list(tdi.DistributedBatchSampler(batches, 2, rank)) for rank in range(2)]
    [[[0, 1], [4, 5]], [[2, 3], [6]]]

    Args:
      batch_sampler: yields lists of indices, the global batches; the same on every rank.
      num_replicas: how many replicas share each batch.
      rank: the number of this replica.

    Raises:
      BatchingError: a piece is empty: raised at construction if the sizes are known (a torch ``BatchSampler`` over a
        sampler with a length), else when the batch is drawn. The message names the step.
      ValueError: ``rank`` is not in ``[0, num_replicas)``.
    """

    def __init__(self, batch_sampler: Iterable[list[Any]], num_replicas: int, rank: int) -> None:
        check_replica(num_replicas, rank)
        self.batch_sampler = batch_sampler
        self.num_replicas = num_replicas
        self.rank = rank
        if type(batch_sampler) is BatchSampler and isinstance(batch_sampler.sampler, Sized):
            length, size = len(batch_sampler.sampler), batch_sampler.batch_size
            for step, each in distinct_steps(length, size, drop_last=batch_sampler.drop_last):
                refuse_empty_pieces(step, each, num_replicas)

    def __len__(self) -> int:
        if not isinstance(self.batch_sampler, Sized):
            raise TypeError(f"the batch sampler, a {type(self.batch_sampler).__name__}, has no length.")
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[Any]]:
        for step, batch in enumerate(self.batch_sampler):
            refuse_empty_pieces(step, len(batch), self.num_replicas)
            lo, hi = split(len(batch), self.num_replicas, self.rank)
            yield batch[lo:hi]
