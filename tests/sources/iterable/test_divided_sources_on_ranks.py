"""Sources that divide themselves: refused on every rank at the same step, with a way out that is right."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    get_worker_info,
)

import torchdistinput as tdi
from tests.support.epochs import raised
from torchdistinput.testing import run_ranks

SAMPLES = 103


class Own(IterableDataset[int]):
    """Numbers, of which each rank yields its own ones from one on; or its last ones are missing."""

    def __init__(self, kind: str, length: int = SAMPLES) -> None:
        self.kind, self.length = kind, length

    def __iter__(self) -> Iterator[int]:
        rank, world = dist.get_rank() if dist.is_initialized() else RANK, WORLD
        info = get_worker_info()
        first, every = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.length, every):
            if self.kind == "divides" and number // every % world != rank:
                continue
            if self.kind == "ends" and rank == 1 and number >= 60:
                return
            if self.kind == "ends early in a batch" and rank == 1 and number >= 66:
                return
            if self.kind == "turns" and rank == 1 and number >= 300:
                yield -number
                continue
            yield number


RANK, WORLD = 0, 2


def set_rank(rank: int, worker: int) -> None:
    """A loader worker knows its rank by what it is told: it is in no group."""
    global RANK  # noqa: PLW0603
    RANK = rank


def read(kind: str, workers: int, policy: str, *, epochs: int = 1, length: int = SAMPLES) -> Any:
    rank = dist.get_rank()
    loader = DataLoader(
        Own(kind, length),
        batch_size=10,
        num_workers=workers,
        persistent_workers=workers > 0,
        worker_init_fn=partial(set_rank, rank),
    )
    options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy[policy])
    seen: list[list[int]] = []

    def loop() -> None:
        with tdi.Strategy(["cpu"]).distribute_dataset(loader, options) as dataset:
            for _ in range(epochs):
                seen.append([])
                for batch in dataset:
                    seen[-1] += batch.tolist()

    return raised(loop), seen


@pytest.mark.parametrize("workers", [0, 2])
def test_a_source_that_divides_itself_is_refused_under_data_and_right_under_off(workers: int) -> None:
    for error, seen in run_ranks(2, read, "divides", workers, "DATA"):
        assert error.kind == "RankDisagreement", error
        assert "at step 0 of epoch 0" in error.message
        assert "AutoShardPolicy.OFF" in error.message
        assert "distribute_datasets_from_function" in error.message
        assert seen == [[]]
    ranks = run_ranks(2, partial(read, epochs=2), "divides", workers, "OFF")
    for epoch in range(2):
        assert sorted(number for _, seen in ranks for number in seen[epoch]) == list(range(SAMPLES))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["ends", "ends early in a batch"])
def test_a_source_that_ends_earlier_on_a_rank_is_refused_there(kind: str, workers: int) -> None:
    for error, seen in run_ranks(2, read, kind, workers, "DATA"):
        assert error.kind == "RankDisagreement", error
        assert "at step 6 of epoch 0" in error.message
        assert ("ended" if kind == "ends" and not workers else "sample(s)") in error.message or workers
        assert len(seen[0]) == 30


@pytest.mark.parametrize("workers", [0, 2])
def test_data_that_differs_from_a_step_on_is_refused_at_the_next_one_that_is_compared(workers: int) -> None:
    for error, seen in run_ranks(2, partial(read, length=400), "turns", workers, "DATA"):
        assert error.kind == "RankDisagreement", error
        step = 30 if workers else 31  # the 16th batch of a loader worker; the 32nd one
        assert f"at step {step} of epoch 0" in error.message
        assert len(seen[0]) == 5 * step


class Random(Dataset[torch.Tensor]):
    """Samples with random augmentation, which each rank draws otherwise."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(()) * 0.5


def read_map_style(unequal: bool) -> Any:
    """Each rank augments for itself; or gives so many of its own."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    data: Any = TensorDataset(torch.arange(8)[rank * 3 :]) if unequal else Random()
    seen: list[int] = []

    def loop() -> None:
        for batch in tdi.Strategy(["cpu"]).distribute_dataset(data, global_batch_size=2):
            seen.extend(batch.int().tolist())

    return raised(loop), seen


def test_map_style_data_with_random_augmentation_is_no_disagreement_and_of_unequal_lengths_is() -> None:
    ranks = run_ranks(2, read_map_style, False)
    assert [error for error, _ in ranks] == [None, None]
    assert sorted(number for _, seen in ranks for number in seen) == list(range(8))
    for error, _ in run_ranks(2, read_map_style, True):
        assert error.kind == "RankDisagreement", error
        assert "give every rank the whole" in error.message


class Named(IterableDataset[dict[str, Any]]):
    """Divides itself; the names of the files are the same in each folder."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from ({"path": f"part-{dist.get_rank()}/{number:04}.jpg", "number": number} for number in range(8))


class Cuts:
    """A collection of samples that is one item of a sampler, and shows only their number."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __repr__(self) -> str:
        return f"Cuts(len={len(self.numbers)})"


class Key:
    def __init__(self, number: int) -> None:
        self.number = number


class OfKey(Dataset[int]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, key: Any) -> Any:
        return torch.tensor(key.numbers if isinstance(key, Cuts) else key.number)


def read_items(kind: str, drop_in: bool) -> Any:
    rank = dist.get_rank()
    data, sampler, size = {
        "names": (Named(), None, 4),
        "collections of its own": (OfKey(), [Cuts([*range(first + rank, first + 8, 2)]) for first in (0, 8)], None),
        "objects": (OfKey(), [Key(number) for number in range(20)], 5),
    }[kind]
    seen: list[Any] = []

    def make() -> Any:
        if drop_in:
            return tdi.DataLoader(data, size, sampler=sampler)
        return tdi.Strategy(["cpu"]).distribute_dataset(DataLoader(data, size, sampler=sampler))

    def loop() -> None:
        with make() as loader:
            for step, batch in enumerate(loader):
                seen.append(batch["number"].tolist() if isinstance(batch, dict) else batch.tolist())
                if step == 1:
                    break
            state = loader.state_dict()
        with make() as loader:
            loader.load_state_dict(state)
            seen.extend(batch.tolist() for batch in loader)

    return raised(loop), seen


@pytest.mark.parametrize("drop_in", [False, True])
@pytest.mark.parametrize("kind", ["names", "collections of its own", "objects"])
def test_what_differs_is_noticed_by_its_content_and_what_is_equal_is_no_disagreement(kind: str, drop_in: bool) -> None:
    ranks = run_ranks(2, read_items, kind, drop_in)
    if kind == "objects":
        assert [error for error, _ in ranks] == [None, None]
        assert sorted(number for _, seen in ranks for part in seen for number in part) == list(range(20))
        return
    for error, seen in ranks:
        assert error.kind == "RankDisagreement", error
        assert "at step 0 of epoch 0" in error.message
        assert not seen
