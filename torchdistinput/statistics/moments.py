"""``Moments``: counts, means and variances, exact before they are rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from torchdistinput.statistics.exact_sums import add, add_products, merged, parts_of, rounded, total

_AT_ONCE: Final = 2**15  # numbers that are summed at once: they stay in the cache of a core


@final
@dataclass(frozen=True)
class MomentsResult:
    """The result of ``Moments``. Each array has the shape of the features.

    Args:
      count: how many numbers there are, int64; without NaNs that were left out.
      mean: their mean.
      variance: their variance.
      minimum: the smallest number, in the dtype of the data.
      maximum: the largest number.
    """

    count: npt.NDArray[np.int64]
    mean: Numbers
    variance: Numbers
    minimum: Numbers
    maximum: Numbers

    @property
    def std(self) -> Numbers:
        """The standard deviation: the square root of the variance."""
        return np.asarray(np.sqrt(self.variance))


@final
@dataclass(frozen=True)
class Moments(Statistic):
    """Count, mean, variance, minimum and maximum of each feature. All are exact until one rounding at the end.

    >>> tdi.analyze(torch.tensor([[1.0, 5.0], [3.0, 5.0]]), tdi.statistics.Moments()).mean
    array([2., 5.])

    The state takes about 100 bytes for each feature.

    Args:
      axis: the dims that tell features apart, as Keras's ``Normalization``: -1 for the columns of a table, 1 for the
        channels of images ``(n, C, H, W)``, ``None`` for one mean of all numbers.
      ddof: the variance is divided by ``count - ddof``: 0 as Keras and NumPy, 1 as ``torch.var``.
      nan_policy: as in ``scipy.stats``. ``"propagate"``: the result of a feature with a NaN is NaN; ``"omit"``: NaNs
        are left out; ``"raise"``: a number that is not finite is an error. An infinity makes the variance NaN, and the
        mean infinite, or NaN where both infinities occur.
      dtype: the dtype of mean and variance: "float64", or "float32" for the nearest float32 numbers.
    """

    axis: int | Sequence[int] | None = -1
    ddof: int = 0
    nan_policy: NanPolicy = "propagate"
    dtype: Literal["float64", "float32"] = "float64"

    def __post_init__(self) -> None:
        check_nan_policy(self.nan_policy)
        check_float_dtype(self.dtype)

    def start(self) -> State:
        """See ``Statistic.start``."""
        return no_data()

    def update(self, state: State, batch: Any) -> State:
        """See ``Statistic.update``, and ``base.taken`` for its errors; ``"raise"`` refuses what is not finite."""
        values, kind = taken(state, batch, self.axis)
        if not values.size:
            return state
        if state["dtype"] is None:
            state = {**kind, **_zeros(values.dtype, len(values))}
        width = max(1, _AT_ONCE // len(values))
        for begin in range(0, values.shape[1], width):
            self._add(state, values[:, begin : begin + width])
        return state

    def _add(self, state: State, values: Numbers) -> None:
        count = np.full(len(values), values.shape[1], np.int64)
        low = high = values
        if values.dtype.kind == "f":
            values, low, high, count = _finite(values, state, self.nan_policy)
        state["count"] += count
        state["minimum"] = np.minimum(state["minimum"], low.min(axis=1))
        state["maximum"] = np.maximum(state["maximum"], high.max(axis=1))
        parts = parts_of(values)
        for part, exponent in parts:
            add(state["sum"], part, exponent)
        add_products(state["squares"], parts, parts)

    def merge(self, state: State, other: State) -> State:
        """See ``Statistic.merge``."""
        return joined(
            state,
            other,
            lambda one, two: {
                "minimum": np.minimum(one["minimum"], two["minimum"]),
                "maximum": np.maximum(one["maximum"], two["maximum"]),
                **{name: one[name] + two[name] for name in ("count", "nans", "above", "below")},
                **{name: merged(one[name], two[name]) for name in ("sum", "squares")},
            },
        )

    def result(self, state: State) -> MomentsResult:
        """See ``Statistic.result``."""
        check_has_data(state)
        features = range(len(state["count"]))
        found = [self._of_feature(state, feature) for feature in features]
        shape = state["shape"]
        mean, variance = (np.array(each, self.dtype).reshape(shape) for each in zip(*found, strict=True))
        extremes = [_extreme(state, name).reshape(shape) for name in ("minimum", "maximum")]
        return MomentsResult(state["count"].reshape(shape), mean, variance, *extremes)

    def _of_feature(self, state: State, feature: int) -> tuple[float, float]:
        above, below = bool(state["above"][feature]), bool(state["below"][feature])
        count = int(state["count"][feature])
        if state["nans"][feature] or (above and below) or not count:
            return np.nan, np.nan
        if above or below:
            return (np.inf if above else -np.inf), np.nan
        return _moments(total(state["sum"], feature), total(state["squares"], feature), count, self.ddof, self.dtype)


def _moments(first: tuple[int, int], second: tuple[int, int], count: int, ddof: int, dtype: str) -> tuple[float, float]:
    """Mean and variance from the exact sums of values and of squares."""
    (number, power), (squares, of_squares) = first, second
    mean = rounded(number, count << power, dtype)
    if count <= ddof:
        return mean, np.nan
    common = max(of_squares, 2 * power)
    exact = ((count * squares) << (common - of_squares)) - (number * number << (common - 2 * power))
    return mean, rounded(exact, (count * (count - ddof)) << common, dtype)


def _zeros(kind: np.dtype[Any], features: int) -> dict[str, Any]:
    """The moments of no numbers."""
    zeros = {name: np.zeros(features, np.int64) for name in ("count", "nans", "above", "below")}
    low, high = (-np.inf, np.inf) if kind.kind == "f" else (False, True)
    if kind.kind in "iu":
        low, high = np.iinfo(kind).min, np.iinfo(kind).max
    ends = {"minimum": np.full(features, high, kind), "maximum": np.full(features, low, kind)}
    return {**zeros, **ends, "sum": {}, "squares": {}}


def _finite(
    values: Numbers, state: State, nan_policy: NanPolicy
) -> tuple[Numbers, Numbers, Numbers, npt.NDArray[np.int64]]:
    """The values: with 0 in place of NaN and infinity; for the minimum; for the maximum; and the count by feature.

    The state gets the numbers of NaNs and infinities.
    """
    values = values + values.dtype.type(0)  # -0.0 and 0.0 are one number, so a minimum does not depend on the order
    count = np.full(len(values), values.shape[1], np.int64)
    finite = np.isfinite(values)
    if finite.all():
        return values, values, values, count
    nans = np.isnan(values)
    number = nans.sum(axis=1)
    if nan_policy == "raise":
        raise ValueError(
            f"{int(number.sum())} NaN and {int((~finite).sum() - number.sum())} infinite among {values.size} numbers; "
            'nan_policy="omit" leaves NaNs out, "propagate" makes the result NaN.'
        )
    if nan_policy == "propagate":
        state["nans"] += number
    state["above"] += (values == np.inf).sum(axis=1)
    state["below"] += (values == -np.inf).sum(axis=1)
    plain = np.where(finite, values, values.dtype.type(0))
    low = np.where(nans, values.dtype.type(np.inf), values)
    high = np.where(nans, values.dtype.type(-np.inf), values)
    return plain, low, high, count - (number if nan_policy == "omit" else 0)


def _extreme(state: State, name: str) -> Numbers:
    found: Numbers = state[name]
    if found.dtype.kind != "f":
        return found
    return np.where((state["nans"] > 0) | (state["count"] == 0), found.dtype.type(np.nan), found)
