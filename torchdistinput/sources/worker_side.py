"""What runs where the data is read: in loader workers, or in this process where there are none.

Only what a replica gets is decoded and collated. Exceptions leave as values: one of a class that cannot be pickled
would otherwise hang the worker's queue, and the indices or the file would be lost on the way.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol, cast, final, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, get_worker_info

from torchdistinput import tree
from torchdistinput.flow import ReadFailure, Row
from torchdistinput.plan.batching import Cutter
from torchdistinput.sources.opaque import Marked, Wait, worker_number
from torchdistinput.sources.own_state import Snapshot
from torchdistinput.sources.seeds import Samples
from torchdistinput.sources.walks import RecordPlace

__all__ = [
    "Cut",
    "CutReady",
    "CutSamples",
    "Failure",
    "PieceDataset",
    "as_is",
    "batched",
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
    worker: int = 0
    """The loader worker that read it; 0 in this process."""
    snapshot: Snapshot | None = None
    """The state of the user's own after this batch, where it was taken."""
    place: str | None = None
    """Where the walk over files stood after this batch, where it was told."""


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
        last, snapshot = samples[-1], None
        if isinstance(last, Failure):
            return last
        if isinstance(last, Wait):
            return Cut([], 0)
        if isinstance(last, Marked):
            samples[-1], snapshot = last
        try:
            rows = [
                [self._collate(samples[lo:hi]) if lo < hi else None for lo, hi in row]
                for row in self._cutter.rows(len(samples))
            ]
            return Cut(rows, len(samples), None, worker_number(), snapshot)
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
        if isinstance(batch, Wait):
            return Cut([], 0)
        snapshot = None
        if isinstance(batch, Marked):
            batch, snapshot = batch
        try:
            rows, size, *_ = self.cut(batch)
            return Cut(rows, size, None, worker_number(), snapshot)
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
