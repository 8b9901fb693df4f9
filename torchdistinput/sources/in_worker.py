"""What runs where the data is read: in loader workers, or in this process where there are none.

Only what a replica gets is decoded and collated. Exceptions leave as values: one of a class that cannot be pickled
would otherwise hang the worker's queue, and the indices or the file would be lost on the way.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Final, NamedTuple, NoReturn, Protocol, cast, final, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

from torchdistinput.coordination.batch_digests import digest_of_read, number_of_size
from torchdistinput.coordination.failures import in_one_line, kind_of, plain_indices, text_of, traceback_of
from torchdistinput.errors import InputError, SourceError
from torchdistinput.plan.batching import Cutter
from torchdistinput.plan.batching import Row as Limits
from torchdistinput.plan.file_resharding import ReaderCursor
from torchdistinput.sources.converting import swift
from torchdistinput.sources.iterable.cursor import Marked, Wait, worker_number
from torchdistinput.sources.iterable.user_state import Snapshot
from torchdistinput.sources.map_style.in_memory import NOT_THERE, InMemoryRows, gather_of, numbers_of
from torchdistinput.sources.map_style.index_array import Numbers
from torchdistinput.sources.opaque_batches import OpaqueCollate
from torchdistinput.sources.sample_index import labelled
from torchdistinput.sources.sample_seed import Samples
from torchdistinput.sources.set_epoch import HearsEpochs
from torchdistinput.step_types import (
    MOST_TOLD,
    NOWHERE,
    Counted,
    Origin,
    PartialPiece,
    ReadFailure,
    Row,
    SizedRow,
    Skipped,
)

__all__ = [
    "ENDS",
    "NO_SAMPLES",
    "PLAIN",
    "Cut",
    "CutSamples",
    "Failure",
    "Keep",
    "OnFailure",
    "PieceDataset",
    "Request",
    "as_is",
    "batched",
    "cannot_skip",
    "cut_of",
    "few",
    "indices_of",
    "labelled_piece",
    "no_sizes",
    "nothing_left",
    "sizes_in",
    "thinned",
]


class WorkerTraceback(Exception):
    """The traceback of a loader worker, as text: the cause of the exception that came from there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@final
class OnFailure(NamedTuple):
    """How a reader takes it that the user's code fails.

    Args:
      goes_on: whether it reads on afterwards, as torch's loader does; else the failure ends the epoch.
      caught: what a failure is. Where torch's loader would read in the user's ``next`` and go on, that is also a
        Ctrl-C. A loader worker ends by one, and what is read ahead would tell of it too late.
    """

    goes_on: bool = False
    caught: type[BaseException] = Exception


ENDS: Final = OnFailure()
"""A failure is an ``Exception``, and ends the epoch."""


@final
class Failure:
    """An exception on its way to the thread that delivers.

    Args:
      error: what was raised.
      where: what was read then, for the message.
      origin: the same as values, as far as they are known; what only this process knows is added.
    """

    def __init__(self, error: BaseException, where: str, origin: Origin = NOWHERE) -> None:
        info = get_worker_info()
        self.where = where
        self.error = error
        self.cause: Exception | None = None
        self.origin = origin
        if info is not None:
            self.where = f"{where}, loader worker {info.id}".lstrip(", ")
            self.origin = origin._replace(
                worker=info.id, kind=kind_of(error), text=text_of(error), traceback=traceback_of(error)
            )
            self.error = _picklable(cast(Exception, error))  # a loader worker catches no others
            # Pickle drops the cause of an exception: that of a SourceError is what the user's code raised.
            if isinstance(error, SourceError) and isinstance(error.__cause__, Exception):
                self.cause = _picklable(error.__cause__)

    def reraise(self, *, goes_on: bool = False) -> NoReturn:
        """Raises a ``ReadFailure`` whose cause is the exception; for ``goes_on`` see there.

        Where the reader goes on, it may keep this object, but not the exception: the traceback of that will hold the
        user's iterator, which could never be garbage then.
        """
        if self.origin.traceback is not None:
            if self.cause is not None:
                self.error.__cause__ = self.cause
            (self.cause or self.error).__cause__ = WorkerTraceback(self.origin.traceback)
        error = self.error
        if goes_on:
            del self.error
        raise ReadFailure(self.where, self.origin, goes_on=goes_on) from error


def _picklable(error: Exception) -> Exception:
    kind = type(error)
    with suppress(Exception):
        copied = pickle.loads(pickle.dumps(error))
        if isinstance(copied, Exception):
            return copied
    with suppress(Exception):  # beside its arguments it may hold a lock, say, or a function
        bare = kind.__new__(kind, *error.args)
        if isinstance(pickle.loads(pickle.dumps(bare)), Exception):
            return bare
    return RuntimeError(text_of(error))  # whatever its reduce method does: its text still tells the story


@runtime_checkable
class _FetchesBatches(Protocol):
    def __getitems__(self, indices: list[Any]) -> list[Any]: ...


Request = tuple[int, Any, int]
"""What torch's loader hands to a ``PieceDataset``: whether to collate a list of samples, the index or indices (as
``Numbers`` where torch's own sampler drew a list of them), and the word of the epoch for ``sample_seed``."""

PLAIN: Final = 2
"""Is added to the first word of a request that has ``Numbers.plain`` instead of ``Numbers``, on its way to a worker."""

_NOTHING: Final = 4
NO_SAMPLES: Final[Request] = (_NOTHING, None, 0)
"""The request for a piece without a sample, which is ``None``."""

Keep = Callable[[Any, int, int], Any]
"""Takes a sample, its position among those of a piece, and their number; returns the sample, whose contents are where
the piece will be, or ``None`` if it leaves this one and all that follow where they are."""


@final
class Cut(NamedTuple):
    """A batch that was cut into rows."""

    rows: list[Row]
    size: int
    """Samples in the whole batch."""
    sizes: Sequence[Sequence[int]]
    """Samples in each piece of each row."""
    numbers: list[list[npt.NDArray[np.int64] | None]] | int | None = None
    """The numbers of the samples of each piece, or that of the first row of a ready batch, where the reader knows."""
    worker: int = 0
    """The loader worker that read it; 0 in this process."""
    snapshot: Snapshot | None = None
    """The state of the user's own after this batch, where it was taken."""
    place: ReaderCursor | None = None
    """Where the walk over files stood after this batch, where it was told."""
    read: int = 0
    """A number of the whole batch that must be the same on all ranks; 0 where nobody compares it."""

    def counted(self, label: Callable[[Cut], list[Row]] | None = None) -> list[Counted]:
        """The rows with the sizes of their pieces, and with the index beside each piece if ``label`` puts it there."""
        rows = self.rows if label is None or not self.rows else label(self)
        # Torch pins tuples to lists.
        return [Counted(row, tuple(sizes)) for row, sizes in zip(rows, self.sizes, strict=True)]


@final
class PieceDataset(Dataset[Any]):
    """A map-style dataset that is asked for whole pieces.

    Args:
      dataset: the user's dataset.
      collate: makes a batch of a list of samples, or converts a batch that came ready.
      skip: whether samples that cannot be read are left out.
      seeds: whether the global generators are seeded for each sample; they are read one by one then.
      on_failure: how it is taken that the dataset or ``collate`` fails.
      hears: tells the dataset the epoch, in loader workers that live on.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        *,
        skip: bool = False,
        seeds: bool = False,
        on_failure: OnFailure = ENDS,
        hears: HearsEpochs | None = None,
    ) -> None:
        self._hears = hears
        self._key: int | None = None  # of the epoch that the dataset was told last
        self.dataset = dataset
        self._caught = on_failure.caught
        self._collate = collate
        self._make = swift(collate)
        self._skip = skip
        self._seeds = seeds
        self._fetches_batches = isinstance(dataset, _FetchesBatches) and not seeds
        self._gather: InMemoryRows | None = None
        self._looked = False  # for a way to gather
        self._keep: Keep | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A way to gather is found anew: it refers to the dataset's tensors in ways that pickle would copy.
        return {**vars(self), "_gather": None, "_looked": False}

    def keep_samples(self, keep: Keep) -> None:
        """Lets samples that ``default_collate`` will stack be put where the piece will be, as soon as they are read."""
        collate = self._collate.collate if isinstance(self._collate, OpaqueCollate) else self._collate
        if collate is default_collate:
            self._keep = keep

    @property
    def gather(self) -> InMemoryRows | None:
        """What makes the pieces of this epoch from indices that are plain ints, once that is known to be possible."""
        return self._gather if self._looked else None

    def begin(self) -> None:
        """An epoch begins, which sees what the user has changed in the dataset since the last one."""
        self._looked = self._gather is not None and self._gather.is_current()

    def __getitem__(self, request: Request) -> Any:
        """The collated piece, ``PartialPiece`` if samples were left out; or a ``Failure`` that names the indices."""
        many, wanted, key = request
        if many & _NOTHING:
            return None
        if many & PLAIN:
            many, wanted = bool(many & ~PLAIN), Numbers.of_plain(wanted)
        try:
            if not self._looked:
                self._gather, self._looked = gather_of(self.dataset, self._collate, many=bool(many)), True
            if self._gather is not None:
                rows = wanted if type(wanted) is Numbers else numbers_of(wanted)
                if rows is not None and len(rows):  # of no samples the user's collate function makes what it likes
                    return self._gather(rows)
        except NOT_THERE:  # the ordinary way tells which index it is, or counts it from the end
            pass
        except Exception as error:
            return _failure(error, wanted.tolist() if isinstance(wanted, Numbers) else wanted)
        if isinstance(wanted, Numbers):
            wanted = wanted.tolist()
        return self._read(many, wanted, key)

    def _read(self, many: int, wanted: Any, key: int) -> Any:
        try:
            if self._hears is not None and key != self._key:
                self._hears.listen(self.dataset)
                self._key = key
            with Samples(key, seeds=self._seeds) as reading:
                if self._skip:
                    return self._thinned((many, wanted, key), reading)
                if not many:
                    samples = self._item(wanted, reading)
                elif self._fetches_batches:
                    samples = self.dataset.__getitems__(wanted)
                else:
                    samples = self._one_by_one(wanted, reading)
            return self._make(samples)
        except ReadFailure as failure:
            return Failure(cast(BaseException, failure.__cause__), failure.where, failure.origin)
        except self._caught as error:
            return _failure(error, wanted)

    def _one_by_one(self, wanted: Sequence[Any], reading: Samples) -> list[Any]:
        dataset, keep, samples = self.dataset, self._keep, []
        for row, index in enumerate(wanted):
            reading.begin(index)
            try:
                sample = dataset[index]
            except self._caught as error:
                raise ReadFailure(f"sample {index}", Origin(plain_indices([index]))) from error
            if keep is not None:
                kept = keep(sample, row, len(wanted))
                if kept is None:  # nor will it keep any of the others
                    keep = None
                else:
                    sample = kept
            samples.append(sample)
        return samples

    def _item(self, index: Any, reading: Samples) -> Any:
        reading.begin(index)
        return self.dataset[index]

    def _thinned(self, request: Request, reading: Samples) -> Any:
        """The collated piece of those samples that can be read. What the collate function raises is raised."""
        many, wanted, _ = request
        if not many:
            try:
                item = self._item(wanted, reading)
            except Exception as error:
                samples_in_it = len(wanted) if isinstance(wanted, list) else 1
                return thinned(dict.fromkeys(range(samples_in_it), _unread(wanted, error)), None)
            return self._make(item)
        left_out: dict[int, str] = {}
        samples = self._readable(wanted, reading, left_out)
        return thinned(left_out, self._collate(samples) if samples or not wanted else None)

    def _one_of_batch(self, index: Any, reading: Samples) -> Any:
        """One sample, by the method that reads many: it may make other ones than ``__getitem__``."""
        (sample,) = self.dataset.__getitems__([index])
        return sample

    def _readable(self, wanted: Sequence[Any], reading: Samples, left_out: dict[int, str]) -> list[Any]:
        """The samples that can be read; those that cannot are told of by their positions."""
        dataset, read = self.dataset, self._item
        if self._fetches_batches:
            try:
                return cast("list[Any]", dataset.__getitems__(wanted))
            except Exception:  # which of them it was shows one by one
                read = self._one_of_batch
        samples = []
        for position, index in enumerate(wanted):
            try:
                samples.append(read(index, reading))
            except Exception as error:  # noqa: PERF203 - each sample may fail by itself
                left_out[position] = _unread(index, error)
        return samples


def _failure(error: BaseException, wanted: Any) -> Failure:
    indices = wanted if isinstance(wanted, list | tuple) else [wanted]
    return Failure(error, f"samples {few(wanted)}", Origin(plain_indices(indices)))


def indices_of(request: Request) -> list[Any]:
    """The indices that a request asks for."""
    many, wanted, _ = request
    if many & _NOTHING:
        return []
    if many & PLAIN:
        return Numbers.of_plain(wanted).tolist()
    return list(wanted) if isinstance(wanted, list | tuple) else [wanted]


def few(indices: Any) -> str:
    """Indices in words, the first few of many."""
    if isinstance(indices, Sequence) and not isinstance(indices, str) and len(indices) > 8:
        return f"{', '.join(map(str, indices[:8]))}, ... ({len(indices)} in all)"
    return ", ".join(map(str, indices)) if isinstance(indices, list | tuple) else str(indices)


def _unread(index: Any, error: Exception) -> str:
    return f"sample {plain_indices([index])[0]}: {in_one_line(error)}"


def thinned(left_out: Mapping[int, str], piece: Any) -> Any:
    """The piece; ``PartialPiece`` if samples were left out.

    Args:
      left_out: by their positions, what is to be told of them.
      piece: of the other samples; ``None`` if there are none.
    """
    if not left_out:
        return piece
    told = tuple(left_out.values())[:MOST_TOLD]
    return PartialPiece(piece, Skipped(len(left_out), told), tuple(left_out))


def cannot_skip(what: str) -> InputError:
    """Why samples of some data cannot be left out."""
    return InputError(
        f'on_error="skip" was given with {what}, of which nobody knows where its samples are or how to go on after an '
        "error. It is for map-style datasets and FileDatasets; catch the error in your own dataset, and go on to the "
        "next sample there."
    )


def nothing_left(skipped: Skipped, cutter: Cutter) -> list[Row]:
    """The rows of a ready batch that could not be read: without a sample, its size being unknown.

    Where all workers read the same batch, and cut it, one of them counts it for all.
    """
    if cutter.shared and cutter.topology.worker:
        skipped = Skipped(0, skipped.first)
    rows: list[Row] = [[None] * cutter.topology.replicas_per_worker for _ in range(cutter.rows_of_ready_batch)]
    rows[0][0] = PartialPiece(None, skipped)
    return rows


def sizes_in(rows: Iterable[Limits]) -> list[tuple[int, ...]]:
    """Samples in each piece of each row, from the limits of the pieces."""
    return [tuple([hi - lo for lo, hi in row]) for row in rows]


def no_sizes(rows: Sequence[Row]) -> list[tuple[int, ...]]:
    """The sizes of rows without a sample."""
    return [(0,) * len(row) for row in rows]


def labelled_piece(index: torch.Tensor | None, piece: Any) -> Any:
    """The piece with the numbers of its samples beside it; without those of samples that were left out."""
    if isinstance(piece, PartialPiece):
        if piece.piece is None or index is None:
            return piece
        kept = torch.ones(len(index), dtype=torch.bool, device="cpu")
        kept[list(piece.left_out)] = False
        return piece._replace(piece=labelled(index[kept], piece.piece))
    return None if piece is None or index is None else labelled(index, piece)


@final
class CutSamples:
    """Collates a list of samples into rows: each local piece by itself, nothing for the pieces of other workers.

    Args:
      collate: makes a batch of a list of samples.
      cutter: the laws of the cut.
      on_failure: how it is taken that ``collate`` fails.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], cutter: Cutter, *, on_failure: OnFailure = ENDS) -> None:
        self._collate = collate
        self._cutter = cutter
        self._caught = on_failure.caught

    def __call__(self, samples: list[Any]) -> Cut | Failure:
        """The rows of a batch, or the failure that the reading met."""
        last = samples[-1]
        if isinstance(last, Failure):
            return last
        if isinstance(last, Wait):
            return Cut([], 0, [])
        snapshot, compared = _taken_off(samples, 0)
        if isinstance(last, Marked) and len(samples) > 1:
            snapshot, _ = _taken_off(samples, -1)
        try:
            read = 0
            if self._cutter.read_by_all:
                read = digest_of_read(samples) if compared else number_of_size(len(samples))
            limits = self._cutter.rows(len(samples))
            rows = [[self._collate(samples[lo:hi]) if lo < hi else None for lo, hi in row] for row in limits]
            return Cut(rows, len(samples), sizes_in(limits), None, worker_number(), snapshot, None, read)
        except self._caught as error:
            return Failure(error, "collating")


def _taken_off(samples: list[Any], place: int) -> tuple[Snapshot | None, bool]:
    """Takes off what a sample is marked with, if it is: the own state before it, and whether its batch is compared."""
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
    return Cut([row], sizes.samples, [sizes.pieces], read=read if isinstance(read, int) else 0)


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
