"""The default random state is one in a process, whatever strategies there are: a drop-in has one of its own."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from torchdistinput.testing import run_ranks

SETTINGS = [
    (prefetch, persistent, read_before)
    for prefetch in (0, 32)
    for persistent in (True, False)
    for read_before in (True, False)
]


def at_the_first_next(loader: Any) -> Iterator[Any]:
    """Begins an epoch of torch's loader where this library begins one."""
    yield from loader


def drawn(prefetch: int | None, *, persistent: bool, read_before: bool) -> list[Any]:
    """The first batch of a shuffled loader that is read beside a drop-in with loader workers; a number drawn after it.

    Args:
      prefetch: of the shuffled one; ``None`` for torch's loaders alone.
      persistent: whether the workers of the drop-in live on.
      read_before: whether it was read once before.
    """
    torch.manual_seed(301)
    data = TensorDataset(torch.arange(1))
    shuffled: Any = DataLoader(TensorDataset(torch.arange(108)), batch_size=5, shuffle=True)
    beside: Any = DataLoader(data, batch_size=4, num_workers=1, persistent_workers=persistent)
    if prefetch is not None:
        beside = tdi.DataLoader(data, batch_size=4, num_workers=1, persistent_workers=persistent)
        shuffled = tdi.Strategy(["cpu"]).distribute_dataset(shuffled, tdi.InputOptions(prefetch=prefetch))
    if read_before:
        list(beside)
    (batch,), _ = next(zip(at_the_first_next(shuffled), at_the_first_next(beside), strict=True))
    return [batch.tolist(), torch.rand(1).item()]


def on_ranks() -> list[list[Any]]:
    return [drawn(prefetch, persistent=lives, read_before=read) for prefetch, lives, read in SETTINGS]


@functools.cache
def by_torch(*, persistent: bool, read_before: bool) -> list[Any]:
    return drawn(None, persistent=persistent, read_before=read_before)


@pytest.mark.parametrize("world", [1, 3])
def test_loaders_of_different_strategies_that_are_read_together_draw_as_torchs(world: int) -> None:
    ranks = run_ranks(world, on_ranks)
    for number, (_, persistent, read_before) in enumerate(SETTINGS):
        batch, after = by_torch(persistent=persistent, read_before=read_before)
        assert [value for rank in ranks for value in rank[number][0]] == batch
        assert {rank[number][1] for rank in ranks} == {after}
