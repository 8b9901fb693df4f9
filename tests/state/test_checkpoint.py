"""The state in ``torch.distributed.checkpoint``: saved and loaded with the model, at worlds 2, 3 and 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support import inputs
from tests.support.packages import package
from tests.support.resume import Run, one_process, steps
from torchdistinput import readers
from torchdistinput.testing import run_ranks

dcp = package("torch.distributed.checkpoint")

LENGTHS = (4, 5, None)
WORLDS = (2, 3, 1)


def shuffled(cls: Any = DataLoader, **more: Any) -> Any:
    return cls(range(23), batch_size=4, shuffle=True, generator=inputs.generator(), **more)


def by_default_state(cls: Any = DataLoader, **more: Any) -> Any:
    return cls(range(23), batch_size=4, shuffle=True, **more)


def runs(folder: str) -> dict[str, Run]:
    """One rank: a run of each kind whose state knows no world."""
    strategy = tdi.Strategy(devices=["cpu"])
    options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.DATA)
    files = tdi.FileDataset(folder + "/?.txt", readers.text_lines, map_fn=int, shuffle_buffer=3, cycle_length=2)
    return {
        "dataset": Run(strategy.distribute_dataset(shuffled(), options), lambda batch: [batch.tolist()]),
        "drop-in": Run(shuffled(tdi.DataLoader), lambda batch: [batch.tolist()]),
        "default state": Run(strategy.distribute_dataset(by_default_state(), options), lambda batch: [batch.tolist()]),
        "files": Run(strategy.distribute_dataset(files, options, global_batch_size=4), lambda batch: [batch.tolist()]),
    }


def segment(folder: str, number: int) -> dict[str, Any]:
    """One rank: loads the checkpoint of the segment before, reads on, and writes the next one."""
    torch.manual_seed(5 + number)
    found = runs(folder)
    weights = torch.full((3,), float(number))
    content: dict[str, Any] = {"model": {"weights": weights}, **{name: run.loader for name, run in found.items()}}
    for run in found.values():
        assert isinstance(run.loader, dcp.stateful.Stateful)
    if number:
        dcp.load(content, checkpoint_id=f"{folder}/checkpoint-{number - 1}")
        assert content["model"]["weights"].tolist() == [number - 1.0] * 3
    delivered = {name: list(steps(run, until=LENGTHS[number])) for name, run in found.items()}
    content["model"]["weights"] = torch.full((3,), float(number))
    dcp.save(content, checkpoint_id=f"{folder}/checkpoint-{number}")
    dist.barrier()
    return delivered


@pytest.mark.filterwarnings("ignore")  # torch's own, of a checkpoint without a process group
def test_a_checkpoint_of_two_ranks_is_loaded_by_three_and_theirs_by_one(tmp_path: Path) -> None:
    inputs.write_numbers(tmp_path)
    whole: dict[str, list[list[int]]] = {}
    for name, make in (("dataset", shuffled), ("drop-in", shuffled), ("default state", by_default_state)):
        torch.manual_seed(5)
        whole[name] = [batch.tolist() for _, _, batch in one_process(make, {})]
    found: dict[str, list[list[int]]] = {name: [] for name in (*whole, "files")}
    for number, world in enumerate(WORLDS):
        ranks = run_ranks(world, segment, str(tmp_path), number)
        for name, batches in found.items():
            for row in zip(*(rank[name] for rank in ranks), strict=True):
                batches.append([sample for _, _, parts in row for part in parts for sample in part])
    assert {name: batches for name, batches in found.items() if name != "files"} == whole
    epoch = list(range(12))
    assert sorted(sample for batch in found["files"] for sample in batch) == sorted(epoch * 3)
