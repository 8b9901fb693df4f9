"""Counts and cuts *ready batches*: batches that the user's source yields as whole batches, not as samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import numpy as np
from torch.utils.data import get_worker_info

from torchdistinput.batches import pytree
from torchdistinput.batches.schema import PER_SAMPLE, Structure
from torchdistinput.batches.schema_check import KnownSchema
from torchdistinput.coordination.batch_digests import digest_of_read, number_of_size
from torchdistinput.errors import BatchingError
from torchdistinput.plan.batching import Cutter, Limits, split
from torchdistinput.sources.converting import fast_collate
from torchdistinput.sources.cuts import Cut, as_is, sizes_in
from torchdistinput.sources.iterable.cursor import Marked, Wait
from torchdistinput.sources.read_failures import ENDS, Failure, OnFailure
from torchdistinput.step_types import OpaqueBatch, Row, RowSizes, SizedRow

_NO_BATCHES = (Failure, Wait, Marked)
_MOST_SIZES = 1024  # batch sizes for which the cut is cached


@final
@dataclass(frozen=True)
class ReadyFns:
    """The user's functions that count and cut ready batches; ``None``: they are counted and cut by their leaves.

    Args:
      count: gives the number of samples in a batch.
      split: cuts a batch into pieces of so many samples each.
    """

    count: Callable[[Any], int] | None = None
    split: Callable[[Any, list[int]], Sequence[Any]] | None = None

    def size_of(self, batch: Any) -> int:
        """Samples in a batch.

        Raises:
          BatchingError: the batch cannot be counted, or ``count`` did not return a count.
        """
        if self.count is None:
            return pytree.batch_size(batch)
        size = self.count(batch)
        found: object = size
        if isinstance(found, bool) or not isinstance(found, int | np.integer) or found < 0:
            raise BatchingError(
                f"count_fn returned {size!r:.100} for a batch of type {type(batch).__name__}; the number of samples in "
                "it is needed, an int of 0 or more."
            )
        return int(found)

    def pieces(self, batch: Any, size: int, like: Structure | None, rows: Sequence[Limits], replicas: int) -> list[Row]:
        """The pieces of a batch; ``None`` for one without a sample.

        Args:
          batch: the batch.
          size: samples in it.
          like: the structure of an earlier batch.
          rows: the limits of the pieces.
          replicas: over how many replicas the batch is cut, by law B1.

        Raises:
          BatchingError: the batch cannot be cut, or ``split`` did not make a piece for each size.
        """
        if self.split is None:
            reading = pytree.read(batch, size, like)
            if reading is None or not reading.leaves:
                raise BatchingError(
                    f"a batch of type {type(batch).__name__} has {size} sample(s), and not all of its tensors and "
                    f"lists have one entry for each. {PER_SAMPLE}"
                )
            return [[reading.cut(lo, hi) if lo < hi else None for lo, hi in row] for row in rows]
        limits = [split(size, replicas, replica) for replica in range(replicas)]
        sizes = [hi - lo for lo, hi in limits if lo < hi]
        made: object = self.split(batch, sizes)
        if not isinstance(made, list | tuple) or len(made) != len(sizes):
            found = f"{type(made).__name__} of {len(made)}" if isinstance(made, Sized) else type(made).__name__
            raise BatchingError(
                f"split_fn returned a {found} for the sizes {sizes}; a list or tuple with a piece for each size is "
                "needed."
            )
        by_first = {lo: piece for (lo, _), piece in zip(limits, made, strict=False)}
        return [[by_first[lo] if lo < hi else None for lo, hi in row] for row in rows]


AS_LEAVES: Final = ReadyFns()
"""Batches are counted and cut by their leaves."""


@final
class Measure:
    """Counts ready batches that are not cut. Most batches have the structure of the one before.

    Args:
      count: gives the number of samples in a batch; ``None``: a batch is counted by its leaves.
    """

    def __init__(self, count: Callable[[Any], int] | None) -> None:
        self._fns = ReadyFns(count)
        self._known = KnownSchema()

    def each(self, batches: Row) -> tuple[int, ...]:
        """Samples in each batch; 0 where there is none.

        Raises:
          BatchingError: a batch cannot be counted.
        """
        return tuple([0 if batch is None else self._size_of(batch) for batch in batches])

    def _size_of(self, batch: Any) -> int:
        size = None if self._fns.count is not None else self._known.size_of(batch)
        if size is None:
            size = self._fns.size_of(batch)
            self._known.remember(batch, size)
        return size


@final
class _KnownCut(NamedTuple):
    """The division of a batch of some size."""

    limits: list[tuple[tuple[int, int], ...]]
    """The limits of the pieces of each row."""
    sizes: list[tuple[int, ...]]
    """Samples in each piece of each row."""
    row: RowSizes
    """The limits of the only row, if there is one."""
    is_whole: bool
    """Whether there is one piece, which is all of the batch."""
    read: int
    """The number by which ranks compare a batch that has no digest; 0 where they do not."""


@final
class CutReady:
    """Cuts a ready batch into rows, along dim 0 of its leaves.

    Args:
      convert: makes tensors of the batches that the source yields.
      cutter: cuts batches by the laws of ``plan``.
      fns: the user's functions that count and cut batches.
      on_failure: how a failure of ``convert`` is handled.
    """

    def __init__(
        self,
        convert: Callable[[Any], Any],
        cutter: Cutter,
        fns: ReadyFns = AS_LEAVES,
        *,
        on_failure: OnFailure = ENDS,
    ) -> None:
        self._caught = on_failure.caught
        self._fns = fns
        self._convert = fast_collate(convert)
        self._cutter = cutter
        self._worker: int | None = None
        self._is_here = False  # objects from a loader worker are always new ones
        self._known = KnownSchema()
        self._schema: object = None
        self._is_sealed = False  # whether batches come as ``OpaqueBatch``
        self._cuts: dict[int, _KnownCut] = {}  # by size, for batches of the known schema
        self._whole: tuple[int, RowSizes, int] | None = None  # for the last batch, if it is a row as it is

    def __call__(self, batch: Any) -> Cut | SizedRow | Failure:
        """The rows of a batch, or the failure that occurred in reading."""
        if self._whole is not None:
            size, row, read = self._whole
            if self._known.size_of(batch) == size:
                return [batch], row, read
        snapshot, read = None, 0
        if type(batch) in _NO_BATCHES:
            if type(batch) is not Marked:
                return Cut([], 0, []) if type(batch) is Wait else batch
            batch, snapshot, compared = batch
            read = digest_of_read(batch) if compared else 0
        if self._worker is None:
            info = get_worker_info()
            self._worker, self._is_here = (0, True) if info is None else (info.id, False)
        try:
            rows, how = self._cut(batch)
        except self._caught as error:
            return Failure(error, "cutting a batch")
        if self._is_here and snapshot is None and len(rows) == 1 and (self._known.is_plain or self._is_sealed):
            as_it_is = how.is_whole and not self._is_sealed and self._convert is as_is
            self._whole = (how.row.samples, how.row, how.read) if as_it_is else None
            return rows[0], how.row, read or how.read
        return Cut(rows, how.row.samples, how.sizes, None, self._worker, snapshot, None, read or how.read)

    def cut(self, batch: Any) -> Cut:
        """The rows of a batch. A piece that is the whole batch is the batch itself."""
        rows, how = self._cut(batch)
        return Cut(rows, how.row.samples, how.sizes)

    def _cut(self, batch: Any) -> tuple[list[Row], _KnownCut]:
        if self._convert is not as_is:
            batch = self._convert(batch)
        if type(batch) is OpaqueBatch:
            size, self._is_sealed = batch.size, True
        elif self._fns.count is not None:
            size = self._fns.size_of(batch)
        else:
            known = self._known.size_of(batch)
            size = self._measured(batch) if known is None else known
        how = self._cuts.get(size) or self._how(size)
        if how.is_whole:
            return [[batch]], how
        if self._known.is_plain and self._fns.split is None:
            return [[self._piece(batch, size, *limits) for limits in row] for row in how.limits], how
        rows = self._fns.pieces(batch, size, self._known.structure, how.limits, self._cutter.topology.num_replicas)
        return rows, how

    def _measured(self, batch: Any) -> int:
        """Measures a batch whose schema differs from the last one's, and notes its schema."""
        size = self._fns.size_of(batch)
        reading = pytree.read(batch, size, self._known.structure)
        if reading is not None:
            self._known.structure = reading.structure
        self._known.remember(batch, size)
        self._cuts.clear()
        self._schema = object()
        return size

    def _how(self, size: int) -> _KnownCut:
        """The division of a batch of ``size`` samples."""
        if len(self._cuts) >= _MOST_SIZES:
            self._cuts.clear()
        limits = self._cutter.rows(size)
        sizes = sizes_in(limits)
        row = RowSizes(size, sizes[0] if sizes else (), self._schema)
        read = number_of_size(size) if self._cutter.read_by_all else 0
        self._cuts[size] = how = _KnownCut(limits, sizes, row, limits == [((0, size),)], read)
        return how

    @staticmethod
    def _piece(batch: Any, size: int, lo: int, hi: int) -> Any:
        return batch if hi - lo == size else pytree.cut(batch, lo, hi) if lo < hi else None
