"""Ranks tell the epoch alike, and resume data with a state of its own at another world size."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, Sampler

import torchdistinput as tdi
from torchdistinput.testing.ranks import run_ranks


class Stream(IterableDataset[int]):
    """Another order in each epoch, and a state of its own."""

    def __init__(self) -> None:
        self.epoch = self.place = self.begin = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        begin, self.begin = self.begin, 0
        for place in range(begin, 13):
            self.place = place + 1
            yield 100 * self.epoch + place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "random": torch.arange(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["random"], torch.arange(3))
        self.begin = state["place"]


def read(workers: int, state: Any, steps: int) -> tuple[list[list[int]], Any]:
    """Some steps of this rank over two epochs and more, and the state after them."""
    lasting = workers > 0
    found: list[list[int]] = []
    warnings.simplefilter("ignore")
    with tdi.DataLoader(
        Stream(), 4, num_workers=workers, persistent_workers=lasting, snapshot_every_n_steps=2
    ) as loader:
        if state is not None:
            loader.load_state_dict(state)
        while len(found) < steps:
            for batch in loader:
                found.append(batch.tolist())
                if len(found) == steps:
                    return found, loader.state_dict()
    raise AssertionError


def together(ranks: list[tuple[list[list[int]], Any]]) -> list[list[int]]:
    return [[*chain.from_iterable(parts)] for parts in zip(*(found for found, _ in ranks), strict=True)]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_epochs_are_told_alike_and_a_state_goes_on_in_another_world(workers: int) -> None:
    whole, _ = read(workers, None, 16)
    assert whole[0] == [0, 1, 2, 3]
    assert any(batch[0] >= 100 for batch in whole)
    for steps, before, after in ((6, 1, 2), (10, 3, 1), (7, 2, 3)):
        first = run_ranks(before, read, workers, None, steps)
        assert together(first) == whole[:steps]
        rest = run_ranks(after, read, workers, first[0][1], 16 - steps)
        assert together(rest) == whole[steps:]


class Quiet(Sampler[int]):
    """Shuffles by its epoch, and shows it to nobody."""

    def set_epoch(self, epoch: int) -> None:
        self._random = random.Random(epoch)

    def __len__(self) -> int:
        return 13

    def __iter__(self) -> Iterator[int]:
        return iter(self._random.sample(range(13), 13))


def go_on(workers: int, lasting: bool) -> list[tuple[int, list[int]]]:
    """A script that goes on at epoch 5, and leaves epoch 6 after a step."""
    sampler, found = Quiet(), []
    data: Any = range(13)
    with tdi.DataLoader(data, 4, sampler=sampler, num_workers=workers, persistent_workers=lasting) as loader:
        for epoch in range(5, 8):
            sampler.set_epoch(epoch)
            for batch in loader:
                found.append((loader.step.epoch, batch.tolist()))
                if epoch == 6:
                    break
    return found


@pytest.mark.parametrize(("workers", "lasting"), [(0, False), (2, False), (2, True)])
def test_a_script_that_sets_the_epochs_of_its_sampler_gets_these_epochs(workers: int, lasting: bool) -> None:
    whole = go_on(workers, lasting)
    assert [epoch for epoch, _ in whole] == [5] * 4 + [6] + [7] * 4
    for epoch in (5, 7):
        order = [number for each, batch in whole if each == epoch for number in batch]
        assert order == random.Random(epoch).sample(range(13), 13)
    ranks = run_ranks(2, go_on, workers, lasting)
    assert [(one[0], one[1] + other[1]) for one, other in zip(*ranks, strict=True)] == whole
