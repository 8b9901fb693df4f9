"""Data that grows or shrinks: a state tells how many samples there were in the epoch that it is of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

import torchdistinput as tdi
from tests.support.epochs import lists
from torchdistinput.testing import run_ranks


class Items(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        yield from range(self.count)


def of_a_loader(data: Any) -> Any:
    return tdi.Strategy().distribute_dataset(DataLoader(data, 4))


def of_samples(data: Any) -> Any:
    return tdi.Strategy().distribute_dataset(data, global_batch_size=4)


DOORS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "drop-in": (Items, lambda data: tdi.DataLoader(data, 4)),
    "a loader": (Items, of_a_loader),
    "samples": (Items, of_samples),
    "elements": (Stream, of_samples),
}


def length_in(state: dict[str, Any]) -> Any:
    return dict(state["fingerprint"])["length"]


def grown(door: str) -> list[Any]:
    """Data that grows from 8 to 15 before its first epoch, or after it; then the state of each is loaded."""
    found: list[Any] = []
    make, divide = DOORS[door]
    for epochs in (0, 1):
        data = make(8)
        loader = divide(data)
        for _ in range(epochs):
            assert len(list(loader)) == 2
        data.count = 15
        state = loader.state_dict()
        same, shorter = divide(make(15)), divide(make(8))
        same.load_state_dict(state)
        with pytest.raises(tdi.StateMismatch, match="length: 15 in the state, 8 here"):
            shorter.load_state_dict(state)
        found.append((length_in(state), list(map(lists, same)) == list(map(lists, loader))))
    return found


@pytest.mark.parametrize("door", DOORS)
def test_a_state_between_two_epochs_has_the_length_of_now(door: str) -> None:
    assert grown(door) == [(15, True)] * 2


def grown_on_ranks() -> dict[str, list[Any]]:
    return {door: grown(door) for door in DOORS if door != "elements"}


@pytest.mark.parametrize("world_size", [2, 3])
def test_so_it_is_on_every_rank(world_size: int) -> None:
    for found in run_ranks(world_size, grown_on_ranks):
        assert found == {door: [(15, True)] * 2 for door in DOORS if door != "elements"}


@pytest.mark.parametrize("door", ["drop-in", "a loader", "samples"])
def test_a_state_in_an_epoch_has_the_length_with_which_the_epoch_began(door: str) -> None:
    make, divide = DOORS[door]
    data = make(8)
    loader = divide(data)
    iterator = iter(loader)
    next(iterator)
    data.count = 15
    state = loader.state_dict()
    assert length_in(state) == 8
    with pytest.raises(tdi.StateMismatch, match="length: 8 in the state, 15 here"):
        divide(data).load_state_dict(state)
    assert len(list(iterator)) == 1
    assert length_in(loader.state_dict()) == 15
    assert len(list(loader)) == 4


@pytest.mark.parametrize("door", ["drop-in", "a loader", "samples"])
def test_a_state_is_compared_with_the_length_of_now(door: str) -> None:
    make, divide = DOORS[door]
    whole = divide(make(15))
    next(iter(whole))
    data = make(8)
    loader = divide(data)
    data.count = 15
    loader.load_state_dict(whole.state_dict())
    assert len(list(loader)) == 3
