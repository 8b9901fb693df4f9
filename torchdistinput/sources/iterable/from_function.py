"""The source for the datasets that a dataset function returned: one for the worker, or one for each local replica."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from torchdistinput.batches.schema import Structure
from torchdistinput.errors import BatchingError, InputError, StateMismatch
from torchdistinput.plan.options import InputOptions
from torchdistinput.plan.seed_schedule import SeedSchedule
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.checks import cannot_skip, refuse_class, refuse_ray
from torchdistinput.sources.contract import Source, SourceFacts
from torchdistinput.sources.iterable.element_reader import ElementReader
from torchdistinput.sources.iterable.position import (
    IterableTrack,
    Place,
    ReaderPosition,
    place_of,
    warn_of_reading_again,
)
from torchdistinput.sources.iterable.reopening import Reopened
from torchdistinput.sources.iterable.skip_in_loader import Later, can_pass_over, passing_over, tell_shuffler
from torchdistinput.sources.iterable.user_state import NOBODY, entered, why_unused
from torchdistinput.sources.kernel.cut import MarkedBatch, TakenBatches
from torchdistinput.sources.kernel.position_log import PositionLog
from torchdistinput.sources.kernel.read_failures import Failure
from torchdistinput.sources.kernel.reading_plan import ReadingPlan, read_by_each_worker, workers_of
from torchdistinput.sources.kernel.ready_batches import Measure, ReadyFns
from torchdistinput.sources.kernel.row_stream import RowStream
from torchdistinput.sources.kernel.sample_index import Positions
from torchdistinput.sources.random_state import RandomState
from torchdistinput.sources.rng import SharedRng, WithRng, packed, unpacked
from torchdistinput.sources.sample_seed import cannot_seed
from torchdistinput.sources.set_epoch import EpochSetter
from torchdistinput.sources.torch_loader.loader_runs import LoaderRun, begin_anew_if_ended
from torchdistinput.sources.torch_loader.open_runs import OpenRuns
from torchdistinput.sources.torch_loader.settings import started_like_ours
from torchdistinput.step_types import Row, RowSizes, SizedRow, Start, Stream


@final
class FunctionSource(Source):
    """The datasets of a dataset function. They are not changed: each local replica gets one batch of them a step.

    Args:
      datasets: the worker's dataset, or one for each local replica.
      topology: the position of this worker among all workers.
      options: the user's options; ``on_error="skip"`` is refused.

    Raises:
      InputError: the function did not return data, or ``on_error="skip"`` was asked for.
      BatchingError: a dataset has single samples.
    """

    def __init__(self, datasets: Sequence[Any], topology: Topology, options: InputOptions) -> None:
        if options.skips:
            raise cannot_skip("a dataset function")
        if options.seed_samples:
            raise cannot_seed("a dataset function")
        if options.balance is not None:
            raise InputError(
                "balance was given with a dataset function, whose batches are taken as they are. Use "
                "distribute_dataset, which divides the samples of global batches."
            )
        self._datasets = datasets
        self._topology = topology
        self._options = options
        self._reopen: list[Callable[[], Iterable[Any]]] = [Reopened(dataset) for dataset in datasets]
        self.user_epoch = EpochSetter(*datasets)
        self._has_begun = False
        self._persistent: dict[int, LoaderRun] = {}
        self._living: list[LoaderRun] = []
        self.workers = self._runs = OpenRuns()
        for dataset in datasets:
            _check(dataset)
        # With several workers, each has a random state of its own, which is part of its position.
        alone = topology.num_workers > 1
        loaders = [each for each in datasets if isinstance(each, DataLoader)]
        holders = [part for each in loaders for part in (each, each.sampler, each.batch_sampler)]
        self.random_state = RandomState(*holders, own_texts=itemgetter(1) if alone else None, own_default=True)
        self.random_state.seeds.schedule = SeedSchedule.of(persistent=any(each.persistent_workers for each in loaders))
        self.facts = SourceFacts(
            fingerprint={"kind": "from function", "datasets": len(datasets)},  # workers may have other lengths
            may_lack_samples=topology.num_replicas > 1,
            of_one_batch=False,
            bound_to_world=True,
            collective_state=True,
            has_epoch_position=alone,
            draws_alone=alone,
            needs_default_state=not alone,
            draws_from_default_generator=not alone,
        )

    def reading_plan(self, epoch: int, topology: Topology) -> ReadingPlan:
        """See ``TellsPlan``."""
        first = self._datasets[0]
        workers, ahead, where = workers_of(first if isinstance(first, DataLoader) else None)
        return ReadingPlan(
            data=f"a dataset function that returned {type(first).__name__}",
            unknown="the function may give each rank data of another length",
            twice="what the function gives to more than one rank",
            twice_in_rank=read_by_each_worker(first),
            loader_workers=workers,
            batches_ahead=ahead,
            user_code=(("the dataset function", "in distribute_datasets_from_function"), ("its dataset", where)),
            unchecked=("what each rank reads; its dataset is taken as it is",),
            bound_to_world=True,
            collective_state=True,
        )

    def close(self) -> None:
        """See ``Source.close``."""
        for number, run in list(self._persistent.items()):  # after an interruption the next call ends the rest
            run.close()
            self._reopen[number] = Reopened(self._datasets[number])
            self._persistent.pop(number, None)
        for run in self._living:
            if run.waits_since is not None or not run.can_go_on:  # its loader worker hangs since the epoch was left
                run.close()

    def next_epoch_position(self) -> list[Any] | None:
        """See ``Source.next_epoch_position``."""
        if not self.facts.draws_alone:
            return None
        return [place_of(Start(), len(self._datasets)).to_json(), [packed(state) for state in self.random_state.own()]]

    def check(self, position: Sequence[Any]) -> None:
        """See ``Source.check``."""
        self._split(position)

    def _split(self, position: Sequence[Any]) -> tuple[Place, list[torch.Tensor]]:
        """The position, and this worker's own random states."""
        if len(position) != 2 or not isinstance(position[1], Sequence) or not isinstance(position[0], Sequence):
            raise StateMismatch(f"position: found {position!r:.200}. Load the state as it was saved.")
        place = Place.from_json(position[0], len(self._datasets))
        states = [unpacked(text) for text in position[1]]
        own = len(self.random_state.own_generators)
        if states and len(states) != 1 + own:
            raise StateMismatch(
                f"position: {len(states) - 1} generator(s) in the state, the DataLoaders that the dataset function "
                f"returned here have {own}. Return them with the same generators."
            )
        return place, states

    @property
    def _per_dataset(self) -> int:
        """Batches that one row has from each dataset."""
        return self._topology.replicas_per_worker // len(self._datasets)

    def open(self, epoch: int, with_rng: WithRng, start: Start) -> Stream:
        """See ``Source.open``."""
        for each in self._datasets:
            if isinstance(each, DataLoader):
                tell_shuffler(each, epoch)
        self.user_epoch.tell(epoch)
        place, states = self._place_of(start)
        if start.steps and states:  # in the middle of an epoch: undoes draws since the state was loaded
            with_rng = SharedRng(states[0])
            for generator, state in zip(self.random_state.own_generators, states[1:], strict=True):
                generator.set_state(state)
        elif self.facts.draws_alone:
            states = self.random_state.own()
        # Opened now, so that loader workers are started from the caller's thread.
        opened = with_rng(lambda: [self._enter(number, reader, start) for number, reader in enumerate(place.readers)])
        self._has_begun = True
        self.random_state.seeds.schedule = self.random_state.seeds.schedule.next
        in_background = all(isinstance(each, DataLoader) and each.num_workers > 0 for each in self._datasets)
        track = IterableTrack(place, self._options.most_ahead, owns_state=True)
        positions = Positions(self._topology, shared=self._topology.num_workers == 1, taken=place.samples)
        count = Measure(ReadyFns(self._options.count_fn))
        numbers = positions if self._options.with_index else None
        must_have = self._topology.num_workers == 1 or start.position is not None
        rows = _dealt_rows(opened, self._per_dataset, track.log, place.rows, numbers, count, must_have=must_have)

        def close() -> None:
            self._living = _close_all(opened, self._runs)
            self.user_epoch.forget_calls()

        return RowStream(
            rows,
            in_background=in_background,
            track=_FunctionTrack(track, states, self._datasets),
            close=close,
            with_rng=with_rng,
            one_structure=True,
        )

    def _place_of(self, start: Start) -> tuple[Place, list[torch.Tensor]]:
        """The position at which to begin, and this worker's own random states, if it had any."""
        count = len(self._datasets)
        if start.position is not None:
            return self._split(start.position)
        if self._options.with_index:  # the index needs the sizes of the batches before, so they are read
            return place_of(start, count), []
        passed = start.steps * self._per_dataset
        return Place((ReaderPosition(passed, passed),) * count), []

    def _enter(self, number: int, reader: ReaderPosition, start: Start) -> _OpenDataset:
        data = self._reopen[number]()
        self.user_epoch.tell_also(data)
        if isinstance(data, DataLoader):
            begin_anew_if_ended(data)
        # One of several datasets may have ended while the steps of the others were counted; so that of another rank.
        others = len(self._datasets) > 1 or (start.position is None and self._topology.num_workers > 1)
        at_least = 0 if others else reader.since
        marks = (self._per_dataset, self._options.snapshot_every)
        if can_pass_over(data):
            loader, sampler = self._passing_over(number, data, reader, at_least, start)
            with started_like_ours(loader):
                later = LoaderRun(iter(loader))
            if loader is not data and loader.persistent_workers:
                self._persistent[number] = later
            begun = ElementReader(later, NOBODY, *marks, batch=reader.batches // self._per_dataset)
            return self._opened(begun, loader, later, ReaderPosition(read=reader.read), sampler=sampler)
        own_state = self._options.own_state
        unused = why_unused(data, own_state)
        reader = reader.without_state() if unused else reader
        warn_of_reading_again(start, Place((reader,)), 1, data, unused=unused)
        with started_like_ours(data):
            iterator, kept = entered(data, reader.text, own_state)
        run = LoaderRun(iterator) if isinstance(data, DataLoader) else None
        batches = iterator if run is None else run
        begun = ElementReader(batches, kept, *marks, batch=(reader.batches - reader.since) // self._per_dataset)
        return self._opened(begun, data, run, reader, at_least)

    def _opened(
        self,
        batches: ElementReader,
        data: Iterable[Any],
        run: LoaderRun | None,
        enters_at: ReaderPosition,
        at_least: int = 0,
        sampler: Later | None = None,
    ) -> _OpenDataset:
        if run is not None:
            self._runs.add(run)
        lives_on = isinstance(data, DataLoader) and data.persistent_workers
        return _OpenDataset(batches, run, lives_on, enters_at, at_least, sampler)

    def _passing_over(
        self, number: int, loader: DataLoader[Any], reader: ReaderPosition, at_least: int, start: Start
    ) -> tuple[DataLoader[Any], Later | None]:
        """The loader, or one that begins later. With persistent loader workers the later one replaces the loader."""
        begun = loader.persistent_workers and self._has_begun
        if not (reader.since or start.replay or (start.seeds is SeedSchedule.NO_EPOCH and not begun)):
            return loader, None
        if number in self._persistent:  # from an earlier resume
            self._persistent.pop(number).close()
        later, sampler = passing_over(loader, reader.since, at_least, start)
        if later.persistent_workers:
            self._reopen[number] = lambda: later
        return later, sampler


@final
@dataclass(frozen=True)
class _OpenDataset:
    """A dataset that is being read.

    Args:
      batches: its batches.
      run: the run of its loader workers, if it is a loader.
      lives_on: whether the run goes on after the epoch.
      enters_at: the position at which reading begins.
      at_least: how many batches there must be after the own state.
      sampler: skips batches, if it is a loader that does so.
    """

    batches: ElementReader
    run: LoaderRun | None
    lives_on: bool
    enters_at: ReaderPosition
    at_least: int
    sampler: Later | None

    def missing(self, per_row: int) -> int:
        """How many batches before ``enters_at`` were not there. Known once the first batch was asked for.

        Whole rows of ``per_row`` batches are skipped: the last row before the end of a dataset may have had fewer.
        """
        never_read = -self.enters_at.since % per_row
        of_sampler = 0 if self.sampler is None else self.sampler.missing
        return max(0, self.batches.missing - never_read) + of_sampler


@final
class _FunctionTrack:
    """See ``row_stream.Track``: the position, and this worker's own random states at the start of the epoch.

    Args:
      track: tracks the position.
      states: the default random state and those of the generators; empty if they are the same on all workers.
      datasets: the worker's datasets.
    """

    owns_state = True

    def __init__(self, track: IterableTrack, states: Sequence[torch.Tensor], datasets: Sequence[Any]) -> None:
        self._track = track
        self._states = states
        self._datasets = datasets
        self._texts: list[str] | None = None

    def position(self, rows: int) -> list[Any]:
        """See ``Stream.position``.

        Raises:
          StateMismatch: the dataset's own state cannot be saved, or it is unknown which batches were delivered.
        """
        for each in self._datasets:
            if isinstance(each, DataLoader) and each.num_workers > 1 and not each.in_order:
                raise StateMismatch(
                    "the dataset function returned a DataLoader with in_order=False, whose batches come in any order: "
                    "nobody knows which of them were delivered. Build it with in_order=True to save its state."
                )
        if self._texts is None:
            self._texts = [packed(state) for state in self._states]
        return [self._track.position(rows), self._texts]


def _check(dataset: Any) -> None:
    refuse_class(dataset, "what the dataset function returned")
    refuse_ray(dataset, "what the dataset function returned")
    if isinstance(dataset, DataLoader):
        refuse_class(dataset.dataset, "the dataset of the DataLoader that the dataset function returned")
    if isinstance(dataset, Dataset) and not isinstance(dataset, IterableDataset):
        raise BatchingError(
            f"the dataset function returned a {type(dataset).__name__}, a map-style dataset of single samples; "
            "batches are needed. Return DataLoader(dataset, batch_size=context.get_per_replica_batch_size(G))."
        )
    if not isinstance(dataset, Iterable) and (isinstance(dataset, type) or not callable(dataset)):
        raise InputError(
            f"the dataset function returned a {type(dataset).__name__}; a DataLoader or another iterable of "
            "batches is needed."
        )


def _close_all(opened: Iterable[_OpenDataset], workers: OpenRuns) -> list[LoaderRun]:
    """Ends the reading. Returns the runs of persistent loader workers, which go on in the next epoch."""
    living = []
    for each in opened:
        if each.run is not None:
            workers.remove(each.run)
            if each.lives_on and each.run.can_go_on:
                living.append(each.run)
            else:
                each.run.close()
    return living


def _dealt_rows(
    opened: Sequence[_OpenDataset],
    per_dataset: int,
    log: PositionLog[Any],
    left: int,
    positions: Positions | None,
    count: Measure,
    *,
    must_have: bool,
) -> Generator[SizedRow, None, None]:
    """Rows of the next batches of each dataset, ``None`` where one has ended, until all have.

    Args:
      opened: the datasets.
      per_dataset: batches that one row has from each dataset.
      log: notes every row.
      left: rows to skip first.
      positions: numbers the samples by the order in which this worker reads them; ``None`` without an index.
      count: counts the samples of a batch.
      must_have: whether there must be as many rows as are skipped.
    """
    for each in opened:
        problem = each.batches.enter(each.enters_at, -(-each.enters_at.since // per_dataset), each.at_least)
        if problem is not None:
            problem.reraise()
    readers = [each.batches.batches() for each in opened]
    is_first = True
    while True:
        row: Row = []
        taken = [_take(number, batches, per_dataset, row) for number, batches in enumerate(readers)]
        missing = [each.missing(per_dataset) for each in opened] if is_first else []
        if any(missing):  # the state is to say how many there are
            log.add(0, (0, [TakenBatches(number, -count, None) for number, count in enumerate(missing)]))
        is_first = False
        if all(batch is None for batch in row):
            break
        samples = 0
        sizes: tuple[int, ...] = ()
        structure: Structure | None = None
        if positions is not None or not left:
            row, sizes, structure = count.each(row)
        if positions is not None:
            row, samples = positions.beside(row, sizes)
        log.add(1, (samples, taken))
        if left:
            left -= 1
        else:
            yield row, RowSizes(samples, sizes, structure), 0
    log.has_ended = True
    if left and must_have:
        raise StateMismatch(f"the data ended {left} step(s) before the one where the epoch was to begin.")


def _take(number: int, batches: Iterator[Any], count: int, row: Row) -> TakenBatches:
    """Puts the next batches of a dataset into the row; a ``Failure`` is raised."""
    found: Any = next(batches, [])
    snapshot: Any = None
    if type(found) is Failure:
        found.reraise()
    if type(found) is MarkedBatch:
        found, snapshot, _ = found
    row += [*found, *[None] * (count - len(found))]
    return TakenBatches(number, len(found), snapshot)
