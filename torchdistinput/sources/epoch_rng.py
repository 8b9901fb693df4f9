"""The random states from which the order of an epoch is drawn, recorded so that a resume draws the same order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch

from torchdistinput.errors import StateMismatch
from torchdistinput.sources.contract import Source
from torchdistinput.sources.random_state import NEXT_SEEDS
from torchdistinput.sources.rng import SharedRngState, is_same_state, packed, unpacked

_States = tuple[dict[torch.Generator, torch.Tensor], tuple[Any, ...], int]
"""The states of generators; other random states; and the epoch that the user's sampler knows."""


@final
class EpochRng:
    """The random states from which the order of an epoch is drawn.

    Args:
      seeds: when torch's loader draws the base seed of its loader workers; see ``BaseSeeds``.
      replay: the number of whole epochs whose draws come before this epoch's.
      default: torch's default random state; ``None`` where it does not matter, or is not known on this rank.
      generators: the states of the input's generators.
    """

    def __init__(
        self, seeds: str, replay: int, default: torch.Tensor | None, generators: Sequence[torch.Tensor]
    ) -> None:
        self.seeds = seeds
        self.replay = replay
        self.default = default
        self.generators = generators
        self._texts: tuple[str, ...] | None = None

    @classmethod
    def of(cls, source: Source, default: torch.Tensor | None) -> EpochRng:
        """The states of an epoch that would begin now."""
        wanted, random = default if source.facts.needs_default_state else None, source.random_state
        return cls(random.seeds.schedule, 0, wanted, [generator.get_state() for generator in random.generators])

    @classmethod
    def from_texts(cls, texts: Sequence[str], source: Source, epoch: int) -> EpochRng:
        """The states from a saved state of an epoch, in which they are the result of ``texts``.

        Raises:
          StateMismatch: the texts are malformed, or belong to an input with another number of generators.
        """
        expected = len(source.random_state.generators)
        if len(texts) != 2 + expected:
            raise StateMismatch(
                f"random: the state has {max(len(texts) - 2, 0)} generator(s), the input here has {expected}. Give "
                "the input the generators that it had (generator= of the DataLoader and of its sampler)."
            )
        word, _, replay = texts[0].partition(" ")
        word = word.removesuffix("+again")  # of 0.2: where torch begins the sampler of an epoch twice
        # Once also where the user set the number of the next epoch back, before its last step was behind.
        is_number = replay.isdecimal() and len(replay) <= len(str(epoch))
        if word not in NEXT_SEEDS or not is_number or int(replay) > max(1, epoch):
            raise StateMismatch(f"random: found {texts[0]!r:.60} as its first entry. Load the state as it was saved.")
        default = unpacked(texts[1]) if texts[1] else None
        return cls(word, int(replay), default, [unpacked(text) for text in texts[2:]])

    def restore(self, source: Source) -> None:
        """Sets the input's generators to the recorded states."""
        for generator, state in zip(source.random_state.generators, self.generators, strict=True):
            generator.set_state(state)

    def texts(self) -> tuple[str, ...]:
        """The states as texts, as a saved state holds them. Packed at the first call."""
        if self._texts is None:
            default = "" if self.default is None else packed(self.default)
            self._texts = (f"{self.seeds} {self.replay}", default, *map(packed, self.generators))
        return self._texts


@final
class UncountedDraws:
    """What was drawn, and told to the user's sampler, for an epoch that is unread: it counts once the epoch is read.

    A generator from which other code has drawn in between keeps its state then.

    Args:
      source: the data, before the epoch begins.
      shared: the default random state from which all ranks draw together.
    """

    def __init__(self, source: Source, shared: SharedRngState) -> None:
        self._random, self._user_epoch, self._shared = source.random_state, source.user_epoch, shared
        self._outside = self._states()
        self._inside: _States | None = None  # while they do not count

    def hide(self) -> None:
        """Sets all to what it was before: the draws up to now do not count."""
        self._inside = self._states()
        self._set(self._outside, self._inside)
        if self._user_epoch.set_by_user() is not None:  # an object has counted the epoch, as it does when it is read
            self._user_epoch.tell(self._outside[2])

    def count(self) -> None:
        """Makes the draws count; the later ones, too."""
        inside, self._inside = self._inside, None
        if inside is not None:
            before, self._outside = self._outside, self._states()
            self._set(inside, before)

    def _states(self) -> _States:
        generators = torch.default_generator, *self._random.own_generators
        random, shared = self._random, self._shared
        others = random.seeds.schedule, random.used_seed, shared.state
        return {each: each.get_state() for each in generators}, others, self._user_epoch.epoch

    def _set(self, wanted: _States, expected: _States) -> None:
        """Sets the states that are the expected ones."""
        for each, state in expected[0].items():
            if each in wanted[0] and is_same_state(each.get_state(), state):
                each.set_state(wanted[0][each])
        self._random.seeds.schedule, self._random.used_seed, shared = wanted[1]
        if self._shared.state is expected[1][2]:
            self._shared.state = shared
        if self._user_epoch.epoch != wanted[2]:
            self._user_epoch.tell(wanted[2])
