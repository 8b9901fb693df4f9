"""The source for iterables that are read in this process, and for functions that return one.

Also ``ShardedIterableDataset``, the wrapper for a plain torch ``DataLoader``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch.utils.data import IterableDataset, default_collate

from torchdistinput.batches import pytree
from torchdistinput.plan.batching import (
    Cutter,
    check_batch_size,
    check_replica,
    distinct_steps,
    num_batches,
    refuse_empty_pieces,
)
from torchdistinput.plan.options import InputOptions
from torchdistinput.plan.seed_schedule import SeedSchedule
from torchdistinput.plan.sharding import AutoShardPolicy
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.base import Exchange, RowStream, length_of, own_shard
from torchdistinput.sources.in_worker import CutSamples, as_is, batched, cut_of
from torchdistinput.sources.iterable.between_epochs import BetweenEpochs
from torchdistinput.sources.iterable.cursor import Place, ReadLog, place_of, warn_of_reading_again
from torchdistinput.sources.iterable.divided_sources import way_out_for
from torchdistinput.sources.iterable.reading import CapturingIterable, entrances_at, labels_by_position, rows_logged
from torchdistinput.sources.iterable.reopening import Reopened, is_function
from torchdistinput.sources.iterable.user_state import OwnState, keeps_state, why_unused
from torchdistinput.sources.rng import Draw
from torchdistinput.sources.sample_costs import balance_by_record
from torchdistinput.sources.set_epoch import ToldEpochs
from torchdistinput.sources.split_batches import CutReady, ReadyFns
from torchdistinput.step_types import Start, Stream

__all__ = ["IterableSource", "ShardedIterableDataset"]

Collate = Callable[[Any], Any]


def _shard_of(data: Any, topology: Topology) -> Any:
    """Policy HINT: the worker's own part of the data, or a function that makes it."""
    if is_function(data):
        return lambda: own_shard(data(), topology.num_workers, topology.worker)
    return own_shard(data, topology.num_workers, topology.worker)


@final
class IterableSource:
    """Any iterable, or a function that returns one: of global batches, or of samples with a global batch size.

    Args:
      data: the iterable or function.
      policy: the policy in force.
      topology: the position of this worker among all workers.
      options: the user's options.
      global_batch_size: G, if samples are to be batched here.
      collate: makes a batch of samples; torch's ``default_collate`` if not given.
      first: the data of the first epoch, if the function was called already.
    """

    workers = None
    seeds = SeedSchedule.EVERY_EPOCH
    draws_order = False

    def __init__(
        self,
        data: Any,
        policy: AutoShardPolicy,
        topology: Topology,
        options: InputOptions,
        global_batch_size: int | None,
        collate: Collate | None,
        *,
        first: Any = None,
    ) -> None:
        self._own_state: OwnState = options.own_state
        self._owns_state = keeps_state(data if first is None else first, self._own_state)
        whole = data
        if policy is AutoShardPolicy.HINT and topology.num_workers > 1:
            data, first = _shard_of(data, topology), None
        self._data = data
        self._between = BetweenEpochs(self._own_state, data)
        self.told = ToldEpochs(whole, data)
        self._reopen = Reopened(data, first)
        self._shared = policy is AutoShardPolicy.DATA or topology.num_workers == 1
        self._cutter = Cutter(topology, self._shared, global_batch_size)
        self._collate = collate
        self._balance = balance_by_record(options, self._cutter, "an iterable")
        self._options = options
        # In-process data may draw from it. With several workers each has its own state; rank 0's is not used for all.
        self.needs_default_state = self.draws_from_default_generator = topology.num_workers == 1
        self.bound_to_world = not self._shared
        self.collective_state = not self._shared or self._owns_state
        self.certain_piece_size: int | None = None
        self.largest_piece_size = self._cutter.largest_piece_size
        self.may_lack_samples = self._cutter.may_lack_samples(drop_last=False, num_samples=None)

    def fingerprint(self) -> Mapping[str, Any]:
        """See ``Source.fingerprint``."""
        return {
            "kind": f"iterable {type(self._data).__name__}",
            "length": length_of(self._data) if self._shared else None,
            "batch size": self._cutter.global_batch_size,
        }

    def epoch_fingerprint(self) -> Mapping[str, Any]:
        """See ``Source.epoch_fingerprint``."""
        return {}

    def num_steps(self) -> int | None:
        """See ``Source.num_steps``."""
        length = length_of(self._data) if self._shared else None
        return None if length is None else num_batches(length, self._cutter.global_batch_size or 1)

    def set_epoch(self, epoch: int) -> None:
        """See ``Source.set_epoch``."""
        self.told.tell(epoch)

    @property
    def way_out(self) -> str:
        """See ``ReadByAll.way_out``."""
        return way_out_for(self._data) if self._cutter.read_by_all else ""

    def close(self) -> None:
        """See ``Source.close``. Nothing outlives an epoch."""

    def generators(self) -> Sequence[torch.Generator]:
        """See ``Source.generators``. The generators of the user's code are not known."""
        return ()

    def check(self, position: Sequence[Any]) -> None:
        """See ``Source.check``."""
        Place.from_json(position, 1)

    @property
    def keeps_between(self) -> bool:
        """See ``KeepsBetweenEpochs.keeps_between``."""
        return self._owns_state

    def front(self) -> list[Any]:
        """See ``KeepsBetweenEpochs.front``."""
        return self._between.position()

    def resume(self, epoch: int, start: Start, share: Exchange) -> Start:
        """See ``Source.resume``."""
        return start

    def open(self, epoch: int, draws: Draw, start: Start) -> Stream:
        """See ``Source.open``."""
        self.told.tell(epoch)
        data, place, size = self._reopen(), place_of(start, 1), self._cutter.global_batch_size
        self.told.tell_also(data)
        unused = why_unused(data, self._own_state)
        place = place.without_states() if unused else place
        warn_of_reading_again(start, place, size or 1, self._data, unused=unused)
        entrances = entrances_at(place)
        if not start.steps and start.position is None:
            place = self._between.begin(data)
        elements = CapturingIterable(
            data,
            size or 1,
            self._options.snapshot_every,
            entrances,
            own_state=self._own_state,
            compares=self._cutter.read_by_all,
        )
        items: Iterable[Any] = elements
        cut: CutReady | CutSamples
        if size is None:
            ready = ReadyFns(self._options.count_fn, self._options.split_fn)
            cut = CutReady(self._collate or as_is, self._cutter, ready)
        else:
            items = batched(elements, size, drop_last=False)
            cut = CutSamples(self._collate or default_collate, self._cutter, self._balance)
        log = ReadLog(place, self._options.most_ahead, owns_state=self._owns_state)
        self._between.begun(log, data)
        label = labels_by_position(self._cutter, place.samples) if self._options.with_index else None
        own_draws = draws if self.draws_from_default_generator else None
        rows = rows_logged(items, cut.__call__, log, place, label)
        cut_by_leaves = size is None and self._options.split_fn is None
        return RowStream(
            rows,
            in_background=False,
            track=log,
            draws=own_draws,
            close=self.told.look,
            one_structure=cut_by_leaves,
        )


@final
class ShardedIterableDataset(IterableDataset[Any]):
    """One replica's part of each global batch of an iterable, for a plain ``DataLoader(..., batch_size=None)``.

    The parts of all replicas put together, in order, are the global batches (law B1): every replica reads all of the
    data and keeps its piece. A plain ``DataLoader`` cannot make an empty batch, so a piece may not be empty; use
    ``Strategy.distribute_dataset`` where that may happen. Local: no communication. With loader workers, each of them
    repeats the data unless ``dataset`` divides itself by ``get_worker_info``, as torch does with any iterable.

    Args:
      dataset: an iterable of global batches, or of samples if ``global_batch_size`` is given.
      num_replicas: how many replicas share each batch.
      rank: the number of this replica.
      global_batch_size: samples in a global batch, to batch them here.
      collate_fn: makes a batch of samples; torch's ``default_collate`` if not given.

    Raises:
      BatchingError: a piece is empty: raised at construction if the length is known, else at the step, which is named.
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
            for step, size in distinct_steps(length_of(dataset) or 0, global_batch_size, drop_last=False):
                refuse_empty_pieces(step, size, num_replicas)

    def __iter__(self) -> Iterator[Any]:
        size, count = self._cutter.global_batch_size, self._cutter.topology.num_replicas
        cut: CutReady | CutSamples
        batches: Iterable[Any]
        measure: Callable[[Any], int]
        if size is None:
            batches, cut, measure = self.dataset, CutReady(self._collate or as_is, self._cutter), pytree.batch_size
        else:
            batches = batched(self.dataset, size, drop_last=False)
            cut, measure = CutSamples(self._collate or default_collate, self._cutter), len
        for step, batch in enumerate(batches):
            refuse_empty_pieces(step, measure(batch), count)
            for row in cut_of(cut(batch)).rows:
                yield row[0]
