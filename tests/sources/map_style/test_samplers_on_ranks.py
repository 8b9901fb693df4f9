"""Samplers of the user's own over ranks: what they draw must be the same everywhere, which is checked at every step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler

import torchdistinput as tdi
from tests.data import Numbers
from torchdistinput.testing import run_ranks


class NumPySampler(Sampler[int]):
    """Draws from NumPy's global state, as many a script does."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(9).tolist())

    def __len__(self) -> int:
        return 9


class DriftingSampler(Sampler[int]):
    """The same on all ranks for two batches, another one afterwards."""

    def __iter__(self) -> Iterator[int]:
        return iter([*range(8), *(number + dist.get_rank() for number in range(8, 16))])


class ShorterSampler(Sampler[int]):
    """One batch less on rank 1."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(16 - 4 * dist.get_rank()))


def read(sampler: Any, prefetch: int, num_workers: int) -> tuple[int, str]:
    loader = DataLoader(Numbers(20), batch_size=4, sampler=sampler, num_workers=num_workers)
    dataset = tdi.Strategy(timeout_seconds=20).distribute_dataset(loader, tdi.InputOptions(prefetch=prefetch))
    steps = 0
    try:
        for _ in dataset:
            steps += 1
    except tdi.RankDisagreement as error:
        return steps, str(error)
    raise AssertionError("no difference was found")


def read_all(prefetch: int, num_workers: int) -> list[tuple[int, str]]:
    np.random.seed(dist.get_rank())
    return [read(sampler, prefetch, num_workers) for sampler in (NumPySampler(), DriftingSampler(), ShorterSampler())]


@pytest.mark.parametrize(("prefetch", "num_workers"), [(0, 0), (2, 0), (3, 2)])
def test_samplers_that_draw_differently_are_refused_at_the_step_where_they_do(prefetch: int, num_workers: int) -> None:
    for found in run_ranks(2, read_all, prefetch, num_workers):
        assert [steps for steps, _ in found] == [0, 2, 3]
        for (steps, message), ended in zip(found, (False, False, True), strict=True):
            assert f"differ at step {steps} of epoch 0" in message
            assert ("rank 1: ended" in message) == ended


def overlap() -> list[list[list[int]]]:
    loader = DataLoader(Numbers(20), batch_size=8, num_workers=2, persistent_workers=True)
    with tdi.Strategy().distribute_dataset(loader) as dataset:
        first = iter(dataset)
        begun = [next(first).tolist()]
        second = [batch.tolist() for batch in dataset]
        begun += [batch.tolist() for batch in first]
        return [begun, second, [batch.tolist() for batch in dataset]]


def test_two_iterators_of_a_loader_with_lasting_workers_do_not_disturb_each_other() -> None:
    whole = [batch.tolist() for batch in DataLoader(Numbers(20), batch_size=8)]
    parts = run_ranks(2, overlap)
    for epochs in zip(*parts, strict=True):
        assert [list(chain(*pieces)) for pieces in zip(*epochs, strict=True)] == whole


def test_two_iterators_of_shuffled_files_have_the_orders_of_their_own_epochs(tmp_path: Any) -> None:
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(f"{number}\n")
    files = tdi.FileDataset(str(tmp_path / "*.txt"), tdi.readers.text_lines, map_fn=int, shuffle_files=True)

    def epochs(num_workers: int) -> list[list[int]]:
        dataset = tdi.Strategy(devices=["cpu"]).distribute_dataset(
            DataLoader(files, batch_size=2, num_workers=num_workers)
        )
        return [torch.cat(list(dataset)).tolist() for _ in range(2)]

    expected = epochs(0)
    assert expected[0] != expected[1]
    for num_workers in (0, 2):
        dataset = tdi.Strategy(devices=["cpu"]).distribute_dataset(
            DataLoader(files, batch_size=2, num_workers=num_workers)
        )
        both = [iter(dataset), iter(dataset)]
        assert [torch.cat(list(each)).tolist() for each in both] == expected
