"""Gives torch's DataPipes their shuffle seed and their shard, as torch's ``DataLoader`` does.

torch's loader does this only for a DataPipe that it reads itself. Here an iterable of this library stands between, so
the seed and the shard are set here, when and as often as torch sets them. Every rank draws the same seed. Under HINT a
``sharding_filter`` divides the data among the ranks and their loader workers, as with torch; else among the loader
workers of a rank.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard, final, runtime_checkable

import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding, get_all_graph_pipes


@runtime_checkable
class _ShardPipe(Protocol):
    def apply_sharding(self, num_of_instances: int, instance_id: int) -> Any: ...


def is_data_pipe(data: object) -> TypeGuard[IterDataPipe[Any]]:
    """Whether the data is a DataPipe, for which torch's loader would set a seed and a shard. Local."""
    return isinstance(data, IterDataPipe)


def has_sharding_filter(data: object) -> bool:
    """Whether the data is a DataPipe with a ``sharding_filter``, which divides itself once its shard is set. Local."""
    return is_data_pipe(data) and any(isinstance(each, _ShardPipe) for each in get_all_graph_pipes(traverse_dps(data)))


@final
class PipeSetting:
    """The seed and shard for the DataPipe of a loader. It is sent to the loader workers.

    Args:
      num_ranks: how many ranks divide the data; 1 if each rank reads all of it.
      rank: the number of this rank among them.
      persistent: whether loader workers are persistent. They then get the seeds of later epochs by shared memory.
    """

    def __init__(self, num_ranks: int, rank: int, *, persistent: bool) -> None:
        self._num_ranks, self._rank = num_ranks, rank
        seed = torch.zeros((), dtype=torch.int64, device="cpu")
        self._seed: torch.Tensor = seed.share_memory_() if persistent else seed  # type: ignore[no-untyped-call] # torch's

    def draw(self, generator: torch.Generator | None) -> None:
        """Draws the seed of an epoch from the loader's generator, when the epoch begins."""
        self._seed.copy_(torch.empty((), dtype=torch.int64).random_(generator=generator))

    def tell_part(self, pipe: IterDataPipe[Any], worker: int = 0, num_workers: int = 1) -> None:
        """Sets the shard: that of a loader worker, or all data of this rank. Call it in the process that reads."""
        apply_sharding(pipe, num_workers * self._num_ranks, worker * self._num_ranks + self._rank)

    def tell_seed(self, pipe: IterDataPipe[Any]) -> None:
        """Sets the seed of the epoch. Call it in the process that reads."""
        apply_random_seed(pipe, torch.Generator().manual_seed(int(self._seed)))
