"""``RandomState``: the random states on which an epoch of a source depends, to be saved and set.

``BaseSeeds`` draws the base seed of a loader's workers from the user's random state, when torch would draw it.

Torch draws one base seed for each epoch; with persistent loader workers, one for the first epoch only. The seed comes
from the random state on which the order of the data may depend. A resumed epoch starts its loader workers anew. It must
draw a seed where the uninterrupted epoch drew one, and only there, or all later draws would differ. Torch draws it on
its default device, if one is set; a generator must then be on that device.

The ranks draw one seed together, as all of them draw the order of the data from one random state. Loader workers with
this seed on all ranks would augment different samples by the same random numbers. So the seed of a rank is mixed with
the number of its data coordinate, where each coordinate reads samples of its own. Coordinate 0 keeps torch's seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Final, final

import torch
from torch.utils.data import DataLoader

from torchdistinput.devices.accelerators import default_state, new_generator
from torchdistinput.plan.permutation import word
from torchdistinput.sources.rng import generators_of, unpacked

NEXT_SEEDS: Final = {"every": "every", "first": "never", "never": "never", "every+drawn": "every"}
"""When an epoch and those after it draw a seed, as a state says it; and the same of the next epoch.

Each epoch; this one only, as persistent loader workers are not started yet; none. The last is of states of 0.1 and 0.2,
whose random states are from after the draw of their epoch.
"""


@final
class BaseSeeds:
    """Draws the base seeds of the loader workers of one loader.

    Args:
      generator: the generator of the loader; ``None`` for torch's default random state.
      coordinate: the data coordinate of this rank, where the coordinates read different samples; else 0.
      persistent: whether the loader workers are persistent.

    Raises:
      TypeError: the generator is no ``torch.Generator``.

    Attributes:
      schedule: when seeds are drawn from the next epoch on, a key of ``NEXT_SEEDS``.
      generator: the generator that torch's loader gets in place of the user's, whose random state does not change.
        Torch draws the seed from it.
    """

    def __init__(self, generator: torch.Generator | None, coordinate: int = 0, *, persistent: bool = False) -> None:
        if not isinstance(generator, torch.Generator | None):
            raise TypeError(
                f"generator of the DataLoader is a {type(generator).__name__}; a torch.Generator is needed, such as "
                "torch.Generator().manual_seed(1), or None."
            )
        self._generator = generator
        self._coordinate = coordinate
        self.schedule = "first" if persistent else "every"
        self.generator = torch.Generator()

    def draw(self) -> None:
        """Begins an epoch: draws its seed, if it has one."""
        own = self._generator
        device = torch.get_default_device() if own is None else own.device
        if self.generator.device != device:
            self.generator = new_generator(device)
        state = default_state(device) if own is None else own.get_state()
        self.generator.set_state(state)
        if self._coordinate:
            digest = blake2b(state.numpy().tobytes(), digest_size=8).digest()
            self.generator.manual_seed(word(int.from_bytes(digest, "little"), self._coordinate))
        if self.schedule in {"every", "first"}:
            torch.empty((), dtype=torch.int64).random_(generator=own)
        self.schedule = NEXT_SEEDS[self.schedule]


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
