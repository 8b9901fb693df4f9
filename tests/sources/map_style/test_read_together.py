"""Shuffled loaders that are read together: their orders are the same at any number of ranks, a state goes on in them,
and they are those of torch's loaders of which each ``iter`` is called right before its first ``next``.

torch draws the base seed of an epoch at ``iter``, and its order with the first batch; this library draws both with the
first batch. In ``zip(a, b)`` both epochs of torch are begun before that, and in a training loop the user may draw in
between: models, noise.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

import torchdistinput as tdi
from tests.support.epochs import lists
from tests.support.resume import OTHER_SEED, SEED
from torchdistinput.testing import run_ranks

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


def read_each(way: str, kind: str, saved: list[list[str] | None]) -> list[Any]:
    return [read(way, kind, each) for each in saved]


def over(world: int, *args: Any) -> list[Any]:
    return [read_each(*args)] if world == 1 else run_ranks(world, read_each, *args)


@pytest.mark.parametrize(("way", "kind"), [*zip(WAYS, ["drop-in", "strategy"] * 2, strict=True)])
def test_loaders_that_are_read_together_have_torchs_orders_and_go_on_from_a_state(way: str, kind: str) -> None:
    expected, _ = read(way, "torch")
    for world, other in ((1, 2), (3, 1)):
        ranks = [found for (found,) in over(world, way, kind, [None])]
        assert put_together([found for found, _ in ranks]) == expected, world
        states = ranks[0][1]
        assert all(of_rank == states for _, of_rank in ranks)
        steps = (1, 6)
        parts = over(other, way, kind, [states[step] for step in steps])
        for step, *of_ranks in zip(steps, *parts, strict=True):
            resumed = put_together([found for found, _ in of_ranks])
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


@pytest.mark.parametrize("world", [1, 2])
def test_seeking_back_into_such_an_epoch_gives_its_order(world: int) -> None:
    for first, again in run_ranks(world, sought, DropIn):
        assert again == first[1:]
