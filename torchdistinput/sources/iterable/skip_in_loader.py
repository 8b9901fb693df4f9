"""Starts a plain torch ``DataLoader`` over map-style data within an epoch, without reading skipped samples."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard, final

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from torchdistinput.errors import StateMismatch
from torchdistinput.plan.seed_schedule import SeedSchedule
from torchdistinput.sources.kernel.index_array import IndexArray
from torchdistinput.sources.map_style.sampler_batches import Batches, batches_of
from torchdistinput.sources.map_style.shuffle_sampler import ShuffleSampler
from torchdistinput.sources.torch_loader.base_seeds import BaseSeeds
from torchdistinput.sources.torch_loader.settings import RebuiltLoader, settings_of
from torchdistinput.step_types import Start


def can_pass_over(data: object) -> TypeGuard[DataLoader[Any]]:
    """Whether the data is a plain torch loader over map-style data, which reads its batches by indices."""
    return type(data) is DataLoader and not isinstance(data.dataset, IterableDataset)


def passing_over(loader: DataLoader[Any], batches: int, at_least: int, start: Start) -> tuple[DataLoader[Any], Later]:
    """The same loader, but its first epoch begins some batches later; later epochs are whole. With its sampler.

    The loader's generators, or torch's default random state, must have the states of the start of the epoch.

    Args:
      loader: the user's loader.
      batches: how many batches to skip, if there are so many.
      at_least: how many there must be.
      start: says how many whole epochs of draws come first, and whether this epoch draws a seed for the loader workers.
    """
    own: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    seeds = BaseSeeds(loader.generator, start.seeds or SeedSchedule.of(persistent=loader.persistent_workers))
    shuffler = _shuffler(loader)
    number = 0 if shuffler is None else shuffler.epoch

    def begun() -> Batches:
        """An epoch as torch begins it; see ``plan.seed_schedule``."""
        again = loader.num_workers > 0 and shuffler is None and seeds.schedule is not SeedSchedule.NO_EPOCH
        asked = batches_of(own)
        seeds.draw()
        return batches_of(own) if again else asked

    for _ in range(start.replay):
        begun().skip(sys.maxsize)
    if shuffler is not None:
        shuffler.set_epoch(number)  # it counts its epochs, also those whose draws alone were made
    later = Later(own, begun(), batches, at_least)
    arguments: dict[str, Any] = {"batch_sampler": later}
    if loader.batch_sampler is None:
        arguments = {"batch_size": None, "sampler": later}
    settings = {**settings_of(loader), "worker_init_fn": loader.worker_init_fn, "generator": seeds.generator}
    return RebuiltLoader(loader.dataset, collate_fn=loader.collate_fn, **arguments, **settings), later


def tell_shuffler(loader: DataLoader[Any], epoch: int) -> None:
    """Sets the epoch of a ``ShuffleSampler``: it counts epochs itself, but in a new process its count is lost."""
    shuffler = _shuffler(loader)
    if shuffler is not None:
        shuffler.set_epoch(epoch)


def _shuffler(loader: DataLoader[Any]) -> ShuffleSampler | None:
    sampler = loader.batch_sampler.sampler if isinstance(loader.batch_sampler, BatchSampler) else loader.sampler
    return sampler if isinstance(sampler, ShuffleSampler) else None


@final
class Later:
    """A sampler or batch sampler whose first epoch begins some batches later.

    Args:
      batches: the user's sampler.
      first: its first epoch, at the start.
      skip: how many batches to skip.
      at_least: how many there must be.
    """

    def __init__(self, batches: Iterable[Any], first: Batches, skip: int, at_least: int) -> None:
        self._batches = batches
        self._first: Batches | None = first
        self._skip = skip
        self._at_least = at_least
        self.missing = 0
        """How many of the batches to skip were not there, once its first epoch has begun."""

    def __iter__(self) -> Iterator[Any]:
        # With loader workers torch makes two iterators, and uses the second.
        skip, self._skip = self._skip, 0
        first, self._first = self._first, None
        batches = batches_of(self._batches) if first is None else first
        if skip:
            passed = batches.skip(skip)
            self.missing = skip - passed.batches
            if passed.batches < self._at_least:
                raise StateMismatch(
                    f"the sampler of the dataset function's DataLoader ended after {passed.batches} batch(es), but "
                    f"the state says that {self._at_least} were delivered. It must be the same data and sampler."
                )
        while True:
            try:
                batch = batches.draw()
            except StopIteration:
                return
            yield batch.tolist() if isinstance(batch, IndexArray) else batch
