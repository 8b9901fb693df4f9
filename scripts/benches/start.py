"""What it takes to begin: the import, the first batch, a new epoch."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import torchdistinput as tdi
from benches.model import Column, Contender, Measured, Table, Target, largest
from benches.timing import seconds_of

__all__ = ["tables"]

IMPORT = "ms over import torch"
FIRST = "ms to the first batch"
EPOCH = "ms to the first batch of a new epoch"
SAMPLES = 20_000
BATCH = 256


class Numbers(Dataset[torch.Tensor]):
    """Samples that cost nothing."""

    def __init__(self) -> None:
        self.sample = torch.zeros(8)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


def imported(module: str, folder: str) -> Measured:
    """In a fresh interpreter, after torch; with its bytecode at hand, as a package that was installed has it."""
    clock = f"start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
    code = f"import gc, time, torch; gc.collect(); {clock}"
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    call = [sys.executable, "-c", code]
    if not any(Path(folder).iterdir()):
        subprocess.run(call, env=environment, capture_output=True, check=True)
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=True)
    return {"ms": 1e3 * float(done.stdout)}


def _first(loader: Iterable[Any]) -> None:
    next(iter(loader))


def _epoch(loader: Iterable[Any]) -> float:
    """Seconds to the first batch; the rest of the epoch is read too."""
    start = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first = time.perf_counter() - start
    deque(batches, maxlen=0)
    return first


def ours_of(workers: int, *, drop_in: bool) -> Any:
    """A loader of ours."""
    settings: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    if drop_in:
        return tdi.DataLoader(Numbers(), BATCH, shuffle=True, **settings)
    return tdi.Strategy(["cpu"]).distribute_dataset(DataLoader(Numbers(), BATCH, shuffle=True, **settings))


def torchs_of(workers: int) -> Any:
    """Torch's."""
    return DataLoader(Numbers(), BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)


def drop_in_of(workers: int) -> Any:
    """The drop-in."""
    return ours_of(workers, drop_in=True)


def strategys_of(workers: int) -> Any:
    """By a strategy."""
    return ours_of(workers, drop_in=False)


def first_batch(make: Callable[[int], Any]) -> Measured:
    """Of a loader just made, without workers; the second one of the process, as the first one warms it."""
    _first(make(0))
    return {"ms": 1e3 * statistics.median(seconds_of(lambda: _first(make(0))) for _ in range(5))}


def new_epoch(make: Callable[[int], Any]) -> Measured:
    """The workers stand."""
    loader = make(2)
    _epoch(loader)
    return {"ms": 1e3 * statistics.median(_epoch(loader) for _ in range(5))}


def tables(*, small: bool, folder: Path) -> Sequence[Table]:
    """The three of them."""
    rounds = 1 if small else 3

    def table(title: str, column: str, run: Callable[..., Measured], bound: float) -> Table:
        contenders = (
            Contender("DataLoader", "peer", run, (torchs_of,)),
            Contender("tdi.DataLoader", "ours", run, (drop_in_of,)),
            Contender("distribute_dataset", "ours", run, (strategys_of,)),
        )
        bounds = (Target(column, "tdi.DataLoader", bound), Target(column, "distribute_dataset", bound))
        return Table(title, (Column(column, "less", largest("ms")),), contenders, 1, rounds, bounds)

    modules = ("torchdistinput", "accelerate", "fsspec")
    imports = tuple(
        Contender(name, "ours" if name == "torchdistinput" else "peer", imported, (name, str(folder)))
        for name in modules
    )
    return [
        Table(
            "The import",
            (Column(IMPORT, "less", largest("ms")),),
            imports,
            1,
            rounds,
            (Target(IMPORT, "torchdistinput", 100.0),),
            "After a garbage collection, which torch's own objects leave due: whatever is imported next would pay it.",
        ),
        table("A map-style dataset, no workers", FIRST, first_batch, 5.0),
        table("Two persistent workers", EPOCH, new_epoch, 5.0),
    ]
