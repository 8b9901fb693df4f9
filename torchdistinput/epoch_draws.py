"""How the order of an epoch is drawn: from which random states, so that it can be drawn again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from torchdistinput.errors import StateMismatch
from torchdistinput.sources.base import Source
from torchdistinput.sources.base_seeds import TIMES
from torchdistinput.sources.random_state import packed, unpacked

__all__ = ["EpochDraws"]


@final
class EpochDraws:
    """How the order of an epoch is drawn: random states, packed when somebody asks.

    Args:
      base_seed: when torch's loader draws the seed of its workers.
      replay: whole epochs whose draws come first.
      default: torch's default state; ``None`` where it does not matter, or is not known on this rank.
      generators: the states of the input's generators.
    """

    def __init__(
        self, base_seed: str, replay: int, default: torch.Tensor | None, generators: Sequence[torch.Tensor]
    ) -> None:
        self.base_seed = base_seed
        self.replay = replay
        self.default = default
        self.generators = generators
        self._texts: tuple[str, ...] | None = None

    @classmethod
    def of(cls, source: Source, default: torch.Tensor | None) -> EpochDraws:
        """How an epoch that begins now would be drawn."""
        wanted = default if source.needs_default_state else None
        return cls(source.base_seed, 0, wanted, [generator.get_state() for generator in source.generators()])

    @classmethod
    def from_texts(cls, texts: Sequence[str], source: Source) -> EpochDraws:
        """What ``texts`` gave, out of a saved state.

        Raises:
          StateMismatch: the texts are none of a state, or of an input with other generators.
        """
        expected = len(source.generators())
        if len(texts) != 2 + expected:
            raise StateMismatch(
                f"random: the state has {max(len(texts) - 2, 0)} generator(s), the input here has {expected}. Give "
                "the input the generators that it had (generator= of the DataLoader and of its sampler)."
            )
        base_seed, _, replay = texts[0].partition(" ")
        if base_seed not in TIMES or not replay.isdecimal():
            raise StateMismatch(f"random: found {texts[0]!r:.60} as its first entry. Load the state as it was saved.")
        default = unpacked(texts[1]) if texts[1] else None
        return cls(base_seed, int(replay), default, [unpacked(text) for text in texts[2:]])

    def restore(self, source: Source) -> None:
        """Sets the input's generators to what they were."""
        for generator, state in zip(source.generators(), self.generators, strict=True):
            generator.set_state(state)

    def texts(self) -> tuple[str, ...]:
        """As a saved state has it."""
        if self._texts is None:
            default = "" if self.default is None else packed(self.default)
            self._texts = (f"{self.base_seed} {self.replay}", default, *map(packed, self.generators))
        return self._texts
