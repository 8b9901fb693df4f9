"""Makes rows of a batch of samples: divides it, makes each piece of this rank by itself, and tells their structure.

Reading knows no batch, and batching knows no kind of data: what a sample is, and how a piece is made of some of them,
is the matter of whoever read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from torchdistinput.batches.schema import Structure
from torchdistinput.plan.batching import Cutter, Limits
from torchdistinput.sources.kernel.asking import ask_collate, for_this_process
from torchdistinput.sources.kernel.cut import Cut, sizes_in
from torchdistinput.sources.kernel.sample_costs import CostDivider, select
from torchdistinput.step_types import Digest, DividedDraw, Row


@final
class Collator:
    """Collates the samples of a piece, and finds the structure of all pieces: the function is asked once.

    Args:
      collate: makes a batch of a list of samples.
      asks: whether the structure is wanted.
    """

    def __init__(self, collate: Callable[[Any], Any], *, asks: bool) -> None:
        self.collate = collate
        self._asks = asks
        self.structure: Structure | bytes | None = None
        """The structure of the pieces, once it is known; see ``RowSizes.structure``."""

    @property
    def knows(self) -> bool:
        """Whether nothing more is to be found out."""
        return self.structure is not None or not self._asks

    def begin(self) -> None:
        """Begins an epoch, in which the structure may be another one."""
        self.structure = None

    def note(self, find: Callable[[], Structure]) -> None:
        """Notes the structure of a piece that is made in another way than by ``collate``."""
        if self._asks and self.structure is None:
            self.structure = for_this_process(find())

    def __call__(self, samples: Any) -> Any:
        """The piece of at least one sample."""
        if self._asks and self.structure is None:
            self.structure = for_this_process(ask_collate(self.collate, samples[0]))
        return self.collate(samples)


@final
class DividedSamples(NamedTuple):
    """A batch, and how it is divided among the replicas."""

    samples: Any
    """The samples, in the order of the pieces."""
    rows: Sequence[Limits]
    """The limits of the pieces of each row."""
    order: npt.NDArray[np.int64] | None
    """The place in the batch of each of the samples; ``None``: they are in order."""
    read: Digest
    """See ``Cut.read``."""

    def cut(
        self, make: Callable[[Any, int, int], Any], collator: Collator, told: Any, numbers: Any, first: int = 0
    ) -> Cut:
        """The rows of the batch, from the ``first`` on; ``make`` makes a piece of the samples ``[lo, hi)``.

        Nothing is made for the pieces of other workers, nor of pieces without a sample.
        """
        limits = self.rows[first:] if first else self.rows
        samples = self.samples
        rows: list[Row] = [[make(samples, lo, hi) if lo < hi else None for lo, hi in row] for row in limits]
        if isinstance(self.read, DividedDraw):
            self.read.note_left_out(rows[0])
        return Cut(rows, len(samples), sizes_in(limits), numbers, told, self.read, collator.structure)

    def of_pieces(self, find: Callable[[int, int], npt.NDArray[np.int64]], first: int = 0) -> list[list[Any]]:
        """What ``find`` gives for the limits of each piece of the rows from the ``first`` on."""
        return [[find(lo, hi) for lo, hi in row] for row in self.rows[first:]]


@final
class Batcher:
    """Divides batches of samples.

    Args:
      cutter: cuts batches by the laws of ``plan``.
      balance: divides batches by cost; ``None``: they are cut by place.
    """

    def __init__(self, cutter: Cutter, balance: CostDivider | None) -> None:
        self._cutter = cutter
        self._balance = balance
        self._last: tuple[int, Sequence[Limits]] = (-1, ())  # nearly all batches have the same size

    def divide(self, samples: Any, read: Digest) -> DividedSamples:
        """How a batch is divided; ``read`` is its digest.

        Raises:
          BatchingError: a cost is no cost, or cannot be found.
        """
        if self._balance is not None and len(samples):
            listed = samples[:]
            division = self._balance.divide(listed)
            read = self._balance.digest_of(division, read)
            return DividedSamples(select(listed, division.order), [division.row], division.order, read)
        if len(samples) != self._last[0]:
            self._last = len(samples), self._cutter.rows(len(samples))
        return DividedSamples(samples, self._last[1], None, read)
