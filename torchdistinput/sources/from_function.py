"""The source for the datasets of a dataset function: a source of sources, each of which reads in a world of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, Final, final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from torchdistinput.errors import BatchingError, InputError, StateMismatch
from torchdistinput.plan.options import InputOptions
from torchdistinput.plan.topology import AutoShardPolicy, Topology
from torchdistinput.sources.checks import cannot_skip, refuse_class
from torchdistinput.sources.contract import Source, SourceFacts
from torchdistinput.sources.datasets.mixture import RecordDataset
from torchdistinput.sources.datasets.record_source import RecordSource
from torchdistinput.sources.iterable.position import IterablePosition
from torchdistinput.sources.iterable.source import IterableSource
from torchdistinput.sources.kernel.explanation import Explanation
from torchdistinput.sources.kernel.ready_batches import Measure, ReadyFns
from torchdistinput.sources.kernel.row_stream import PositionLog
from torchdistinput.sources.kernel.sample_index import Positions
from torchdistinput.sources.random_state import RandomState
from torchdistinput.sources.resolve import source_of_loader
from torchdistinput.sources.rng import SharedRng, WithRng, packed, unpacked
from torchdistinput.sources.sample_seed import cannot_seed
from torchdistinput.sources.set_epoch import EpochSetter
from torchdistinput.sources.torch_loader.loader_runs import LoaderRuns
from torchdistinput.sources.torch_loader.open_runs import OpenRuns
from torchdistinput.sources.torch_loader.settings import own_iteration
from torchdistinput.step_types import Row, RowSizes, SizedRow, Start, Stream

_ALONE: Final = Topology(num_workers=1, replicas_per_worker=1, worker=0)


@final
class FunctionSource(Source):
    """The datasets of a dataset function, each read as in a script of its own: a local replica gets one batch a step.

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
        for dataset in datasets:
            _check(dataset)
        self._topology = topology
        self._options = options
        self._per_dataset = topology.replicas_per_worker // len(datasets)
        self.workers = OpenRuns()
        self._sources = [_source_of(each, options) for each in datasets]
        for source in self._sources:
            if isinstance(source.workers, LoaderRuns):
                source.workers.counted_in = self.workers
        self.user_epoch = EpochSetter(*datasets)
        # With several workers, each has a random state of its own, which is part of its position.
        alone = topology.num_workers > 1
        loaders = [each for each in datasets if isinstance(each, DataLoader)]
        holders = [part for each in loaders for part in (each, each.sampler, each.batch_sampler)]
        self.random_state = RandomState(*holders, own_texts=itemgetter(1) if alone else None, own_default=True)
        persistent = (number for number, each in enumerate(datasets) if getattr(each, "persistent_workers", False))
        self._tells_seeds = self._sources[next(persistent, 0)].random_state.seeds
        self.random_state.seeds.schedule = self._tells_seeds.schedule
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
            times=self._sources[0].facts.times if len(datasets) == 1 else None,
        )

    def reading_plan(self, epoch: int, topology: Topology) -> Explanation:
        """See ``Source.reading_plan``."""
        first = self._sources[0].reading_plan(epoch, _ALONE)
        twice, within = "what the function gives to more than one rank", first.read_twice
        if topology.num_workers > 1:
            within = twice if within == "nothing" else f"{twice}. Within a rank it {within}"
        return Explanation(
            data=f"a dataset function that returned {first.data}",
            unknown="the function may give each rank data of another length",
            read_twice=within,
            loader_workers=first.loader_workers,
            batches_ahead=first.batches_ahead,
            user_code=(("the dataset function", "in distribute_datasets_from_function"), *first.user_code),
            unchecked=("what each rank reads; its dataset is taken as it is",),
            bound_to_world=True,
            state_is_collective=True,
        )

    def close(self) -> None:
        """See ``Source.close``."""
        for each in self._sources:
            each.close()

    def next_epoch_position(self) -> list[Any] | None:
        """See ``Source.next_epoch_position``."""
        if not self.facts.draws_alone:
            return None
        return [[], [packed(state) for state in self.random_state.own()]]

    def check(self, position: Sequence[Any]) -> None:
        """See ``Source.check``."""
        self._split(position)
        for source, start in zip(self._sources, self._starts(Start(position=position)), strict=True):
            if start.position is not None:
                source.check(start.position)

    def _split(self, position: Sequence[Any]) -> tuple[Sequence[Any], list[torch.Tensor], int]:
        """Where each dataset stood, this worker's own random states, and the samples before."""
        if not 1 < len(position) < 4 or not all(isinstance(each, list | tuple) for each in position[:2]):
            raise StateMismatch(f"position: found {position!r:.200}. Load the state as it was saved.")
        states = [unpacked(text) for text in position[1]]
        own = len(self.random_state.own_generators)
        if states and len(states) != 1 + own:
            raise StateMismatch(
                f"position: {len(states) - 1} generator(s) in the state, the DataLoaders that the dataset function "
                f"returned here have {own}. Return them with the same generators."
            )
        return position[0], states, position[2] if len(position) == 3 else 0

    def _starts(self, start: Start) -> list[Start]:
        """Where each dataset begins. Version 0.2 saved one position of an iterable for all of them."""
        count, per = len(self._sources), self._per_dataset
        if start.position is None:
            return [replace(start, steps=start.steps * per)] * count
        places = self._split(start.position)[0]
        if not places:
            return [replace(start, steps=0, position=None)] * count
        if places[0] == "iterable":
            old = IterablePosition.from_json(places, count)
            found = []
            for source, reader in zip(self._sources, old.readers, strict=True):
                keeps = isinstance(source, IterableSource) and source.num_readers == 1
                place = IterablePosition((reader,), rows=old.rows * per).to_json() if keeps else None
                found.append(replace(start, steps=reader.batches + old.rows * per, position=place))
            return found
        if len(places) != count or not all(_is_place(each) for each in places):
            raise StateMismatch(
                f"position: found {places!r:.200} of {len(places)} dataset(s) of a function; {count} are here. Load "
                "the state as it was saved, with a function that returns as many."
            )
        return [replace(start, steps=steps, position=place) for steps, place in places]

    def open(self, epoch: int, with_rng: WithRng, start: Start) -> Stream:
        """See ``Source.open``."""
        states: list[torch.Tensor] = []
        samples, left = start.samples, 0
        if start.position is not None:
            _, states, samples = self._split(start.position)
        elif self._options.with_index:  # the index needs the sizes of the batches before, so they are read
            samples, left, start = 0, start.steps, replace(start, steps=0)
        starts = self._starts(start)
        if start.steps and states:  # in the middle of an epoch: undoes draws since the state was loaded
            with_rng = SharedRng(states[0])
            for generator, state in zip(self.random_state.own_generators, states[1:], strict=True):
                generator.set_state(state)
        elif self.facts.draws_alone:
            states = self.random_state.own()
        self.user_epoch.epoch = epoch  # the sources tell it
        schedule = start.seeds or self.random_state.seeds.schedule
        opened = [
            source.open(
                epoch,
                with_rng,
                replace(each, seeds=schedule if source.random_state.seeds is self._tells_seeds else None),
            )
            for source, each in zip(self._sources, starts, strict=True)
        ]
        self.user_epoch.forget_calls()
        self.random_state.seeds.schedule = self._tells_seeds.schedule
        stream = _SideBySide(
            opened,
            starts,
            self._topology,
            [packed(state) for state in states],
            samples,
            self._options,
            self.user_epoch.forget_calls,
        )
        stream.pass_over(left, must_have=self._topology.num_workers == 1)  # another rank may have more
        return stream


@final
class _SideBySide:
    """The stream of one epoch: some batches of each of several streams make a row, ``None`` where one has ended.

    Args:
      streams: of single batches.
      starts: where each stream begins.
      topology: the position of this worker among all workers.
      texts: this worker's own random states at the start of the epoch.
      samples: samples in the rows before.
      options: the user's options.
      closed: called at the end.
    """

    owns_state = True
    structure = None
    samples_passed = None
    one_structure = True

    def __init__(
        self,
        streams: Sequence[Stream],
        starts: Sequence[Start],
        topology: Topology,
        texts: list[str],
        samples: int,
        options: InputOptions,
        closed: Callable[[], None],
    ) -> None:
        self.in_background = all(each.in_background for each in streams)
        self._streams = streams
        self._begun = [each.steps for each in starts]
        self._per_stream = topology.replicas_per_worker // len(streams)
        self._texts = texts
        alone = topology.num_workers == 1
        # Of steps that were counted, this stream may have had fewer than another one, or one of another rank.
        others = not alone or len(streams) > 1
        self._lenient = [others and each.steps > 0 and each.position is None for each in starts]
        self._may_lack = list(self._lenient)
        self._numbers = Positions(topology, shared=alone, taken=samples) if options.with_index else None
        self._count = Measure(ReadyFns(options.count_fn))
        self._closed = closed
        self._passed_over = 0  # rows before the first one that is given
        self._drawn_out = [False] * len(streams)
        self._has_ended = [False] * len(streams)
        # Also the row for which the consumer waits, and one that was inspected.
        self._log: PositionLog[_Given] = PositionLog(
            0, (samples, (0,) * len(streams)), 0, options.most_ahead + 2, _follow
        )

    def pass_over(self, rows: int, *, must_have: bool) -> None:
        """Reads rows that are not given, before the first one. Caller's thread.

        Raises:
          StateMismatch: there are fewer, and there must be as many.
        """
        self._passed_over = rows
        for row in range(rows):
            if (drawn := self.draw()) is None or self.fetch(drawn) is None:
                if not must_have:
                    break
                raise StateMismatch(f"the data ended {rows - row} step(s) before the one where the epoch was to begin.")

    def draw(self) -> list[list[Any]] | None:
        """See ``Stream.draw``."""
        drawn = [[self._draw(number) for _ in range(self._per_stream)] for number in range(len(self._streams))]
        return None if all(self._drawn_out) and all(each is None for some in drawn for each in some) else drawn

    def _draw(self, number: int) -> Any:
        if self._drawn_out[number]:
            return None
        drawn = self._asked(number, self._streams[number].draw)
        self._drawn_out[number] = drawn is None
        return drawn

    def _asked(self, number: int, ask: Callable[[], Any]) -> Any:
        """What a stream gives; ``None`` where it has fewer batches than it was to pass over, and may have."""
        try:
            return ask()
        except StateMismatch:
            if not self._may_lack[number]:
                raise
            return None

    def fetch(self, drawn: list[list[Any]]) -> SizedRow | None:
        """See ``Stream.fetch``."""
        row: Row = []
        given = []
        for number, some in enumerate(drawn):
            found = [self._fetched(number, each) for each in some]
            given.append(len(found) - found.count(None))
            row += [None if each is None else each[0][0] for each in found]
        if all(self._has_ended) and not any(given):
            self._log.has_ended = True
            return None
        row, sizes, structure = self._count.each(row)
        samples = sum(sizes)
        if self._numbers is not None:
            row, samples = self._numbers.beside(row, sizes)
        self._log.add(1, (samples, given))
        return row, RowSizes(samples, sizes, structure), 0

    def _fetched(self, number: int, drawn: Any) -> SizedRow | None:
        """The row of one batch; ``None`` at the end of its stream."""
        found: SizedRow | None = None
        if type(drawn) is tuple:
            found = drawn
        elif drawn is not None and not self._has_ended[number]:
            found = self._asked(number, partial(self._streams[number].fetch, drawn))
        self._may_lack[number] = False
        self._has_ended[number] = found is None
        return found

    def position(self, rows: int) -> list[Any]:
        """See ``Stream.position``."""
        samples, given = self._log.at(rows + self._passed_over)[1]
        places = [
            [begun + own, None if lenient and not own else stream.position(own)]
            for stream, begun, own, lenient in zip(self._streams, self._begun, given, self._lenient, strict=True)
        ]
        return [places, self._texts, samples]

    def counts(self, rows: int) -> None:
        """See ``Stream.counts``."""

    def close(self) -> None:
        """See ``Stream.close``."""
        for each in self._streams:
            each.close()
        self._closed()


_Given = tuple[int, tuple[int, ...]]
"""Samples in all rows so far, and the batches that each stream has given in them."""


def _follow(reached: _Given, notes: Sequence[tuple[int, Sequence[int]]]) -> _Given:
    samples, given = reached
    for more, batches in notes:
        samples += more
        given = tuple(one + other for one, other in zip(given, batches, strict=True))
    return samples, given


def _is_place(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and type(value[0]) is int and value[0] >= 0


def _source_of(dataset: Any, options: InputOptions) -> Source:
    """The source of one dataset in a world of one, whose batches are taken as they are."""
    place = AutoShardPolicy.OFF, _ALONE, replace(options, with_index=False, split_fn=None)
    if isinstance(dataset, DataLoader) and not own_iteration(dataset):
        return source_of_loader(dataset, *place)
    return RecordSource(dataset, *place) if isinstance(dataset, RecordDataset) else IterableSource(dataset, *place)


def _check(dataset: Any) -> None:
    refuse_class(dataset, "what the dataset function returned")
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
