"""Batches cut into rows: the batcher divides a batch of samples; the collator makes each piece of this rank.

Batching knows no kind of data: what a sample is, and how a piece is made of some of them, is the matter of whoever read
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch

from torchdistinput.batches.schema import Structure
from torchdistinput.plan.batching import Cutter, Limits
from torchdistinput.sources.kernel.collating import ask_collate, for_this_process
from torchdistinput.sources.kernel.read_failures import Failure
from torchdistinput.sources.kernel.sample_costs import CostDivider, taken_at
from torchdistinput.step_types import MAX_DESCRIBED, Digest, DividedDraw, PartialPiece, Row, RowSizes, SizedRow, Skipped


class TakenBatches(NamedTuple):
    """Batches that one reader gave."""

    reader: int
    batches: int
    mark: Any


class MarkedBatch(NamedTuple):
    """A batch of an iterable, with a mark of the moment before its last element, or a request to compare it."""

    batch: Any
    mark: Any
    compared: bool = False
    """Whether the ranks compare a digest of it."""


BatchRead = tuple[int, Sequence[TakenBatches]]
"""What the readers of an iterable tell of a batch: its samples, and the readers that gave it."""

READ_HERE: Final = (TakenBatches(0, 1, None),)
"""A batch that the only reader gave, without a mark."""


@final
class Cut(NamedTuple):
    """A batch that was cut into rows."""

    rows: list[Row]
    size: int
    """Samples in the whole batch."""
    sizes: Sequence[Sequence[int]]
    """Samples in each piece of each row."""
    numbers: list[list[npt.NDArray[np.int64]]] | None = None
    """The numbers of the samples of each piece, if they are known. For an iterable whose batch was divided by cost: the
    places of the samples in the batch."""
    told: Any = None
    """What its reader told of the position after it, for the ``PositionLog``: the cursor of a reader of records, if it
    was reported; of an iterable a ``BatchRead``."""
    read: Digest = 0
    """A number of the whole batch that must be the same on all ranks; 0 if the ranks do not compare it."""
    structure: Structure | bytes | None = None
    """See ``RowSizes.structure``."""

    def sized(self, label: Callable[[Cut], list[Row]] | None = None) -> list[SizedRow]:
        """The rows with their sizes, and with the index beside each piece if ``label`` puts it there."""
        rows = self.rows if label is None or not self.rows else label(self)
        sizes = [RowSizes(self.size, tuple(pieces), self.structure) for pieces in self.sizes]  # torch pins to lists
        return [(row, each, self.read) for row, each in zip(rows, sizes, strict=True)]


def cut_of(item: Cut | SizedRow | Failure) -> Cut:
    """The batch, cut; a ``Failure`` is raised."""
    if type(item) is Failure:
        item.reraise()
    if type(item) is Cut:
        return item
    row, sizes, read = item
    return Cut([row], sizes.samples, [sizes.pieces], None, (sizes.samples, READ_HERE), read, sizes.structure)


def piece_without(left_out: Mapping[int, str], piece: Any) -> Any:
    """The piece; ``PartialPiece`` if samples were left out.

    Args:
      left_out: the message for each sample that was left out, by its position.
      piece: the piece of the other samples; ``None`` if there are none.
    """
    if not left_out:
        return piece
    first = tuple(left_out.values())[:MAX_DESCRIBED]
    return PartialPiece(piece, Skipped(len(left_out), first), tuple(left_out))


def nothing_left(skipped: Skipped, cutter: Cutter) -> list[Row]:
    """The rows of a ready batch that could not be read. They have no samples, as the size of the batch is unknown.

    If all workers read and cut the same batch, only one of them counts it as skipped.
    """
    if cutter.shared and cutter.topology.worker:
        skipped = Skipped(0, skipped.first)
    rows: list[Row] = [[None] * cutter.topology.replicas_per_worker for _ in range(cutter.rows_of_ready_batch)]
    rows[0][0] = PartialPiece(None, skipped)
    return rows


def labelled(row: Row, numbers: Iterable[npt.NDArray[np.int64]]) -> Row:
    """The row, each piece together with the numbers of its samples; samples that were left out have no number there.

    The numbers become a tensor here, with the piece: a tensor that was made ahead in inference mode could not be
    changed after it.
    """
    return [_labelled_piece(piece, its) for piece, its in zip(row, numbers, strict=True)]


def _labelled_piece(piece: Any, numbers: npt.NDArray[np.int64]) -> Any:
    if isinstance(piece, PartialPiece):
        if piece.piece is None:
            return piece
        kept = torch.from_numpy(np.delete(numbers, piece.left_out))
        return piece._replace(piece=(kept, piece.piece))
    return None if piece is None else (torch.from_numpy(numbers), piece)


def sizes_in(rows: Iterable[Limits]) -> list[tuple[int, ...]]:
    """Samples in each piece of each row, from the limits of the pieces."""
    return [tuple([hi - lo for lo, hi in row]) for row in rows]


def no_sizes(rows: Sequence[Row]) -> list[tuple[int, ...]]:
    """The sizes of rows without a sample."""
    return [(0,) * len(row) for row in rows]


def as_is(value: Any) -> Any:
    """The value."""
    return value


def batched(samples: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of ``size`` samples; the last may be shorter."""
    iterator = iter(samples)
    while batch := list(islice(iterator, size)):
        yield batch


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
            read = DividedDraw(read, division)
            return DividedSamples(taken_at(listed, division.order), [division.row], division.order, read)
        if len(samples) != self._last[0]:
            self._last = len(samples), self._cutter.rows(len(samples))
        return DividedSamples(samples, self._last[1], None, read)
