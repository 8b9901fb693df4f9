"""Attributes of the drop-in that are set between epochs, on real ranks: on all of them, or on some only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support.epochs import lists, raised
from torchdistinput.testing import run_ranks

Scenes = Callable[[str], list[Any]]


def doubled(rows: list[int]) -> torch.Tensor:
    return 2 * torch.tensor(rows)


def change(loader: Any, seed: int = 9) -> None:
    loader.collate_fn, loader.num_workers, loader.prefetch_factor = doubled, 1, 2
    loader.generator = torch.Generator().manual_seed(seed)


def loader_of(cls: Any) -> Any:
    return cls(range(7), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))


def epochs_of(loader: Any) -> list[Any]:
    """Two epochs before the change, two after it."""
    found = [lists([*loader]), lists([*loader])]
    change(loader)
    return [*found, lists([*loader]), lists([*loader])]


def on_one_rank(rank: int) -> Any:
    """What both ranks hear of it, and the epoch that they read once both have done it."""
    loader = loader_of(tdi.DataLoader)
    list(loader)
    if rank == 0:
        change(loader)
    error = raised(lambda: iter(loader))
    if rank == 1:
        change(loader)
    return error, lists([*loader]), loader.step.epoch


def not_alike(rank: int) -> Any:
    loader = loader_of(tdi.DataLoader)
    list(loader)
    change(loader, seed=rank)
    return raised(lambda: iter(loader))


def play() -> dict[str, Any]:
    rank = dist.get_rank()
    return {"on all": epochs_of(loader_of(tdi.DataLoader)), "on one": on_one_rank(rank), "not alike": not_alike(rank)}


@pytest.fixture(scope="module")
def scenes() -> Scenes:
    ranks = run_ranks(2, play, timeout_seconds=60)
    return lambda name: [rank[name] for rank in ranks]


def put_together(*ranks: list[list[int]]) -> list[list[int]]:
    return [[sample for part in parts for sample in part] for parts in zip(*ranks, strict=True)]


def test_what_all_ranks_set_counts_from_the_next_epoch_on(scenes: Scenes) -> None:
    expected = epochs_of(loader_of(DataLoader))
    assert [put_together(*epoch) for epoch in zip(*scenes("on all"), strict=True)] == expected


def test_what_one_rank_sets_alone_is_said_on_all_and_counts_once_all_have_set_it(scenes: Scenes) -> None:
    (first, own, epoch), (second, others, _) = scenes("on one")
    for error in (first, second):
        assert error.kind == "RankDisagreement"
        assert "rank 0" in error.message
        assert "rank 1" in error.message
    assert put_together(own, others) == epochs_of(loader_of(DataLoader))[2] or epoch == 1
    assert sorted(sample for batch in (*own, *others) for sample in batch) == list(range(0, 14, 2))


def test_generators_that_differ_are_a_disagreement(scenes: Scenes) -> None:
    for error in scenes("not alike"):
        assert error.kind == "RankDisagreement"
        assert "generator state" in error.message
