"""Over real ranks: devices that differ, and ranks that never come; every rank learns it, and nobody hangs."""

from __future__ import annotations

import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support.epochs import Raised, raised
from tests.support.interpreters import Interpreters, printed
from tests.support.launched import at_once
from torchdistinput.testing import run_ranks

HANG_SECONDS = 20.0

Played = dict[str, list[Any]]
"""By scene, what each rank saw."""


def my_rank() -> int:
    return dist.get_rank()


def device_that_is_not_there() -> Raised | None:
    return raised(lambda: tdi.Strategy(devices=["cuda:97" if my_rank() == 1 else "cpu"], timeout_seconds=5))


@pytest.fixture(scope="module")
def played() -> Played:
    return at_once(
        {
            "device": partial(run_ranks, 2, device_that_is_not_there),
            "devices": partial(run_ranks, 2, different_numbers_of_devices),
            "absent": partial(run_ranks, 3, absent),
            "absent from the start": partial(run_ranks, 2, absent_from_the_start),
        }
    )


def test_a_device_that_does_not_exist_on_one_rank_is_an_error_on_every_rank(played: Played) -> None:
    first, second = played["device"]
    for error in (first, second):
        assert error is not None
        assert "cuda:97" in error.message


def different_numbers_of_devices() -> Raised | None:
    return raised(lambda: tdi.Strategy(devices=["cpu"] * (1 + my_rank())))


def test_every_rank_needs_the_same_number_of_devices(played: Played) -> None:
    for error in played["devices"]:
        assert error is not None
        assert error.kind == "RankDisagreement"
        assert "1" in error.message
        assert "2" in error.message


def absent() -> tuple[Raised | None, float]:
    """Rank 2 makes the strategy with the others, and then does not come."""
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=4)
    dist.barrier()
    started = time.monotonic()
    error = None if my_rank() == 2 else raised(lambda: strategy.distribute_dataset(DataLoader(range(6), batch_size=4)))  # type: ignore[arg-type]
    waited = time.monotonic() - started
    dist.barrier()
    return error, waited


def test_a_rank_that_never_comes_is_named_within_the_timeout(played: Played) -> None:
    *present, (missing, _) = played["absent"]
    assert missing is None
    for error, waited in present:
        assert error is not None
        assert error.kind == "CoordinationTimeout"
        assert "rank 2" in error.message or "[2]" in error.message
        assert "distribute_dataset" in error.message
        assert waited < HANG_SECONDS


def absent_from_the_start() -> tuple[Raised | None, float]:
    started = time.monotonic()
    error = None if my_rank() == 1 else raised(lambda: tdi.Strategy(devices=["cpu"], timeout_seconds=4))
    waited = time.monotonic() - started
    dist.barrier()
    return error, waited


def test_a_rank_that_makes_no_strategy_is_named_within_the_timeout(played: Played) -> None:
    (error, waited), (nothing, _) = played["absent from the start"]
    assert nothing is None
    assert error is not None
    assert error.kind == "CoordinationTimeout"
    assert "rank 1" in error.message or "[1]" in error.message
    assert waited < HANG_SECONDS


ALONE = """
import os, sys, torch, torch.distributed as dist, torchdistinput as tdi
def call():
    if "drop-in" in sys.argv:
        loader = tdi.DataLoader(torch.arange(4), batch_size=4)
        print([batch.tolist() for batch in loader], flush=True)
    else:
        strategies.append(tdi.Strategy(["cpu"]))
strategies = []
for time in range(2):
    call()
    if "destroyed" in sys.argv:
        dist.barrier()
        dist.destroy_process_group()
if os.environ["RANK"] == "0":
    if "forgotten" in sys.argv:
        strategies.clear()
    try:
        (tdi.Strategy if "destroyed" in sys.argv else call)()
    except tdi.RankLost as error:
        print(error)
"""


@pytest.mark.parametrize("how", ["", "forgotten", "destroyed", "destroyed drop-in", "destroyed host", "drop-in"])
def test_a_rank_that_calls_after_the_others_ended_is_told_at_once(how: str, tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    with Interpreters() as interpreters:
        if "host" in how:  # rank 0 hosts the store, not the launcher
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = str(free.getsockname()[1])
            told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            places = [{**told, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
            ended = interpreters.run(*[[str(script), *how.split()]] * 2, places=places)
        else:
            ended = interpreters.run_as_torchrun(2, str(script), *how.split())
    text = printed(ended)
    assert "rank 1 ended before it came here. Every rank of the strategy makes the same calls" in text
    assert text.count("[[0, 1]]") == text.count("[[2, 3]]") == (2 if "drop-in" in how else 0)
