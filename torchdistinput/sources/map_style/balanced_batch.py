"""A batch of indices that is divided by cost, when its first piece is needed.

The user's sampler is advanced on the training thread. With loader workers, a batch is divided later, on the background
thread, where torch takes the next request: so the training thread does not wait for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

from torchdistinput.plan.balancing import Division, StepCosts
from torchdistinput.sources.kernel.index_array import IndexArray
from torchdistinput.sources.kernel.sample_costs import CostDivider, select
from torchdistinput.sources.map_style.piece_dataset import Request
from torchdistinput.step_types import LeftOut


@final
class BalancedBatch:
    """A batch and its division.

    Args:
      indices: an ``IndexArray``, or a list that does not change.
      balance: divides it.
      numbers: the number of each sample, if the index is wanted.
    """

    def __init__(self, indices: Any, balance: CostDivider, numbers: Any) -> None:
        self._indices = indices
        self._balance = balance
        self._numbers = numbers
        self._division: Division | Exception | None = None

    @property
    def is_known(self) -> bool:
        """Whether its indices are those of one of torch's own samplers."""
        return isinstance(self._indices, IndexArray)

    @property
    def division(self) -> Division:
        """How the batch is divided; found at the first use.

        Raises:
          BatchingError: the costs cannot be found; the same at each use.
        """
        if self._division is None:
            try:
                self._division = self._balance.divide(self._indices)
            except Exception as error:
                self._division = error
        if isinstance(self._division, Exception):
            raise self._division
        return self._division

    def costs(self, left_out: LeftOut) -> StepCosts:
        """See ``DividedDraw``."""
        return StepCosts(self.division, left_out)

    def indices_of(self, piece: int) -> Any:
        """The indices of a piece."""
        lo, hi = self.division.row[piece]
        whole = hi - lo == len(self._indices)  # in order, by law C4
        return self._indices if whole else select(self._indices, self.division.order[lo:hi])

    @property
    def numbers(self) -> tuple[Any, ...] | None:
        """The numbers of the samples of each piece, if they are wanted."""
        if self._numbers is None:
            return None
        order = self.division.order
        return tuple(self._numbers[order[lo:hi]] for lo, hi in self.division.row)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples in each piece."""
        return tuple(hi - lo for lo, hi in self.division.row)


@final
class LatePiece(NamedTuple):
    """Stands for the indices of a piece in a request, until the request is taken."""

    batch: BalancedBatch
    piece: int

    def request(self, collate: bool, key: int) -> Request:  # noqa: FBT001 - as in the request
        """The request; for no samples if there are none, or if the batch cannot be divided, which ``division`` says."""
        try:
            indices = self.batch.indices_of(self.piece)
        except Exception:  # the row that the piece belongs to raises it, in its turn
            return None
        return (collate, indices, key) if len(indices) else None
