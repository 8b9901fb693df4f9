"""The seed of a loader's workers, which torch draws from the user's random state when it makes an iterator.

Torch draws one for each epoch, with persistent workers one for the first epoch only; on the default device, if one is
set, which a generator must then be of. A resumed epoch, which starts workers anew, must draw when the uninterrupted one
drew and not else, or all that is drawn later would differ.

Torch asks the sampler for its iterator before that. Where it starts workers it asks once more afterwards, and uses the
second: a sampler that draws as soon as it is asked, as those do that return ``iter(batches)``, draws twice.
"""

from __future__ import annotations

from typing import Final, final

import torch

from torchdistinput.devices.accelerators import default_state, new_generator

__all__ = ["TIMES", "BaseSeeds", "once_drawn"]

_AGAIN: Final = "+again"
_DRAWN: Final = "every+drawn"
TIMES: Final = ("every", "first", "never", _DRAWN, f"every{_AGAIN}", f"first{_AGAIN}")
"""What a state may say of when seeds are drawn; see ``Source.base_seed``."""


def once_drawn(when: str) -> str:
    """What to say of when seeds are drawn, beside random states as they were after that of the epoch was drawn."""
    return {"every": _DRAWN, "first": "never"}.get(when, when)


@final
class BaseSeeds:
    """Draws the seeds of one loader's workers.

    Args:
      generator: the loader's; ``None`` for torch's default random state.
      lasting: whether its workers live on from epoch to epoch.
      again: whether torch asks the sampler once more when it starts workers, and that may matter.

    Raises:
      TypeError: the generator is none.
    """

    def __init__(self, generator: torch.Generator | None, *, lasting: bool, again: bool = False) -> None:
        if not isinstance(generator, torch.Generator | None):
            raise TypeError(
                f"generator of the DataLoader is a {type(generator).__name__}; a torch.Generator is needed, such as "
                "torch.Generator().manual_seed(1), or None."
            )
        self._generator = generator
        self.when = ("first" if lasting else "every") + (_AGAIN if again else "")
        """When the next one is drawn: see ``Source.base_seed``."""
        self.generator = torch.Generator()
        """For torch's loader, in place of the user's: what it draws there is the seed, and costs the user nothing."""

    def draw(self) -> bool:
        """An epoch begins: its seed is drawn, if it has one. Whether the sampler is then to be asked again."""
        own = self._generator
        device = torch.get_default_device() if own is None else own.device
        if self.generator.device != device:
            self.generator = new_generator(device)
        self.generator.set_state(default_state(device) if own is None else own.get_state())
        if self.when not in ("never", _DRAWN):
            torch.empty((), dtype=torch.int64).random_(generator=own)
        again = self.when.endswith(_AGAIN)
        if self.when == _DRAWN:
            self.when = "every"
        elif self.when.startswith("first"):
            self.when = "never"
        return again
