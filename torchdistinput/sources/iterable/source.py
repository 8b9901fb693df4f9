"""The source for iterables, functions that return one, and a torch ``DataLoader`` over an opaque iterable dataset.

A loader without loader workers, and any other iterable, is read in this process; a function is called again for each
epoch. ``position`` says what a state holds. Also ``ShardedIterableDataset``, the wrapper for a plain torch
``DataLoader``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast, final

from torch.utils.data import DataLoader, IterableDataset, default_collate

from torchdistinput.batches import pytree
from torchdistinput.errors import InputError
from torchdistinput.plan.batching import (
    Cutter,
    check_batch_size,
    check_replica,
    distinct_steps,
    num_batches,
    refuse_empty_pieces,
)
from torchdistinput.plan.options import InputOptions
from torchdistinput.plan.topology import AutoShardPolicy, Topology, is_shared
from torchdistinput.sources.checks import length_of, own_shard
from torchdistinput.sources.contract import Collate, EpochFacts, Source, SourceFacts
from torchdistinput.sources.iterable.divided_sources import WAY_OUT
from torchdistinput.sources.iterable.element_batches import CutSamples, ElementBatches
from torchdistinput.sources.iterable.position import (
    BetweenEpochs,
    IterablePosition,
    IterableTrack,
    place_of,
    warn_of_reading_again,
)
from torchdistinput.sources.iterable.user_state import keeps_state, why_unused
from torchdistinput.sources.kernel.batcher import as_is, batched, cut_of
from torchdistinput.sources.kernel.explanation import Explanation, read_by_each_worker, workers_of
from torchdistinput.sources.kernel.ready_batches import CutReady, ReadyFns
from torchdistinput.sources.kernel.row_stream import RowStream, rows_of
from torchdistinput.sources.kernel.sample_costs import balance_by_record
from torchdistinput.sources.kernel.sample_index import Positions
from torchdistinput.sources.random_state import BaseSeeds, RandomState
from torchdistinput.sources.rng import WithRng
from torchdistinput.sources.set_epoch import EpochSetter
from torchdistinput.sources.torch_loader.loader_runs import LoaderRuns
from torchdistinput.sources.torch_loader.settings import (
    check_loader,
    generator_digest,
    is_read_here,
    keeps_order,
    let_torch_warn,
    own_iteration,
)
from torchdistinput.step_types import Start, Stream
from torchdistinput.tracing.read_times import ReadTimes


@final
class Reopened:
    """Gives fresh data for each epoch: calls a function again, or refuses an iterator that is exhausted."""

    def __init__(self, data: Any, first: Any = None) -> None:
        self._data = data
        self._first = first
        self._used = False

    def __call__(self) -> Iterable[Any]:
        """The data, to be iterated once.

        Raises:
          InputError: the data is an iterator that is exhausted.
        """
        data, self._first = self._first, None
        if data is None:
            data = self._data() if is_function(self._data) else self._data
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


def is_function(data: Any) -> bool:
    """Whether ``data`` is a function that returns the data."""
    return callable(data) and not isinstance(data, Iterable)


def _shard_of(data: Any, topology: Topology) -> Any:
    """Policy HINT: the worker's own part of the data, or a function that makes it."""
    if is_function(data):
        return lambda: own_shard(data(), topology.num_workers, topology.worker)
    return own_shard(data, topology.num_workers, topology.worker)


@final
class IterableSource(Source):
    """An iterable of global batches, or of samples with a global batch size: batches are cut where they are read.

    Args:
      data: the iterable, a function that returns one, a ``DataLoader`` over an iterable dataset, or a ``DataLoader`` of
        a class that iterates in a way of its own, as an iterable of ready batches.
      policy: the policy in force.
      topology: the position of this worker among all workers.
      options: the user's options.
      global_batch_size: G, if samples are to be batched here; a ``DataLoader`` has its own.
      collate: makes a batch of samples; torch's ``default_collate`` if not given.
      first: the data of the first epoch, if the function was called already.
      like_torch: see ``settings.LikeTorch``.
    """

    def __init__(  # noqa: PLR0915 - one kind of source is one call
        self,
        data: Any,
        policy: AutoShardPolicy,
        topology: Topology,
        options: InputOptions,
        global_batch_size: int | None = None,
        collate: Collate | None = None,
        *,
        first: Any = None,
        like_torch: bool = False,
    ) -> None:
        self._given_loader = given = data if isinstance(data, DataLoader) else None
        # The loader whose dataset is read here; one that iterates in a way of its own is read as it is.
        self._loader = loader = None if given is None or own_iteration(given) else given
        self._options = options
        self._times = ReadTimes() if options.measures else None
        self._policy = policy
        self._drop_last = False
        if loader is not None:
            check_loader(
                loader, policy, alone=like_torch or (policy is AutoShardPolicy.OFF and topology.num_replicas == 1)
            )
            size = loader.batch_size
            global_batch_size = None if size is None else check_batch_size(size, "batch_size")
            collate, self._drop_last = cast(Collate, loader.collate_fn), loader.drop_last
            data = loader.dataset
        elif collate is None:
            collate = as_is if global_batch_size is None else default_collate
        self._collates = collate is not as_is
        shared = is_shared(policy, topology)
        self._cutter = cutter = Cutter(topology, shared, global_batch_size)
        kind = "an iterable" if loader is None else "a DataLoader over an iterable"
        balance = balance_by_record(options, cutter, kind)
        self._owns_state = keeps_state(data if first is None else first, options.own_state)
        self._whole = data
        if policy is AutoShardPolicy.HINT and topology.num_workers > 1:
            data, first = _shard_of(data, topology), None
        self._data = data
        self._reopen: Callable[[], Any] = Reopened(data, first) if loader is None else lambda: data
        self._between = BetweenEpochs(options.own_state, data)
        cuts_empty = global_batch_size is None and options.cuts_empty
        lacks = cutter.may_lack_samples(drop_last=self._drop_last, num_samples=None, cuts_empty=cuts_empty)
        self._cut: CutReady | CutSamples
        if global_batch_size is None:
            ready = ReadyFns(options.count_fn, options.split_fn)
            self._cut = CutReady(collate, cutter, ready)
        else:
            asks = options.needs_structure(topology.replicas_per_worker, may_lack=lacks)
            self._cut = CutSamples(collate, cutter, balance, asks=asks)
        self._num_loader_workers = 0 if loader is None else loader.num_workers
        self._reads_here = loader is None or is_read_here(loader)
        persistent = loader is not None and loader.persistent_workers and loader.num_workers > 0
        self.user_epoch = EpochSetter(self._whole, data, persistent=persistent)
        # In-process data may draw from the default state. With several workers each has its own state; rank 0's is not
        # used for all, unless a loader draws the seed of its loader workers from it.
        needs_default = draws_default = topology.num_workers == 1
        self._seeds: BaseSeeds | None = None
        self._runs: LoaderRuns | None = None
        if loader is not None:
            self._seeds = BaseSeeds(loader.generator, persistent=persistent)
            self.workers = self._runs = LoaderRuns(loader, self._seeds, times=self._times)
            draws_default = loader.generator is None
            needs_default = loader.generator is None and shared
        elif given is not None and given.generator is None and shared:
            needs_default = draws_default = True
        # The generators of the user's code are not known.
        self.random_state = RandomState(*([] if given is None else [given]), seeds=self._seeds)
        # Every rank reads an opaque loader under DATA: the results must be the same on all ranks.
        self._draws_rows = draws_default if given is None else shared
        certain = shared and balance is None
        self.facts = SourceFacts(
            times=self._times,
            fingerprint=self.fingerprint(),
            read_by_all_hint=WAY_OUT if cutter.read_by_all else "",
            may_lack_samples=lacks,
            certain_piece_size=cutter.certain_piece_size(drop_last=self._drop_last) if certain else None,
            largest_piece_size=cutter.largest_piece_size,
            bound_to_world=not shared,
            collective_state=not shared or self._owns_state,
            has_epoch_position=self._owns_state and self._reads_here,
            needs_default_state=needs_default,
            draws_from_default_generator=draws_default,
        )

    def fingerprint(self) -> Mapping[str, Any]:
        """See ``Source.fingerprint``."""
        size, loader = self._cutter.global_batch_size, self._loader
        if loader is None:
            return {"kind": f"iterable {type(self._data).__name__}", "length": self._length, "batch size": size}
        return {
            "kind": f"iterable {type(self._whole).__name__}",
            "batch size": size,
            "drop_last": self._drop_last,
            # torch repeats or divides an opaque iterable among its loader workers: their number is part of the data.
            "num_workers": loader.num_workers,
        }

    @property
    def _length(self) -> int | None:
        """The length of the data that all ranks read, if it has one."""
        return length_of(self._data) if self._cutter.shared else None

    def epoch_facts(self) -> EpochFacts:
        """See ``Source.epoch_facts``."""
        given = self._given_loader
        if given is None:
            return EpochFacts({"length": self._length})
        return EpochFacts({"generator state": generator_digest(given.generator)})

    def reading_plan(self, epoch: int, topology: Topology) -> Explanation:
        """See ``Source.reading_plan``."""
        workers, ahead, where = workers_of(self._loader)
        shared = is_shared(self._policy, topology)
        twice = "everything: each rank reads all"
        if self._policy is AutoShardPolicy.HINT:
            twice = "what shard() gives to more than one rank"
        name, num_steps = type(self._whole).__name__, self.num_steps() if shared else None
        ready = " of ready batches" if self._cutter.global_batch_size is None else ""
        return Explanation(
            data=f"{name}, an iterable{ready}, in its own order",
            num_steps=num_steps,
            unknown="an iterable has no end that is known before it is read" if num_steps is None else "",
            read_twice=read_by_each_worker(self._loader, "" if topology.num_workers == 1 else twice),
            loader_workers=workers,
            batches_ahead=ahead,
            user_code=((f"{name}.__iter__ and collate_fn" if self._collates else f"{name}.__iter__", where),),
            bound_to_world=not shared,
            state_is_collective=not shared or self._owns_state,
            state_has_random=topology.num_workers == 1 if self._given_loader is None else None,
        )

    def num_steps(self, position: Sequence[Any] | None = None, *, for_len: bool = False) -> int | None:
        """See ``Source.num_steps``. Not known with several loader workers, each of which has a short last batch.

        It is not known either where a loader iterates in a way of its own, which may repeat the data. ``len`` then has
        the number that torch says.
        """
        is_torchs_guess = self._num_loader_workers > 1 or self._given_loader is not self._loader
        if not self._cutter.shared or (is_torchs_guess and not for_len):
            return None
        if self._loader is not None:
            return length_of(self._loader)
        length = length_of(self._data)
        return None if length is None else num_batches(length, self._cutter.global_batch_size or 1)

    def num_samples(self) -> int | None:
        """See ``Source.num_samples``. Batches of a loader's own may be of any size."""
        return self._length if self._loader is None else None

    def close(self) -> None:
        """See ``Source.close``."""
        if self._runs is not None:
            self._runs.close()

    def check(self, position: Sequence[Any]) -> None:
        """See ``Source.check``."""
        IterablePosition.from_json(position, self.num_readers)

    def next_epoch_position(self) -> list[Any] | None:
        """See ``Source.next_epoch_position``."""
        return self._between.position() if self.facts.has_epoch_position else None

    @property
    def num_readers(self) -> int:
        """The loader workers, or this process alone."""
        return max(1, self._num_loader_workers)

    def open(self, epoch: int, with_rng: WithRng, start: Start) -> Stream:
        """See ``Source.open``."""
        self.user_epoch.tell(epoch)
        data, place = self._reopen(), place_of(start, self.num_readers)
        self.user_epoch.tell_also(data)
        unused = why_unused(data, self._options.own_state)
        place = place.without_states() if unused else place
        per_batch = self._cutter.global_batch_size or 1
        lived_on = self._num_loader_workers > 0 and start.seeds == "never"
        warn_of_reading_again(start, place, per_batch, self._data, unused=unused, lived_on=lived_on)
        batches = ElementBatches(
            data,
            self._cutter.global_batch_size,
            self._cut.__call__,
            None if place.is_front else place,
            drop_last=self._drop_last,
            shared_epoch=self.user_epoch.shared_epoch,
            own_state=self._options.own_state,
            compares=self._cutter.read_by_all,
            times=self._times,
        )
        if not place.is_front:
            self.close()  # persistent loader workers have another position
        elif self._reads_here:
            place = self._between.begin(data)
        cuts, end = with_rng(lambda: self._start(batches, start))

        def close() -> None:
            if end is not None:
                end()
            self._between.closed(track.log)
            self.user_epoch.forget_calls()

        in_order = self._loader is None or keeps_order(self._loader)
        track = IterableTrack(place, self._options.most_ahead, owns_state=self._owns_state, in_order=in_order)
        self._between.begun(track.log, data)
        numbers = Positions(self._cutter.topology, shared=self._cutter.shared, taken=place.samples)
        label = partial(numbers.label, self._cutter) if self._options.with_index else None
        must_have = self._cutter.shared or start.position is not None
        return RowStream(
            rows_of(cuts, track.log, place.rows, label, must_have=must_have),
            in_background=self._num_loader_workers > 0,
            position=track.position,
            owns_state=lambda: track.owns_state,
            close=close,
            with_rng=with_rng if self._draws_rows else None,
            one_structure=self._cutter.global_batch_size is None and self._options.split_fn is None,
            passed=track.log if start.position is None and self._cutter.shared else None,
        )

    def _start(self, batches: ElementBatches, start: Start) -> tuple[Iterable[Any], Callable[[], None] | None]:
        """Makes the draws that torch would have made by now. Returns how to read an epoch, and how to end it.

        Without loader workers this process reads by itself: torch's loader would do nothing else.
        """
        loader, seeds, runs = self._loader, self._seeds, self._runs
        if loader is not None and seeds is not None and runs is not None:
            seeds.schedule = start.seeds or seeds.schedule
            for _ in range(start.replay + 1):
                seeds.draw()
            if not self._reads_here:
                run = runs.start(batches)
                return run, lambda: runs.finish(run)
            let_torch_warn(loader, seeds.generator)
        return batches, None


@final
class ShardedIterableDataset(IterableDataset[Any]):
    """One replica's part of each global batch of an iterable, for a plain ``DataLoader(..., batch_size=None)``.

    The parts of all replicas put together, in order, are the global batches (law B1): every replica reads all of the
    data and keeps its piece. A plain ``DataLoader`` cannot make an empty batch, so a piece may not be empty; use
    ``Strategy.distribute_dataset`` where that may happen. Local: no communication. With loader workers, each of them
    repeats the data unless ``dataset`` divides itself by ``get_worker_info``, as torch does with any iterable.

    >>> list(tdi.ShardedIterableDataset([torch.arange(4), torch.arange(4, 7)], num_replicas=2, rank=1))
    [tensor([2, 3]), tensor([6])]

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
            batches = batched(self.dataset, size)
            cut, measure = CutSamples(self._collate or default_collate, self._cutter), len
        for step, batch in enumerate(batches):
            refuse_empty_pieces(step, measure(batch), count)
            for row in cut_of(cut(batch)).rows:
                yield row[0]
