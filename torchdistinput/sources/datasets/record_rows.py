"""Reads, decodes and cuts batches of records, and divides the decoding among ranks and loader workers.

It runs in the process that reads the data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, default_collate

from torchdistinput.errors import SourceError, StateMismatch
from torchdistinput.plan.batching import Cutter
from torchdistinput.plan.file_resharding import Deals, ReaderCursor, fresh_files
from torchdistinput.plan.mixing import Cursor
from torchdistinput.plan.topology import shards_of
from torchdistinput.sources.datasets.mixture import Mixture, RecordDataset
from torchdistinput.sources.formats.columns import Columns, RecordList, collated
from torchdistinput.sources.kernel.batcher import (
    Batcher,
    Collator,
    Cut,
    labelled,
    no_sizes,
    nothing_left,
    piece_without,
)
from torchdistinput.sources.kernel.collating import OpaqueCollate, ask
from torchdistinput.sources.kernel.read_failures import Failure, RecordPlace
from torchdistinput.sources.kernel.ready_batches import AS_LEAVES, CutReady, ReadyFns
from torchdistinput.sources.kernel.sample_costs import CostDivider
from torchdistinput.sources.kernel.sample_index import number_of
from torchdistinput.sources.readers.interleave import Interleave, Reader, Reserved
from torchdistinput.sources.readers.mixed import MixedReader
from torchdistinput.sources.sample_seed import epoch_key
from torchdistinput.sources.set_epoch import SharedEpoch, loader_worker
from torchdistinput.step_types import Digest, OpaqueBatch, Origin, Row, Skipped
from torchdistinput.tracing.read_times import ReadTimes

# Reporting a cursor costs a microsecond or two for each file. A resume reads the records since the last cursor again,
# undecoded.
_RECORDS_BETWEEN_PLACES: Final = 64  # for each open file
_BATCHES_BETWEEN_PLACES: Final = 4

RecordBatch = RecordList | Reserved
"""The undecoded records of a batch."""


@final
@dataclass(frozen=True)
class RecordStart:
    """The position at which a reader starts.

    Args:
      deals: the changes of the world so far; see ``plan.file_resharding``.
      place: the cursor of the reader.
      rows: how many rows to skip from there on.
      must_exist: whether the data must have all these rows.
    """

    deals: Deals = ()
    place: Cursor = field(default_factory=ReaderCursor)
    rows: int = 0
    must_exist: bool = False


@final
@dataclass(frozen=True)
class SkippedRows:
    """The result of skipping rows.

    Args:
      records: the batch with the last skipped row, if rows of this batch are left; else empty.
      rows_left: how many of its rows are skipped; 0 if no row of it is left.
      place: the cursor of the reader before this batch.
      missing: how many of the rows to skip the data did not have.
    """

    records: RecordBatch
    rows_left: int
    place: Cursor
    missing: int = 0


def _taking(reader: Reader, *, in_ranges: bool) -> Callable[[int], RecordBatch]:
    """Takes the undecoded records of a batch; those of files are only reserved, if they are to be."""
    return reader.reserve if in_ranges and isinstance(reader, Interleave) else reader.take


def pass_over(reader: Reader, cutter: Cutter, rows: int, *, drop_last: bool, in_ranges: bool = False) -> SkippedRows:
    """Skips rows: reads their batches undecoded; stops at the end of the data.

    Args:
      reader: the reader of the records.
      cutter: cuts batches by the laws of ``plan``.
      rows: how many rows.
      drop_last: whether a short last batch is dropped.
      in_ranges: whether batches are reserved, so that they are read only if there is no other way.
    """
    take = _taking(reader, in_ranges=in_ranges)
    size = cutter.global_batch_size or 1
    while rows > 0:
        place = reader.position()
        records = take(size)
        if not records or (len(records) < size and drop_last):
            break
        count = len(cutter.rows(len(records))) if cutter.global_batch_size else cutter.rows_of_ready_batch
        if count > rows:
            return SkippedRows(records, rows, place)
        rows -= count
    return SkippedRows([], 0, reader.position(), rows)


@final
class RecordRows(IterableDataset[Any]):
    """The rows of a ``FragmentDataset`` or ``Mixture``.

    Each of the ``k`` loader workers reads the undecoded records of this rank's files. Batch ``j`` is decoded and
    collated by loader worker ``j mod k``, so the result does not depend on the number of loader workers.

    Args:
      dataset: the files, or the mixture.
      cutter: cuts batches by the laws of ``plan``.
      collate: makes a batch of a list of decoded samples; converts a decoded record where records are ready batches.
      by_file: whether the files are dealt out to the workers (policy FILE); else each worker reads all files.
      sizes: of all files, in bytes, if they are dealt by size.
      drop_last: whether a short last batch is dropped.
      with_index: whether the numbers of the samples are wanted.
      ready: how records that are ready batches are counted and cut.
      skip: whether records that cannot be read, or decoded, are left out.
      seeds: whether the global generators are seeded for each record that is decoded.
      in_ranges: whether another process reads a part of each batch, or some batches.
      asks: whether the collate function is asked for the structure of its batches.
      balance: divides batches by cost; ``None``: they are cut by place.
      compares: whether the ranks compare what was read, as all must read the same.
      times: measures how long reading, decoding and ``collate`` take; ``None``: they are not measured.
    """

    def __init__(  # noqa: PLR0913 - one kind of rows is one call
        self,
        dataset: RecordDataset,
        cutter: Cutter,
        collate: Callable[[Any], Any],
        *,
        by_file: bool,
        sizes: Sequence[int] | None = None,
        drop_last: bool,
        with_index: bool,
        ready: ReadyFns = AS_LEAVES,
        skip: bool = False,
        seeds: bool = False,
        in_ranges: bool = False,
        asks: bool = False,
        balance: CostDivider | None = None,
        compares: bool = False,
        times: ReadTimes | None = None,
    ) -> None:
        self._times = times
        self._collator = Collator(collate if times is None else times.of_collate(collate), asks=asks)
        self._batcher = Batcher(cutter, balance)
        self._compares = compares
        self.dataset = dataset
        self._cutter = cutter
        self._by_file = by_file
        self._sizes = sizes
        self._drop_last = drop_last
        self._with_index = with_index
        self._ready = ready
        self._skip = skip
        self._seeds = seeds
        self._seals = isinstance(collate, OpaqueCollate)
        plain = collate.collate if isinstance(collate, OpaqueCollate) else collate
        self._joins_columns = not dataset.decodes and plain is default_collate
        self._in_ranges = in_ranges
        self._start = RecordStart()
        self._epoch = SharedEpoch()

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration, also in persistent loader workers."""
        self._epoch.announce(epoch)

    def of_epoch(self, epoch: int, start: RecordStart | None = None) -> RecordRows:
        """The rows of one epoch, independent of later ``set_epoch`` calls; from a start on, if one is given."""
        rows = copy.copy(self)
        rows._epoch = SharedEpoch()  # noqa: SLF001 - its own copy
        rows.set_epoch(epoch)
        rows._start = start or RecordStart()  # noqa: SLF001 - its own copy
        return rows

    def __iter__(self) -> Iterator[Cut | Failure]:
        epoch, start = self._epoch.last, self._start
        try:
            reader = self._reader(epoch, start)
            if self._times is not None and isinstance(reader, Interleave):
                reader.measure(self._times)
            with closing(reader):
                yield from self._cuts(reader, start, epoch_key(self.dataset.seed, epoch))
        except (SourceError, StateMismatch) as error:
            yield Failure(error, "")

    def _reader(self, epoch: int, start: RecordStart) -> Interleave | MixedReader:
        """Reads the records of this rank, from the start on."""
        if isinstance(self.dataset, Mixture):
            return self.dataset.read_epoch(epoch, start.place, skip=self._skip)
        order: Sequence[int] = fresh_files(self.dataset.file_order(epoch), start.deals, self._sizes)
        if self._by_file:
            topology = self._cutter.topology
            order = shards_of(order, topology.num_workers, self._sizes)[topology.worker]
        return self.dataset.reader(order, epoch, start.place, skip=self._skip, in_ranges=self._in_ranges)

    def _cuts(self, reader: Interleave | MixedReader, start: RecordStart, key: int) -> Iterator[Cut | Failure]:
        """This loader worker's batches, from the start on."""
        worker, num_workers = loader_worker()
        self._collator.begin()
        size = self._cutter.global_batch_size or 1
        # Records and batches until the next cursor is reported; files that were open at the last report.
        to_report, batches_to_report, opened = 0, 0, 0
        take = _taking(reader, in_ranges=self._in_ranges)
        if self._times is not None and not isinstance(reader, Interleave):  # of many datasets
            take = self._times.of_reading(take)
        rows = start.rows
        passed = pass_over(reader, self._cutter, rows, drop_last=self._drop_last, in_ranges=self._in_ranges)
        if passed.missing and start.must_exist:
            raise StateMismatch(f"the files end {passed.missing} step(s) before the one where the epoch was to begin.")
        first, records = passed.rows_left, passed.records
        for number in count():
            if self._times is not None:
                self._times.enter()
            records = records or take(size)
            if not records or (len(records) < size and self._drop_last):
                return
            if number % num_workers == worker:
                place = None
                to_report, batches_to_report = to_report - len(records), batches_to_report - 1
                if (to_report <= 0 and batches_to_report <= 0) or reader.opened > opened:
                    place = reader.position()
                    to_report = _RECORDS_BETWEEN_PLACES * max(1, len(place.slots))
                    batches_to_report = _BATCHES_BETWEEN_PLACES
                    opened = place.opened
                read = reader.digest() if self._compares else 0
                yield self._cut(records, reader, key, first, place, read)
            first, records = 0, []

    def _cut(
        self, records: RecordBatch, reader: Reader, key: int, first: int, place: Cursor | None, read: Digest
    ) -> Cut | Failure:
        try:
            if self._cutter.global_batch_size is None:
                cut = self._cut_ready([*records[:]], partial(reader.places, 0, 1), key, first)
                return cut._replace(told=place, read=read)
            divided = self._batcher.divide(records, read)
            origins = reader if divided.order is None else _InOrder(reader, divided.order)
            numbers = None
            if self._with_index:
                numbers = divided.of_pieces(
                    lambda lo, hi: np.array([*map(number_of, origins.places(lo, hi))], dtype=np.int64), first
                )
            return divided.cut(partial(self._piece, origins, key), self._collator, place, numbers, first)
        except Exception as error:
            if isinstance(error, SourceError):
                return Failure(error, "")
            start = reader.places(0, 1)[0]
            where = f"collating from record {start.record} of {start.file} on"
            return Failure(error, where, Origin(file=start.file))

    def _piece(self, reader: Reader | _InOrder, key: int, batch: RecordBatch, lo: int, hi: int) -> Any:
        """The collated piece of some records of a batch, ``PartialPiece`` if some were left out."""
        collator = self._collator
        times = self._times
        began = 0.0 if times is None else perf_counter()
        records = batch[lo:hi] if isinstance(batch, Reserved) or hi - lo < len(batch) else batch
        if times is not None:
            self._note_read(times, began, reader, lo)
        if isinstance(records, Columns):
            if self._joins_columns:
                columns = records
                collator.note(lambda: ask(lambda count: columns.take([0] * count).batch()))
                return self._handed_on(records.batch(), hi - lo)
            records = list(records)
        if not (self._skip or self.dataset.decodes):
            return collator(records)
        places = partial(reader.places, lo, hi)
        began = 0.0 if times is None else perf_counter()
        samples, left_out = self.dataset.decode(records, places, key, seeds=self._seeds, skip=self._skip)
        if times is not None:
            self._note_read(times, began, reader, lo)
        if samples and reader.of_columns and self._joins_columns:  # these are beside a record that cannot be read
            collator.note(lambda: ask(lambda count: collated(samples[:1] * count)))
            return piece_without(left_out, self._handed_on(collated(samples), len(samples)))
        return piece_without(left_out, collator(samples) if samples else None)

    @staticmethod
    def _note_read(times: ReadTimes, began: float, reader: Reader | _InOrder, lo: int) -> None:
        """Tells how long some records took: those from the one at ``lo`` on, in the batch that was taken last."""
        seconds = perf_counter() - began
        place = next(iter(reader.places(lo, lo + 1)), None)
        times.read(seconds, *((None, None) if place is None else place[:2]))

    def _handed_on(self, piece: Any, size: int) -> Any:
        return OpaqueBatch(piece, size) if self._seals else piece

    def _cut_ready(self, records: list[Any], places: Callable[[], list[RecordPlace]], key: int, first: int) -> Cut:
        decoded, left_out = self.dataset.decode(records, places, key, seeds=self._seeds, skip=self._skip)
        if left_out:
            rows = nothing_left(Skipped(1, tuple(left_out.values())), self._cutter)
            rows = rows[: len(rows) - first]
            return Cut(rows, 0, no_sizes(rows))
        cut = CutReady(self._collator.collate, self._cutter, self._ready).cut(decoded[0])
        return cut._replace(rows=cut.rows[first:], sizes=cut.sizes[first:])


def label(cut: Cut) -> list[Row]:
    """The rows with the index beside each piece. Called in the process that delivers, not in a loader worker."""
    return [labelled(row, numbers) for row, numbers in zip(cut.rows, cut.numbers or (), strict=True)]


@final
class _InOrder:
    """The origins of the records of a batch in another order.

    Args:
      reader: took the batch.
      order: the places of the records in it.
    """

    def __init__(self, reader: Reader, order: npt.NDArray[np.int64]) -> None:
        self._reader = reader
        self._order = order

    @property
    def of_columns(self) -> bool:
        return self._reader.of_columns

    def places(self, lo: int, hi: int) -> list[RecordPlace]:
        places = self._reader.places(0, len(self._order))
        return [places[place] for place in self._order[lo:hi].tolist()]
