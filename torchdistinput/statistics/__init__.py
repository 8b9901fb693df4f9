"""Statistics whose result does not depend on the order of the data or on how it is cut. No torch, no ranks.

Each statistic is a small value with functions of a state (``Statistic``). States of parts of the data are merged
exactly, so the result is the same to the last bit for any number of workers, batch size and order.
``torchdistinput.analyze`` runs them.

- ``base``: The contract of a statistic, and the code shared by all statistics of numbers.
- ``exact_sums``: Sums without a rounding error.
- ``moments``: ``Moments`` and ``Covariance``.
- ``quantiles``: ``Quantiles``, found digit by digit.
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
