"""Draws the order of an epoch again, from the random states with which it began, and moves nothing of the user's.

A copy of the user's sampler draws, with copies of its generators; torch's default random state is put back. The dataset
is not copied. A sampler that draws from Python's or NumPy's global generators is refused: their states at the beginning
of the epoch are not known.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, final

import numpy as np
import torch

from torchdistinput.plan.permutation import Ints
from torchdistinput.sources.epoch_rng import EpochRng
from torchdistinput.sources.kernel.epoch_order import cannot_know
from torchdistinput.sources.kernel.index_array import IndexArray
from torchdistinput.sources.map_style.sampler_batches import Batches, batches_of
from torchdistinput.sources.rng import comparable, generators_of, global_states, set_global_states
from torchdistinput.sources.set_epoch import wants_epochs
from torchdistinput.sources.torch_loader.base_seeds import BaseSeeds


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
    batches: Any, holders: Sequence[Any], generator: torch.Generator | None, dataset: Any, random: EpochRng, epoch: int
) -> list[Any]:
    """The batches of an epoch, drawn by a copy of the user's sampler. Local; takes as long as the sampler takes.

    Args:
      batches: the user's batch sampler, or sampler.
      holders: the loader and samplers that hold generators, as for ``RandomState``.
      generator: of the loader.
      dataset: is not copied.
      random: the states with which the epoch began, or an earlier one; see ``EpochRng.replay``.
      epoch: the number of the epoch.

    Raises:
      InputError: the sampler cannot be copied, or draws from a generator whose state is not known.
    """
    kind = type(getattr(batches, "sampler", batches)).__name__
    copied, own = _copied((batches, generator), holders, dataset, random, kind)
    seeds = BaseSeeds(own)
    seeds.schedule = random.seeds
    told = [each for each in wants_epochs(copied) if each is not dataset]
    for each in wants_epochs(copied, inside=True):
        if not hasattr(each, "epoch") and each is not dataset:
            name = type(each).__name__
            raise cannot_know(
                f"the {name} has set_epoch() and no attribute epoch, so nobody knows which epoch it will be told",
                "Let it show its epoch, as torch's DistributedSampler does, or use a ShuffleSampler(n, seed).",
            )
    found: list[Any] = []
    with _random_states_kept(kind):
        if random.default is not None:
            torch.set_rng_state(random.default)
        for number in range(epoch - random.replay, epoch + 1):
            for each in told:
                each.set_epoch(number)
            drawn = batches_of(copied)
            seeds.draw()
            if number < epoch:
                drawn.skip(sys.maxsize)
                continue
            found += _all_of(drawn)
    return found


def _copied(
    wanted: tuple[Any, torch.Generator | None], holders: Sequence[Any], dataset: Any, random: EpochRng, kind: str
) -> tuple[Any, torch.Generator | None]:
    """A copy of the sampler and of the loader's generator, whose generators have the states of the epoch."""
    memo: dict[int, Any] = {id(dataset): dataset}
    for each, state in zip(generators_of(*holders), random.generators, strict=True):
        own = torch.Generator(each.device)
        own.set_state(state)
        memo[id(each)] = own
    try:
        copied: tuple[Any, torch.Generator | None] = copy.deepcopy(wanted, memo)
    except Exception as error:
        raise cannot_know(
            f"the {kind} draws the order, and a copy of it, which would draw it again, cannot be made ({error!r:.100})",
            "Give the sampler a __deepcopy__, or use a ShuffleSampler(n, seed).",
        ) from error
    return copied


def _all_of(drawn: Batches) -> Iterator[Any]:
    with suppress(StopIteration):
        while True:
            yield drawn.draw()


@contextmanager
def _random_states_kept(kind: str) -> Iterator[None]:
    """Puts torch's default random state back, and refuses draws from other global ones."""
    before = global_states()
    try:
        yield
        names = "", "Python's random", "numpy.random"  # torch's state may move: it is known
        triples = zip(names, comparable(before), comparable(global_states()), strict=True)
        moved = [name for name, one, other in triples if name and one != other]
        if moved:
            raise cannot_know(
                f"the {kind} draws from {moved[0]}, whose state at the beginning of the epoch is not known",
                "Let it draw from a torch.Generator of its own, or use a ShuffleSampler(n, seed).",
            )
    finally:
        set_global_states(before)
