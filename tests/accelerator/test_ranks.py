"""Several ranks, each on a device of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchdistinput as tdi
from tests.accelerator import simulated
from tests.accelerator.consumers import Witness, batch_of, scratch
from torchdistinput.testing import run_ranks

pytestmark = pytest.mark.simulated

STEPS = 6


def on_the_device_of_its_rank(seed: int) -> Any:
    simulated.register()
    simulated.configure(seed, 100)
    strategy = tdi.Strategy()
    (device,) = strategy.devices
    witness = Witness()
    host = [batch_of(step) for step in range(STEPS)]
    with strategy.distribute_dataset(host) as dataset:
        for step, batch in enumerate(dataset):
            rank = dist.get_rank()
            witness.look(batch["large"], host[step]["large"].chunk(2)[rank])
            del batch
            scratch(device)
    return str(device), torch.accelerator.current_device_index(), witness.wrong()


def test_each_rank_takes_the_device_of_its_local_rank(weather: int) -> None:
    found = run_ranks(2, on_the_device_of_its_rank, weather)
    assert found == [("simulated:0", 0, 0), ("simulated:1", 1, 0)]
