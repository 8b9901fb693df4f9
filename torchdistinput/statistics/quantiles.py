"""``Quantiles``: exact order statistics, found digit by digit, 16 bits in each pass over the data.

Numbers are mapped to unsigned ints in the same order. The first pass counts their highest 16 bits. The counts show
which highest digits the wanted numbers have, and how many numbers lie below these digits. The next pass counts the next
16 bits of the numbers with these highest digits, and so on: two passes for 32 bits, four for 64. Counts are ints, so
the result does not depend on the order of the data or on how it is cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Final, Literal, final

import numpy as np
import numpy.typing as npt

from torchdistinput.statistics.base import (
    NanPolicy,
    Numbers,
    State,
    Statistic,
    check_float_dtype,
    check_has_data,
    check_nan_policy,
    joined,
    no_data,
    taken,
)
from torchdistinput.statistics.exact_sums import rounded

Method = Literal["linear", "lower", "higher", "inverted_cdf", "interpolated_inverted_cdf"]


_METHODS: Final = ("linear", "lower", "higher", "inverted_cdf", "interpolated_inverted_cdf")
_DIGIT: Final = 16
_MAX_BYTES: Final = 1 << 30


@final
@dataclass(frozen=True)
class _EarlierPasses:
    """The results of the earlier passes.

    Args:
      dtype: the dtype of the data.
      shape: the shape of the features.
      counts: how many numbers each feature has, without NaNs.
      bits: how many of the highest bits of the wanted numbers are known.
      prefixes: for each feature, these bits: sorted, each once.
      places: for each feature and wanted number: its place among all numbers, the index of its prefix, and its place
        among the numbers with this prefix.
    """

    dtype: str
    shape: list[int]
    counts: list[int]
    bits: int
    prefixes: list[list[int]]
    places: list[list[tuple[int, int, int]]]


@final
@dataclass(frozen=True)
class Quantiles(Statistic):
    """Exact quantiles of each feature. Numbers of up to 16 bits take one pass, 32 bits two passes, 64 bits four.

    >>> tdi.analyze(torch.tensor([1.0, 2.0, 6.0]), tdi.statistics.Quantiles(0.5, axis=None))
    array(2.)

    The state takes 512 KiB for each feature in the first pass. In later passes it takes 512 KiB for each wanted number
    with other upper digits. More than 1 GiB is refused.

    Args:
      q: a number from 0 to 1, or several. A float counts as the decimal number that Python prints for it; a
        ``fractions.Fraction`` is taken exactly.
      axis: the dims that tell features apart; see ``Moments``.
      method: how a quantile between two numbers is found, named as in ``numpy.quantile``. ``"linear"``,
        ``"interpolated_inverted_cdf"`` interpolate; ``"lower"``, ``"higher"`` and ``"inverted_cdf"`` give a number of
        the data.
      nan_policy: see ``Moments``. Infinities have their place in the order.
      dtype: the dtype of the result: "float64", or "float32" for the nearest float32 numbers.

    Raises:
      ValueError: a quantile is not from 0 to 1, or another argument is not one of its words.
    """

    q: float | Fraction | Sequence[float | Fraction]
    axis: int | Sequence[int] | None = -1
    method: Method = "linear"
    nan_policy: NanPolicy = "propagate"
    dtype: Literal["float64", "float32"] = "float64"
    _known: _EarlierPasses | None = field(default=None, kw_only=True, repr=False)
    """The results of the earlier passes; ``None`` in the first pass."""

    def __post_init__(self) -> None:
        check_nan_policy(self.nan_policy)
        check_float_dtype(self.dtype)
        if self.method not in _METHODS:
            raise ValueError(f"method is {self.method!r}; it must be {', '.join(map(repr, _METHODS))}.")
        for each in self.wanted():
            if not 0 <= each <= 1:
                raise ValueError(f"q={float(each):g} is no quantile; it must be from 0 to 1.")

    def wanted(self) -> list[Fraction]:
        """The quantiles as fractions."""
        given = self.q if isinstance(self.q, Sequence | np.ndarray) else [self.q]
        return [each if isinstance(each, Fraction) else Fraction(str(each)) for each in given]

    def start(self) -> State:
        """See ``Statistic.start``."""
        return no_data()

    def update(self, state: State, batch: Any) -> State:
        """See ``Statistic.update``, and ``base.taken`` for its errors; too many features are a ``ValueError``, too."""
        values, kind = taken(state, batch, self.axis)
        if not values.size:
            return state
        prefixes = [[0]] * len(values) if self._known is None else self._known.prefixes
        if len(prefixes) != len(values):
            raise ValueError(f"the data has {len(values)} features; it had {len(prefixes)} in the pass before.")
        width = _width(values.dtype)
        offsets = np.cumsum([0, *map(len, prefixes)])
        if state["dtype"] is None:
            rows = int(offsets[-1])
            if rows * 8 << width > _MAX_BYTES:
                raise ValueError(
                    f"quantiles of {len(values)} features of {values.dtype} need counts of {rows * 8 << width >> 20:,} "
                    f"MiB in a pass; {_MAX_BYTES >> 20:,} MiB is the most. Take fewer features at a time, fewer "
                    "quantiles, or axis=None for one set of quantiles over all."
                )
            zeros = {name: np.zeros(len(values), np.int64) for name in ("count", "nans")}
            state = {**kind, **zeros, "bins": np.zeros((rows, 1 << width), np.int64)}
        for feature, row in enumerate(values):
            numbers = self._without_nans(row, state, feature)
            state["count"][feature] += len(numbers)
            bins = state["bins"][offsets[feature] : offsets[feature + 1]]
            index = self._digits(_keys(numbers), prefixes[feature])
            bins += np.bincount(index, minlength=bins.size).reshape(bins.shape)
        return state

    def _digits(self, keys: Numbers, prefixes: Sequence[int]) -> npt.NDArray[np.int64]:
        """The next digits of the numbers with these prefixes; each prefix has its own range of digits."""
        width = _width(keys.dtype)
        bits = 8 * keys.dtype.itemsize
        unsigned = keys.dtype.type
        if self._known is None:
            first: npt.NDArray[np.int64] = (keys >> unsigned(bits - width)).astype(np.int64)
            return first
        known = self._known.bits
        inside, place = _with_prefix(keys >> unsigned(bits - known), prefixes, known)
        digit = keys[inside] >> unsigned(bits - known - width) & unsigned((1 << width) - 1)
        index: npt.NDArray[np.int64] = (place << width) + digit.astype(np.int64)
        return index

    def _without_nans(self, row: Numbers, state: State, feature: int) -> Numbers:
        if row.dtype.kind != "f":
            return row
        nans = np.isnan(row)
        number = int(nans.sum())
        if self.nan_policy == "raise":
            infinite = int(np.isinf(row).sum())
            if number or infinite:
                raise ValueError(f"{number} NaN and {infinite} infinite among {row.size} numbers of feature {feature}.")
        if not number:
            return row
        state["nans"][feature] += number
        found: Numbers = row[~nans]
        return found

    def merge(self, state: State, other: State) -> State:
        """See ``Statistic.merge``."""
        return joined(
            state, other, lambda one, two: {name: one[name] + two[name] for name in ("count", "nans", "bins")}
        )

    def next_pass(self, state: State) -> Statistic | None:
        """See ``Statistic.next_pass``."""
        self._check(state)
        if state["dtype"] is None:
            return None
        bits, found = self._found(state)
        if bits == 8 * np.dtype(state["dtype"]).itemsize:
            return None
        prefixes = [sorted({key for key, _ in keys.values()}) or [0] for keys in found]
        places = [
            [(place, own.index(key), inside) for place, (key, inside) in keys.items()]
            for own, keys in zip(prefixes, found, strict=True)
        ]
        counts = state["count"].tolist()
        return replace(self, _known=_EarlierPasses(state["dtype"], state["shape"], counts, bits, prefixes, places))

    def result(self, state: State) -> Numbers:
        """The quantiles: ``(len(q), *features)``, without the first dim where ``q`` is one number.

        Raises:
          ValueError: there is no data.
        """
        self._check(state)
        check_has_data(state)
        columns = []
        counted = zip(state["count"].tolist(), state["nans"].tolist(), self._found(state)[1], strict=True)
        for count, nans, keys in counted:
            if not count or (nans and self.nan_policy == "propagate"):
                columns.append([np.nan] * len(self.wanted()))
                continue
            values = {place: _value(key, state["dtype"]) for place, (key, _) in keys.items()}
            wanted = self.places(count)
            columns.append([_between(values[low], values[high], weight, self.dtype) for low, high, weight in wanted])
        table: Numbers = np.array(columns, self.dtype).T.reshape(-1, *state["shape"])
        return table if isinstance(self.q, Sequence | np.ndarray) else table.reshape(state["shape"])

    def _found(self, state: State) -> tuple[int, list[dict[int, tuple[int, int]]]]:
        """How many bits are known now; for each feature and wanted place, the bits, and the place among equal ones."""
        width = _width(np.dtype(state["dtype"]))
        known = self._known
        found: list[dict[int, tuple[int, int]]] = []
        row = 0
        for feature, count in enumerate(state["count"].tolist()):
            if known is None:
                wanted = {each for low, high, _ in self.places(count) for each in (low, high)} if count else ()
                prefixes, places = [0], [(place, 0, place) for place in sorted(wanted)]
            else:
                prefixes, places = known.prefixes[feature], known.places[feature]
            sums = [np.cumsum(each) for each in state["bins"][row : row + len(prefixes)]]
            row += len(prefixes)
            keys = {}
            for place, index, inside in places:
                digit = int(np.searchsorted(sums[index], inside, side="right"))
                below = int(sums[index][digit - 1]) if digit else 0
                keys[place] = ((prefixes[index] << width) + digit, inside - below)
            found.append(keys)
        return (0 if known is None else known.bits) + width, found

    def _check(self, state: State) -> None:
        """Refuses data that differs from the data of the earlier passes."""
        if self._known is None:
            return
        before = (self._known.dtype, self._known.shape, self._known.counts)
        now = (state["dtype"], state["shape"], state["count"].tolist() if state["dtype"] else [])
        if now != before:
            raise ValueError(
                f"the data changed between two passes: dtype, shape and counts were {before}, and are {now}. Quantiles "
                "read the data more than once; each pass must give the same samples."
            )

    def places(self, count: int) -> list[tuple[int, int, Fraction]]:
        """For each quantile of ``count`` sorted numbers: two places, counted from 0, and the upper one's weight."""
        found = []
        for q in self.wanted():
            if self.method in ("inverted_cdf", "interpolated_inverted_cdf"):
                place = min(max(count * q, Fraction(1)), Fraction(count)) - 1
                place = Fraction(math.ceil(place)) if self.method == "inverted_cdf" else place
            else:
                place = (count - 1) * q
            lower = math.floor(place)
            upper = math.ceil(place)
            if self.method == "lower":
                upper = lower
            if self.method == "higher":
                lower = upper
            found.append((lower, upper, place - lower if upper > lower else Fraction(0)))
        return found


def _width(dtype: np.dtype[Any]) -> int:
    """The bits of a digit."""
    return min(_DIGIT, 8 * dtype.itemsize)


def _with_prefix(upper: Numbers, prefixes: Sequence[int], known: int) -> tuple[Numbers, npt.NDArray[np.int64]]:
    """The places of the numbers that have one of these upper digits, and which prefix each of these numbers has."""
    if known == _DIGIT:  # a table is faster than a search
        table = np.full(1 << _DIGIT, -1, np.int64)
        table[list(prefixes)] = np.arange(len(prefixes))
        found = table[upper]
        inside = np.flatnonzero(found >= 0)
        return inside, found[inside]
    wanted = np.array(prefixes, upper.dtype)
    place = np.minimum(np.searchsorted(wanted, upper), len(wanted) - 1)
    inside = np.flatnonzero(wanted[place] == upper)
    return inside, place[inside]


def _keys(values: Numbers) -> Numbers:
    """The numbers as unsigned ints in the same order; -0.0 and 0.0 are one number."""
    size = values.dtype.itemsize
    unsigned, signed = np.dtype(f"u{size}"), np.dtype(f"i{size}")
    top = unsigned.type(1 << (8 * size - 1))
    if values.dtype.kind == "f":
        keys = (values + values.dtype.type(0)).view(signed)
        negative = keys >> signed.type(8 * size - 1)  # all bits are set for negative numbers, none for others
        ordered: Numbers = keys.view(unsigned) ^ (negative.view(unsigned) | top)
        return ordered
    ordered = np.ascontiguousarray(values).view(unsigned)
    return ordered ^ top if values.dtype.kind == "i" else ordered


def _value(key: int, dtype: str) -> Fraction | float:
    """The value of a key: a fraction, or an infinity."""
    kind = np.dtype(dtype)
    unsigned = np.dtype(f"u{kind.itemsize}")
    top = 1 << (8 * kind.itemsize - 1)
    if kind.kind == "f":
        bits = key ^ top if key & top else key ^ (2 * top - 1)
        number = float(np.array(bits, unsigned).view(kind))
        return number if math.isinf(number) else Fraction(number)
    return Fraction(key - top if kind.kind == "i" else key)


def _between(low: Fraction | float, high: Fraction | float, weight: Fraction, dtype: str) -> float:
    if isinstance(low, Fraction) and isinstance(high, Fraction):
        exact = low + (high - low) * weight
        return rounded(exact.numerator, exact.denominator, dtype)
    return float(low) if not weight else float(low) + float(high) * float(weight)
