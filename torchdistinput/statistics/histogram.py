"""``Histogram``: counts the numbers between given edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from torchdistinput.plan.arrays import Ints
from torchdistinput.statistics.base import (
    NanPolicy,
    State,
    Statistic,
    check_has_data,
    check_nan_policy,
    joined,
    no_data,
    taken,
)


@final
@dataclass(frozen=True)
class HistogramResult:
    """The result of ``Histogram``; int64 arrays.

    Args:
      counts: ``(*features, len(edges) - 1)``: how many numbers lie in each bin.
      below: ``features``: how many numbers lie below the first edge.
      above: how many numbers lie above the last edge.
      nans: how many numbers are NaN.
    """

    counts: Ints
    below: Ints
    above: Ints
    nans: Ints


@final
@dataclass(frozen=True)
class Histogram(Statistic):
    """The numbers of each feature in bins: bin ``i`` is ``[edges[i], edges[i + 1])``, and the last has its upper edge.

    >>> tdi.analyze(torch.tensor([1.0, 2.0, 6.0]), tdi.statistics.Histogram([0, 2, 4])).counts
    array([1, 1])

    These are the bins of ``numpy.histogram``. Numbers are compared with the edges as float64. The state takes 8 bytes
    for each feature and bin.

    Args:
      edges: two numbers or more, rising.
      axis: the dims that tell features apart; see ``Moments``. ``None``: one histogram of all numbers.
      nan_policy: ``"propagate"`` and ``"omit"`` count NaNs apart; ``"raise"``: a number that is not finite is an error.

    Raises:
      ValueError: the edges are fewer than two, do not rise, or are NaN.
    """

    edges: Sequence[float]
    axis: int | Sequence[int] | None = None
    nan_policy: NanPolicy = "propagate"

    def __post_init__(self) -> None:
        check_nan_policy(self.nan_policy)
        edges = np.asarray(self.edges, np.float64)
        if edges.ndim != 1 or len(edges) < 2 or not (np.diff(edges) > 0).all():
            raise ValueError(f"edges={list(self.edges)!r:.100}; two or more rising numbers are needed.")

    def start(self) -> State:
        """See ``Statistic.start``."""
        return no_data()

    def update(self, state: State, batch: Any) -> State:
        """See ``Statistic.update``, and ``base.taken`` for its errors; ``"raise"`` refuses what is not finite."""
        values, kind = taken(state, batch, self.axis)
        if not values.size:
            return state
        edges = np.asarray(self.edges, np.float64)
        bins = len(edges) + 2  # below, the bins, above, NaN
        plain = values.astype(np.float64)
        if self.nan_policy == "raise" and not np.isfinite(plain).all():
            raise ValueError(f"{int((~np.isfinite(plain)).sum())} of {plain.size} numbers are NaN or infinite.")
        place = np.searchsorted(edges, plain, side="right")
        place[plain == edges[-1]] = len(edges) - 1
        place[np.isnan(plain)] = bins - 1
        place += np.arange(len(values))[:, None] * bins
        counts = np.bincount(place.reshape(-1), minlength=len(values) * bins).reshape(len(values), bins)
        return self.merge(state, {**kind, "counts": counts.astype(np.int64)})

    def merge(self, state: State, other: State) -> State:
        """See ``Statistic.merge``."""
        return joined(state, other, lambda one, two: {"counts": one["counts"] + two["counts"]})

    def result(self, state: State) -> HistogramResult:
        """See ``Statistic.result``."""
        check_has_data(state)
        counts, shape = state["counts"], tuple(state["shape"])
        below, above, nans = (counts[:, column].reshape(shape) for column in (0, -2, -1))
        return HistogramResult(counts[:, 1:-2].reshape(*shape, -1), below, above, nans)
