"""``RandomState``: the random states on which an epoch of a source depends, to be saved and set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch.utils.data import DataLoader

from torchdistinput.sources.rng import generators_of, unpacked
from torchdistinput.sources.torch_loader.base_seeds import BaseSeeds


@final
class RandomState:
    """The generators of a source, when its loader workers get base seeds, and the base seed of ``sample_seed``.

    Args:
      *holders: the user's loaders and samplers, which hold the generators.
      own_texts: where each worker draws from states of its own: finds their texts in a position.
      own_default: whether torch's default random state is the first of them.
      seeds: draws the base seeds of loader workers, where torch does not do it itself.
      seeds_samples: whether ``sample_seed`` has a base seed; else the data has none, or has it in its own arguments.
    """

    def __init__(
        self,
        *holders: Any,
        own_texts: Callable[[Sequence[Any]], Sequence[str]] | None = None,
        own_default: bool = False,
        seeds: BaseSeeds | None = None,
        seeds_samples: bool = False,
    ) -> None:
        self._holders = holders
        self._own_texts = own_texts
        self._own_default = own_default
        self.seeds = BaseSeeds(None) if seeds is None else seeds
        """When torch's loader draws the base seeds of its loader workers, from the next epoch on (``schedule``)."""
        self._seeds_samples = seeds_samples
        self._given_seed: int | None = None
        self.used_seed: int | None = None
        """The base seed of ``sample_seed`` of the last epoch that was begun."""

    @property
    def generators(self) -> Sequence[torch.Generator]:
        """The generators on which the order of an epoch depends on every rank, each once."""
        return self.own_generators if self._own_texts is None else ()

    @property
    def own_generators(self) -> Sequence[torch.Generator]:
        """The same, also where each worker draws from states of its own."""
        return generators_of(*self._holders)

    def own(self) -> list[torch.Tensor]:
        """This worker's present states."""
        default = [torch.get_rng_state()] if self._own_default else []
        return [*default, *(generator.get_state() for generator in self.own_generators)]

    def restore(self, position: Sequence[Any]) -> None:
        """Sets this worker's own states to those of a position; does nothing where it has none. Caller's thread."""
        states = [] if self._own_texts is None else [unpacked(text) for text in self._own_texts(position)]
        if states and self._own_default:
            torch.set_rng_state(states.pop(0))
        for generator, state in zip(self.own_generators, states, strict=False):
            generator.set_state(state)

    @property
    def sample_seed(self) -> int | None:
        """The base seed of ``sample_seed`` of the last epoch that was begun, or of the state that was loaded."""
        return self.used_seed if self._given_seed is None else self._given_seed

    def give_sample_seed(self, seed: int | None) -> None:
        """Sets the base seed of ``sample_seed`` of later epochs; ``None``: it is that of the generator."""
        if self._seeds_samples:
            self._given_seed = seed

    def begin_samples(self, loader: DataLoader[Any]) -> int:
        """The base seed of ``sample_seed`` of the epoch that begins."""
        # Without a generator the sampler draws from the default state, here that of rank 0: it gives the base seed.
        own = torch.initial_seed() if loader.generator is None else loader.generator.initial_seed()
        self.used_seed = own if self._given_seed is None else self._given_seed
        return self.used_seed
