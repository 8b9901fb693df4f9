"""A loader worker that hangs in its fork is forked anew, and nobody sees a difference in the data."""

from __future__ import annotations

import gc
import logging
import mmap
import multiprocessing
import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support.platforms import quick_forks
from torchdistinput.sources.torch_loader import stuck_forks
from torchdistinput.sources.torch_loader.stuck_forks import StuckForks, arrivals_of

HANG_SECONDS = 60.0


def epochs(num_workers: int, *, persistent: bool = False, of_function: bool = False) -> list[list[list[int]]]:
    generator = torch.Generator().manual_seed(5)
    loader: DataLoader[int] = DataLoader(
        range(23),  # type: ignore[arg-type] # a dataset by its methods
        batch_size=4,
        shuffle=True,
        generator=generator,
        num_workers=num_workers,
        persistent_workers=persistent,
    )
    strategy = tdi.Strategy(["cpu"])
    with (
        strategy.distribute_datasets_from_function(lambda _: loader)
        if of_function
        else strategy.distribute_dataset(loader)
    ) as dataset:
        return [[batch.tolist() for batch in dataset] for _ in range(2)]


def hang_in_forks(monkeypatch: pytest.MonkeyPatch, worker: int, times: int) -> None:
    """The first forks of one worker hang where a copied lock would let them."""
    hung = mmap.mmap(-1, 1)
    arrive = StuckForks.arrive

    def hanging(self: StuckForks, number: int) -> None:
        if number == worker and hung[0] < times:
            hung[0] += 1
            time.sleep(HANG_SECONDS)
        arrive(self, number)

    monkeypatch.setattr(StuckForks, "arrive", hanging)
    monkeypatch.setattr(stuck_forks, "_SECONDS", 1.5)


@quick_forks
@pytest.mark.parametrize("of_function", [False, True])
@pytest.mark.parametrize(("worker", "persistent"), [(0, False), (1, True)])
def test_a_worker_that_hangs_in_its_fork_is_forked_anew(
    worker: int, persistent: bool, of_function: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = epochs(2, persistent=persistent, of_function=of_function)
    hang_in_forks(monkeypatch, worker, times=1)
    with caplog.at_level(logging.WARNING, "torchdistinput"):
        assert epochs(2, persistent=persistent, of_function=of_function) == expected
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(" seconds ")[0] for text in told] == [f"loader worker {worker} did not come up within 1.5"]
    assert "It was loader worker" in told[0]
    gc.collect()  # the workers of a user's own loader live as long as it
    assert not multiprocessing.active_children()


def test_a_worker_that_is_forked_anew_gets_what_its_release_of_torch_gives() -> None:
    """Since torch 2.15 that is a list with the dataset, which the worker empties; before, it was the dataset."""

    def plain(dataset: Any, worker_id: int) -> None:
        """As until torch 2.14."""

    def held(dataset_holder: Any, worker_id: int) -> None:
        """As since torch 2.15."""

    data = range(4)
    iterator = iter(DataLoader(data, num_workers=1))  # type: ignore[arg-type] # a dataset by its methods
    assert stuck_forks._arguments_of(plain, iterator, 0) == {"dataset": data, "worker_id": 0}
    assert stuck_forks._arguments_of(held, iterator, 0) == {"dataset_holder": [data], "worker_id": 0}


@quick_forks
def test_a_worker_that_never_comes_up_is_an_error_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hang_in_forks(monkeypatch, worker=1, times=100)
    monkeypatch.setattr(stuck_forks, "_SECONDS", 0.4)
    with pytest.raises(tdi.InputError, match=r"loader worker 1 did not come up within 0\.4 seconds, nor did 3 others"):
        epochs(2)
    assert not multiprocessing.active_children()


def test_only_forked_workers_are_waited_for() -> None:
    assert arrivals_of(None, 0) is None
    assert arrivals_of(multiprocessing.get_context("forkserver"), 2) is None
    waiting = arrivals_of(multiprocessing.get_context("fork"), 2)
    assert waiting is not None
    assert waiting.missing() == [0, 1]
    waiting.arrive(1)
    assert waiting.missing() == [0]


@quick_forks
def test_a_worker_that_dies_before_it_came_up_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def dying(_self: StuckForks, _number: int) -> Any:
        raise SystemExit(7)

    monkeypatch.setattr(StuckForks, "arrive", dying)
    with pytest.raises(tdi.SourceError, match="exited with code 7"):
        epochs(1)
