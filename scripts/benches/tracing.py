"""What a step takes with a trace, a verdict or sums, beside the same step without. At most 10 us, 1 % of 1 ms."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torchdistinput as tdi
from benches.model import Column, Contender, Measured, Table, Target, largest
from benches.overhead import Ready, of_function
from benches.timing import calibrated, steps, waits

__all__ = ["tables"]

STEP = "us a step"
WAIT = "us in next, p50"
OFF, TRACE = "off", "trace="
SUMS = "sums="
TRAINING_SECONDS = 1e-3


def _one(batch: object) -> int:
    return 1


def _options(kind: str, folder: str) -> tdi.InputOptions:
    return tdi.InputOptions(
        trace=folder if "trace" in kind else None,
        log_every=10**6 if "log" in kind else 0,
        sums={"count": _one} if kind == SUMS else {},
    )


def alone(number: int, kind: str) -> Measured:
    """A ready batch, with nothing in between."""
    with (
        tempfile.TemporaryDirectory() as folder,
        tdi.Strategy(["cpu"]).distribute_dataset(Ready(), _options(kind, folder)) as dataset,
    ):
        return steps(iter(dataset), number, warm=100)


def beside(number: int, kind: str) -> Measured:
    """A ready batch beside a training step of 1 ms on the CPU, of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        strategy: Any = tdi.Strategy(["cpu"])
        with strategy.distribute_datasets_from_function(of_function, _options(kind, folder)) as dataset:
            return waits(iter(dataset), number, calibrated(TRAINING_SECONDS), warm=200)


def tables(*, small: bool, folder: Path) -> Sequence[Table]:
    """One process, and two beside a training step."""
    number, rounds = (500, 1) if small else (20_000, 3)
    kinds = (OFF, TRACE, "log_every=", "trace= and log_every=", SUMS)
    return [
        Table(
            "A ready batch",
            (Column(STEP, "less", largest("us")),),
            tuple(Contender(kind, "before" if kind == OFF else "ours", alone, (number, kind)) for kind in kinds),
            1,
            rounds,
            (Target(STEP, TRACE, 3.5, (OFF,), better_by=False),),
        ),
        Table(
            "A ready batch beside a step of 1 ms",
            (Column(WAIT, "less", largest("us")),),
            tuple(Contender(kind, "before" if kind == OFF else "ours", beside, (number // 10, kind)) for kind in kinds),
            2,
            rounds,
            (Target(WAIT, TRACE, 20.0),),
        ),
    ]
