"""Batches that are cut into rows: the pieces of this rank's replicas, for each step that the batch lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch

from torchdistinput.batches.schema import Structure
from torchdistinput.coordination.batch_digests import digest_of_samples, number_of_size
from torchdistinput.plan.batching import Cutter, Limits
from torchdistinput.sources.files.plain_epochs import loader_worker
from torchdistinput.sources.iterable.cursor import READ_HERE, Marked, TakenBatches, Wait
from torchdistinput.sources.iterable.user_state import Snapshot
from torchdistinput.sources.kernel.asking import ask_collate, for_this_process
from torchdistinput.sources.kernel.read_failures import ENDS, Failure, OnFailure
from torchdistinput.sources.kernel.sample_costs import Balance, select
from torchdistinput.step_types import MAX_DESCRIBED, Digest, PartialPiece, Row, RowSizes, SizedRow, Skipped


@final
class Cut(NamedTuple):
    """A batch that was cut into rows."""

    rows: list[Row]
    size: int
    """Samples in the whole batch."""
    sizes: Sequence[Sequence[int]]
    """Samples in each piece of each row."""
    numbers: list[list[npt.NDArray[np.int64] | None]] | int | None = None
    """The numbers of the samples of each piece, or the number of the first row of a ready batch, if they are known. For
    an iterable whose batch was divided by cost: the places of the samples in the batch."""
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


@final
class CutSamples:
    """Collates a list of samples into rows: each local piece by itself, nothing for the pieces of other workers.

    Args:
      collate: makes a batch of a list of samples.
      cutter: cuts batches by the laws of ``plan``.
      balance: divides batches by cost; ``None``: they are cut by place.
      on_failure: how a failure of ``collate`` is handled.
      asks: whether ``collate`` is asked for the structure of its batches.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        cutter: Cutter,
        balance: Balance | None = None,
        *,
        on_failure: OnFailure = ENDS,
        asks: bool = False,
    ) -> None:
        self._asks = asks
        self._structure: Structure | bytes | None = None
        self._balance = balance
        self._collate = collate
        self._cutter = cutter
        self._caught = on_failure.caught

    def __call__(self, samples: list[Any]) -> Cut | Failure:
        """The rows of a batch, or the failure with which reading ended."""
        last = samples[-1]
        if isinstance(last, Failure):
            return last
        if isinstance(last, Wait):
            return Cut([], 0, [])
        snapshot, compared = _taken_off(samples, 0)
        if isinstance(last, Marked) and len(samples) > 1:
            snapshot, _ = _taken_off(samples, -1)
        try:
            read: Digest = 0
            if self._cutter.read_by_all:
                read = digest_of_samples(samples) if compared else number_of_size(len(samples))
            places: list[list[npt.NDArray[np.int64] | None]] | None = None
            if self._balance is None:
                limits = self._cutter.rows(len(samples))
            else:
                division = self._balance.divide(samples)
                limits, samples = division.rows, select(samples, division.order)
                read = self._balance.digest_of(division, read)
                places = [[division.order[lo:hi] for lo, hi in row] for row in limits]
            if self._asks:  # of a copy, as the function may change its samples
                self._structure, self._asks = for_this_process(ask_collate(self._collate, samples[0])), False
            rows = [[self._collate(samples[lo:hi]) if lo < hi else None for lo, hi in row] for row in limits]
            told = len(samples), (TakenBatches(loader_worker()[0], 1, snapshot),)
            return Cut(rows, len(samples), sizes_in(limits), places, told, read, self._structure)
        except self._caught as error:
            return Failure(error, "collating")


def _taken_off(samples: list[Any], place: int) -> tuple[Snapshot | None, bool]:
    """Removes the mark of a sample, if any: the user's own state before it, and whether its batch is compared."""
    marked = samples[place]
    if type(marked) is not Marked:
        return None, False
    samples[place] = marked.element
    return marked.snapshot, marked.compared


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


def labelled_piece(index: torch.Tensor | None, piece: Any) -> Any:
    """The piece together with the numbers of its samples; samples that were left out have no number there."""
    if isinstance(piece, PartialPiece):
        if piece.piece is None or index is None:
            return piece
        kept = torch.ones(len(index), dtype=torch.bool, device="cpu")
        kept[list(piece.left_out)] = False
        return piece._replace(piece=(index[kept], piece.piece))
    return None if piece is None or index is None else (index, piece)


def sizes_in(rows: Iterable[Limits]) -> list[tuple[int, ...]]:
    """Samples in each piece of each row, from the limits of the pieces."""
    return [tuple([hi - lo for lo, hi in row]) for row in rows]


def no_sizes(rows: Sequence[Row]) -> list[tuple[int, ...]]:
    """The sizes of rows without a sample."""
    return [(0,) * len(row) for row in rows]


def as_is(value: Any) -> Any:
    """The value."""
    return value


def batched(samples: Iterable[Any], size: int, *, drop_last: bool) -> Iterator[list[Any]]:
    """Lists of ``size`` samples; the last may be shorter, or is dropped."""
    iterator = iter(samples)
    while batch := list(islice(iterator, size)):
        if len(batch) < size and drop_last:
            return
        yield batch
