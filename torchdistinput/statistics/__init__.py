"""Statistics whose result does not depend on the order of the data or on how it is cut. No torch, no ranks.

Each statistic is a small value with functions of a state (``Statistic``). States of parts of the data are merged
exactly, so the result is the same to the last bit for any number of workers, batch size and order.
``torchdistinput.analyze`` runs them.

- ``base``: The contract of a statistic, and the code shared by all statistics of numbers.
- ``exact_sums``: Sums without a rounding error.
- ``moments``: ``Moments``.
- ``quantiles``: ``Quantiles``, found digit by digit.
- ``counts``: ``Counts``: how often each value occurs.
- ``encoding``: A state as bytes, and back.
"""

from __future__ import annotations

from torchdistinput.statistics.base import NanPolicy, State, Statistic
from torchdistinput.statistics.counts import Counts, CountsResult
from torchdistinput.statistics.moments import Moments, MomentsResult
from torchdistinput.statistics.quantiles import Quantiles

__all__ = [
    "Counts",
    "CountsResult",
    "Moments",
    "MomentsResult",
    "NanPolicy",
    "Quantiles",
    "State",
    "Statistic",
]
