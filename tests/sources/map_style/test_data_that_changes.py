"""Data that changes between epochs: alike on all ranks it is read as it is now; else all ranks are told before a step.

The number of samples decides whether a rank has none at the last step. The data may change after the loader was made,
and the length of a sampler may be wrong, so a rank without a sample gets an empty batch whatever was known before.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import torchdistinput as tdi
from tests.data import Mapped, Order
from tests.support.epochs import Raised, cut_by_s, lists, steps_until_raised
from tests.support.launched import Scenes, launched
from tests.support.resume import OTHER_SEED, SEED

BATCH, WORLDS, WORKERS = 4, (2, 3), (0, 2)


class Changing(NamedTuple):
    """A loader, and how its data changes after the first epoch."""

    loader: DataLoader[Any]
    change: Callable[[], object]


def with_list(change: Callable[[list[int]], object], **arguments: Any) -> Changing:
    data = [*range(8)]
    return Changing(DataLoader(data, BATCH, **arguments), lambda: change(data))  # type: ignore[arg-type]


def with_length(**arguments: Any) -> Changing:
    """Samples without a list of them."""
    data = Mapped(8, int)
    return Changing(DataLoader(data, BATCH, **arguments), lambda: setattr(data, "n", 9))


def with_sampler(**arguments: Any) -> Changing:
    """Later it draws more indices than its length says."""
    draws = [*range(8)]
    sampler = Order(8, lambda _: [*draws])
    return Changing(DataLoader(range(20), BATCH, sampler=sampler, **arguments), lambda: draws.append(8))  # type: ignore[arg-type]


def with_num_samples(**arguments: Any) -> Changing:
    generator = torch.Generator().manual_seed(1)
    sampler = RandomSampler(range(20), replacement=True, num_samples=8, generator=generator)
    return Changing(
        DataLoader(range(20), BATCH, sampler=sampler, **arguments),  # type: ignore[arg-type]
        lambda: setattr(sampler, "_num_samples", 9),
    )


CHANGES: dict[str, Callable[..., Changing]] = {
    "a list grows": lambda **arguments: with_list(lambda data: data.append(8), **arguments),
    "a list shrinks": lambda **arguments: with_list(lambda data: data.__delitem__(slice(5, None)), **arguments),
    "a list shrinks to one sample": lambda **arguments: with_list(
        lambda data: data.__delitem__(slice(1, None)), **arguments
    ),
    "a length grows": with_length,
    "a sampler draws more than its length": with_sampler,
    "num_samples grows": with_num_samples,
}


def epochs_of(name: str, loader_workers: int, distribute: bool) -> list[list[Any]]:
    """The batches of the epoch before the change, and of the one after it."""
    loader, change = CHANGES[name](num_workers=loader_workers)
    data: Any = loader
    if distribute:
        data = tdi.Strategy(devices=["cpu"], timeout_seconds=20).distribute_dataset(loader)
    before = [lists(each) for each in data]
    change()
    return [before, [lists(each) for each in data]]


@pytest.mark.parametrize("loader_workers", WORKERS)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", CHANGES)
def test_data_that_changes_alike_is_delivered_as_it_is_now(
    name: str, world: int, loader_workers: int, scenes: Scenes
) -> None:
    ranks = scenes(world, f"{name}, {loader_workers} workers")
    wanted = [
        [cut_by_s(torch.tensor(batch), world) for batch in epoch] for epoch in epochs_of(name, loader_workers, False)
    ]
    assert [[list(step) for step in zip(*epoch, strict=True)] for epoch in zip(*ranks, strict=True)] == wanted


def counted(samples: list[int]) -> dict[str, Any]:
    """A batch that cannot be made without a sample."""
    return {"count": len(samples), "samples": torch.tensor(samples)}


def error_of_change(name: str) -> tuple[int, int, Raised | None]:
    loader, change = CHANGES[name](collate_fn=counted)
    dataset = tdi.Strategy(devices=["cpu"], timeout_seconds=20).distribute_dataset(loader)
    before = len(list(dataset))
    change()
    return before, *steps_until_raised(dataset)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *[("a list grows", 0), ("a list shrinks", 0), ("a list shrinks to one sample", 0), ("a length grows", 0)],
        *[("a sampler draws more than its length", 2), ("num_samples grows", 0)],
    ],
)
def test_a_batch_that_cannot_be_empty_is_an_error_of_all_ranks_at_one_step(
    name: str, steps: int, scenes: Scenes
) -> None:
    for before, after, error in scenes(2, f"{name}, no batch without a sample"):
        assert (before, after) == (2, steps)
        assert error is not None
        assert error.kind == "BatchingError"
        assert "'count'" in error.message
        assert "empty_fn" in error.message


def subset() -> Subset[int]:
    return Subset(range(100), [*range(8)])  # type: ignore[arg-type]


def subset_by_array() -> Subset[int]:
    return Subset(range(100), np.arange(8))  # type: ignore[arg-type]


def replaced(data: Any) -> None:
    data.indices = [*range(50, 58)]


def longer(data: Any) -> None:
    data.n = 9


def inner_reversed(data: Any) -> None:
    data.datasets[1].indices.reverse()


def another_sample(data: Any) -> None:
    data[-1] = {"number": 2}


def another_tensor(data: Any) -> None:
    data.tensors = (torch.arange(8, 16),)


OFF = tdi.AutoShardPolicy.OFF
APART: dict[str, tuple[Callable[[], Any], Callable[[Any], object], dict[str, Any], str]] = {
    "indices replaced": (subset, replaced, {}, "the samples"),
    "indices in another order": (subset, lambda data: data.indices.reverse(), {}, "the samples"),
    "indices in an array": (subset_by_array, lambda data: data.indices.__iadd__(8), {}, "the samples"),
    "indices of a subset inside": (
        *(lambda: ConcatDataset([Mapped(8, int), subset()]), inner_reversed, {}, "the samples"),
    ),
    "a sample of a list": (lambda: [{"number": 1}] * 8, another_sample, {}, "the samples"),
    "a tensor": (lambda: TensorDataset(torch.arange(8)), another_tensor, {}, "the samples"),
    "length": (lambda: Mapped(8, int), longer, {}, "length"),
    "length, each rank reads all": (lambda: Mapped(8, int), longer, {"auto_shard_policy": OFF}, "length"),
    "length of ready batches": (lambda: [torch.ones(4)] * 2, lambda data: data.append(torch.ones(4)), {}, "length"),
}


def change_apart(name: str, alike: bool) -> tuple[int, int, Raised | None]:
    """One epoch, a change on the last rank alone or on all, and the next epoch."""
    make, change, options, _ = APART[name]
    data, strategy = make(), tdi.Strategy(devices=["cpu"], timeout_seconds=20)
    loader = (
        data
        if name == "length of ready batches"
        else DataLoader(data, BATCH, shuffle=name == "indices in another order")
    )
    dataset = strategy.distribute_dataset(loader, tdi.InputOptions(**options))
    before = len(list(dataset))
    if alike or dist.get_rank() == dist.get_world_size() - 1:
        change(data)
    return before, *steps_until_raised(dataset)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", APART)
def test_data_that_comes_to_differ_is_told_on_every_rank_before_a_step(name: str, world: int, scenes: Scenes) -> None:
    found = scenes(world, f"{name}, apart")
    assert len(set(found)) == 1, "the ranks raise different errors"
    _, steps, error = found[0]
    assert steps == 0
    assert error is not None
    assert error.kind == "RankDisagreement"
    assert f"the ranks differ in {APART[name][3]}:" in error.message
    assert f"rank {world - 1}: " in error.message


@pytest.mark.parametrize("name", APART)
def test_data_that_changes_on_all_ranks_is_no_difference(name: str, scenes: Scenes) -> None:
    for before, steps, error in scenes(2, f"{name}, alike"):
        assert error is None
        assert steps >= before


def note_in_samples() -> list[int]:
    """Epochs in which each rank notes in the samples of a list which of them it read."""
    whole, of_half = ([{"number": each, "read": 0} for each in range(8)] for _ in range(2))

    def collate(batch: list[dict[str, int]]) -> torch.Tensor:
        for sample in batch:
            sample["read"] += 1
        return torch.tensor([sample["number"] for sample in batch])

    half: Subset[Any] = Subset(of_half, [*range(4)])  # type: ignore[arg-type]
    found = []
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=20)
    for data in (whole, half):
        loader = strategy.distribute_dataset(DataLoader(data, BATCH, collate_fn=collate))  # type: ignore[arg-type]
        found += [len(list(loader)) for _ in range(3)]
    again = strategy.distribute_dataset(DataLoader(half, BATCH, collate_fn=collate))
    return [*found, len(list(again))]


@pytest.mark.parametrize("world", WORLDS)
def test_what_a_rank_notes_inside_of_its_samples_is_no_difference(world: int, scenes: Scenes) -> None:
    assert scenes(world, "notes") == [[2, 2, 2, 1, 1, 1, 1]] * world


def read_by_two_loaders() -> list[list[float]]:
    strategy, data = tdi.Strategy(["cpu"]), torch.arange(8.0)
    loaders = [strategy.distribute_dataset(DataLoader(data, 4)) for _ in range(2)]  # type: ignore[arg-type]
    return [batch.tolist() for loader in loaders for _ in range(2) for batch in loader]


def test_a_tensor_may_be_the_data_of_several_loaders(scenes: Scenes) -> None:
    """It is known by its identity: two tensors are equal element by element."""
    for ranks in ([read_by_two_loaders()], scenes(2, "two loaders")):
        batches = [[*chain.from_iterable(parts)] for parts in zip(*ranks, strict=True)]
        assert batches == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]] * 4


NUMBERS: Any = range(20)
OTHERS: Any = range(100, 140)
PAIRS = 8  # in two epochs
DropIn: Any = tdi.DataLoader  # torch's types ask for a Dataset; ranges will do

Make = Callable[..., Any]
States = dict[int, list[str]]


def by_default(kind: Make) -> list[Any]:
    return [kind(NUMBERS, 5, shuffle=True), kind(OTHERS, 4, shuffle=True)]


def by_other_samplers(kind: Make) -> list[Any]:
    drawn = WeightedRandomSampler([1.0 + i for i in range(20)], 20)
    return [kind(NUMBERS, 5, sampler=drawn), kind(OTHERS, 4, sampler=RandomSampler(OTHERS, replacement=True))]


def by_one_generator(kind: Make) -> list[Any]:
    generator = torch.Generator().manual_seed(SEED)
    return [kind(NUMBERS, 5, shuffle=True, generator=generator), kind(OTHERS, 4, shuffle=True, generator=generator)]


def one_with_workers(kind: Make) -> list[Any]:
    return [kind(NUMBERS, 5, shuffle=True), kind(OTHERS, 4, shuffle=True, num_workers=1)]


WAYS = {way.__name__: way for way in (by_default, by_other_samplers, by_one_generator, one_with_workers)}


def at_the_first_next(loader: Any) -> Iterator[Any]:
    yield from loader


def in_pairs(loaders: list[Any]) -> Iterator[list[Any]]:
    while True:
        pairs = zip(*map(at_the_first_next, loaders), strict=False)
        yield from ([lists(element) for element in pair] for pair in pairs)


def divided() -> Make:
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=60)
    return lambda *args, **more: strategy.distribute_dataset(DataLoader(*args, **more))


def read(way: str, kind: str, saved: list[str] | None = None) -> tuple[list[Any], States]:
    """Pairs of this rank, from the front with all states, or from a state on."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed((SEED if saved is None else OTHER_SEED) + rank)
    loaders = WAYS[way]({"torch": DataLoader, "drop-in": DropIn}.get(kind) or divided())
    for loader, state in zip(loaders, saved or (), strict=False):
        loader.load_state_dict(json.loads(state))
    found: list[Any] = []
    states: States = {}
    for pair in itertools.islice(in_pairs(loaders), PAIRS):
        found.append(pair)
        if saved is None and kind != "torch":
            states[len(found)] = [json.dumps(loader.state_dict()) for loader in loaders]
    return found, states


def put_together(parts: list[list[Any]]) -> list[Any]:
    return [[list(itertools.chain(*side)) for side in zip(*pairs, strict=True)] for pairs in zip(*parts, strict=True)]


WAYS_AND_KINDS = [*zip(WAYS, ["drop-in", "strategy"] * 2, strict=True)]
LEFT = (1, 6)
"""After so many pairs."""


@pytest.mark.parametrize(("way", "kind"), WAYS_AND_KINDS)
def test_loaders_that_are_read_together_have_torchs_orders_and_go_on_from_a_state(
    way: str, kind: str, scenes: Scenes
) -> None:
    expected, _ = read(way, "torch")
    for world, other in ((1, 2), (3, 1)):
        ranks = [read(way, kind)] if world == 1 else scenes(world, f"{way}, {kind}")
        assert put_together([found for found, _ in ranks]) == expected, world
        states = ranks[0][1]
        assert all(of_rank == states for _, of_rank in ranks)
        for step in LEFT:
            parts = [read(way, kind, states[step])] if other == 1 else scenes(other, f"{way}, {kind}, from {step}")
            resumed = put_together([found for found, _ in parts])
            rest = PAIRS // 2 - step % 4  # of the epoch; the later ones follow from whoever drew last before them
            assert resumed[:rest] == expected[step : step + rest], (world, step)


def drawn_between(kind: Make, saved: Any = None) -> tuple[list[Any], list[Any]]:
    """A loop that makes its model after the iterator, and the states after its steps."""
    torch.manual_seed(SEED if saved is None else OTHER_SEED)
    loader = kind(NUMBERS, 5, shuffle=True)
    if saved is not None:
        loader.load_state_dict(saved)
    iterator = iter(loader)
    torch.rand(7)
    found, states = [], []
    for batch in iterator:
        found.append(lists(batch))
        states.append(None if kind is DataLoader else json.loads(json.dumps(loader.state_dict())))
    return found, states


@pytest.mark.parametrize("make", [DropIn, None], ids=["drop-in", "strategy"])
def test_what_is_drawn_between_the_iterator_and_its_first_batch_moves_the_order_and_the_state_knows(
    make: Make | None,
) -> None:
    kind = divided() if make is None else make
    expected, _ = drawn_between(DataLoader)
    found, states = drawn_between(kind)
    assert found == expected
    rest, again = drawn_between(kind, states[0])
    assert rest == expected[1:]
    rest, _ = drawn_between(kind, again[0])
    assert rest == expected[2:]


def sought(kind: Make) -> list[Any]:
    torch.manual_seed(SEED)
    loader = kind(NUMBERS, 5, shuffle=True)
    iterator = iter(loader)
    torch.rand(7)
    first = [lists(batch) for batch in iterator]
    loader.seek(0, 1)
    return [first, [lists(batch) for batch in loader]]


def test_seeking_back_into_such_an_epoch_gives_its_order(scenes: Scenes) -> None:
    for first, again in [sought(DropIn), *scenes(2, "sought")]:
        assert again == first[1:]


# ------------------------------------------------------------------------------------------------------- the launches


def scenes_of(alone: dict[str, States], world: int, _: Path) -> dict[str, Callable[[], Any]]:
    """What is played by so many ranks; ``alone``: the states of one process, of each way."""
    found: dict[str, Callable[[], Any]] = {
        f"{name}, {workers} workers": partial(epochs_of, name, workers, True) for name in CHANGES for workers in WORKERS
    }
    found |= {f"{name}, apart": partial(change_apart, name, False) for name in APART}
    found["notes"] = note_in_samples
    if world == 3:
        return found | {f"{way}, {kind}": partial(read, way, kind) for way, kind in WAYS_AND_KINDS}
    found |= {f"{name}, no batch without a sample": partial(error_of_change, name) for name in CHANGES}
    found |= {f"{name}, alike": partial(change_apart, name, True) for name in APART}
    found |= {
        f"{way}, {kind}, from {step}": partial(read, way, kind, alone[way][step])
        for way, kind in WAYS_AND_KINDS
        for step in LEFT
    }
    return found | {"two loaders": read_by_two_loaders, "sought": partial(sought, DropIn)}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    alone = {way: read(way, kind)[1] for way, kind in WAYS_AND_KINDS}
    return launched(WORLDS, partial(scenes_of, alone), tmp_path_factory.mktemp("nothing"))
