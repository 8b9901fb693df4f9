"""The seed of a loader's workers, which torch draws from the user's random state when it makes an iterator.

Torch draws one for each epoch, with persistent workers one for the first epoch only. A resumed epoch, which starts
workers anew, must draw when the uninterrupted one drew and not else, or all that is drawn later would differ.
"""

from __future__ import annotations

from typing import final

import torch

__all__ = ["BaseSeeds"]


@final
class BaseSeeds:
    """Draws the seeds of one loader's workers.

    Args:
      generator: the loader's; ``None`` for torch's default random state.
      lasting: whether its workers live on from epoch to epoch.
    """

    def __init__(self, generator: torch.Generator | None, *, lasting: bool) -> None:
        self._generator = generator
        self.when = "first" if lasting else "every"
        """When the next one is drawn: see ``Source.base_seed``."""
        self.generator = torch.Generator()
        """For torch's loader, in place of the user's: what it draws there is the seed, and costs the user nothing."""

    def draw(self) -> None:
        """An epoch begins: its seed is drawn, if it has one."""
        own = self._generator
        self.generator.set_state(torch.get_rng_state() if own is None else own.get_state())
        if self.when != "never":
            torch.empty((), dtype=torch.int64).random_(generator=own)
        if self.when == "first":
            self.when = "never"
