"""Reads, decodes and collates samples: in loader workers, or in this process if there are none.

Only the samples that this rank needs are decoded and collated. Exceptions are returned as values: an exception of a
class that cannot be pickled would otherwise hang the queue of the loader worker, and the indices or the file would be
missing in its message.
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

from torchdistinput.coordination.batch_digests import digest_of_samples, number_of_size
from torchdistinput.coordination.failures import in_one_line, kind_of, plain_indices, text_of, traceback_of
from torchdistinput.errors import InputError, SourceError
from torchdistinput.plan.batching import Cutter
from torchdistinput.plan.batching import Row as Limits
from torchdistinput.plan.mixed_turns import Cursor
from torchdistinput.sources.converting import fast_collate
from torchdistinput.sources.files.plain_epochs import SharedEpoch, loader_worker
from torchdistinput.sources.iterable.cursor import Compared, Marked, Wait
from torchdistinput.sources.iterable.user_state import Snapshot
from torchdistinput.sources.map_style.in_memory import NOT_THERE, InMemoryRows, gather_of, numbers_of
from torchdistinput.sources.map_style.index_array import Numbers
from torchdistinput.sources.opaque_batches import OpaqueCollate
from torchdistinput.sources.sample_costs import Balance, select
from torchdistinput.sources.sample_seed import Samples
from torchdistinput.sources.set_epoch import set_announced_epoch
from torchdistinput.step_types import (
    MAX_DESCRIBED,
    NO_ORIGIN,
    Counted,
    Digest,
    Origin,
    PartialPiece,
    ReadFailure,
    Row,
    SizedRow,
    Skipped,
)


class WorkerTraceback(Exception):
    """The traceback of a loader worker, as text: the cause of the exception that this loader worker returned."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@final
class OnFailure(NamedTuple):
    """How a reader handles a failure of the user's code.

    Args:
      goes_on: whether it reads on afterwards, as torch's loader does; else the failure ends the epoch.
      caught: the exceptions that count as failures. Where torch's loader would read in the user's ``next`` and go on,
        Ctrl-C is one of them. Elsewhere it is not: Ctrl-C ends a loader worker, and read-ahead would report it late.
    """

    goes_on: bool = False
    caught: type[BaseException] = Exception


ENDS: Final = OnFailure()
"""A failure is an ``Exception``, and ends the epoch."""


@final
class Failure:
    """An exception of the reading code, as a value that travels to the thread that delivers batches.

    Args:
      error: the exception.
      where: what was being read, for the message.
      origin: the same as known values; the values that only this process knows are added.
    """

    def __init__(self, error: BaseException, where: str, origin: Origin = NO_ORIGIN) -> None:
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
            self.error = _picklable(cast(Exception, error))  # a loader worker catches no other exceptions
            # Pickle drops the cause of an exception. The cause of a SourceError is the exception of the user's code.
            if isinstance(error, SourceError) and isinstance(error.__cause__, Exception):
                self.cause = _picklable(error.__cause__)

    def reraise(self, *, goes_on: bool = False) -> NoReturn:
        """Raises a ``ReadFailure`` whose cause is the exception; ``ReadFailure`` explains ``goes_on``.

        A reader that goes on may keep this object, but not the exception: its traceback will refer to the user's
        iterator, which could then never be garbage-collected.
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
    with suppress(Exception):  # an attribute of the exception may be a lock, for example, or a function
        bare = kind.__new__(kind, *error.args)
        if isinstance(pickle.loads(pickle.dumps(bare)), Exception):
            return bare
    return RuntimeError(text_of(error))  # it cannot be pickled; its text still says what happened


@runtime_checkable
class FetchesBatches(Protocol):
    """A dataset that reads many samples at once, as torch's loader asks for them."""

    def __getitems__(self, indices: list[Any]) -> list[Any]: ...


Request = tuple[int, Any, int]
"""The request that torch's loader passes to a ``PieceDataset``: whether to collate a list of samples, the index or
indices (as ``Numbers`` if torch's own sampler drew a list of them), and the key of the epoch for ``sample_seed``."""

PLAIN_INDICES: Final = 2
"""Added to the first value of a request to a loader worker if it has ``Numbers.plain`` instead of ``Numbers``."""

_NOTHING: Final = 4
NO_SAMPLES: Final[Request] = (_NOTHING, None, 0)
"""The request for a piece without a sample. Its result is ``None``."""

MoveSample = Callable[[Any, int, int], Any]
"""Takes a sample, its position in the piece, and the number of samples in the piece. Returns the sample with its
contents moved into the memory of the piece, or ``None`` if neither this sample nor later ones are moved."""


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
    worker: int = 0
    """The loader worker that read the batch; 0 in this process."""
    snapshot: Snapshot | None = None
    """The state of the user's own dataset or iterator after this batch, if it was taken."""
    place: Cursor | None = None
    """The cursor of the file reader after this batch, if it was reported."""
    read: Digest = 0
    """A number of the whole batch that must be the same on all ranks; 0 if the ranks do not compare it."""

    def compared(self, rows: list[Counted]) -> Sequence[Counted | Compared]:
        """These rows of the batch, with the number that must be the same on all ranks, if they compare it."""
        return [Compared(*row, self.read) for row in rows] if self.read else rows

    def counted(self, label: Callable[[Cut], list[Row]] | None = None) -> list[Counted]:
        """The rows with the sizes of their pieces, and with the index beside each piece if ``label`` puts it there."""
        rows = self.rows if label is None or not self.rows else label(self)
        # Torch pins tuples to lists.
        return [Counted(row, tuple(sizes)) for row, sizes in zip(rows, self.sizes, strict=True)]


@final
class PieceDataset(Dataset[Any]):
    """A map-style dataset whose items are whole pieces: one request gives the collated piece of a replica.

    Args:
      dataset: the user's dataset.
      collate: makes a batch of a list of samples, or converts a ready batch.
      skip: whether samples that cannot be read are left out.
      seeds: whether the global generators are seeded for each sample; samples are then read one by one.
      on_failure: how a failure of the dataset or of ``collate`` is handled.
      shared_epoch: the epoch to which the dataset is set, in persistent loader workers.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        *,
        skip: bool = False,
        seeds: bool = False,
        on_failure: OnFailure = ENDS,
        shared_epoch: SharedEpoch | None = None,
    ) -> None:
        self._shared_epoch = shared_epoch
        self._key: int | None = None  # the key of the epoch that the dataset was set to last
        self.dataset = dataset
        self._caught = on_failure.caught
        self._collate = collate
        self._make = fast_collate(collate)
        self._skip = skip
        self._seeds = seeds
        self._fetches_batches = isinstance(dataset, FetchesBatches) and not seeds
        self._gather: InMemoryRows | None = None
        self._looked = False  # whether a way to gather was searched for
        self._keep: MoveSample | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The copy searches for a way to gather again: pickle would copy the tensors to which it refers.
        return {**vars(self), "_gather": None, "_looked": False}

    def move_samples(self, keep: MoveSample) -> None:
        """Lets ``keep`` move each sample into the memory of the piece once it is read, for ``default_collate``."""
        collate = self._collate.collate if isinstance(self._collate, OpaqueCollate) else self._collate
        if collate is default_collate:
            self._keep = keep

    @property
    def gather(self) -> InMemoryRows | None:
        """The reader that gathers the pieces of this epoch from plain int indices; ``None`` if it is not possible."""
        return self._gather if self._looked else None

    def begin(self) -> None:
        """Begins an epoch. It takes in the changes that the user made to the dataset since the last epoch."""
        self._looked = self._gather is not None and self._gather.is_current()

    def __getitem__(self, request: Request) -> Any:
        """The collated piece, ``PartialPiece`` if samples were left out; or a ``Failure`` that names the indices."""
        many, wanted, key = request
        if many & _NOTHING:
            return None
        if many & PLAIN_INDICES:
            many, wanted = bool(many & ~PLAIN_INDICES), Numbers.of_plain(wanted)
        try:
            if not self._looked:
                self._gather, self._looked = gather_of(self.dataset, self._collate, many=bool(many)), True
            if self._gather is not None:
                rows = wanted if type(wanted) is Numbers else numbers_of(wanted)
                if rows is not None and len(rows):  # for no samples the user's collate function may return anything
                    return self._gather(rows)
        except NOT_THERE:  # reading one by one names the bad index, or counts it from the end
            pass
        except Exception as error:
            return _failure(error, wanted.tolist() if isinstance(wanted, Numbers) else wanted)
        if isinstance(wanted, Numbers):
            wanted = wanted.tolist()
        return self._read(many, wanted, key)

    def _read(self, many: int, wanted: Any, key: int) -> Any:
        try:
            if self._shared_epoch is not None and key != self._key:
                set_announced_epoch(self._shared_epoch, self.dataset)
                self._key = key
            with Samples(key, seeds=self._seeds) as reading:
                if self._skip:
                    return self._read_skipping((many, wanted, key), reading)
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
                if kept is None:  # it will not move any later sample either
                    keep = None
                else:
                    sample = kept
            samples.append(sample)
        return samples

    def _item(self, index: Any, reading: Samples) -> Any:
        reading.begin(index)
        return self.dataset[index]

    def _read_skipping(self, request: Request, reading: Samples) -> Any:
        """The collated piece of the samples that can be read. Exceptions of the collate function are raised."""
        many, wanted, _ = request
        if not many:
            try:
                item = self._item(wanted, reading)
            except Exception as error:
                samples_in_it = len(wanted) if isinstance(wanted, list) else 1
                return without_left_out(dict.fromkeys(range(samples_in_it), _unread(wanted, error)), None)
            return self._make(item)
        left_out: dict[int, str] = {}
        samples = self._readable(wanted, reading, left_out)
        return without_left_out(left_out, self._collate(samples) if samples or not wanted else None)

    def _one_of_batch(self, index: Any, reading: Samples) -> Any:
        """One sample, read by ``__getitems__``: its samples may differ from those of ``__getitem__``."""
        (sample,) = self.dataset.__getitems__([index])
        return sample

    def _readable(self, wanted: Sequence[Any], reading: Samples, left_out: dict[int, str]) -> list[Any]:
        """The samples that can be read. The errors of the others are put into ``left_out``, by position."""
        dataset, read = self.dataset, self._item
        if self._fetches_batches:
            try:
                return cast("list[Any]", dataset.__getitems__(wanted))
            except Exception:  # reading one by one shows which sample failed
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
    return Failure(error, f"samples {indices_as_text(wanted)}", Origin(plain_indices(indices)))


def indices_of(request: Request) -> list[Any]:
    """The indices that a request asks for."""
    many, wanted, _ = request
    if many & _NOTHING:
        return []
    if many & PLAIN_INDICES:
        return Numbers.of_plain(wanted).tolist()
    return list(wanted) if isinstance(wanted, list | tuple) else [wanted]


def indices_as_text(indices: Any) -> str:
    """Indices as text; of many indices only the first few."""
    if isinstance(indices, Sequence) and not isinstance(indices, str) and len(indices) > 8:
        return f"{', '.join(map(str, indices[:8]))}, ... ({len(indices)} in all)"
    return ", ".join(map(str, indices)) if isinstance(indices, list | tuple) else str(indices)


def _unread(index: Any, error: Exception) -> str:
    return f"sample {plain_indices([index])[0]}: {in_one_line(error)}"


def without_left_out(left_out: Mapping[int, str], piece: Any) -> Any:
    """The piece; ``PartialPiece`` if samples were left out.

    Args:
      left_out: the message for each sample that was left out, by its position.
      piece: the piece of the other samples; ``None`` if there are none.
    """
    if not left_out:
        return piece
    told = tuple(left_out.values())[:MAX_DESCRIBED]
    return PartialPiece(piece, Skipped(len(left_out), told), tuple(left_out))


def cannot_skip(what: str) -> InputError:
    """The error for data that does not support ``on_error="skip"``."""
    return InputError(
        f'on_error="skip" was given with {what}, for which it is not known where a sample begins or how to go on '
        "after an error. It is for map-style datasets and FileDatasets; catch the error in your own dataset, and go on "
        "to the next sample there."
    )


def nothing_left(skipped: Skipped, cutter: Cutter) -> list[Row]:
    """The rows of a ready batch that could not be read. They have no samples, as the size of the batch is unknown.

    If all workers read and cut the same batch, only one of them counts it as skipped.
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
    """The piece together with the numbers of its samples; samples that were left out have no number there."""
    if isinstance(piece, PartialPiece):
        if piece.piece is None or index is None:
            return piece
        kept = torch.ones(len(index), dtype=torch.bool, device="cpu")
        kept[list(piece.left_out)] = False
        return piece._replace(piece=(index[kept], piece.piece))
    return None if piece is None or index is None else (index, piece)


@final
class CutSamples:
    """Collates a list of samples into rows: each local piece by itself, nothing for the pieces of other workers.

    Args:
      collate: makes a batch of a list of samples.
      cutter: cuts batches by the laws of ``plan``.
      balance: divides batches by cost; ``None``: they are cut by place.
      on_failure: how a failure of ``collate`` is handled.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        cutter: Cutter,
        balance: Balance | None = None,
        *,
        on_failure: OnFailure = ENDS,
    ) -> None:
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
            rows = [[self._collate(samples[lo:hi]) if lo < hi else None for lo, hi in row] for row in limits]
            return Cut(rows, len(samples), sizes_in(limits), places, loader_worker()[0], snapshot, None, read)
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
