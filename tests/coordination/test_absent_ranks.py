"""Over real ranks: devices that differ, and ranks that never come; every rank learns it, and nobody hangs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torchdistinput as tdi
from tests.support.epochs import Raised, raised
from tests.support.interpreters import Interpreters, printed
from tests.support.launched import at_once
from torchdistinput.testing import run_ranks
from torchdistinput.testing.ranks import free_port

KEPT: list[object] = []


def device_that_is_not_there() -> object:
    return tdi.Strategy(devices=["cuda:97" if dist.get_rank() == 1 else "cpu"])


def different_numbers_of_devices() -> object:
    return tdi.Strategy(devices=["cpu"] * (1 + dist.get_rank()))


def does_not_distribute() -> object:
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=4)
    KEPT.append(strategy)  # else rank 1 would have ended it
    dist.barrier()
    return dist.get_rank() == 1 or strategy.distribute_dataset([torch.arange(4)])


def makes_no_strategy() -> object:
    return dist.get_rank() == 1 or tdi.Strategy(devices=["cpu"], timeout_seconds=4)


SCENES: dict[str, tuple[Callable[[], object], str, tuple[str, ...]]] = {
    "a device that is not there": (device_that_is_not_there, "ValueError", ("cuda:97",)),
    "different numbers of devices": (different_numbers_of_devices, "RankDisagreement", ("1", "2")),
    "does not distribute": (does_not_distribute, "CoordinationTimeout", ("rank 1", "distribute_dataset")),
    "makes no strategy": (makes_no_strategy, "CoordinationTimeout", ("rank 1", "Strategy")),
}
"""What rank 1 does otherwise, and what all are told; nothing is told to a rank that does not come."""


def scene_of(name: str) -> Raised | None:
    dist.barrier()  # the ranks import this module at different times, which is no time of theirs to wait
    error = raised(SCENES[name][0])
    dist.barrier()
    return error


@pytest.fixture(scope="module")
def played() -> dict[str, list[Raised | None]]:
    return at_once({name: partial(run_ranks, 2, scene_of, name) for name in SCENES})


@pytest.mark.parametrize("name", SCENES)
def test_what_one_rank_does_otherwise_is_an_error_on_every_rank_that_comes(
    name: str, played: dict[str, list[Raised | None]]
) -> None:
    _, kind, words = SCENES[name]
    for rank, error in enumerate(played[name]):
        if kind == "CoordinationTimeout" and rank == 1:
            assert error is None
            continue
        assert error is not None
        assert error.kind == kind
        assert all(word in error.message for word in words)


ALONE = """
import os, sys, torch, torchdistinput as tdi
def call():
    if "drop-in" in sys.argv:
        loader = tdi.DataLoader(torch.arange(4), batch_size=4)
        print([batch.tolist() for batch in loader], flush=True)
    else:
        strategies.append(tdi.Strategy(["cpu"]))
strategies = []
for time in range(2):
    call()
if os.environ["RANK"] == "0":
    if "forgotten" in sys.argv:
        strategies.clear()
    try:
        call()
    except tdi.RankLost as error:
        print(error)
"""


@pytest.mark.parametrize("how", ["", "forgotten", "host", pytest.param("drop-in", marks=pytest.mark.long)])
def test_a_rank_that_calls_after_the_others_ended_is_told_at_once(
    how: str, interpreters: Interpreters, tmp_path: Path
) -> None:
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    if "host" in how:  # rank 0 hosts the store, not the launcher
        told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        places = [{**told, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        ended = interpreters.run(*[[str(script), *how.split()]] * 2, places=places)
    else:
        ended = interpreters.run_as_torchrun(2, str(script), *how.split())
    text = printed(ended)
    assert "rank 1 ended before it came here. Every rank of the strategy makes the same calls" in text
    assert text.count("[[0, 1]]") == text.count("[[2, 3]]") == (2 if "drop-in" in how else 0)
