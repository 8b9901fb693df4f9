"""The class of examples/my_trainer/torchtitan.md: made, iterated and saved as torchtitan's trainer does it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchdistinput as tdi
from tests.support.packages import package
from tests.test_readme import snippets
from torchdistinput.testing import run_ranks

dcp = package("torch.distributed.checkpoint")

SAMPLES, OF_RANK = 22, 2


def samples() -> list[Any]:
    return [({"input": torch.full((3,), number)}, torch.full((3,), number + 1)) for number in range(SAMPLES)]


def made(world: int, rank: int) -> Any:
    """A loader, as the trainer makes it of its configuration."""
    (code,) = (each for each in snippets("examples/my_trainer/torchtitan.md") if "torchtitan." in each)
    names: dict[str, Any] = {"torch": torch, "tdi": tdi, "train": samples(), "__name__": __name__}
    exec(compile(code, "examples/my_trainer/torchtitan.md", "exec"), names)
    given = {"tokenizer": None, "seq_len": 3, "snapshot_every_n_steps": 2}
    return (
        names["OnRanks"]
        .Config()
        .build(dp_world_size=world, dp_rank=rank, local_batch_size=2 * OF_RANK // world, **given)
    )


def steps(loader: Any, number: int) -> list[list[int]]:
    """The samples of some steps, by the trainer's own generator of batches."""
    from torchtitan.trainer import Trainer  # type: ignore[import-not-found, unused-ignore] # noqa: PLC0415 - seconds

    metrics = SimpleNamespace(ntokens_since_last_log=0, data_loading_times=[])
    batches = Trainer.batch_generator(SimpleNamespace(metrics_processor=metrics), loader)
    return [next(batches)[0]["input"][:, 0].tolist() for _ in range(number)]


def play(folder: str) -> tuple[list[list[int]], list[list[int]]]:
    """One rank: seven steps, which begin the second epoch, and their continuation from a checkpoint after three."""
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = steps(made(world, rank), 7)
    loader = made(world, rank)
    begun = steps(loader, 3)
    assert begun == whole[:3]
    dcp.save({"dataloader": loader}, checkpoint_id=folder)
    loader = made(world, rank)
    dcp.load({"dataloader": loader}, checkpoint_id=folder)
    return whole, [*begun, *steps(loader, 4)]


def go_on(folder: str) -> list[list[int]]:
    """The only rank goes on from the checkpoint of two."""
    loader = made(1, 0)
    dcp.load({"dataloader": loader}, checkpoint_id=folder)
    return steps(loader, 4)


def alone() -> list[list[int]]:
    return steps(made(1, 0), 7)


def test_a_trainer_of_torchtitan_gets_the_global_batches_also_after_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan.trainer")
    (expected,) = run_ranks(1, alone)
    ranks = run_ranks(2, play, str(tmp_path))
    for epoch in zip(*ranks, strict=True):
        assert [sorted(one + other) for one, other in zip(*epoch, strict=True)] == [sorted(step) for step in expected]
    assert run_ranks(1, go_on, str(tmp_path)) == [expected[3:]]
