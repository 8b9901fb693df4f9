"""What it costs many ranks on one machine to begin: seconds and sockets of the rank that has the most."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import torchdistinput as tdi
from benches.model import Column, Contender, Measured, Table, largest

__all__ = ["tables"]

PARTS = ("Strategy()", "distribute_dataset", "the first epoch", "a later epoch")


def num_sockets() -> int:
    """Sockets of this process that are connected or listen."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            found += os.readlink(descriptor).startswith("socket:")
    return found


def begun(world: int) -> Measured:
    """A strategy, a dataset, and two epochs."""
    torch.set_num_threads(1)
    found: dict[str, float] = {}

    def measured(name: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        found[f"{name}, s"] = time.perf_counter() - began
        found[f"{name}, sockets"] = num_sockets()
        return result

    strategy = measured(PARTS[0], lambda: tdi.Strategy(["cpu"], timeout_seconds=300.0))
    data = {"x": torch.arange(10 * world)}
    dataset = measured(PARTS[1], lambda: strategy.distribute_dataset(data, global_batch_size=world))
    for name in PARTS[2:]:
        measured(name, lambda: [None for _ in dataset])
    strategy.reduce("SUM", 1.0)  # nobody ends before all are done
    return found


def tables(*, small: bool, folder: Path) -> Sequence[Table]:
    """2, 32 and 128 ranks. Seconds hold for as many processors as there are here, and fall with more."""
    del folder
    columns = tuple(
        Column(f"{name}, {unit}", "less", largest(f"{name}, {unit}")) for name in PARTS for unit in ("s", "sockets")
    )
    return [
        Table(f"The begin of {world} ranks", columns, (Contender("tdi", "ours", begun, (world,)),), world, 1)
        for world in ((2,) if small else (2, 32, 128))
    ]
