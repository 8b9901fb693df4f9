"""Draws the base seed of a loader's workers from the user's random state, when torch would draw it.

See ``seed_schedule`` for when torch draws a seed. Torch draws it on its default device, if one is set; a generator must
then be on that device.

The ranks draw one seed together, as all of them draw the order of the data from one random state. Loader workers with
this seed on all ranks would augment different samples by the same random numbers. So the seed of a rank is mixed with
the number of its data coordinate, where each coordinate reads samples of its own. Coordinate 0 keeps torch's seed.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import final

import torch

from torchdistinput.devices.accelerators import default_state, new_generator
from torchdistinput.plan.permutation import word
from torchdistinput.plan.seed_schedule import SeedSchedule


@final
class BaseSeeds:
    """Draws the base seeds of the loader workers of one loader.

    Args:
      generator: the generator of the loader; ``None`` for torch's default random state.
      schedule: when a seed is drawn.
      coordinate: the data coordinate of this rank, where the coordinates read different samples; else 0.

    Raises:
      TypeError: the generator is no ``torch.Generator``.

    Attributes:
      schedule: when seeds are drawn from the next epoch on.
      generator: the generator that torch's loader gets in place of the user's, whose random state does not change.
        Torch draws the seed from it.
    """

    def __init__(self, generator: torch.Generator | None, schedule: SeedSchedule, coordinate: int = 0) -> None:
        if not isinstance(generator, torch.Generator | None):
            raise TypeError(
                f"generator of the DataLoader is a {type(generator).__name__}; a torch.Generator is needed, such as "
                "torch.Generator().manual_seed(1), or None."
            )
        self._generator = generator
        self._coordinate = coordinate
        self.schedule = schedule
        self.generator = torch.Generator()

    def draw(self) -> bool:
        """Begins an epoch: draws its seed, if it has one. Returns whether ``iter(sampler)`` must be called again."""
        own, schedule = self._generator, self.schedule
        device = torch.get_default_device() if own is None else own.device
        if self.generator.device != device:
            self.generator = new_generator(device)
        state = default_state(device) if own is None else own.get_state()
        self.generator.set_state(state)
        if self._coordinate:
            digest = blake2b(state.numpy().tobytes(), digest_size=8).digest()
            self.generator.manual_seed(word(int.from_bytes(digest, "little"), self._coordinate))
        if schedule.draws:
            torch.empty((), dtype=torch.int64).random_(generator=own)
        self.schedule = schedule.next
        return schedule.sampler_twice
