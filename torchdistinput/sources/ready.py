"""Batches that come ready, on their way into rows: cut where they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch.utils.data import get_worker_info

from torchdistinput import tree
from torchdistinput.alike import Alike
from torchdistinput.flow import Known, Like, Row, Sealed
from torchdistinput.plan.batching import Cutter
from torchdistinput.sources.converting import swift
from torchdistinput.sources.opaque import Marked, Wait
from torchdistinput.sources.worker_side import Cut, Failure, as_is
from torchdistinput.structure import Structure

__all__ = ["CutReady"]

_NO_BATCHES = (Failure, Wait, Marked)
_MOST_SIZES = 1024  # of batches, of which it is kept how they are cut


@final
class _Cut:
    """How a batch of one kind and size is cut.

    Args:
      limits: where, for each row.
      is_whole: whether there is one piece, which is all of it.
      takes_as_is: whether the row of one that is like it may be known without any more.
      like: how its row is, if it makes one.
    """

    def __init__(
        self, limits: list[tuple[tuple[int, int], ...]], *, is_whole: bool, takes_as_is: bool, like: Like
    ) -> None:
        self.limits = limits
        self.is_whole = is_whole
        self.takes_as_is = takes_as_is
        self.like = like


@final
class CutReady:
    """Cuts a batch that came ready into rows, along dim 0 of its leaves.

    Args:
      convert: makes tensors of what the source yields.
      cutter: the laws of the cut.
    """

    def __init__(self, convert: Callable[[Any], Any], cutter: Cutter) -> None:
        self._convert = swift(convert)
        self._cutter = cutter
        self._worker: int | None = None
        self._is_here = False  # not in a loader worker, from where no object comes as the same
        # Of the batch before, which most batches are like, but for their size perhaps:
        self._last = Alike()
        self._structure: Structure | None = None
        self._kind: object = None
        self._cuts: dict[int, _Cut] = {}  # of its kind, by size
        self._cut_as: _Cut | None = None

    def __call__(self, batch: Any) -> Cut | Known | Failure:
        """The rows of a batch, or the failure that the reading met."""
        how = self._cut_as
        if how is not None and how.takes_as_is and self._last.size_of(batch) is not None:
            return [batch], how.like, 0
        snapshot = None
        if type(batch) in _NO_BATCHES:
            if type(batch) is not Marked:
                return Cut([], 0) if type(batch) is Wait else batch
            batch, snapshot = batch
        if self._worker is None:
            info = get_worker_info()
            self._worker, self._is_here = (0, True) if info is None else (info.id, False)
        try:
            rows, how = self._cut(batch)
        except Exception as error:
            return Failure(error, "cutting a batch")
        if self._is_here and snapshot is None and self._kind is not None and len(rows) == 1:
            return rows[0], how.like, 0
        return Cut(rows, how.like.samples, None, self._worker, snapshot)

    def cut(self, batch: Any) -> Cut:
        """The rows of a batch. A piece that is the whole batch is the batch itself."""
        rows, how = self._cut(batch)
        return Cut(rows, how.like.samples)

    def _cut(self, batch: Any) -> tuple[list[Row], _Cut]:
        how = self._cut_as
        if self._convert is not as_is:
            batch = self._convert(batch)
        if type(batch) is Sealed:
            size = batch.size
            if self._kind is not Sealed:
                self._begin_kind(Sealed)  # whatever is in it
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
        return [[self._piece(batch, size, *limits) for limits in row] for row in how.limits], how

    def _measured(self, batch: Any) -> int:
        """Looks closer at a batch that is of another kind than the last one."""
        size = None if self._structure is None else self._structure.size_of_same(batch)
        if size is None:
            size = tree.batch_size(batch)
            self._structure = tree.structure_of(batch)
        self._last.remember(batch, size)
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
            )
        self._cut_as = how
        return how

    @staticmethod
    def _piece(batch: Any, size: int, lo: int, hi: int) -> Any:
        return batch if hi - lo == size else tree.cut(batch, lo, hi)
