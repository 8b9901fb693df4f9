"""What runs where the data is read: in loader workers, or in this process where there are none.

Only what a replica gets is decoded and collated. Exceptions leave as values: one of a class that cannot be pickled
would otherwise hang the worker's queue, and the indices or the file would be lost on the way.
"""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple, Protocol, cast, final, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from torchdistinput import tree
from torchdistinput.errors import SourceError
from torchdistinput.flow import ReadFailure, Row
from torchdistinput.plan.batching import Cutter
from torchdistinput.plan.sharding import deal
from torchdistinput.sources.files import FileDataset
from torchdistinput.sources.index import Positions, labelled, labelled_batch, number_of, number_of_first_row
from torchdistinput.sources.seeds import Samples, epoch_key
from torchdistinput.sources.walks import RecordPlace

__all__ = [
    "Cut",
    "CutReady",
    "CutSamples",
    "Failure",
    "Guarded",
    "GuardedIterator",
    "PieceDataset",
    "RecordRows",
    "as_is",
    "batched",
    "labels_by_position",
    "rows_of",
]


class WorkerTraceback(Exception):
    """The traceback of a loader worker, as text: the cause of the exception that came from there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@final
class Failure:
    """An exception on its way to the thread that delivers.

    Args:
      error: what was raised.
      where: what was read then, for the message.
    """

    def __init__(self, error: Exception, where: str) -> None:
        info = get_worker_info()
        self.where = where if info is None else f"{where}, loader worker {info.id}".lstrip(", ")
        self.error: Exception = error
        self.traceback: str | None = None
        if info is not None:
            self.traceback = "".join(traceback.format_exception(error))
            self.error = _picklable(error)

    def reraise(self) -> None:
        """Raises a ``ReadFailure`` whose cause is the exception."""
        if self.traceback is not None:
            self.error.__cause__ = WorkerTraceback(self.traceback)
        raise ReadFailure(self.where) from self.error


def _picklable(error: Exception) -> Exception:
    try:
        return cast(Exception, pickle.loads(pickle.dumps(error)))
    except Exception:  # whatever its reduce method does: its text still tells the story
        return RuntimeError("".join(traceback.TracebackException.from_exception(error).format_exception_only()).strip())


@runtime_checkable
class _FetchesBatches(Protocol):
    def __getitems__(self, indices: list[Any]) -> list[Any]: ...


_Places = Callable[[int, int], list[RecordPlace]]

Request = tuple[bool, Any, int]
"""What torch's loader hands to a ``PieceDataset``: whether to collate a list of samples, the index or indices, and the
word of the epoch for ``sample_seed``."""


class Cut(NamedTuple):
    """A batch that was cut into rows."""

    rows: list[Row]
    size: int
    """Samples in the whole batch."""
    numbers: list[list[npt.NDArray[np.int64] | None]] | int | None = None
    """The numbers of the samples of each piece, or that of the first row of a ready batch, where the reader knows."""


@final
class PieceDataset(Dataset[Any]):
    """A map-style dataset that is asked for whole pieces.

    Args:
      dataset: the user's dataset.
      collate: makes a batch of a list of samples, or converts a batch that came ready.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self._collate = collate

    def __getitem__(self, request: Request) -> Any:
        """The collated piece, or a ``Failure`` that names the indices."""
        many, wanted, key = request
        try:
            with Samples(key) as reading:
                if not many:
                    reading.index = wanted
                    samples = self.dataset[wanted]
                elif isinstance(self.dataset, _FetchesBatches):
                    samples = self.dataset.__getitems__(wanted)
                else:
                    samples = [self._sample(index, reading) for index in wanted]
            return self._collate(samples)
        except ReadFailure as failure:
            return Failure(cast(Exception, failure.__cause__), failure.where)
        except Exception as error:
            return Failure(error, f"samples {_few(wanted)}")

    def _sample(self, index: Any, reading: Samples) -> Any:
        reading.index = index
        try:
            return self.dataset[index]
        except Exception as error:
            raise ReadFailure(f"sample {index}") from error


def _few(indices: Any) -> str:
    if isinstance(indices, Sequence) and not isinstance(indices, str) and len(indices) > 8:
        return f"{', '.join(map(str, indices[:8]))}, ... ({len(indices)} in all)"
    return ", ".join(map(str, indices)) if isinstance(indices, list | tuple) else str(indices)


@final
class Guarded(IterableDataset[Any]):
    """An iterable dataset whose exception is its last element, as a ``Failure``.

    Args:
      dataset: the user's dataset.
    """

    def __init__(self, dataset: Iterable[Any]) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        try:
            elements = iter(self.dataset)
        except Exception as error:
            yield Failure(error, "element 0")
            return
        yield from GuardedIterator(elements)


@final
class GuardedIterator(Iterator[Any]):
    """An iterator whose exception is its last element, as a ``Failure``. May be dropped while another thread is in it.

    Args:
      iterator: the user's.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._number = 0
        self._failed = False

    def __next__(self) -> Any:
        if self._failed:
            raise StopIteration
        try:
            element = next(self._iterator)
        except StopIteration:
            raise
        except ReadFailure as failure:
            self._failed = True
            return Failure(cast(Exception, failure.__cause__), failure.where)
        except Exception as error:
            self._failed = True
            return Failure(error, f"element {self._number}")
        self._number += 1
        return element


@final
class CutSamples:
    """Collates a list of samples into rows: each local piece by itself, nothing for the pieces of other workers.

    Args:
      collate: makes a batch of a list of samples.
      cutter: the laws of the cut.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], cutter: Cutter) -> None:
        self._collate = collate
        self._cutter = cutter

    def __call__(self, samples: list[Any]) -> Cut | Failure:
        """The rows of a batch, or the failure that the reading met."""
        for sample in samples:
            if isinstance(sample, Failure):
                return sample
        try:
            rows = [
                [self._collate(samples[lo:hi]) if lo < hi else None for lo, hi in row]
                for row in self._cutter.rows(len(samples))
            ]
            return Cut(rows, len(samples))
        except Exception as error:
            return Failure(error, "collating")


@final
class CutReady:
    """Cuts a batch that came ready into rows, along dim 0 of its leaves.

    Args:
      convert: makes tensors of what the source yields.
      cutter: the laws of the cut.
    """

    def __init__(self, convert: Callable[[Any], Any], cutter: Cutter) -> None:
        self._convert = convert
        self._cutter = cutter
        self._like: tree.Structure | None = None  # of the batch before, which most batches are like

    def __call__(self, batch: Any) -> Cut | Failure:
        """The rows of a batch, or the failure that the reading met."""
        if isinstance(batch, Failure):
            return batch
        try:
            return self.cut(batch)
        except Exception as error:
            return Failure(error, "cutting a batch")

    def cut(self, batch: Any) -> Cut:
        """The rows of a batch. A piece that is the whole batch is the batch itself."""
        batch = self._convert(batch)
        size = None if self._like is None else self._like.size_of_same(batch)
        if size is None:
            size = tree.batch_size(batch)
            self._like = tree.structure_of(batch)
        return Cut([[self._piece(batch, size, *limits) for limits in row] for row in self._cutter.rows(size)], size)

    @staticmethod
    def _piece(batch: Any, size: int, lo: int, hi: int) -> Any:
        if hi - lo == size:
            return batch
        return tree.cut(batch, lo, hi)


def rows_of(
    items: Iterable[Cut | Failure], label: Callable[[Cut], list[Row]] | None = None
) -> Generator[Row, None, None]:
    """The rows, one by one, with the index beside each piece if ``label`` puts it there; a ``Failure`` is raised."""
    for item in items:
        if isinstance(item, Failure):
            item.reraise()
        else:
            yield from item.rows if label is None else label(item)


def labels_by_position(cutter: Cutter) -> Callable[[Cut], list[Row]]:
    """Puts the index beside the pieces of one epoch's batches, by their order."""
    positions = Positions(cutter.topology, shared=cutter.shared)
    return lambda cut: positions.label(cut.rows, cut.size, cutter)


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


@final
class RecordRows(IterableDataset[Any]):
    """The rows of a ``FileDataset``.

    Every loader worker walks the undecoded records of this rank's files, and batch ``j`` is decoded and collated by
    worker ``j mod k``, so nothing depends on the number of loader workers.

    Args:
      dataset: the files.
      cutter: the laws of the cut.
      collate: makes a batch of a list of decoded samples; converts a decoded record where records are ready batches.
      by_file: whether the files are dealt out to the workers (policy FILE); else each worker walks them all.
      drop_last: whether a short last batch is dropped.
      with_index: whether the numbers of the samples are wanted.
    """

    def __init__(
        self,
        dataset: FileDataset,
        cutter: Cutter,
        collate: Callable[[Any], Any],
        *,
        by_file: bool,
        drop_last: bool,
        with_index: bool,
    ) -> None:
        self.dataset = dataset
        self._cutter = cutter
        self._collate = collate
        self._by_file = by_file
        self._drop_last = drop_last
        self._with_index = with_index
        # In shared memory, so that persistent loader workers learn of it too.
        self._epoch: torch.Tensor = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call] # torch's

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration, in loader workers that live on as well."""
        self._epoch[0] = epoch

    def of_epoch(self, epoch: int) -> RecordRows:
        """The rows of one epoch, whatever this one is told later."""
        rows = copy.copy(self)
        rows._epoch = torch.tensor([epoch])  # noqa: SLF001 - its own copy
        return rows

    def __iter__(self) -> Iterator[Cut | Failure]:
        epoch = int(self._epoch)
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        order: Sequence[int] = self.dataset.file_order(epoch)
        if self._by_file:
            order = deal(order, self._cutter.topology.num_workers, self._cutter.topology.worker)
        walk = self.dataset.walk(order, epoch)
        key = epoch_key(self.dataset.seed, epoch)
        size = self._cutter.global_batch_size or 1
        try:
            for number in count():
                records = walk.take(size)
                if not records or (len(records) < size and self._drop_last):
                    return
                if number % num_workers == worker:
                    yield self._cut(records, walk.places, key)
        except SourceError as error:
            yield Failure(error, "")
        finally:
            walk.close()

    def _cut(self, records: list[Any], places: _Places, key: int) -> Cut | Failure:
        try:
            if self._cutter.global_batch_size is None:
                return self._cut_ready(records, partial(places, 0, 1), key)
            rows: list[Row] = []
            numbers: list[list[Any]] = []
            for limits in self._cutter.rows(len(records)):
                rows.append(
                    [
                        self._collate(self.dataset.decode(records[lo:hi], partial(places, lo, hi), key))
                        if lo < hi
                        else None
                        for lo, hi in limits
                    ]
                )
                if self._with_index:
                    numbers.append([np.array([*map(number_of, places(lo, hi))], dtype=np.int64) for lo, hi in limits])
            return Cut(rows, len(records), numbers or None)
        except Exception as error:
            place = places(0, 1)[0]
            where = "" if isinstance(error, SourceError) else f"collating from record {place.record} of {place.file} on"
            return Failure(error, where)

    def _cut_ready(self, records: list[Any], places: Callable[[], list[RecordPlace]], key: int) -> Cut:
        batch = self.dataset.decode(records, places, key)[0]
        cut = CutReady(self._collate, self._cutter).cut(batch)
        return cut._replace(numbers=number_of_first_row(places()[0])) if self._with_index else cut

    def label(self, cut: Cut) -> list[Row]:
        """The rows with the index beside each piece. Where the rows are delivered, not where they are read."""
        if isinstance(cut.numbers, int):
            return labelled_batch(cut.numbers, cut.rows, cut.size, self._cutter)
        return [
            [
                None if piece is None else labelled(torch.from_numpy(number), piece)
                for piece, number in zip(row, numbers, strict=True)
            ]
            for row, numbers in zip(cut.rows, cut.numbers or (), strict=True)
        ]
