"""One replica's part of each batch of a batch sampler, for a plain torch ``DataLoader``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, final

from torch.utils.data import BatchSampler, Sampler

from torchdistinput.plan.batching import check_replica, distinct_steps, refuse_empty_pieces, split


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
