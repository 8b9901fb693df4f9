"""Statistics whose result does not depend on the order and the cut of the data: no torch, no ranks.

Each is a small value with functions of a state (``Statistic``): states of parts are merged, exactly, so the result is
the same to the last bit for any number of workers, batch size and order. ``torchdistinput.analyze`` runs them.

- ``base``: The contract of a statistic, and what those of numbers share.
- ``exact_sums``: Sums without a rounding error.
- ``moments``: ``Moments`` and ``Covariance``.
- ``quantiles``: ``Quantiles``, digit by digit.
- ``histogram``: ``Histogram``: numbers between given edges.
- ``counts``: ``Counts`` and ``Distinct``: how often each value occurs.
- ``encoding``: A state as bytes, and back.
"""

from __future__ import annotations

from torchdistinput.statistics.base import NanPolicy, State, Statistic
from torchdistinput.statistics.counts import Counts, CountsResult, Distinct
from torchdistinput.statistics.histogram import Histogram, HistogramResult
from torchdistinput.statistics.moments import Covariance, CovarianceResult, Moments, MomentsResult
from torchdistinput.statistics.quantiles import Quantiles

__all__ = [
    "Counts",
    "CountsResult",
    "Covariance",
    "CovarianceResult",
    "Distinct",
    "Histogram",
    "HistogramResult",
    "Moments",
    "MomentsResult",
    "NanPolicy",
    "Quantiles",
    "State",
    "Statistic",
]
