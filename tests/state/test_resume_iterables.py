"""Opaque iterables and dataset functions, left after any row and entered again: the rest is what it would have been."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, get_worker_info

import torchdistinput as tdi
from tests.support import inputs
from tests.support.epochs import lists
from torchdistinput.errors import StateMismatch
from torchdistinput.plan.options import InputOptions
from torchdistinput.plan.sharding import AutoShardPolicy
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.contract import Source
from torchdistinput.sources.iterable.from_function import FunctionSource
from torchdistinput.sources.iterable.source import IterableSource
from torchdistinput.sources.map_style.shuffle_sampler import ShuffleSampler
from torchdistinput.sources.rng import call_directly
from torchdistinput.step_types import ReadFailure, Row, Start

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

DATA, OFF = AutoShardPolicy.DATA, AutoShardPolicy.OFF
FAR = InputOptions(prefetch=4096)  # an epoch may be read to its end before the first step is delivered
NUMBERED = InputOptions(prefetch=4096, with_index=True, snapshot_every=2)


class Plain(IterableDataset[int]):
    """Numbers of this loader worker, of which the first has the most."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.given: list[int] = []

    def numbers(self) -> list[int]:
        info = get_worker_info()
        if info is None:
            return [*range(self.count)]
        return [1000 * info.id + number for number in range(max(0, self.count - 5 * info.id))]

    def __iter__(self) -> Iterator[int]:
        for number in self.numbers():
            self.given.append(number)
            yield number


class Kept(Plain):
    """The same with a state of its own, which says more than how many were read: it skips what it skipped before."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.state = {"next": 0, "sum": 0}

    def __iter__(self) -> Iterator[int]:
        numbers = self.numbers()
        while self.state["next"] < len(numbers):
            number = numbers[self.state["next"]]
            self.given.append(number)
            self.state = {"next": self.state["next"] + 1, "sum": self.state["sum"] + number}
            yield number + 10**6 * self.state["sum"]
        self.state = {"next": 0, "sum": 0}

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


class KeptByIterator(Plain):
    """The state is that of the iterator."""

    def __iter__(self) -> Iterator[int]:
        return Counter(self)


class Counter(Iterator[int]):
    def __init__(self, data: Plain) -> None:
        self.data = data
        self.numbers = data.numbers()
        self.place = 0

    def __next__(self) -> int:
        if self.place == len(self.numbers):
            raise StopIteration
        self.place += 1
        self.data.given.append(self.numbers[self.place - 1])
        return self.numbers[self.place - 1]

    def state_dict(self) -> list[int]:
        return [self.place]

    def load_state_dict(self, state: list[int]) -> None:
        (self.place,) = state


class Batches(Plain):
    """Ready batches of several sizes."""

    def __iter__(self) -> Iterator[Any]:
        for number in super().__iter__():
            yield torch.arange(number % 3 + 3) + 10 * number


def plain(row: Row) -> Any:
    return [None if piece is None else lists(piece) for piece in row]


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def read(source: Source, start: Start | None = None) -> tuple[list[Any], list[Any]]:
    """The rows of an epoch from a place on, and the positions before the first one and after each."""
    stream = source.open(0, call_directly, start or Start())
    rows: list[Any] = []
    positions: list[Any] = []
    try:
        positions.append(through_json(stream.position(0)))
        while (drawn := stream.draw()) is not None and (row := stream.fetch(drawn)) is not None:
            rows.append(plain(row[0]))
            positions.append(through_json(stream.position(len(rows))))
    finally:
        stream.close()
    return rows, positions


def read_to_the_end_first(source: Source) -> list[Any]:
    """The positions after each row, asked for when all have been read."""
    stream = source.open(0, call_directly, Start())
    count = 0
    while (drawn := stream.draw()) is not None and stream.fetch(drawn) is not None:
        count += 1
    positions = [through_json(stream.position(row)) for row in range(count + 1)]
    stream.close()
    return positions


def quietly(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the iterable .* is read again")
        return call()


def entered(source: Source, position: Any, steps: int) -> tuple[list[Any], list[Any]]:
    source.check(position)
    if source.facts.draws_alone:
        source.random_state.restore(position)
    result: tuple[list[Any], list[Any]] = quietly(lambda: read(source, Start(steps=steps, position=position)))
    return result


def one_of(workers: int, local: int = 1, worker: int = 0) -> Topology:
    return Topology(num_workers=workers, replicas_per_worker=local, worker=worker)


def loader_of(data: Any, size: int | None, workers: int, **more: Any) -> DataLoader[Any]:
    if workers:
        more["multiprocessing_context"] = "fork"
    return DataLoader(data, batch_size=size, num_workers=workers, **more)


Make = Callable[[], Source]


def in_process(data: Callable[[], Any], policy: AutoShardPolicy, topology: Topology, size: int | None) -> Make:
    return lambda: IterableSource(data(), policy, topology, NUMBERED, size, None)


def in_loader(
    data: Callable[[], Any],
    policy: AutoShardPolicy,
    topology: Topology,
    size: int | None,
    workers: int,
    **more: Any,
) -> Make:
    return lambda: IterableSource(loader_of(data(), size, workers, **more), policy, topology, NUMBERED)


SOURCES: dict[str, Make] = {
    "samples": in_process(lambda: Plain(23), DATA, one_of(1, 2), 4),
    "samples with a state": in_process(lambda: Kept(23), DATA, one_of(2, 1, 1), 4),
    "samples with a state of the iterator": in_process(lambda: KeptByIterator(24), DATA, one_of(1), 4),
    "a function of samples": in_process(lambda: lambda: Plain(15), DATA, one_of(1), 4),
    "ready batches": in_process(lambda: Batches(7), DATA, one_of(2, 2, 1), None),
    "ready batches of each worker": in_process(lambda: Batches(5), OFF, one_of(2, 1, 1), None),
    "samples of each worker": in_process(lambda: Plain(19), OFF, one_of(3, 1, 2), 4),
    "samples with a state of each worker": in_process(lambda: Kept(19), OFF, one_of(2, 1, 1), 5),
    "loader in process": in_loader(lambda: Kept(17), DATA, one_of(1, 2), 4, 0, drop_last=True),
    "loader of one worker": in_loader(lambda: Plain(14), DATA, one_of(1), 4, 1),
    "loader": in_loader(lambda: Plain(14), DATA, one_of(2, 1, 1), 3, 3, drop_last=True),
    "loader with a state": in_loader(lambda: Kept(16), DATA, one_of(1, 2), 3, 2),
    "loader with a state of the iterator": in_loader(lambda: KeptByIterator(16), DATA, one_of(1), 3, 2),
    "loader of each worker": in_loader(lambda: Kept(13), OFF, one_of(2, 1, 1), 4, 2),
    "loader of ready batches": in_loader(lambda: Batches(8), DATA, one_of(2, 1), None, 2),
}


def some_of(name: str, count: int) -> list[int]:
    """All rows of a quick source; of one with loader workers the first, one between, and the last."""
    return sorted({1, count // 2 + 1, count}) if "loader" in name else [*range(count + 1)]


@pytest.mark.parametrize("name", SOURCES)
def test_the_rest_from_any_row_is_that_of_the_uninterrupted_epoch(name: str) -> None:
    make = SOURCES[name]
    rows, positions = read(make())
    assert len(rows) > 3
    for row in some_of(name, len(rows)):
        rest, later = entered(make(), positions[row], row)
        assert rest == rows[row:]
        if "loader" in name and row == 1:
            continue
        # A second time, from a state of the resumed epoch.
        again = row + (len(rows) - row) // 2
        assert entered(make(), later[again - row], again)[0] == rows[again:]


@pytest.mark.parametrize("name", [name for name in SOURCES if "loader" not in name])
def test_a_place_does_not_depend_on_what_was_read_ahead(name: str) -> None:
    make = SOURCES[name]
    assert read_to_the_end_first(make()) == read(make())[1]


@pytest.mark.parametrize("name", SOURCES)
def test_a_step_is_sought_without_a_place(name: str) -> None:
    make = SOURCES[name]
    rows, _ = read(make())
    for step in [len(rows) - 2] if "loader" in name else [1, len(rows) - 1, len(rows)]:
        with pytest.warns(UserWarning, match=f"read again from its front, to go on after {step} steps.*state_dict"):
            found, positions = read(make(), Start(steps=step))
        assert found == rows[step:]
        if "loader" in name:
            return
        assert entered(make(), positions[0], step)[0] == rows[step:]
        assert entered(make(), positions[-1], len(rows))[0] == []
    with pytest.warns(UserWarning, match="read again"), pytest.raises(StateMismatch, match="ended 2 step"):
        read(make(), Start(steps=len(rows) + 2))


def test_a_snapshot_is_taken_each_so_many_batches() -> None:
    taken = []

    class Counted(Kept):
        def state_dict(self) -> dict[str, int]:
            taken.append(self.state["next"])
            return super().state_dict()

    read(IterableSource(Counted(40), DATA, one_of(1), replace(FAR, snapshot_every=3), 4, None))
    assert taken == [3, 15, 27, 39]  # before the last element of a batch


def test_reading_again_is_said_once_with_what_it_costs() -> None:
    rows, positions = read(IterableSource(Plain(23), DATA, one_of(1), FAR, 4, None))
    for row in range(len(rows) + 1):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            read(IterableSource(Plain(23), DATA, one_of(1), FAR, 4, None), Start(steps=row, position=positions[row]))
        assert [str(each.message).partition(". ")[0] for each in told] == [
            f"the iterable Plain is read again from its front, to go on after {row} steps: {4 * row} element(s)"
        ] * (row > 0)


def test_data_that_became_shorter_is_a_mismatch() -> None:
    _, positions = read(IterableSource(Plain(23), DATA, one_of(1), FAR, 4, None))
    with pytest.raises(ReadFailure) as caught:
        entered(IterableSource(Plain(12), DATA, one_of(1), FAR, 4, None), positions[4], 4)
    assert isinstance(caught.value.__cause__, StateMismatch)
    assert "ended after 12 element(s), but the state says that 13 or more" in str(caught.value.__cause__)


def test_a_failure_while_passing_over_names_the_element() -> None:
    class Broken(Plain):
        def __iter__(self) -> Iterator[int]:
            yield from range(6)
            raise OSError("disk")

    _, positions = read(IterableSource(Plain(23), DATA, one_of(1), FAR, 4, None))
    with pytest.raises(ReadFailure, match="element 6"):
        entered(IterableSource(Broken(23), DATA, one_of(1), FAR, 4, None), positions[3], 3)


def test_a_failure_after_a_state_counts_elements_from_the_front() -> None:
    class Broken(Kept):
        def __iter__(self) -> Iterator[int]:
            for number in super().__iter__():
                if self.state["next"] == 19:
                    raise OSError("disk")
                yield number

    _, positions = read(IterableSource(Kept(23), DATA, one_of(1), replace(FAR, snapshot_every=2), 4, None))
    with pytest.raises(ReadFailure, match="element 18"):
        entered(IterableSource(Broken(23), DATA, one_of(1), FAR, 4, None), positions[3], 3)


def test_a_state_that_is_not_plain_is_refused_when_it_is_asked_for() -> None:
    class Sets(Kept):
        def state_dict(self) -> Any:
            return {"shards": [{"rng": {1}}]}

    use = replace(FAR, own_state="use")
    for make in (
        lambda: IterableSource(Sets(12), DATA, one_of(1), use, 4, None),
        lambda: IterableSource(loader_of(Sets(12), 4, 2), DATA, one_of(1), use),
        lambda: FunctionSource([Sets(12)], one_of(1), replace(use, count_fn=lambda _: 1)),
    ):
        stream = make().open(0, call_directly, Start())
        for _ in range(2):
            assert stream.fetch(stream.draw()) is not None
        assert stream.position(0)
        with pytest.raises(StateMismatch, match=r'Sets.state_dict\(\)\["shards"\]\[0\]\["rng"\] is of type set'):
            stream.position(2)
        assert stream.owns_state
        while stream.fetch(stream.draw()) is not None:
            pass
        stream.close()


def test_what_cannot_be_saved_is_read_again_with_one_warning() -> None:
    class Sets(Kept):
        def state_dict(self) -> Any:
            return {1, 2}

    sources: tuple[Make, ...] = (
        lambda: IterableSource(Sets(23), DATA, one_of(1), FAR, 4, None),
        lambda: IterableSource(loader_of(Sets(23), 4, 2), DATA, one_of(1), FAR),
    )
    for make in sources:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            rows, positions = read(make())
        assert [str(each.message)[:40] for each in told if "Sets" in str(each.message)] == [
            "the data's own state cannot be saved, so"
        ]
        with pytest.warns(UserWarning, match="cannot be saved"):  # the rest is saved, too
            assert entered(make(), positions[3], 3)[0] == rows[3:]


class Late(Kept):
    """Says what was before its last element: its state does not restore it."""

    def state_dict(self) -> dict[str, int]:
        return {**self.state, "next": max(0, self.state["next"] - 1)}


@pytest.mark.parametrize("workers", [None, 0, 2])
def test_a_state_after_which_another_element_comes_is_a_mismatch(workers: int | None) -> None:
    def make(own_state: Any) -> Source:
        options = replace(FAR, own_state=own_state)
        if workers is None:
            return IterableSource(Late(23), DATA, one_of(1), options, 4, None)
        return IterableSource(loader_of(Late(23), 4, workers), DATA, one_of(1), options)

    rows, positions = read(make("auto"))
    with pytest.raises(ReadFailure) as caught:
        entered(make("auto"), positions[3], 3)
    assert isinstance(caught.value.__cause__, StateMismatch)
    assert 'own_state="ignore"' in str(caught.value.__cause__)
    assert entered(make("ignore"), positions[3], 3)[0] == rows[3:]
    assert entered(make("use"), positions[3], 3)[0] != rows[3:]


class Seeded(Plain):
    """Numbers of the default random state of whoever reads."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.count):
            yield torch.randint(1000, ())


@pytest.mark.parametrize("lasting", [False, True])
def test_loader_workers_keep_their_random_seeds(lasting: bool) -> None:
    def make() -> IterableSource:
        generator = torch.Generator().manual_seed(5)
        data = loader_of(Seeded(7), 2, 3, generator=generator, persistent_workers=lasting)
        return IterableSource(data, DATA, one_of(1), FAR)

    source = make()
    rows, positions = read(source)
    after = [generator.get_state() for generator in source.random_state.generators]
    for row in (4, 5):
        resumed = make()
        assert entered(resumed, positions[row], row)[0] == rows[row:]
        assert all(map(torch.equal, after, [generator.get_state() for generator in resumed.random_state.generators]))
        resumed.close()
    source.close()


def test_workers_that_live_on_begin_the_next_epoch_at_the_front() -> None:
    def make() -> IterableSource:
        return IterableSource(loader_of(Kept(14), 3, 2, persistent_workers=True), DATA, one_of(1), FAR)

    source = make()
    epochs = [read(source) for _ in range(3)]
    source.close()
    resumed = make()
    assert entered(resumed, epochs[0][1][3], 3)[0] == epochs[0][0][3:]
    assert read(resumed)[0] == epochs[1][0]
    # Once more in the same process, where workers stand at the end of an epoch.
    assert entered(resumed, epochs[0][1][5], 5)[0] == epochs[0][0][5:]
    assert read(resumed)[0] == epochs[1][0]
    resumed.close()


def test_the_draws_of_epochs_before_are_made_again() -> None:
    for lasting in (False, True):
        generators = [torch.Generator().manual_seed(5) for _ in range(2)]
        sources = [
            IterableSource(
                loader_of(Seeded(7), 2, 2, generator=generator, persistent_workers=lasting), DATA, one_of(1), FAR
            )
            for generator in generators
        ]
        epochs = [read(sources[0])[0] for _ in range(3)]
        found = read(sources[1], Start(replay=2))[0]
        assert torch.equal(generators[0].get_state(), generators[1].get_state())
        assert lasting or found == epochs[2]
        for source in sources:
            source.close()


# Dataset functions.


class Counted(torch.utils.data.Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return index


def shuffled(count: int, size: int, seed: int | None, workers: int = 0, **more: Any) -> DataLoader[Any]:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return loader_of(Counted(count), size, workers, shuffle=True, generator=generator, **more)


def by_function(*datasets: Callable[[], Any], topology: Topology) -> Make:
    return lambda: FunctionSource([make() for make in datasets], topology, NUMBERED)


FUNCTIONS: dict[str, Make] = {
    "shuffled loader": by_function(lambda: shuffled(23, 3, 7), topology=one_of(2, 1, 1)),
    "shuffled loader of several replicas": by_function(lambda: shuffled(23, 3, 7, 2), topology=one_of(1, 3)),
    "loaders for each replica": by_function(
        lambda: shuffled(11, 3, 7), lambda: shuffled(23, 3, 8), topology=one_of(2, 2, 1)
    ),
    "loader without batches": by_function(
        lambda: DataLoader(
            [torch.full((3,), each) for each in range(9)],  # type: ignore[arg-type]
            batch_size=None,
            shuffle=True,
            generator=torch.Generator().manual_seed(3),
        ),
        topology=one_of(1),
    ),
    "own batch sampler": by_function(
        lambda: DataLoader(
            Counted(13),
            batch_sampler=BatchSampler(
                RandomSampler(range(13), generator=torch.Generator().manual_seed(3)), 4, drop_last=True
            ),
        ),
        topology=one_of(1),
    ),
    "own batch sampler that draws at once": by_function(
        lambda: DataLoader(Counted(13), batch_sampler=inputs.BatchesDrawnAtOnce(13, inputs.generator())),
        topology=one_of(1),
    ),
    "batches": by_function(lambda: Batches(9), topology=one_of(2, 2, 1)),
    "batches with a state": by_function(lambda: DataLoader(Kept(23), batch_size=4), topology=one_of(1)),
    "iterable with a state": by_function(lambda: map_of(Kept(23)), lambda: map_of(Kept(13)), topology=one_of(1, 2)),
    "loader over an iterable": by_function(lambda: loader_of(Plain(13), 3, 2), topology=one_of(1)),
}


class map_of(Plain):  # noqa: N801 - reads as a function
    """Batches of one, with the state of what is batched."""

    def __init__(self, data: Kept) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        for number in self.data:
            yield torch.tensor([number])

    def state_dict(self) -> Any:
        return self.data.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.data.load_state_dict(state)


def in_new_state(make: Make, states: list[torch.Tensor]) -> Source:
    """A source as in a process that was started anew, with its generators as a saved state has them."""
    source = make()
    for generator, state in zip(source.random_state.generators, states, strict=True):
        generator.set_state(state)
    return source


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_function_returned_goes_on_in_any_epoch_and_so_do_the_epochs_after(name: str) -> None:
    make = FUNCTIONS[name]
    source = make()
    states, epochs = [], []
    for _ in range(3):
        states.append([generator.get_state() for generator in source.random_state.generators])
        epochs.append(read(source))
    for epoch in (0, 1):
        rows, positions = epochs[epoch]
        slow = "over an iterable" in name or "several replicas" in name
        for row in [epoch + 1] if slow else range(len(rows) + 1):
            resumed = in_new_state(make, states[epoch])
            rest, later = entered(resumed, positions[row], row)
            assert rest == rows[row:]
            assert read(resumed)[0] == epochs[epoch + 1][0]
            again = row + (len(rows) - row) // 2
            assert entered(in_new_state(make, states[epoch]), later[again - row], again)[0] == rows[again:]


def test_a_loader_over_map_style_data_is_entered_without_reading() -> None:
    rows, positions = read(FunctionSource([shuffled(40, 4, 7)], one_of(1), FAR))
    for position in (positions[8], None):
        loader = shuffled(40, 4, 7)
        found, _ = read(FunctionSource([loader], one_of(1), FAR), Start(steps=8, position=position))  # no warning
        assert found == rows[8:]
        data: Any = loader.dataset
        assert len(data.asked) == 8


def test_each_worker_of_a_function_has_random_states_of_its_own() -> None:
    """Also those of the default state, and whatever state the process that resumes is in."""
    torch.manual_seed(11)
    source = FunctionSource([shuffled(20, 4, None)], one_of(2, 1, 1), FAR)
    rows, positions = read(source)
    for row in range(len(rows) + 1):
        torch.manual_seed(99)
        found, later = entered(FunctionSource([shuffled(20, 4, None)], one_of(2, 1, 1), FAR), positions[row], row)
        assert found == rows[row:]
        assert later[-1] == positions[-1]


def test_workers_of_a_function_that_live_on_draw_no_second_seed() -> None:
    def make() -> FunctionSource:
        return FunctionSource([shuffled(14, 3, 7, 2, persistent_workers=True)], one_of(1), FAR)

    source = make()
    states, seeds, epochs = [], [], []
    for _ in range(4):
        states.append([generator.get_state() for generator in source.random_state.generators])
        seeds.append(source.random_state.seeds.schedule)
        epochs.append(read(source))
    assert [each.value for each in seeds] == ["first", "never", "never", "never"]
    for epoch, row in ((0, 3), (1, 0), (2, 4)):
        resumed = in_new_state(make, states[epoch])
        start = Start(steps=row, position=epochs[epoch][1][row] if row else None, seeds=seeds[epoch])
        assert read(resumed, start)[0] == epochs[epoch][0][row:]
        assert read(resumed)[0] == epochs[epoch + 1][0]
        resumed.close()


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("lasting", [False, True])
def test_the_draws_of_a_functions_epochs_before_are_made_again(lasting: bool, at_once: bool) -> None:
    def make() -> FunctionSource:
        generator = inputs.generator()
        sampler: Any = inputs.BatchesDrawnAtOnce(14, generator)
        if not at_once:
            sampler = BatchSampler(RandomSampler(range(14), generator=generator), 3, drop_last=False)
        more: dict[str, Any] = {"num_workers": 2, "persistent_workers": True} if lasting else {}
        loader: Any = DataLoader(Counted(14), batch_sampler=sampler, generator=generator, **more)
        return FunctionSource([loader], one_of(1), FAR)

    source, resumed = make(), make()
    epochs = [read(source)[0] for _ in range(4)]
    assert read(resumed, Start(steps=2, replay=2))[0] == epochs[2][2:]
    assert read(resumed)[0] == epochs[3]
    resumed.close()


def test_a_function_whose_batches_come_in_any_order_has_no_place() -> None:
    source = FunctionSource([loader_of(Counted(20), 4, 2, in_order=False)], one_of(1), FAR)
    stream = source.open(0, call_directly, Start())
    with pytest.raises(StateMismatch, match="in_order=True"):
        stream.position(0)
    stream.close()


def test_a_functions_shuffle_sampler_is_told_its_epoch() -> None:
    def make() -> FunctionSource:
        return FunctionSource([loader_of(Counted(20), 4, 0, sampler=ShuffleSampler(20, seed=1))], one_of(1), FAR)

    def of(source: Source, epoch: int, start: Start) -> list[Any]:
        stream = source.open(epoch, call_directly, start)
        return [plain(row[0] if (row := stream.fetch(drawn)) else []) for drawn in iter(stream.draw, None)]

    source = make()
    epochs = [of(source, epoch, Start()) for epoch in range(3)]
    assert epochs[0] != epochs[2]
    assert of(make(), 2, Start(steps=3)) == epochs[2][3:]


def test_fewer_batches_of_a_function_than_were_delivered_are_a_mismatch() -> None:
    _, positions = read(FunctionSource([shuffled(20, 4, 7)], one_of(1), FAR))
    with pytest.raises(ReadFailure) as caught:
        entered(FunctionSource([shuffled(9, 4, 7)], one_of(1), FAR), positions[4], 4)
    assert isinstance(caught.value.__cause__, StateMismatch)


@pytest.mark.parametrize("position", [[], [1, 2], [["iterable", 0, 0, 0, [[0, 0, None]]], ["?"]], "ab"])
def test_a_malformed_position_of_a_function_is_a_mismatch(position: Any) -> None:
    with pytest.raises(StateMismatch):
        FunctionSource([shuffled(9, 4, 7)], one_of(1), FAR).check(position)


class OwnIterator(IterableDataset[int]):
    """Its own iterator: at its end after an epoch, until a state is loaded."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == 6:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("begun", [False, True], ids=["before iter", "before the first step"])
def test_a_state_of_the_front_brings_data_back_that_is_its_own_iterator(begun: bool) -> None:
    loader = tdi.DataLoader(OwnIterator(), batch_size=2)
    iterator = iter(loader) if begun else None
    state = loader.state_dict()
    whole = [batch.tolist() for batch in (loader if iterator is None else iterator)]
    assert whole == [[0, 1], [2, 3], [4, 5]]
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == whole
    fresh = tdi.DataLoader(OwnIterator(), batch_size=2)
    fresh.load_state_dict(state)
    assert [batch.tolist() for batch in fresh] == whole


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_step_of_a_dataset_function_that_is_skipped_to_is_a_batch_of_each_replica(step: int) -> None:
    strategy = tdi.Strategy(devices=["cpu"] * 2)
    dataset = strategy.distribute_datasets_from_function(lambda _: torch.arange(8).reshape(8, 1))
    with warnings.catch_warnings(), dataset:
        warnings.simplefilter("ignore", UserWarning)  # that the data is read again
        dataset.skip_to(step)
        found = [[part.tolist() for part in strategy.local_results(element)] for element in dataset]
    assert found == [[[2 * each], [2 * each + 1]] for each in range(step, 4)]
