"""Over real ranks: loops that are left early, on all ranks or on some, by break, close, exception or interrupt."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support.epochs import Raised, raised
from torchdistinput.testing import run_ranks

HANG_SECONDS = 20.0  # far above any healthy run, far below the coordination timeouts that these tests leave alone


def one() -> tdi.Strategy:
    return tdi.Strategy(devices=["cpu"])


def number_range(n: int, batch_size: int) -> Any:
    return DataLoader(range(n), batch_size=batch_size)  # type: ignore[arg-type]


def footprint() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/dev/fd"))


def break_often(epochs: int, prefetch: int) -> tuple[list[list[int]], list[tuple[int, int]]]:
    dataset = one().distribute_dataset(number_range(40, 4), tdi.InputOptions(prefetch=prefetch))
    seen, sizes = [], []
    for number in range(epochs):
        rows = []
        for element in dataset:
            rows.append(element.tolist()[0])
            if dataset.step.index == number % 5:
                break
        seen.append(rows)
        sizes.append(footprint())
    return seen, sizes


@pytest.mark.parametrize("prefetch", [0, 2, 4])
def test_a_break_on_all_ranks_is_clean_and_leaves_nothing_behind(prefetch: int) -> None:
    ranks = run_ranks(2, break_often, 20, prefetch)
    for rank, (seen, sizes) in enumerate(ranks):
        assert seen == [[4 * t + 2 * rank for t in range(number % 5 + 1)] for number in range(20)]
        assert max(sizes[10:]) <= max(sizes[:10]), f"threads and files grow: {sizes}"


def break_and_read_on(epochs: int) -> list[list[int]]:
    """A whole epoch after each broken one, on the same group."""
    dataset = one().distribute_dataset(number_range(10, 4))
    found = []
    for _ in range(epochs):
        for _ in dataset:
            break
        found.append([value for element in dataset for value in element.tolist()])
    return found


def test_the_epoch_after_a_break_is_whole() -> None:
    first, second = run_ranks(2, break_and_read_on, 5)
    assert first == [[0, 1, 4, 5, 8]] * 5
    assert second == [[2, 3, 6, 7, 9]] * 5


def leave(rank_that_leaves: int, how: str, prefetch: int) -> tuple[int, Raised | None, float]:
    """This rank's number of steps, its error, and how long the error took to come."""
    data = (torch.arange(4) for _ in range(100_000))
    dataset = one().distribute_dataset(lambda: data, tdi.InputOptions(prefetch=prefetch, timeout_seconds=60))
    steps = 0
    started = time.monotonic()

    def loop() -> None:
        nonlocal steps
        for _ in dataset:
            steps += 1
            if dist.get_rank() == rank_that_leaves and steps == 3:
                break

    def by_close() -> None:
        nonlocal steps
        iterator = iter(dataset)
        for _ in range(3):
            next(iterator)
            steps += 1
        iterator.close()

    leaves = dist.get_rank() == rank_that_leaves
    error = raised(by_close if leaves and how == "close" else loop)
    waited = time.monotonic() - started
    dist.barrier()  # the rank that left lives on: it is not its death that the others see
    return steps, error, waited


@pytest.mark.parametrize(
    ("world", "leaver", "how", "prefetch"),
    [(2, 0, "break", 2), (2, 1, "close", 0), (3, 1, "break", 0), (3, 2, "close", 2)],
)
def test_a_rank_that_leaves_early_gives_the_others_an_error_that_names_it(
    world: int, leaver: int, how: str, prefetch: int
) -> None:
    ranks = run_ranks(world, leave, leaver, how, prefetch)
    for rank, (steps, error, waited) in enumerate(ranks):
        if rank == leaver:
            assert (steps, error) == (3, None)
            continue
        assert error is not None
        assert error.kind == "RankLost"
        assert f"rank {leaver}" in error.message or f"[{leaver}]" in error.message
        assert 3 <= steps <= 3 + max(prefetch, 1) + 1
        assert waited < HANG_SECONDS


def interrupted(rank_that_stops: int) -> Any:
    """One rank's loop is interrupted, as by Ctrl-C, and its traceback is kept: only ``close`` tells the others."""
    dataset = one().distribute_dataset(lambda: (torch.arange(4) for _ in range(100_000)))
    steps = 0
    started = time.monotonic()

    def loop() -> None:
        nonlocal steps
        for _ in dataset:
            steps += 1
            if steps == 3 and dist.get_rank() == rank_that_stops:
                raise KeyboardInterrupt
            time.sleep(0.001)

    if dist.get_rank() == rank_that_stops:
        with pytest.raises(KeyboardInterrupt) as kept:
            loop()
        assert kept.traceback is not None  # the traceback keeps the iterator alive, as an interactive session does
        dataset.close()
        return None
    return raised(loop), time.monotonic() - started


def test_an_iterator_kept_alive_by_a_traceback_is_announced_at_close() -> None:
    first, second = run_ranks(2, interrupted, 1)
    assert second is None
    error, waited = first
    assert error.kind == "RankLost"
    assert "rank 1" in error.message or "[1]" in error.message
    assert waited < HANG_SECONDS
