"""The source for a torch ``DataLoader`` over an opaque iterable dataset; see ``source`` and ``cursor``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast, final

import torch
from torch.utils.data import DataLoader

from torchdistinput.plan.batching import Cutter, check_batch_size
from torchdistinput.plan.options import InputOptions
from torchdistinput.plan.seed_schedule import SeedSchedule
from torchdistinput.plan.sharding import AutoShardPolicy
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.base import Exchange, RowStream, length_of, own_shard
from torchdistinput.sources.in_worker import ENDS, CutSamples, as_is, batched
from torchdistinput.sources.iterable.between_epochs import BetweenEpochs
from torchdistinput.sources.iterable.cursor import Place, ReadLog, place_of, warn_of_reading_again
from torchdistinput.sources.iterable.data_pipes import PipeSetting, is_data_pipe
from torchdistinput.sources.iterable.divided_sources import way_out_for
from torchdistinput.sources.iterable.reading import (
    CapturingIterable,
    Entrance,
    entrances_at,
    labels_by_position,
    rows_logged,
)
from torchdistinput.sources.iterable.user_state import keeps_state, why_unused
from torchdistinput.sources.rng import Draw, generators_of
from torchdistinput.sources.sample_costs import balance_by_record
from torchdistinput.sources.set_epoch import ToldEpochs
from torchdistinput.sources.split_batches import CutReady, ReadyFns
from torchdistinput.sources.torch_loader.base_seeds import BaseSeeds
from torchdistinput.sources.torch_loader.run import LoaderRuns
from torchdistinput.sources.torch_loader.settings import (
    RebuiltLoader,
    WorkerInit,
    check_loader,
    failing_like_torch,
    generator_digest,
    is_read_here,
    keeps_order,
    let_torch_warn,
    settings_of,
)
from torchdistinput.step_types import Start, Stream

__all__ = ["IterableLoaderSource"]


@final
class IterableLoaderSource:
    """A ``DataLoader`` over an opaque iterable dataset: batches are cut where they are read.

    Args:
      loader: the user's loader.
      policy: the policy in force.
      topology: the position of this worker among all workers.
      options: the user's options; ``snapshot_every`` counts batches of a loader worker.
      like_torch: see ``settings.LikeTorch``.
    """

    draws_order = False

    def __init__(  # noqa: PLR0915 - one kind of source is one call
        self,
        loader: DataLoader[Any],
        policy: AutoShardPolicy,
        topology: Topology,
        options: InputOptions,
        *,
        like_torch: bool = False,
    ) -> None:
        check_loader(loader, policy, alone=like_torch)
        self._on_failure = failing_like_torch(loader, options) if like_torch else ENDS
        self._loader = loader
        self._reads_here = is_read_here(loader)
        dataset: Any = loader.dataset
        divides = policy is AutoShardPolicy.HINT and topology.num_workers > 1
        self._pipe: PipeSetting | None = None
        if is_data_pipe(dataset):
            ranks = (topology.num_workers, topology.worker) if divides else (1, 0)
            self._pipe = PipeSetting(*ranks, lasting=loader.persistent_workers)
        elif divides:
            dataset = own_shard(dataset, topology.num_workers, topology.worker)
        size = None if loader.batch_size is None else check_batch_size(loader.batch_size, "batch_size")
        shared = policy is AutoShardPolicy.DATA or topology.num_workers == 1
        cutter = Cutter(topology, shared, size)
        collate = cast(Callable[[Any], Any], loader.collate_fn)
        self._dataset: Any = dataset
        self._cutter = cutter
        self._shared = shared
        self._options = options
        lasting = loader.persistent_workers and loader.num_workers > 0
        self.told = ToldEpochs(loader.dataset, dataset, lasting=lasting)
        self._whole = self._guarded()
        self._unused = why_unused(dataset, options.own_state)
        self._owns_state = keeps_state(dataset, options.own_state)
        self._between = BetweenEpochs(options.own_state, self._dataset)
        self._seeds = BaseSeeds(loader.generator, SeedSchedule.of(persistent=lasting))
        balance = balance_by_record(options, cutter, "a DataLoader over an iterable")
        self._cut: CutReady | CutSamples
        if size is None:
            ready = ReadyFns(options.count_fn, options.split_fn)
            self._cut = CutReady(collate, cutter, ready, on_failure=self._on_failure)
        else:
            self._cut = CutSamples(collate, cutter, balance, on_failure=self._on_failure)
        build = partial(
            _build, loader, size, self._cut, self._seeds, self._pipe
        )  # a method would make a cycle; workers would live on
        self.workers = LoaderRuns(build, lasting=lasting)
        self.needs_default_state = loader.generator is None and (shared or self._pipe is not None)
        self.bound_to_world = not shared
        self.collective_state = not shared or self._owns_state
        self.draws_from_default_generator = loader.generator is None
        self.certain_piece_size = cutter.certain_piece_size(drop_last=loader.drop_last) if shared else None
        if balance is not None:
            self.certain_piece_size = None
        self.largest_piece_size = cutter.largest_piece_size
        self.may_lack_samples = cutter.may_lack_samples(drop_last=loader.drop_last, num_samples=None)

    def fingerprint(self) -> Mapping[str, Any]:
        """See ``Source.fingerprint``."""
        return {
            "kind": f"iterable {type(self._loader.dataset).__name__}",
            "batch size": self._cutter.global_batch_size,
            "drop_last": self._loader.drop_last,
            # torch repeats or divides an opaque iterable among its loader workers: their number is part of the data.
            "num_workers": self._loader.num_workers,
        }

    def epoch_fingerprint(self) -> Mapping[str, Any]:
        """See ``Source.epoch_fingerprint``."""
        return {"generator state": generator_digest(self._loader.generator)}

    def num_steps(self) -> int | None:
        """See ``Source.num_steps``."""
        return length_of(self._loader) if self._shared else None

    def set_epoch(self, epoch: int) -> None:
        """See ``Source.set_epoch``."""
        self.told.tell(epoch)

    @property
    def way_out(self) -> str:
        """See ``ReadByAll.way_out``."""
        return way_out_for(self._loader.dataset) if self._cutter.read_by_all else ""

    def close(self) -> None:
        """See ``Source.close``."""
        self.workers.close()

    @property
    def seeds(self) -> SeedSchedule:
        """See ``Source.seeds``."""
        return self._seeds.schedule

    def generators(self) -> Sequence[torch.Generator]:
        """See ``Source.generators``."""
        return generators_of(self._loader)

    def check(self, position: Sequence[Any]) -> None:
        """See ``Source.check``."""
        Place.from_json(position, self._num_readers)

    @property
    def keeps_between(self) -> bool:
        """See ``KeepsBetweenEpochs.keeps_between``."""
        return self._owns_state and self._reads_here

    def front(self) -> list[Any]:
        """See ``KeepsBetweenEpochs.front``."""
        return self._between.position()

    def resume(self, epoch: int, start: Start, share: Exchange) -> Start:
        """See ``Source.resume``. It needs no facts of the other workers."""
        return start

    @property
    def _num_readers(self) -> int:
        return max(1, self._loader.num_workers)

    def open(self, epoch: int, draws: Draw, start: Start) -> Stream:
        """See ``Source.open``."""
        self.told.tell(epoch)
        place = place_of(start, self._num_readers)
        if self._unused:
            place = place.without_states()
        dataset = self._whole if place.is_front else self._from(place, start)
        if place.is_front and self._reads_here:
            place = self._between.begin(self._dataset)
        items, cut, end = draws(lambda: self._start(dataset, start))

        def close() -> None:
            if end is not None:
                end()
            self.told.look()

        in_background = self._loader.num_workers > 0
        log = ReadLog(
            place,
            self._options.most_ahead,
            owns_state=self._owns_state,
            in_order=keeps_order(self._loader),
        )
        self._between.begun(log, self._dataset)
        label = labels_by_position(self._cutter, place.samples) if self._options.with_index else None
        return RowStream(
            rows_logged(items, cut, log, place, label, goes_on=self._on_failure.goes_on),
            in_background=in_background,
            track=log,
            close=close,
            # Every rank reads an opaque iterable under DATA: the results must be the same on all ranks.
            draws=draws if self._shared else None,
            one_structure=self._cutter.global_batch_size is None and self._options.split_fn is None,
        )

    def _draw_seeds(self) -> None:
        """Makes the draws of torch's loader at the start of an epoch."""
        pipe, seeds = self._pipe, self._seeds
        starts_workers = self._loader.num_workers > 0 and seeds.schedule is not SeedSchedule.NO_EPOCH
        if pipe is not None:
            pipe.draw(self._loader.generator)
        seeds.draw()
        if pipe is not None and starts_workers:  # torch draws another seed for the pipe, and does not use it
            torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)

    def _from(self, place: Place, start: Start) -> CapturingIterable:
        """The user's dataset from a position on. Persistent loader workers are ended: their position is another one."""
        per_batch = self._cutter.global_batch_size or 1
        lived_on = self._loader.num_workers > 0 and start.seeds is SeedSchedule.NO_EPOCH
        warn_of_reading_again(start, place, per_batch, self._dataset, unused=self._unused, lived_on=lived_on)
        self.workers.close()
        return self._guarded(entrances_at(place))

    def _guarded(self, entrances: Sequence[Entrance] = ()) -> CapturingIterable:
        return CapturingIterable(
            self._dataset,
            self._cutter.global_batch_size or 1,
            self._options.snapshot_every,
            entrances,
            on_failure=self._on_failure,
            pipe=self._pipe,
            hears=self.told.hears,
            own_state=self._options.own_state,
            compares=self._cutter.read_by_all,
        )

    def _start(
        self, dataset: CapturingIterable, start: Start
    ) -> tuple[Iterable[Any], Callable[[Any], Any], Callable[[], None] | None]:
        """Makes the draws that torch would have made by now. Returns how to read an epoch, to cut it and to end it.

        Without loader workers this process reads by itself: torch's loader would do nothing else.
        """
        self._seeds.schedule = start.seeds or self._seeds.schedule
        for _ in range(start.replay + 1):
            self._draw_seeds()
        if self._reads_here:
            let_torch_warn(self._loader, self._seeds.generator)
            size = self._cutter.global_batch_size
            items: Iterable[Any] = dataset if size is None else batched(dataset, size, drop_last=self._loader.drop_last)
            return items, self._cut.__call__, None
        run = self.workers.start(dataset)
        return run, as_is, lambda: self.workers.finish(run)


def _build(
    loader: DataLoader[Any],
    size: int | None,
    cut: CutReady | CutSamples,
    seeds: BaseSeeds,
    pipe: PipeSetting | None,
    dataset: CapturingIterable,
) -> DataLoader[Any]:
    """The loader that reads a dataset and cuts its batches."""
    batching: dict[str, Any] = {} if size is None else {"drop_last": loader.drop_last}
    settings = {**settings_of(loader), "generator": seeds.generator}
    init = settings["worker_init_fn"]
    if pipe is not None and isinstance(init, WorkerInit):
        init.tell_part = pipe.tell_part
    return RebuiltLoader(dataset, batch_size=size, collate_fn=cut, **batching, **settings)
