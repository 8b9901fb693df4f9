"""Ranks tell the epoch alike, and resume data with a state of its own at another world size."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

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
