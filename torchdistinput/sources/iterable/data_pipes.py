"""DataPipes of torch: iterables made of iterables, which torch's loader tells their seed and their part.

torch's loader tells only those that it reads itself. Here an iterable of our own stands between, so they are told here,
when and as often as torch tells them. Every rank draws the same seed. Where the policy is HINT, a ``sharding_filter``
divides the data among the ranks and their loader workers, as with torch; else among the loader workers of a rank.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard, final, runtime_checkable

import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding, get_all_graph_pipes

__all__ = ["PipeSetting", "has_sharding_filter", "is_data_pipe"]


@runtime_checkable
class _Shards(Protocol):
    def apply_sharding(self, num_of_instances: int, instance_id: int) -> Any: ...


def is_data_pipe(data: object) -> TypeGuard[IterDataPipe[Any]]:
    """Whether torch's loader would tell it a seed and a part. Local."""
    return isinstance(data, IterDataPipe)


def has_sharding_filter(data: object) -> bool:
    """Whether it is a DataPipe that divides itself, once it is told its part. Local."""
    return is_data_pipe(data) and any(isinstance(each, _Shards) for each in get_all_graph_pipes(traverse_dps(data)))


@final
class PipeSetting:
    """What the DataPipe of a loader is told. Goes to its loader workers.

    Args:
      num_ranks: how many ranks divide it; 1 where each reads all of it.
      rank: which of them this is.
      lasting: whether loader workers live on, which then hear of the seeds of later epochs by shared memory.
    """

    def __init__(self, num_ranks: int, rank: int, *, lasting: bool) -> None:
        self._num_ranks, self._rank = num_ranks, rank
        seed = torch.zeros((), dtype=torch.int64, device="cpu")
        self._seed: torch.Tensor = seed.share_memory_() if lasting else seed  # type: ignore[no-untyped-call] # torch's

    def draw(self, generator: torch.Generator | None) -> None:
        """An epoch begins: its seed is drawn from the loader's generator."""
        self._seed.copy_(torch.empty((), dtype=torch.int64).random_(generator=generator))

    def tell_part(self, pipe: IterDataPipe[Any], worker: int = 0, num_workers: int = 1) -> None:
        """Tells it which part to read: that of a loader worker, or all of this rank's. Where it is read."""
        apply_sharding(pipe, num_workers * self._num_ranks, worker * self._num_ranks + self._rank)

    def tell_seed(self, pipe: IterDataPipe[Any]) -> None:
        """Tells it the seed of the epoch. Where it is read."""
        apply_random_seed(pipe, torch.Generator().manual_seed(int(self._seed)))
