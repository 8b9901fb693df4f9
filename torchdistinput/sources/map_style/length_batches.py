"""Batch samplers by the lengths of samples: ``TokenBatchSampler`` and ``BucketBatchSampler``.

They make *global* batches, so all ranks are in the same batch, and in the same bucket, at each step. They draw indices
from a sampler, and the batches follow from its order; so a resume replays the indices, and reads no sample.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Literal, TypeAlias, final

from torch.utils.data import Sampler

from torchdistinput.sources.checks import checked_int
from torchdistinput.sources.set_epoch import epoch_of, tell_epoch

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
