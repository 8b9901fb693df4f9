"""Batches divided by cost on several ranks: the same global batches, states without a world, ranks that differ."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

import torchdistinput as tdi
from tests.support.epochs import Raised, raised, steps_until_raised
from torchdistinput import readers
from torchdistinput.testing import run_ranks

SAMPLES, GLOBAL_BATCH = 29, 8
COSTS = [float((5 * index) % 13) ** 2 for index in range(SAMPLES)]


def cost_of(record: Any) -> float:
    return COSTS[int(record)]


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(torch.tensor, range(SAMPLES))


def map_style(workers: int) -> DataLoader[Any]:
    made = torch.Generator().manual_seed(6)
    return DataLoader(range(SAMPLES), GLOBAL_BATCH, shuffle=True, generator=made, num_workers=workers)  # type: ignore[arg-type]


def data_of(kind: str, folder: str) -> tuple[Any, Any]:
    """The data of a kind, and its costs."""
    if kind == "files":
        return DataLoader(tdi.FileDataset(f"{folder}/?.txt", readers.text_lines, map_fn=int), GLOBAL_BATCH), cost_of
    if kind == "iterable":
        return DataLoader(Stream(), GLOBAL_BATCH), cost_of
    if kind == "tensors":
        made = torch.Generator().manual_seed(6)
        return DataLoader(torch.arange(SAMPLES), GLOBAL_BATCH, shuffle=True, generator=made), COSTS  # type: ignore[arg-type]
    return map_style(2 if kind == "loader workers" else 0), COSTS


DATA = tdi.AutoShardPolicy.DATA


def write(folder: Path) -> str:
    for file in range(3):
        values = range(file * 10, min(SAMPLES, file * 10 + 10))
        (folder / f"{file}.txt").write_text("".join(f"{value}\n" for value in values))
    return str(folder)


# ------------------------------------------------------------------------------------------------ ranks that differ


def differs(record: Any) -> float:
    """Another cost on rank 1 from sample 15 on."""
    return COSTS[int(record)] + (int(record) == 15 and dist.get_rank() == 1)


def nan_on_all(record: Any) -> float:
    return float("nan") if int(record) == 15 else 1.0


def nan_on_one(record: Any) -> float:
    return float("nan") if int(record) == 15 and dist.get_rank() == 1 else 1.0


def never_equal() -> list[float]:
    return [*COSTS[1:], 7.0 + dist.get_rank()]


def bad_on_one() -> list[float]:
    return COSTS if dist.get_rank() else [-1.0, *COSTS[1:]]


def too_short_on_one() -> list[float]:
    return COSTS[dist.get_rank() :]


@dataclasses.dataclass(frozen=True)
class Case:
    """What is given, and what every rank must be told.

    Args:
      kind: of data.
      balance: the option; a name of a function above that makes it is called.
      error: the class of the error.
      message: a part of it.
      at_step: after how many steps, if it is not raised when the dataset is distributed.
    """

    kind: str
    balance: Any
    error: str
    message: str
    at_step: int | None = None


CASES = {
    "another array": Case("samples", "never_equal", "RankDisagreement", "the ranks differ in balance"),
    "a bad array on one": Case("samples", "bad_on_one", "BatchingError", "balance[0] is -1.0"),
    "a short array on one": Case("samples", "too_short_on_one", "BatchingError", "has 28 costs"),
    "another function": Case("in order", differs, "RankDisagreement", "the costs of the samples at step 1", 1),
    "another function, loader workers": Case(
        "in order, loader workers", differs, "RankDisagreement", "differ in the costs of the samples at step 1", 1
    ),
    "another function of records": Case("files", differs, "RankDisagreement", "differ in the costs of the samples", 1),
    "another function of elements": Case("iterable", differs, "RankDisagreement", "differ in the costs", 1),
    "no cost on any rank": Case("in order", nan_on_all, "BatchingError", "the cost of sample 15 is nan", 1),
    "no cost on one rank": Case("in order", nan_on_one, "BatchingError", "the cost of sample 15 is nan", 1),
    "no cost on one rank, loader workers": Case(
        "in order, loader workers", nan_on_one, "BatchingError", "the cost of sample 15 is nan", 1
    ),
    "batches of each rank's own": Case(
        "files, FILE", cost_of, "ShardingError", "auto_shard_policy=AutoShardPolicy.DATA"
    ),
    "all data on each rank": Case("samples, OFF", COSTS, "ShardingError", "AutoShardPolicy.DATA)"),
    "elements on each rank": Case("iterable, OFF", cost_of, "ShardingError", "each rank has batches of its own"),
    "the index of a shard": Case("samples, HINT", COSTS, "ShardingError", "counts in a rank's own shard"),
}


class Shardable(torch.utils.data.Dataset[int]):
    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> int:
        return self.numbers[index]

    def shard(self, num_shards: int, index: int) -> Shardable:
        return Shardable(self.numbers[index::num_shards])


def play(folder: str) -> dict[str, tuple[int | None, Raised | None]]:
    """One rank: how each case ends, and after how many steps."""
    found: dict[str, tuple[int | None, Raised | None]] = {}
    for name, case in CASES.items():
        policy = DATA
        if case.kind.startswith("in order"):
            data: Any = DataLoader(range(SAMPLES), GLOBAL_BATCH, num_workers=int("workers" in case.kind))  # type: ignore[arg-type]
        elif case.kind == "samples, HINT":
            data, policy = DataLoader(Shardable(range(SAMPLES)), GLOBAL_BATCH), tdi.AutoShardPolicy.HINT
        else:
            data = data_of(case.kind.partition(",")[0], folder)[0]
        if case.kind.endswith(("FILE", "OFF")):
            policy = tdi.AutoShardPolicy[case.kind.rpartition(" ")[2]]
        balance = globals()[case.balance]() if isinstance(case.balance, str) else case.balance
        options = tdi.InputOptions(auto_shard_policy=policy, balance=balance, prefetch=2)
        strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=30)
        made: list[Any] = []
        error = raised(lambda: made.append(strategy.distribute_dataset(data, options)))  # noqa: B023 - called at once
        if error is None:
            with contextlib.closing(made[0]) as loader:
                found[name] = steps_until_raised(loader)
        else:
            found[name] = None, error
    return found


def test_bad_costs_are_the_same_error_on_every_rank_at_the_same_place(tmp_path: Path) -> None:
    for rank in run_ranks(2, play, write(tmp_path), timeout_seconds=120):
        for name, case in CASES.items():
            steps, error = rank[name]
            assert error is not None, name
            assert steps == case.at_step, (name, steps, error)
            assert case.message in error.message, (name, error)
            assert error.kind == case.error, (name, error)
