"""Data that is read in this process: iterables, functions that return one, files without a ``DataLoader``.

Also ``ShardedIterableDataset``, the wrapper for a plain torch ``DataLoader``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, cast, final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from torchdistinput import tree
from torchdistinput.errors import BatchingError, InputError
from torchdistinput.flow import Row, Stream
from torchdistinput.plan.batching import (
    Cutter,
    check_batch_size,
    check_replica,
    distinct_steps,
    num_batches,
    refuse_empty_pieces,
)
from torchdistinput.plan.sharding import AutoShardPolicy
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.base import RowStream, SetsEpoch, Shards, tell_epoch
from torchdistinput.sources.files import FileDataset
from torchdistinput.sources.index import Positions
from torchdistinput.sources.runs import LoaderRun
from torchdistinput.sources.worker_side import (
    CutReady,
    CutSamples,
    Failure,
    Guarded,
    GuardedIterator,
    RecordRows,
    as_is,
    batched,
    labels_by_position,
    rows_of,
)

__all__ = ["FunctionSource", "IterableSource", "RecordSource", "ShardedIterableDataset"]

Draw = Callable[[Callable[[], Any]], Any]
Collate = Callable[[Any], Any]


@final
class _Reopened:
    """Gives fresh data for each epoch: calls a function again, or refuses an iterator that was used up."""

    def __init__(self, data: Any, first: Any = None) -> None:
        self._data = data
        self._first = first
        self._used = False

    def __call__(self) -> Iterable[Any]:
        data, self._first = self._first, None
        if data is None:
            data = self._data() if _is_function(self._data) else self._data
        if not isinstance(data, Iterator):
            return cast(Iterable[Any], data)
        spent = inspect.isgenerator(data) and inspect.getgeneratorstate(data) == inspect.GEN_CLOSED
        if spent or (self._used and data is self._data):
            raise InputError(
                f"the data is a {type(data).__name__} that was already read; it cannot start again for another epoch. "
                "Give the function that makes it (distribute_dataset(make_batches), not make_batches())."
            )
        self._used = True
        return data


def _shard_of(data: Any, topology: Topology) -> Any:
    """Policy HINT: the worker's own part of the data, or a function that makes it."""
    if _is_function(data):
        return lambda: data().shard(num_shards=topology.num_workers, index=topology.worker)
    return cast(Shards, data).shard(num_shards=topology.num_workers, index=topology.worker)


def _is_function(data: Any) -> bool:
    return callable(data) and not isinstance(data, Iterable)


@final
class IterableSource:
    """Any iterable, or a function that returns one: of global batches, or of samples with a global batch size.

    Args:
      data: the iterable or function.
      policy: the policy in force.
      topology: where this worker stands.
      global_batch_size: G, if samples are to be batched here.
      collate: makes a batch of samples; torch's ``default_collate`` if not given.
      first: what the function returned already, for the first epoch.
      with_index: whether each piece comes with the numbers of its samples.
    """

    draws_from_default_generator = False

    def __init__(
        self,
        data: Any,
        policy: AutoShardPolicy,
        topology: Topology,
        global_batch_size: int | None,
        collate: Collate | None,
        *,
        first: Any = None,
        with_index: bool = False,
    ) -> None:
        if policy is AutoShardPolicy.HINT and topology.num_workers > 1:
            data, first = _shard_of(data, topology), None
        self._data = data
        self._reopen = _Reopened(data, first)
        self._shared = policy is AutoShardPolicy.DATA or topology.num_workers == 1
        self._cutter = Cutter(topology, self._shared, global_batch_size)
        self._collate = collate
        self._with_index = with_index
        self.certain_piece_size: int | None = None
        self.largest_piece_size = self._cutter.largest_piece_size

    def fingerprint(self) -> Mapping[str, Any]:
        """See ``Source.fingerprint``."""
        return {
            "kind": f"iterable {type(self._data).__name__}",
            "length": len(self._data) if self._shared and isinstance(self._data, Sized) else None,
            "batch size": self._cutter.global_batch_size,
        }

    def epoch_fingerprint(self) -> Mapping[str, Any]:
        """See ``Source.epoch_fingerprint``."""
        return {}

    def num_steps(self) -> int | None:
        """See ``Source.num_steps``."""
        if not self._shared or not isinstance(self._data, Sized):
            return None
        return num_batches(len(self._data), self._cutter.global_batch_size or 1)

    def set_epoch(self, epoch: int) -> None:
        """See ``Source.set_epoch``."""
        if isinstance(self._data, SetsEpoch):
            self._data.set_epoch(epoch)

    def close(self) -> None:
        """See ``Source.close``. Nothing outlives an epoch."""

    def open(self, epoch: int, draws: Draw) -> Stream:
        """See ``Source.open``."""
        elements = Guarded(self._reopen())
        size = self._cutter.global_batch_size
        if size is None:
            cuts = map(CutReady(self._collate or as_is, self._cutter), elements)
        else:
            cut_samples = CutSamples(self._collate or default_collate, self._cutter)
            cuts = map(cut_samples, batched(elements, size, drop_last=False))
        rows = rows_of(cuts, labels_by_position(self._cutter) if self._with_index else None)
        return RowStream(rows, in_background=False)


@final
class RecordSource:
    """A ``FileDataset`` without a ``DataLoader``: records are batched here, or are ready batches.

    Args:
      dataset: the files.
      policy: the policy in force.
      topology: where this worker stands.
      global_batch_size: G, if records are to be batched here.
      collate: makes a batch of samples; torch's ``default_collate`` if not given.
      with_index: whether each piece comes with the numbers of its samples.
    """

    draws_from_default_generator = False
    certain_piece_size: int | None = None

    def __init__(
        self,
        dataset: FileDataset,
        policy: AutoShardPolicy,
        topology: Topology,
        global_batch_size: int | None,
        collate: Collate | None,
        *,
        with_index: bool = False,
    ) -> None:
        shared = policy is AutoShardPolicy.DATA or topology.num_workers == 1
        if collate is None:
            collate = as_is if global_batch_size is None else default_collate
        self._cutter = Cutter(topology, shared, global_batch_size)
        self._with_index = with_index
        self.largest_piece_size = self._cutter.largest_piece_size
        self._rows = RecordRows(
            dataset,
            self._cutter,
            collate,
            by_file=policy is AutoShardPolicy.FILE,
            drop_last=False,
            with_index=with_index,
        )

    def fingerprint(self) -> Mapping[str, Any]:
        """See ``Source.fingerprint``."""
        return {"kind": "files", "batch size": self._cutter.global_batch_size, **self._rows.dataset.fingerprint()}

    def epoch_fingerprint(self) -> Mapping[str, Any]:
        """See ``Source.epoch_fingerprint``."""
        return {}

    def num_steps(self) -> int | None:
        """See ``Source.num_steps``."""
        return None

    def set_epoch(self, epoch: int) -> None:
        """See ``Source.set_epoch``. The epoch comes with ``open``."""

    def close(self) -> None:
        """See ``Source.close``. Nothing outlives an epoch."""

    def open(self, epoch: int, draws: Draw) -> Stream:
        """See ``Source.open``."""
        rows = rows_of(iter(self._rows.of_epoch(epoch)), self._rows.label if self._with_index else None)
        return RowStream(rows, in_background=False)


@final
class FunctionSource:
    """What a dataset function returned: taken as it is, one of its batches for each local replica and step.

    Args:
      datasets: the worker's dataset, or one for each local replica.
      topology: where this worker stands.
      with_index: whether each batch comes with the numbers of its samples.
    """

    draws_from_default_generator = False
    certain_piece_size: int | None = None
    largest_piece_size: int | None = None

    def __init__(self, datasets: Sequence[Any], topology: Topology, *, with_index: bool = False) -> None:
        self._datasets = datasets
        self._topology = topology
        self._with_index = with_index
        self._reopen = [_Reopened(dataset) for dataset in datasets]
        for dataset in datasets:
            if isinstance(dataset, Dataset) and not isinstance(dataset, IterableDataset):
                raise BatchingError(
                    f"the dataset function returned a {type(dataset).__name__}, a map-style dataset of single samples; "
                    "batches are needed. Return DataLoader(dataset, batch_size=context.get_per_replica_batch_size(G))."
                )
            if not isinstance(dataset, Iterable) and not callable(dataset):
                raise InputError(
                    f"the dataset function returned a {type(dataset).__name__}; a DataLoader or another iterable of "
                    "batches is needed."
                )

    def fingerprint(self) -> Mapping[str, Any]:
        """See ``Source.fingerprint``. Lengths may differ from worker to worker."""
        return {"kind": "from function", "datasets": len(self._datasets)}

    def epoch_fingerprint(self) -> Mapping[str, Any]:
        """See ``Source.epoch_fingerprint``."""
        return {}

    def num_steps(self) -> int | None:
        """See ``Source.num_steps``."""
        return None

    def set_epoch(self, epoch: int) -> None:
        """See ``Source.set_epoch``."""
        for dataset in self._datasets:
            if isinstance(dataset, DataLoader):
                tell_epoch(dataset, epoch)
            elif isinstance(dataset, SetsEpoch):
                dataset.set_epoch(epoch)

    def close(self) -> None:
        """See ``Source.close``. Nothing outlives an epoch."""

    def open(self, epoch: int, draws: Draw) -> Stream:
        """See ``Source.open``."""
        per_replica = self._topology.replicas_per_worker // len(self._datasets)
        # Made now: loader workers are started from the thread that asks for them.
        opened = [_opened(reopen()) for reopen in self._reopen]
        rows = _dealt_rows([GuardedIterator(each) for each in opened], per_replica)
        if self._with_index:
            rows = _numbered(rows, Positions(self._topology, shared=self._topology.num_workers == 1))
        return RowStream(
            rows,
            in_background=all(isinstance(each, DataLoader) and each.num_workers > 0 for each in self._datasets),
            close=lambda: _close_all(opened),
        )


def _opened(data: Iterable[Any]) -> Iterator[Any]:
    if isinstance(data, DataLoader) and not data.persistent_workers:
        return LoaderRun(iter(data))
    return iter(data)


def _close_all(opened: Iterable[Iterator[Any]]) -> None:
    for iterator in opened:
        if isinstance(iterator, LoaderRun):
            iterator.close()


def _dealt_rows(iterators: Sequence[Iterator[Any]], per_iterator: int) -> Generator[Row, None, None]:
    """Rows of the next batches of each iterator, ``None`` where one has ended, until all have."""
    while True:
        row = [next(iterator, None) for iterator in iterators for _ in range(per_iterator)]
        for batch in row:
            if isinstance(batch, Failure):
                batch.reraise()
        if all(batch is None for batch in row):
            return
        yield row


def _numbered(rows: Iterator[Row], positions: Positions) -> Generator[Row, None, None]:
    """The rows with the index beside each batch, by the order in which this worker reads them."""
    for row in rows:
        yield [None if batch is None else _with_positions(batch, positions) for batch in row]


def _with_positions(batch: Any, positions: Positions) -> tuple[torch.Tensor, Any]:
    size = tree.batch_size(batch)
    first = positions.take(size)
    return torch.arange(first, first + size), batch


@final
class ShardedIterableDataset(IterableDataset[Any]):
    """One replica's part of each global batch of an iterable, for a plain ``DataLoader(..., batch_size=None)``.

    The parts of all replicas put together, in order, are the global batches (law S): every replica reads all of the
    data and keeps its piece. A plain ``DataLoader`` cannot make an empty batch, so a piece may not be empty; use
    ``Strategy.distribute_dataset`` where that may happen. Local: no communication. With loader workers, each of them
    repeats the data unless ``dataset`` divides itself by ``get_worker_info``, as torch does with any iterable.

    Args:
      dataset: an iterable of global batches, or of samples if ``global_batch_size`` is given.
      num_replicas: over how many replicas they are split.
      rank: which of them this is.
      global_batch_size: samples in a global batch, to batch them here.
      collate_fn: makes a batch of samples; torch's ``default_collate`` if not given.

    Raises:
      BatchingError: a piece is empty: at construction where the length is known, else at that step, which is named.
      ValueError: ``rank`` is not in ``[0, num_replicas)``.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        num_replicas: int,
        rank: int,
        *,
        global_batch_size: int | None = None,
        collate_fn: Collate | None = None,
    ) -> None:
        check_replica(num_replicas, rank)
        self.dataset = dataset
        topology = Topology(num_workers=num_replicas, replicas_per_worker=1, worker=rank)
        self._cutter = Cutter(topology, shared=True, global_batch_size=global_batch_size)
        self._collate = collate_fn
        if global_batch_size is not None:
            check_batch_size(global_batch_size)
            if isinstance(dataset, Sized):
                for step, size in distinct_steps(len(dataset), global_batch_size, drop_last=False):
                    refuse_empty_pieces(step, size, num_replicas)

    def __iter__(self) -> Iterator[Any]:
        size, count = self._cutter.global_batch_size, self._cutter.topology.num_replicas
        cut: CutReady | CutSamples
        batches: Iterable[Any]
        measure: Callable[[Any], int]
        if size is None:
            batches, cut, measure = self.dataset, CutReady(self._collate or as_is, self._cutter), tree.batch_size
        else:
            batches = batched(self.dataset, size, drop_last=False)
            cut, measure = CutSamples(self._collate or default_collate, self._cutter), len
        for step, batch in enumerate(batches):
            refuse_empty_pieces(step, measure(batch), count)
            yield from (row[0] for row in rows_of([cut(batch)]))
