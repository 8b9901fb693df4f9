"""An iterator of which nothing was taken never was; of two that are read, the one that delivered last has the state."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

import torchdistinput as tdi
from tests.data import Order, Repeated
from tests.support import inputs
from tests.support.epochs import lists
from tests.support.launched import Scenes, launched

EPOCHS = 2
NUMBERS: Any = range(10)


def told() -> Order:
    """Orders by the epoch that it is told, and reads it anew at each sample."""
    order = Order(10, lambda _: ((place + 3 * order.epoch) % 10 for place in range(10)))
    return order


class Stream(IterableDataset[int]):
    """Goes on where it was left: an epoch is the next ten numbers. It is its own iterator, with a state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.at += 1
        if not self.at % 11:
            raise StopIteration
        return self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]


def sampled_with_replacement() -> dict[str, Any]:
    generator = inputs.generator()
    return {"sampler": RandomSampler(NUMBERS, replacement=True, generator=generator), "generator": generator}


DATA: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "by a generator": lambda: (NUMBERS, {"shuffle": True, "generator": inputs.generator()}),
    "by the default generator": lambda: (NUMBERS, {"shuffle": True}),
    "by a generator, with replacement": lambda: (NUMBERS, sampled_with_replacement()),
    "by the epoch": lambda: (NUMBERS, {"sampler": told()}),
    "in order": lambda: (NUMBERS, {}),
    "an iterable": lambda: (Repeated(10), {}),
    "a stream": lambda: (Stream(), {}),
}


def one_strategy(loader: Any) -> Any:
    return tdi.Strategy().distribute_dataset(loader)


def one_strategy_over(samples: Any) -> Any:
    return tdi.Strategy().distribute_dataset(samples, global_batch_size=4)


DOORS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "drop-in": (tdi.DataLoader, lambda loader: loader),
    "strategy": (DataLoader, one_strategy),
}


def thrown_away(loader: Any) -> None:
    iter(loader)


def closed(loader: Any) -> None:
    iter(loader).close()


def zipped(loader: Any) -> None:
    assert not list(zip(range(0), loader, strict=False))


def two(loader: Any) -> None:
    first, second = iter(loader), iter(loader)
    assert first is not second
    del first
    del second


def kept_for_a_while(loader: Any) -> None:
    before = loader.epoch
    iterator = iter(loader)
    loader.state_dict()
    assert loader.epoch == before
    del iterator


def asked_for_more(loader: Any) -> None:
    iter(loader).has_next()


def spec(loader: Any) -> None:
    assert loader.element_spec.dtype == torch.int64


LOOKS = {look.__name__: look for look in (thrown_away, closed, zipped, two, kept_for_a_while, asked_for_more, spec)}


def run(door: str, name: str, look: Callable[[Any], object], **more: Any) -> list[Any]:
    """Two epochs with a look at their beginning, after each step and at the end: what a look must not change."""
    torch.manual_seed(3)
    kind, divide = DOORS[door]
    data, given = DATA[name]()
    loader = divide(kind(data, 4, **given, **more))
    found: list[Any] = []

    def note(*what: Any) -> None:
        look(loader)
        generators = torch.default_generator, *([given["generator"]] if "generator" in given else [])
        states = [zlib.crc32(each.get_state().numpy().tobytes()) for each in generators]
        epoch = getattr(given.get("sampler"), "epoch", None)
        found.append([*what, loader.state_dict(), loader.epoch, epoch, states])

    for _ in range(EPOCHS):
        note("begin")
        for batch in loader:
            note(lists(batch), loader.step.epoch, loader.step.index, loader.stats()["steps"])
    note("end")
    return found


def both(door: str, name: str, look: str, **more: Any) -> tuple[list[Any], list[Any]]:
    """What a run finds without a look and with it."""
    return run(door, name, lambda _: None, **more), run(door, name, LOOKS[look], **more)


def looks_of(door: str, name: str = "") -> list[str]:
    """The drop-in has no ``element_spec``; what was read of a stream of the user's own cannot be put back."""
    left_out = {"spec"} if door == "drop-in" else set()
    return [look for look in LOOKS if look not in left_out | ({"asked_for_more"} if name == "a stream" else set())]


@pytest.mark.parametrize(
    ("door", "name", "look"), [(door, name, look) for door in DOORS for name in DATA for look in looks_of(door, name)]
)
def test_an_iterator_of_which_nothing_was_taken_never_was(door: str, name: str, look: str) -> None:
    plain, looked = both(door, name, look)
    assert looked == plain


@pytest.mark.parametrize("look", ["thrown_away", "two", "asked_for_more"])
@pytest.mark.parametrize("name", ["by a generator", "by the epoch"])
def test_so_it_is_with_loader_workers(name: str, look: str) -> None:
    plain, looked = both("drop-in", name, look, num_workers=1)
    assert looked == plain


def on_each_rank() -> dict[tuple[str, str, str], tuple[list[Any], list[Any]]]:
    found = {}
    for door in DOORS:
        for name in ("by a generator", "by the default generator", "by the epoch")[: 4 - dist.get_world_size()]:
            plain = run(door, name, lambda _: None)
            for look in {"two", "spec"}.intersection(looks_of(door)):
                found[door, name, look] = plain, run(door, name, LOOKS[look])
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_so_it_is_on_every_rank(world_size: int, scenes: Scenes) -> None:
    for found in scenes(world_size, "looks"):
        for key, (plain, looked) in found.items():
            for first in (plain[0], looked[0]):  # the ranks do not know yet from which default state they will draw
                first[1].pop("random", None)
            assert looked == plain, key


def kept_on_one_rank() -> list[Any]:
    """Each rank throws the iterator away that looked, but one, where something else still holds it for an epoch."""
    loader = tdi.Strategy().distribute_dataset(DataLoader(NUMBERS, 4, shuffle=True, generator=inputs.generator()))
    looked: Any = iter(loader)
    assert looked.has_next()
    if dist.get_rank() != 1:
        looked = None
    read = [*map(lists, loader)]
    looked = None
    return [*read, lists(next(iter(loader)))]


def test_who_still_holds_an_iterator_that_looked_is_no_matter(scenes: Scenes) -> None:
    for numbers in zip(*scenes(2, "kept"), strict=True):
        assert len({number for part in numbers for number in part}) in {2, 4}, "each rank has its part of one batch"


@pytest.mark.parametrize("door", DOORS)
def test_what_one_iterator_looked_into_another_begins_anew(door: str) -> None:
    kind, divide = DOORS[door]
    loader = divide(kind(NUMBERS, 4))
    first, second = iter(loader), iter(loader)
    assert first.has_next()
    assert lists(next(second)) == [0, 1, 2, 3]
    assert [lists(batch) for batch in first] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [lists(batch) for batch in second] == [[4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize(("door", "look"), [(door, look) for door in DOORS for look in looks_of(door)])
@pytest.mark.parametrize("begins", ["loaded", "sought", "told"])
def test_a_place_that_was_set_outlives_a_look(begins: str, door: str, look: str) -> None:
    kind, divide = DOORS[door]
    generators = [inputs.generator() for _ in range(3)]
    run, plain, looked = (divide(kind(NUMBERS, 4, shuffle=True, generator=each)) for each in generators)
    for _ in run:
        break
    for each in (plain, looked):
        if begins == "loaded":
            each.load_state_dict(run.state_dict())
        elif begins == "sought":
            each.seek(1, 1)
        else:
            each.set_epoch(5)
    LOOKS[look](looked)
    assert looked.state_dict() == plain.state_dict()
    assert looked.epoch == plain.epoch == {"loaded": 0, "sought": 1, "told": 5}[begins]
    for _ in range(2):
        assert list(map(lists, looked)) == list(map(lists, plain))
        assert looked.state_dict() == plain.state_dict()


@pytest.mark.parametrize("look", LOOKS)
def test_looks_at_files(look: str, tmp_path: Path) -> None:
    inputs.write_numbers(tmp_path)
    plain, looked = (one_strategy_over(inputs.numbers_of(tmp_path)) for _ in range(2))
    for _ in range(2):
        for one, other in zip(plain, looked, strict=True):
            LOOKS[look](looked)
            assert lists(other) == lists(one)
            assert looked.state_dict() == plain.state_dict()


# ------------------------------------------------------------------------------------------------------- two are read


def place_of(loader: Any) -> tuple[int, int]:
    state = loader.state_dict()
    return state["epoch"], state["step"]


@pytest.mark.parametrize("door", DOORS)
def test_a_picture_in_a_running_loop_leaves_the_state_to_the_loop(door: str) -> None:
    kind, divide = DOORS[door]
    loader = divide(kind(NUMBERS, 4, shuffle=True, generator=inputs.generator()))
    order, states = [], []
    for batch in loader:
        order.append(lists(batch))
        states.append(loader.state_dict())
        assert loader.epoch == loader.step.epoch == 0
        next(iter(loader))
    assert loader.epoch == 4  # each picture was an epoch of its own, which was left after one step
    assert [(state["epoch"], state["step"]) for state in states[:2]] == [(0, 1), (0, 2)]
    for done, state in enumerate(states[:2], 1):
        resumed = divide(kind(NUMBERS, 4, shuffle=True, generator=inputs.generator()))
        resumed.load_state_dict(state)
        assert list(map(lists, resumed)) == order[done:]


# ------------------------------------------------------------------------------------------- what is known locally


def specs_of_one_rank() -> list[Any]:
    """Only rank 0 asks, inside the loop and after it."""
    loader = tdi.Strategy(timeout_seconds=60).distribute_dataset(range(8), global_batch_size=2 * dist.get_world_size())
    found: list[Any] = []
    iterator = iter(loader)
    for _ in iterator:
        if dist.get_rank() == 0:
            found.append((loader.element_spec, iterator.element_spec, loader.step.index))
    if dist.get_rank() == 0:
        found.append((loader.element_spec, place_of(loader)))
    loader.close()
    return found


def test_once_a_batch_was_delivered_a_rank_knows_the_spec_alone(scenes: Scenes) -> None:
    first, second = scenes(2, "specs")
    assert second == []
    assert [place for *_, place in first] == [0, 1, (1, 0)]
    assert {str(spec) for spec, *_ in first} == {str(first[0][1])}


# ------------------------------------------------------------------------------------------------ loader.epoch


@pytest.mark.parametrize("door", DOORS)
def test_the_epoch_is_the_one_that_a_loop_reads_or_the_next_one_will(door: str) -> None:
    kind, divide = DOORS[door]
    loader = divide(kind(NUMBERS, 4))
    assert loader.epoch == 0
    read: list[Any] = []
    state: dict[str, Any] = {}
    for epoch in range(loader.epoch, 3):
        for _ in loader:
            read.append((epoch, loader.epoch, loader.step.epoch))
            if epoch == 1:
                state = loader.state_dict()
                break
        assert loader.epoch == epoch + 1
    assert read == [(0, 0, 0)] * 3 + [(1, 1, 1)] + [(2, 2, 2)] * 3
    resumed = divide(kind(NUMBERS, 4))
    resumed.load_state_dict(state)
    assert resumed.epoch == 1
    resumed.seek(4)
    assert resumed.epoch == 4
    resumed.set_epoch(2)
    assert resumed.epoch == 2
    assert next(iter(resumed)) is not None
    assert resumed.epoch == 3


@pytest.mark.parametrize("door", DOORS)
def test_the_epoch_that_the_sampler_is_told_is_the_loaders(door: str) -> None:
    kind, divide = DOORS[door]
    sampler = told()
    loader = divide(kind(NUMBERS, 4, sampler=sampler))
    sampler.set_epoch(6)
    assert loader.epoch == 6
    list(loader)
    assert loader.epoch == 7
    sampler.set_epoch(3)
    assert loader.epoch == 3


def only_rank_0_asks() -> tuple[int, int]:
    loader = tdi.DataLoader(NUMBERS, 4)
    asked = loader.epoch if dist.get_rank() == 0 else 0
    return asked, len(list(loader))


def test_the_epoch_of_a_loader_that_was_not_read_is_known_to_a_rank_alone(scenes: Scenes) -> None:
    assert scenes(2, "epoch") == [(0, 3), (0, 3)]


def scenes_of(world_size: int, _: Path) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {"looks": on_each_rank}
    if world_size == 2:
        found |= {"kept": kept_on_one_rank, "specs": specs_of_one_rank, "epoch": only_rank_0_asks}
    return found


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    return launched((2, 3), scenes_of, tmp_path_factory.mktemp("nothing"))
