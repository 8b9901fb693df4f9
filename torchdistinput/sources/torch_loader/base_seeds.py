"""Draws the base seed of a loader's workers from the user's random state, when torch would draw it.

Torch draws one base seed for each epoch; with persistent loader workers, one for the first epoch only. The seed comes
from the random state on which the order of the data may depend. A resumed epoch starts its loader workers anew. It must
draw a seed where the uninterrupted epoch drew one, and only there, or all later draws would differ. Torch draws it on
its default device, if one is set; a generator must then be on that device.

The ranks draw one seed together, as all of them draw the order of the data from one random state. Loader workers with
this seed on all ranks would augment different samples by the same random numbers. So the seed of a rank is mixed with
the number of its data coordinate, where each coordinate reads samples of its own. Coordinate 0 keeps torch's seed.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final, final

import torch

from torchdistinput.devices.accelerators import default_state, new_generator
from torchdistinput.plan.permutation import word

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
