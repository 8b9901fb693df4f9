"""The samples and sums of some steps over all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import NamedTuple, final


@final
class Totals(NamedTuple):
    """The samples and the sums of some steps, over all replicas."""

    samples: int
    sums: Sequence[int]

    def plus(self, other: Totals) -> Totals:
        """Those of both."""
        return Totals(self.samples + other.samples, list(map(add, self.sums, other.sums)))
