"""The samples of a state after a step was sought: those of the steps before it count too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

import torchdistinput as tdi
from tests.support import inputs
from torchdistinput.testing import run_ranks

NUMBERS: Any = range(11)
SIZES = (3, 1, 5, 2)
"""Of the batches of ``inputs.UnevenBatches``."""


class Stream(IterableDataset[int]):
    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Iterator[int]:
        yield from range(11)


def samples_in(loader: Any) -> int:
    found: int = loader.state_dict()["samples"]
    return found


LOADERS: dict[str, tuple[Callable[[], dict[str, Any]], tuple[int, ...]]] = {
    "a batch size": (lambda: {"batch_size": 4}, (4, 4, 3)),
    "a batch size, the rest dropped": (lambda: {"batch_size": 4, "drop_last": True}, (4, 4)),
    "shuffled": (lambda: {"batch_size": 4, "shuffle": True, "generator": inputs.generator()}, (4, 4, 3)),
    "a batch sampler": (lambda: {"batch_sampler": inputs.UnevenBatches()}, SIZES),
    "lists of a sampler": (
        lambda: {"batch_size": None, "sampler": BatchSampler(SequentialSampler(NUMBERS), 4, drop_last=False)},
        (4, 4, 3),
    ),
}
DOORS: dict[str, Callable[..., Any]] = {
    "drop-in": tdi.DataLoader,
    "strategy": lambda *given, **named: tdi.Strategy().distribute_dataset(DataLoader(*given, **named)),
}


def counted(door: str, name: str) -> list[tuple[int, int]]:
    """From each step on: the samples of the state after the next one, and those that should be there."""
    arguments, sizes = LOADERS[name]
    found = []
    data = inputs.BatchesByList() if name == "lists of a sampler" else NUMBERS
    loader: Any = DOORS[door](data, **arguments())
    for step in range(len(sizes)):
        loader.seek(0, step)
        iterator = iter(loader)
        next(iterator)
        if step + 1 < len(sizes):  # else the state is of the next epoch
            found.append((samples_in(loader), sum(sizes[: step + 1])))
        iterator.close()
    return found


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("door", DOORS)
def test_the_samples_before_the_sought_step_count(door: str, name: str) -> None:
    for found, right in counted(door, name):
        assert found == right


def counted_everywhere() -> dict[tuple[str, str], list[tuple[int, int]]]:
    return {(door, name): counted(door, name) for door in DOORS for name in LOADERS}


@pytest.mark.parametrize("world_size", [2, 3])
def test_so_it_is_on_every_rank(world_size: int) -> None:
    for found in run_ranks(world_size, counted_everywhere):
        for key, counts in found.items():
            assert [each for each, _ in counts] == [right for _, right in counts], key


@pytest.mark.parametrize("kind", ["loader", "samples", "elements"])
def test_the_end_of_an_epoch_has_as_many_samples_as_the_data(kind: str) -> None:
    data: Any = {"loader": DataLoader(NUMBERS, 4), "samples": NUMBERS, "elements": Stream()}[kind]
    dataset = tdi.Strategy().distribute_dataset(data, global_batch_size=None if kind == "loader" else 4)
    for step, samples in ((0, 0), (2, 8), (3, 11)):
        dataset.seek(0, step)
        assert (dataset.state_dict()["step"], samples_in(dataset)) == (step, samples)
