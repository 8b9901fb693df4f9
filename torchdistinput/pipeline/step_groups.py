"""The groups of steps for gradient accumulation (``InputOptions.accumulate``): a group is delivered once it is whole.

So the number of its steps, their samples and their sums are known at its first step. Steps ``gA`` to ``gA + A - 1`` of
an epoch are group ``g``. Steps that are passed over do not count, and the last group of an epoch may be shorter.

Where an error comes in a group, the group is not delivered: the error comes before its first step, on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import final

from torchdistinput.plan.sums import Totals
from torchdistinput.step_types import End, Group, LocalStep, Outcome


@final
class StepGroups:
    """Holds agreed steps back until their group is whole. One thread at a time.

    Args:
      length: steps of a group.
      first_step: the number of the next step in the epoch.
      so_far: the totals of the steps that were delivered of its group, if it is in the middle of one.
    """

    def __init__(self, length: int, first_step: int, so_far: Totals | None) -> None:
        self._length = length
        self._next = first_step
        self._so_far = so_far
        self.held: list[LocalStep] = []
        """The steps that are held back."""

    def take(self, outcome: Outcome) -> Sequence[Outcome]:
        """The outcomes to be delivered now. Steps come in their groups; others come at once."""
        if type(outcome) is LocalStep:
            self.held.append(outcome)
            return [] if (self._next + len(self.held)) % self._length else self._release()
        return [*self._release(), outcome] if isinstance(outcome, End) and self.held else [outcome]

    def _release(self) -> Sequence[LocalStep]:
        steps, self.held = self.held, []
        totals = [Totals(step.global_size, step.sums) for step in steps]
        if self._so_far is not None:
            totals[0], self._so_far = self._so_far.plus(totals[0]), None
        end = self._next + len(steps)
        group = Group(self._next - self._next % self._length, end, list(accumulate(totals, Totals.plus)))
        self._next = end
        for step in steps:
            step.group = group
        return steps
