"""Counts and cuts *ready batches*: batches that the user's source yields as whole batches, not as samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import numpy as np
from torch.utils.data import get_worker_info

from torchdistinput.batches import pytree
from torchdistinput.batches.collated import unknown
from torchdistinput.batches.containers import kind_of
from torchdistinput.batches.pytree import Nesting
from torchdistinput.batches.schema import PER_SAMPLE, Structure, described
from torchdistinput.batches.schema_check import changed
from torchdistinput.coordination.batch_digests import digest_of_read, number_of_size
from torchdistinput.errors import BatchingError
from torchdistinput.plan.batching import Cutter, split
from torchdistinput.sources.kernel.batcher import Cut, MarkedBatch, TakenBatches, as_is, sizes_in
from torchdistinput.sources.kernel.collating import ask, for_this_process
from torchdistinput.sources.kernel.read_failures import Failure
from torchdistinput.step_types import OpaqueBatch, Row, RowSizes, SizedRow

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

    def counts_entries(self, batch: Any) -> bool:
        """Whether the entries of a list or tuple are its samples, and no columns: it is counted by ``len`` itself."""
        return self.count is len and type(batch) in (list, tuple)

    def split_by(self, batch: Any, sizes: list[int]) -> Sequence[Any]:
        """The pieces that the user's ``split`` makes.

        Raises:
          BatchingError: it did not make a piece for each size.
        """
        made: object = None if self.split is None else self.split(batch, sizes)
        if not isinstance(made, list | tuple) or len(made) != len(sizes):
            found = f"{type(made).__name__} of {len(made)}" if isinstance(made, Sized) else type(made).__name__
            raise BatchingError(
                f"split_fn returned a {found} for the sizes {sizes}; a list or tuple with a piece for each size is "
                "needed."
            )
        return made

    def structure_of_split(self, batch: Any, size: int) -> Structure:
        """The structure of the pieces of ``split``, from its pieces of one and of two samples."""
        if size < 2:
            return unknown(batch, "and the pieces of split_fn are known from a batch of two samples on")
        return ask(lambda count: self.split_by(batch, [count, size - count] if count < size else [count])[0])


AS_LEAVES: Final = ReadyFns()
"""Batches are counted and cut by their leaves."""


@final
class LeafFinder:
    """Counts ready batches, and finds the leaves that have an entry for each sample. Most are like the one before.

    Args:
      fns: the user's functions that count and cut batches.
    """

    def __init__(self, fns: ReadyFns) -> None:
        self._fns = fns
        self.known = pytree.KnownShapes()
        """The dtypes and shapes of the last batch."""
        self.structure: Structure | None = None
        """The structure of the last batch; the same object for batches that are alike."""

    def known_leaves(self, batch: Any) -> Collection[Any] | None:
        """The leaves of a batch that is like the last one; ``None``: ``find`` them, as where a function counts."""
        return None if self._fns.count is not None else self.known.leaves_of(batch)

    def find(self, batch: Any) -> tuple[Any, int, list[Any]]:
        """The batch, its arrays as tensors; its size; and its leaves.

        There are no leaves where not all but the constants have an entry for each sample.

        Raises:
          BatchingError: the batch cannot be counted.
        """
        leaves, nesting = pytree.flatten(batch)
        size = pytree.size_of_leaves(batch, leaves, nesting) if self._fns.count is None else self._fns.size_of(batch)
        if self.structure is not None and self.structure.is_unknown:
            return batch, size, []
        if self._fns.counts_entries(batch):
            self._note(Structure.of_leaf("rows", object, cls=type(batch)))
            return batch, size, [batch]
        if self._fns.count is not None and _holds_list_of([nesting], size):
            raise BatchingError(
                f"count_fn counts {size} samples, and a list of {size} in the batch could hold them as well as "
                f"columns of them: {described(leaves, nesting)}. Give InputOptions(count_fn=len) where the batch is "
                "this list, and the entries are samples; else split_fn=, which cuts such a batch."
            )
        if not pytree.all_have_rows(leaves, size):
            self._note(unknown(batch, "and not all of its tensors and lists have one entry for each sample"))
            return batch, size, []
        tensors = [pytree.as_tensor(leaf) for leaf in leaves]
        self._note(described(tensors, nesting))
        if any(leaf is not tensor for leaf, tensor in zip(leaves, tensors, strict=True)):
            batch = pytree.unflatten(nesting, tensors)
        return batch, size, tensors

    def _note(self, structure: Structure) -> None:
        if structure != self.structure:
            self.structure = structure


@final
class Measure:
    """Counts ready batches that are not cut, and finds their structure.

    Args:
      fns: the user's function that counts batches.
    """

    def __init__(self, fns: ReadyFns) -> None:
        self._finder = LeafFinder(fns)

    def each(self, batches: Row) -> tuple[Row, tuple[int, ...], Structure | None]:
        """The batches, their arrays as tensors; the samples in each, 0 where there is none; and their structure.

        Raises:
          BatchingError: a batch cannot be counted, or two of them differ in structure.
        """
        finder, row, sizes = self._finder, [], []
        for batch in batches:
            size = 0 if batch is None else finder.known.size
            if batch is not None and finder.known_leaves(batch) is None:
                before = finder.structure
                batch, size, _ = finder.find(batch)  # noqa: PLW2901 - with tensors in the place of arrays
                now = finder.structure
                if not size:  # its structure does not count
                    finder.structure = before
                elif before is not None and now is not None and before.signature() != now.signature():
                    raise changed(before, now)
                else:
                    finder.known.remember(batch, size)
            row.append(batch)
            sizes.append(size)
        return row, tuple(sizes), finder.structure


@final
class _KnownCut(NamedTuple):
    """The division of a batch of some size."""

    limits: list[tuple[tuple[int, int], ...]]
    """The limits of the pieces of each row."""
    sizes: list[tuple[int, ...]]
    """Samples in each piece of each row."""
    row: RowSizes
    """The sizes of the only row, if there is one."""
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
    """

    def __init__(
        self,
        convert: Callable[[Any], Any],
        cutter: Cutter,
        fns: ReadyFns = AS_LEAVES,
    ) -> None:
        self._fns = fns
        self._convert = convert
        self._cutter = cutter
        self._worker: int | None = None
        self._is_here = False  # objects from a loader worker are always new ones
        self._finder = LeafFinder(fns)
        self._known = self._finder.known
        self._structure: Structure | bytes | None = None
        self._cuts: dict[int, _KnownCut] = {}  # by size, for batches of the known structure
        self._whole: tuple[RowSizes, int] | None = None  # of the last batch, if it is a row as it is

    def __call__(self, batch: Any) -> Cut | SizedRow | Failure:
        """The rows of a batch, or the failure that occurred in reading."""
        if self._whole is not None:
            row, read = self._whole
            if self._known.leaves_of(batch) is not None:
                return [batch], row, read
        mark, read = None, 0
        if type(batch) is Failure:
            return batch
        if type(batch) is MarkedBatch:
            batch, mark, compared = batch
            read = digest_of_read(batch) if compared else 0
        if self._worker is None:
            info = get_worker_info()
            self._worker, self._is_here = (0, True) if info is None else (info.id, False)
        try:
            rows, how = self._cut(batch)
        except Exception as error:
            return Failure(error, "cutting a batch")
        if self._is_here and mark is None and len(rows) == 1:
            as_it_is = how.is_whole and self._convert is as_is and self._fns.count is None
            self._whole = (how.row, how.read) if as_it_is else None
            return rows[0], how.row, read or how.read
        read = read or how.read
        told = how.row.samples, (TakenBatches(self._worker, 1, mark),)
        return Cut(rows, how.row.samples, how.sizes, None, told, read, how.row.structure)

    def cut(self, batch: Any) -> Cut:
        """The rows of a batch. A piece that is the whole batch is the batch itself."""
        rows, how = self._cut(batch)
        return Cut(rows, how.row.samples, how.sizes, structure=how.row.structure)

    def _cut(self, batch: Any) -> tuple[list[Row], _KnownCut]:
        if self._convert is not as_is:
            batch = self._convert(batch)
        if type(batch) is OpaqueBatch:
            return [[batch]], self._cuts.get(batch.size) or self._how(batch.size)
        if self._fns.split is not None:
            return self._split(batch, self._fns.size_of(batch))
        leaves = self._finder.known_leaves(batch)
        if leaves is None:
            batch, size, leaves = self._found(batch)
        else:
            size = self._known.size
        how = self._cuts.get(size) or self._how(size)
        if how.is_whole:
            return [[batch]], how
        nesting = None if self._finder.structure is None else self._finder.structure.nesting

        def piece(lo: int, hi: int) -> Any:
            return batch if hi - lo == size else pytree.unflatten(nesting, pytree.cut_leaves(leaves, lo, hi))

        return [[piece(lo, hi) for lo, hi in row] for row in how.limits], how

    def _found(self, batch: Any) -> tuple[Any, int, list[Any]]:
        """A batch that has not the shapes of the last one, its size and leaves; notes its structure and shapes."""
        before, self._whole = self._finder.structure, None
        batch, size, leaves = self._finder.find(batch)
        if self._cutter.topology.num_replicas > 1:
            if not leaves:
                raise _cannot_be_cut(batch, size)
            if not self._fns.counts_entries(batch):
                pytree.check_cuttable(batch)
        if self._fns.count is None:  # else each batch is counted anew
            self._known.remember(batch if leaves else None, size)
        if self._finder.structure is not before:
            self._note(self._finder.structure)
        return batch, size, leaves

    def _note(self, structure: Structure | None) -> None:
        self._structure = None if structure is None else for_this_process(structure)
        self._cuts.clear()

    def _split(self, batch: Any, size: int) -> tuple[list[Row], _KnownCut]:
        """The pieces that the user's function makes; ``None`` for one without a sample."""
        if self._structure is None and self._cutter.topology.num_replicas > 1:
            self._note(self._fns.structure_of_split(batch, size))
        how = self._cuts.get(size) or self._how(size)
        if how.is_whole:
            return [[batch]], how
        replicas = self._cutter.topology.num_replicas
        limits = [split(size, replicas, replica) for replica in range(replicas)]
        made = self._fns.split_by(batch, [hi - lo for lo, hi in limits if lo < hi])
        by_first = {lo: piece for (lo, _), piece in zip(limits, made, strict=False)}
        return [[by_first[lo] if lo < hi else None for lo, hi in row] for row in how.limits], how

    def _how(self, size: int) -> _KnownCut:
        """The division of a batch of ``size`` samples."""
        if len(self._cuts) >= _MOST_SIZES:
            self._cuts.clear()
        limits = self._cutter.rows(size)
        sizes = sizes_in(limits)
        row = RowSizes(size, sizes[0] if sizes else (), self._structure)
        read = number_of_size(size) if self._cutter.read_by_all else 0
        self._cuts[size] = how = _KnownCut(limits, sizes, row, limits == [((0, size),)], read)
        return how


def _holds_list_of(nestings: Sequence[Nesting | None], size: int) -> bool:
    """Whether there is a list or tuple of so many tensors or containers in parts of a batch."""
    opened = [each for each in nestings if each is not None]
    is_list = any(kind_of(each.cls) in ("list", "tuple") and len(each.keys) == size for each in opened)
    return is_list or any(_holds_list_of(each.children, size) for each in opened)


def _cannot_be_cut(batch: Any, size: int) -> BatchingError:
    return BatchingError(
        f"a batch of type {type(batch).__name__} has {size} sample(s), and not all of its tensors and lists have one "
        f"entry for each. {PER_SAMPLE}"
    )
