"""The weights of a mixture over its epochs: those that it was made with, and those of a state that is resumed.

A state has the weights of its epoch. Where those of the mixture from its position on are others, they hold from there
on; before it, the records were read by the weights of the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, final

from torchdistinput.errors import StateMismatch
from torchdistinput.plan.mixing import Changes, of_version_02, shares


@final
class MixtureWeights:
    """See the module.

    Args:
      names: of the sources.
      schedule: the weights from positions on.
      temperature: see ``Mixture``.

    Raises:
      ValueError: a weight is negative, of an unknown source, or missing; all weights are 0.
    """

    def __init__(
        self, names: Sequence[str], schedule: Sequence[tuple[int, Mapping[str, float]]], temperature: float | None
    ) -> None:
        self._names = list(names)
        self._base: Changes = [(at, self._shares(each, temperature)) for at, each in schedule]
        self.schedule = [(at, {name: float(each[name]) for name in names}) for at, each in schedule]
        self._resumed: tuple[int, Changes] | None = None  # an epoch that was entered, and its weights

    def _shares(self, weights: Mapping[str, float], temperature: float | None) -> list[Fraction]:
        unknown = [name for name in weights if name not in self._names]
        if unknown:
            known = ", ".join(map(repr, self._names))
            raise ValueError(f"there is a weight for {unknown[0]!r}; the sources are {known}.")
        missing = [name for name in self._names if name not in weights]
        if missing:
            raise ValueError(f"there is no weight for {missing[0]!r}; give each source one, or 0 to leave it out.")
        return shares([weights[name] for name in self._names], temperature)

    def changes(self, epoch: int) -> Changes:
        """The weights of an epoch from positions on."""
        return self._resumed[1] if self._resumed is not None and self._resumed[0] == epoch else self._base

    def to_json(self, epoch: int) -> list[object]:
        """The weights of an epoch as its states have them, as plain values."""
        return [[at, [*map(str, weights)]] for at, weights in self.changes(epoch)]

    def begin(self, epoch: int) -> None:
        """Begins an epoch at its front."""
        if self._resumed is not None and self._resumed[0] == epoch:
            self._resumed = None

    def resume(self, value: object, epoch: int, position: int) -> None:
        """Takes the weights of a state.

        Args:
          value: of ``to_json``.
          epoch: of the state.
          position: how many samples of the epoch came.

        Raises:
          StateMismatch: see ``parsed``.
        """
        then = self.parsed(value)
        rest = _from(self._base, position)
        if _from(then, position) != rest:
            then = [*(each for each in then if each[0] < position), *rest]
        self._resumed = epoch, then

    def parsed(self, value: object) -> Changes:
        """The weights of a state.

        Raises:
          StateMismatch: the value is malformed, or of version 0.2.
        """
        given: Any = value
        try:
            if isinstance(given[0][0], list):
                raise of_version_02()
            found = [(int(at), [Fraction(str(each)) for each in weights]) for at, weights in given]
            if any(len(weights) != len(self._names) for _, weights in found):
                raise ValueError(found)
        except (TypeError, ValueError, IndexError, ZeroDivisionError) as error:
            raise StateMismatch(f"position: found {value!r:.200} in the state as the weights of a mixture.") from error
        return found


def _from(changes: Changes, position: int) -> list[tuple[int, Sequence[Fraction]]]:
    """The weights from a position on."""
    now = [weights for at, weights in changes if at <= position][-1]
    return [(position, now), *(each for each in changes if each[0] > position)]
