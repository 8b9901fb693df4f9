"""A rank that dies without a word: the others learn it within seconds, and their message names it.

``run_ranks`` ends the other ranks as soon as one dies, so these ranks are started by hand and write what they saw.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support.epochs import raised
from tests.support.processes import run_to_the_end

HANG_SECONDS = 20.0


def endless_numbers() -> Any:
    return (torch.arange(6) for _ in range(100_000))


def reader(rank: int, world: int, folder: str, victim: int, where: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    strategy = tdi.Strategy(devices=["cpu"])
    data: Any = DataLoader(range(100_000), batch_size=6) if where == "map-style" else endless_numbers  # type: ignore[arg-type]
    dataset = strategy.distribute_dataset(data)
    steps = 0

    def loop() -> None:
        nonlocal steps
        for _ in dataset:
            steps += 1
            if rank == victim and steps == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.001)

    started = time.monotonic()
    error = raised(loop)
    waited = time.monotonic() - started
    told = {} if error is None else {"kind": error.kind, "message": error.message}
    Path(folder, f"{rank}.json").write_text(json.dumps({**told, "steps": steps, "waited": waited}))
    os._exit(0)  # the default group has lost a member: what its own teardown does is not the matter here


@pytest.mark.parametrize(("world", "victim", "where"), [(2, 1, "map-style"), (3, 1, "iterable")])
def test_a_rank_that_is_killed_is_named_to_the_others(world: int, victim: int, where: str, tmp_path: Path) -> None:
    run_to_the_end(reader, [(rank, world, str(tmp_path), victim, where) for rank in range(world)])
    for rank in range(world):
        told = tmp_path / f"{rank}.json"
        if rank == victim:
            assert not told.exists()
            continue
        found = json.loads(told.read_text())
        assert found["kind"] == "RankLost"
        assert f"rank {victim}" in found["message"]
        assert found["steps"] >= 4
        assert found["waited"] < HANG_SECONDS
