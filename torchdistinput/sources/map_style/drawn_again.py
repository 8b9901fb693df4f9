"""Draws the order of an epoch again, from the random states with which it began, and moves nothing of the user's.

A copy of torch's sampler, or of one of this library, draws, with copies of its generators; torch's default random state
is put back. What a sampler of the user's depends on, nobody knows.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, final

import numpy as np
import torch
from torch.utils.data import BatchSampler

from torchdistinput.plan.permutation import Ints
from torchdistinput.sources.epoch_rng import EpochRng
from torchdistinput.sources.kernel.epoch_order import cannot_know
from torchdistinput.sources.kernel.index_array import IndexArray
from torchdistinput.sources.map_style.sampler_batches import Batches, batches_of
from torchdistinput.sources.map_style.samplers import BucketBatchSampler, TokenBatchSampler
from torchdistinput.sources.random_state import BaseSeeds
from torchdistinput.sources.rng import generators_of
from torchdistinput.sources.set_epoch import tell_epoch
from torchdistinput.sources.torch_loader.settings import TORCH_SAMPLERS

_OF_SAMPLERS: Final = (BatchSampler, TokenBatchSampler, BucketBatchSampler)
"""Batch samplers that draw from a sampler."""


@final
class DrawnIndices:
    """Indices that a sampler drew, batch by batch; see ``SampleSequence``."""

    def __init__(self, batches: Sequence[IndexArray | Sequence[Any]]) -> None:
        self.ends = np.cumsum([len(each) for each in batches], dtype=np.int64)
        """Where each batch ends."""
        arrays = [each.array() for each in batches if isinstance(each, IndexArray)]
        self._indices: Ints | list[Any]
        if len(arrays) == len(batches):
            self._indices = np.concatenate([np.empty(0, np.int64), *arrays])
        else:
            self._indices = [
                index for each in batches for index in (each.tolist() if isinstance(each, IndexArray) else each)
            ]

    def __len__(self) -> int:
        return len(self._indices)

    def between(self, lo: int, hi: int) -> list[Any]:
        """See ``SampleSequence.between``."""
        found = self._indices[lo:hi]
        return found.tolist() if isinstance(found, np.ndarray) else found

    def found(self, sample: Any) -> Any:
        """See ``SampleSequence.found``: any, as the sampler may draw anything."""
        return sample


def draw_again(
    batches: Any, holders: Sequence[Any], generator: torch.Generator | None, random: EpochRng, epoch: int
) -> list[Any]:
    """The batches of an epoch, drawn by a copy of the user's sampler. Local; takes as long as the sampler takes.

    Args:
      batches: the user's batch sampler, or sampler.
      holders: the loader and samplers that hold generators, as for ``RandomState``.
      generator: of the loader.
      random: the states with which the epoch began, or an earlier one; see ``EpochRng.replay``.
      epoch: the number of the epoch.

    Raises:
      InputError: it is a sampler of the user's, or of another library.
    """
    own: dict[int, torch.Generator] = {}
    for each, state in zip(generators_of(*holders), random.generators, strict=True):
        own[id(each)] = torch.Generator(each.device)
        own[id(each)].set_state(state)
    copied = _copied(batches, own)
    seeds = BaseSeeds(None if generator is None else own[id(generator)])
    seeds.schedule = random.seeds
    found: list[Any] = []
    before = torch.get_rng_state()
    try:
        if random.default is not None:
            torch.set_rng_state(random.default)
        for number in range(epoch - random.replay, epoch + 1):
            tell_epoch(number, copied)
            drawn = batches_of(copied)
            seeds.draw()
            if number < epoch:
                drawn.skip(sys.maxsize)
                continue
            found += _all_of(drawn)
    finally:
        torch.set_rng_state(before)
    return found


def _copied(sampler: Any, own: Mapping[int, torch.Generator]) -> Any:
    """A copy of a sampler, with its own generators; see ``draw_again``."""
    if type(sampler) in (list, tuple, range):
        return sampler
    if type(sampler) not in (*TORCH_SAMPLERS, *_OF_SAMPLERS):
        raise cannot_know(
            f"a {type(sampler).__name__} draws the order, and only it knows how",
            "Use torch's samplers with a generator=, or a ShuffleSampler(n, seed).",
        )
    copied = copy.copy(sampler)
    if type(sampler) in _OF_SAMPLERS:
        copied.sampler = _copied(sampler.sampler, own)
    elif isinstance(getattr(sampler, "generator", None), torch.Generator):
        copied.generator = own[id(sampler.generator)]
    return copied


def _all_of(drawn: Batches) -> Iterator[Any]:
    with suppress(StopIteration):
        while True:
            yield drawn.draw()
