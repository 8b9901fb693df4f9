"""Batches that come ready, on their way into rows: counted and cut where they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
from torch.utils.data import get_worker_info

from torchdistinput.batches import pytree
from torchdistinput.batches.same_schema import SameSchema
from torchdistinput.batches.schema import PER_SAMPLE, Structure
from torchdistinput.coordination.batch_digests import digest_of_read, number_of_size
from torchdistinput.errors import BatchingError
from torchdistinput.plan.batching import Cutter, split
from torchdistinput.plan.batching import Row as Limits
from torchdistinput.sources.converting import swift
from torchdistinput.sources.in_worker import ENDS, Cut, Failure, OnFailure, as_is, sizes_in
from torchdistinput.sources.iterable.cursor import Marked, Wait
from torchdistinput.step_types import Known, Like, OpaqueBatch, Row

__all__ = ["AS_LEAVES", "CutReady", "Measure", "ReadyFns"]

_NO_BATCHES = (Failure, Wait, Marked)
_MOST_SIZES = 1024  # of batches, of which it is kept how they are cut


@final
@dataclass(frozen=True)
class ReadyFns:
    """How the user lets ready batches be counted and cut; ``None``: by their leaves.

    Args:
      count: gives the number of samples in a batch.
      split: cuts a batch into pieces of so many samples each.
    """

    count: Callable[[Any], int] | None = None
    split: Callable[[Any, list[int]], Sequence[Any]] | None = None

    def size_of(self, batch: Any) -> int:
        """Samples in a batch.

        Raises:
          BatchingError: it cannot be counted, or ``count`` gave no count.
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
          like: the structure of a batch before.
          rows: the limits of the pieces.
          replicas: over how many the batch is cut, by law B1.

        Raises:
          BatchingError: it cannot be cut, or ``split`` did not make a piece for each size.
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
    """Counts ready batches that are not cut. Most are like the one before.

    Args:
      count: gives the number of samples in a batch; ``None``: it is counted by its leaves.
    """

    def __init__(self, count: Callable[[Any], int] | None) -> None:
        self._fns = ReadyFns(count)
        self._last = SameSchema()

    def each(self, batches: Row) -> tuple[int, ...]:
        """Samples in each batch; 0 where there is none.

        Raises:
          BatchingError: one cannot be counted.
        """
        return tuple([0 if batch is None else self._size_of(batch) for batch in batches])

    def _size_of(self, batch: Any) -> int:
        size = None if self._fns.count is not None else self._last.size_of(batch)
        if size is None:
            size = self._fns.size_of(batch)
            if self._fns.count is None:
                self._last.remember(batch, size)
        return size


@final
class _Cut:
    """How a batch of one kind and size is cut.

    Args:
      limits: where, for each row.
      is_whole: whether there is one piece, which is all of it.
      takes_as_is: whether the row of one that is like it may be known without any more.
      like: how its row is, if it makes one.
      read: the number by which ranks compare a batch that has no digest; 0 where they do not.
    """

    def __init__(
        self, limits: list[tuple[tuple[int, int], ...]], *, is_whole: bool, takes_as_is: bool, like: Like, read: int
    ) -> None:
        self.read = read
        self.limits = limits
        self.sizes = sizes_in(limits)
        self.is_whole = is_whole
        self.takes_as_is = takes_as_is
        self.like = like


@final
class CutReady:
    """Cuts a batch that came ready into rows, along dim 0 of its leaves.

    Args:
      convert: makes tensors of what the source yields.
      cutter: the laws of the cut.
      fns: how batches are counted and cut.
      on_failure: how it is taken that ``convert`` fails.
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
        self._is_plain = False  # whether the last batch's leaves are tensors, which are cut at once
        self._convert = swift(convert)
        self._cutter = cutter
        self._worker: int | None = None
        self._is_here = False  # not in a loader worker, from where no object comes as the same
        # Of the batch before, which most batches are like, but for their size perhaps:
        self._last = SameSchema()
        self._structure: Structure | None = None
        self._kind: object = None
        self._cuts: dict[int, _Cut] = {}  # of its kind, by size
        self._cut_as: _Cut | None = None

    def __call__(self, batch: Any) -> Cut | Known | Failure:
        """The rows of a batch, or the failure that the reading met."""
        how = self._cut_as
        if how is not None and how.takes_as_is and self._last.size_of(batch) is not None:
            return [batch], how.like, how.read
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
        if self._is_here and snapshot is None and self._kind is not None and len(rows) == 1:
            return rows[0], how.like, read or how.read
        return Cut(rows, how.like.samples, how.sizes, None, self._worker, snapshot, None, read or how.read)

    def cut(self, batch: Any) -> Cut:
        """The rows of a batch. A piece that is the whole batch is the batch itself."""
        rows, how = self._cut(batch)
        return Cut(rows, how.like.samples, how.sizes)

    def _cut(self, batch: Any) -> tuple[list[Row], _Cut]:  # noqa: C901, PLR0912 - for every step
        how = self._cut_as
        if self._convert is not as_is:
            batch = self._convert(batch)
        if type(batch) is OpaqueBatch:
            size = batch.size
            if self._kind is not OpaqueBatch:
                self._begin_kind(OpaqueBatch)  # whatever is in it
                how = None
        elif self._fns.count is not None:
            size = self._fns.size_of(batch)
            if self._kind is not None:
                self._begin_kind(None)
                how = None
        else:
            found = None if how is not None and how.takes_as_is else self._last.size_of(batch)  # it was looked at
            if found is None:
                found = self._last.resized(batch)
            if found is None:
                found, how = self._measured(batch), None
            size = found
        if how is None or how.like.samples != size:
            how = self._how(size)
        if how.is_whole:
            return [[batch]], how
        if self._is_plain:  # as most batches are
            return [[self._piece(batch, size, *limits) for limits in row] for row in how.limits], how
        rows = self._fns.pieces(batch, size, self._structure, how.limits, self._cutter.topology.num_replicas)
        return rows, how

    def _measured(self, batch: Any) -> int:
        """Looks closer at a batch that is of another kind than the last one."""
        size = None if self._structure is None else self._structure.size_of_same(batch)
        if size is None:
            size = self._fns.size_of(batch)
            reading = pytree.read(batch, size, self._structure)
            self._structure = self._structure if reading is None else reading.structure
        self._last.remember(batch, size)
        self._is_plain = self._fns.split is None and self._last.size_of(batch) is not None
        kind = object() if self._last.size_of(batch) is not None else None
        if kind is not None or self._kind is not None:
            self._begin_kind(kind)
        return size

    def _begin_kind(self, kind: object) -> None:
        self._kind = kind
        self._cuts.clear()
        self._cut_as = None

    def _how(self, size: int) -> _Cut:
        """How a batch of the last one's kind is cut."""
        how = self._cuts.get(size)
        if how is None:
            if len(self._cuts) >= _MOST_SIZES:
                self._cuts.clear()
            limits = self._cutter.rows(size)
            is_whole = limits == [((0, size),)]
            self._cuts[size] = how = _Cut(
                limits,
                is_whole=is_whole,
                takes_as_is=is_whole and self._is_here and self._kind is not None and self._convert is as_is,
                like=Like(self._kind, size, tuple(hi - lo for lo, hi in limits[0])),
                read=number_of_size(size) if self._cutter.read_by_all else 0,
            )
        self._cut_as = how
        return how

    @staticmethod
    def _piece(batch: Any, size: int, lo: int, hi: int) -> Any:
        return batch if hi - lo == size else pytree.cut(batch, lo, hi) if lo < hi else None
