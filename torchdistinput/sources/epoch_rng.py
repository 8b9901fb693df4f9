"""The random states from which the order of an epoch is drawn, recorded so that a resume draws the same order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

from torchdistinput.errors import StateMismatch
from torchdistinput.plan.seed_schedule import SeedSchedule
from torchdistinput.sources.contract import Source
from torchdistinput.sources.rng import SharedRng, SharedRngState, WithRng, packed, unpacked


@final
class EpochRng:
    """The random states from which the order of an epoch is drawn.

    Args:
      seeds: when torch's loader draws the base seed of its loader workers.
      replay: the number of whole epochs whose draws come before this epoch's.
      default: torch's default random state; ``None`` where it does not matter, or is not known on this rank.
      generators: the states of the input's generators.
    """

    def __init__(
        self, seeds: SeedSchedule, replay: int, default: torch.Tensor | None, generators: Sequence[torch.Tensor]
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
        is_number = replay.isdecimal() and len(replay) <= len(str(epoch))
        if word not in {each.value for each in SeedSchedule} or not is_number or int(replay) > epoch:
            raise StateMismatch(f"random: found {texts[0]!r:.60} as its first entry. Load the state as it was saved.")
        default = unpacked(texts[1]) if texts[1] else None
        return cls(SeedSchedule(word), int(replay), default, [unpacked(text) for text in texts[2:]])

    def restore(self, source: Source) -> None:
        """Sets the input's generators to the recorded states."""
        for generator, state in zip(source.random_state.generators, self.generators, strict=True):
            generator.set_state(state)

    def begin_at(self, default: torch.Tensor | None, generators: Sequence[torch.Tensor]) -> None:
        """Records that the first batch is drawn from these states, after the base seed of this epoch was drawn."""
        self.seeds, self.replay = self.seeds.after_draw, 0
        self.default, self.generators = default, generators
        self._texts = None

    def texts(self) -> tuple[str, ...]:
        """The states as texts, as a saved state holds them. Packed at the first call."""
        if self._texts is None:
            default = "" if self.default is None else packed(self.default)
            self._texts = (f"{self.seeds.value} {self.replay}", default, *map(packed, self.generators))
        return self._texts


@final
class RngSnapshot:
    """Calls the draws of an epoch, and records the random states from which the first batch is drawn.

    torch draws the first batch at the first ``next``, not at ``iter``. In between, the user or another loader in the
    same ``zip`` may draw from the same generators. So the states from which the order can be drawn again are those at
    the first ``next``.

    Args:
      with_rng: calls the user code that draws.
      random: the states at the beginning of the epoch; corrected here if the first batch is drawn from others.
      source: the data.
    """

    def __init__(self, with_rng: WithRng, random: EpochRng, source: Source) -> None:
        self._with_rng = with_rng
        self._random = random
        self._source = source
        self._calls = 0
        self._left: list[torch.Tensor] | None = None  # the states after the beginning, if no batch was drawn by then

    def __call__(self, call: Callable[[], Any]) -> Any:
        """Makes the call and returns its result. The first call begins the epoch, each later one draws a batch.

        The beginning may draw the first batch at once, by a call inside of its call.
        """
        self._calls += 1
        if self._calls == 2 and self._left is not None:
            return self._draw_first(call, self._left)
        try:
            return self._with_rng(call)
        finally:
            if self._calls == 1:
                self._left = self._states()

    def _draw_first(self, call: Callable[[], Any], left: list[torch.Tensor]) -> Any:
        shared = self._with_rng if isinstance(self._with_rng, SharedRng) else None
        if shared is not None:
            shared.follow()
        found = self._states()
        if not all(map(_equal, left, found)):
            default = found.pop(0) if self._source.facts.needs_default_state else None
            self._random.begin_at(default, found)
        try:
            return self._with_rng(call)
        finally:
            if shared is not None:
                shared.publish()

    def _states(self) -> list[torch.Tensor]:
        """The present states: the default state, if the order may depend on it, then those of the generators."""
        with_rng, states = self._with_rng, [each.get_state() for each in self._source.random_state.generators]
        if not self._source.facts.needs_default_state:
            return states
        return [with_rng.state if isinstance(with_rng, SharedRng) else torch.get_rng_state(), *states]


@final
class UnreadDraws:
    """The random draws of an epoch that was begun. They are taken back where nothing of it is read.

    A generator from which other code has drawn in between keeps its state.

    Args:
      source: the data, before the epoch begins.
      shared: the default random state from which all ranks draw together.
    """

    def __init__(self, source: Source, shared: SharedRngState) -> None:
        self._random, self._shared = source.random_state, shared
        self._before = self._after = self._states()
        self._others_before = self._others_after = self._others()

    def __call__(self, call: Callable[[], Any]) -> Any:
        """Makes a call that may draw for the epoch, and returns its result."""
        self._before = {each: self._before[each] for each in self._unchanged(self._after)}
        try:
            return call()
        finally:
            self.made()

    def made(self) -> None:
        """Notes that all draws up to now are those of the epoch."""
        self._after, self._others_after = self._states(), self._others()

    def take_back(self) -> None:
        """Sets the random states to what they were before the draws."""
        for each in self._unchanged(self._after):
            each.set_state(self._before[each])
        self._move(self._others_after, self._others_before)

    def make_again(self) -> None:
        """Sets the random states to what they were after the draws, which were taken back."""
        for each in self._unchanged(self._before):
            each.set_state(self._after[each])
        self._move(self._others_before, self._others_after)

    def _states(self) -> dict[torch.Generator, torch.Tensor]:
        return {each: each.get_state() for each in (torch.default_generator, *self._random.own_generators)}

    def _unchanged(self, states: Mapping[torch.Generator, torch.Tensor]) -> list[torch.Generator]:
        """The generators that are in these states, of those from which only the epoch has drawn."""
        return [each for each in self._before if each in states and _equal(each.get_state(), states[each])]

    def _others(self) -> tuple[Any, ...]:
        random, shared = self._random, self._shared
        return random.seeds.schedule, random.used_seed, shared.state, shared.begun

    def _move(self, here: tuple[Any, ...], there: tuple[Any, ...]) -> None:
        self._random.seeds.schedule, self._random.used_seed = there[:2]
        if self._shared.state is here[2]:
            self._shared.state, self._shared.begun = there[2:]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.numpy(force=True).tobytes() == other.numpy(force=True).tobytes()  # torch.equal takes 10 us
