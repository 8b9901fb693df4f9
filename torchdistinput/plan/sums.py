"""Exact sums over replicas and steps (``InputOptions.sums``), and their form in a vote.

A summand is an int, or a float that is a multiple of ``2**-160``. Float32 numbers and their sums are such floats. A
float is kept as that multiple, so all sums are sums of ints: exact, in any order. A sum of floats is rounded once, when
its value is asked for.

In a vote a summand takes six words: a counter of the ranks that bring an int (15 bits), and of those that bring a float
(15 bits above); then its 240 bits, 48 in a word, so the words of 32,767 ranks add up without an overflow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple, final

WORDS_OF_SUM: Final = 6
_LIMB: Final = (1 << 48) - 1
_ONE_FLOAT: Final = 1 << 15
_UNITS: Final = 2.0**160  # of a float in 1.0
_MAX_INT: Final = 1 << 200
_MAX_FLOAT: Final = 2.0**64


@final
class ExactSum(NamedTuple):
    """A sum, or a summand.

    Args:
      number: of ints the sum; of floats the sum in units of ``2**-160``.
      kind: of the summands; ``None``: there are none.
    """

    number: int = 0
    kind: type[int | float] | None = None

    @property
    def value(self) -> int | float:
        """The sum, of floats rounded to the nearest one."""
        return self.number / int(_UNITS) if self.kind is float else self.number

    def plus(self, other: ExactSum) -> ExactSum:
        """The sum of both, which are of one kind."""
        return ExactSum(self.number + other.number, self.kind or other.kind)

    def words(self) -> tuple[int, ...]:
        """Six words, whose sums over the ranks make up the sum."""
        number, kind = self
        ranks = 0 if kind is None else 1 if kind is int else _ONE_FLOAT
        if 0 <= number <= _LIMB:
            return ranks, number, 0, 0, 0, 0
        lower = (number & _LIMB, number >> 48 & _LIMB, number >> 96 & _LIMB, number >> 144 & _LIMB)
        return (ranks, *lower, number >> 192)

    @classmethod
    def of_words(cls, words: Sequence[int]) -> ExactSum | None:
        """The sum from the sums of the words of all ranks; ``None`` where some rank has an int and some a float."""
        ranks, number, second, third, fourth, fifth = words
        if second or third or fourth or fifth:
            number += (second << 48) + (third << 96) + (fourth << 144) + (fifth << 192)
        if ranks < _ONE_FLOAT:
            return cls(number, int if ranks else None)
        return None if ranks % _ONE_FLOAT else cls(number, float)


@final
class Totals(NamedTuple):
    """The samples and the sums of some steps, over all replicas."""

    samples: int
    sums: Sequence[ExactSum]

    def plus(self, other: Totals) -> Totals:
        """Those of both."""
        return Totals(self.samples + other.samples, list(map(ExactSum.plus, self.sums, other.sums)))


def exact(value: float) -> ExactSum:
    """An int or a float as a summand.

    Raises:
      ValueError: the int has more than 200 bits; or the float is not finite, 2**64 or more, or has bits below 2**-160.
    """
    if isinstance(value, int):
        if not -_MAX_INT < value < _MAX_INT:
            raise ValueError(
                f"an int of {value.bit_length()} bits; at most 200 can be summed. Return fewer, such as value // 2**64"
            )
        return ExactSum(value, int)
    units = value * _UNITS
    if not (-_MAX_FLOAT < value < _MAX_FLOAT and units.is_integer()):
        way_out = "round(value, 12)" if abs(value) < 1 else "value / 2**64"
        if not math.isfinite(value):
            way_out = "float(values[values.isfinite()].sum())"
        raise ValueError(
            f"{value}; a finite number below 2**64 without bits below 2**-160 can be summed exactly. Return such a "
            f"one: {way_out}"
        )
    return ExactSum(int(units), float)
