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

__all__ = ["CutReady"]

_NO_BATCHES = (Failure, Wait, Marked)


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
        # Of the batch before, which most batches are like:
        self._last = Alike()
        self._structure: tree.Structure | None = None
        self._size = -1
        self._limits: list[tuple[tuple[int, int], ...]] = []
        self._is_whole = False
        self._like: Like | None = None
        self._takes_as_is = False  # what is exactly like it

    def __call__(self, batch: Any) -> Cut | Known | Failure:
        """The rows of a batch, or the failure that the reading met."""
        like = self._like
        if like is not None and self._takes_as_is and self._last.size_of(batch) is not None:
            return [batch], like
        snapshot = None
        if type(batch) in _NO_BATCHES:
            if isinstance(batch, Failure):
                return batch
            if isinstance(batch, Wait):
                return Cut([], 0)
            batch, snapshot = batch
        if self._worker is None:
            info = get_worker_info()
            self._worker, self._is_here = (0, True) if info is None else (info.id, False)
        try:
            rows, size = self._cut(batch)
        except Exception as error:
            return Failure(error, "cutting a batch")
        if self._like is not None and self._is_here and snapshot is None:
            return rows[0], self._like
        return Cut(rows, size, None, self._worker, snapshot)

    def cut(self, batch: Any) -> Cut:
        """The rows of a batch. A piece that is the whole batch is the batch itself."""
        return Cut(*self._cut(batch))

    def _cut(self, batch: Any) -> tuple[list[Row], int]:
        if self._convert is not as_is:
            batch = self._convert(batch)
        if type(batch) is Sealed:
            if self._like is None or self._like.samples != batch.size:
                self._like = Like(batch.size, (batch.size,))
            return [[batch]], batch.size
        size = self._last.size_of(batch)
        if size is None:
            size = self._measured(batch)
        if self._is_whole:
            return [[batch]], size
        return [[self._piece(batch, size, *limits) for limits in row] for row in self._limits], size

    def _measured(self, batch: Any) -> int:
        """Looks closer at a batch that is not exactly like the last one."""
        self._like = None
        self._takes_as_is = False
        size = None if self._structure is None else self._structure.size_of_same(batch)
        if size is None:
            size = tree.batch_size(batch)
            self._structure = tree.structure_of(batch)
        self._last.remember(batch, size)
        if size != self._size:
            self._limits, self._size = self._cutter.rows(size), size
            self._is_whole = self._limits == [((0, size),)]
        if len(self._limits) == 1 and self._last.size_of(batch) is not None:
            self._like = Like(size, tuple(hi - lo for lo, hi in self._limits[0]))
            self._takes_as_is = self._is_whole and self._is_here and self._convert is as_is
        return size

    @staticmethod
    def _piece(batch: Any, size: int, lo: int, hi: int) -> Any:
        return batch if hi - lo == size else tree.cut(batch, lo, hi)
