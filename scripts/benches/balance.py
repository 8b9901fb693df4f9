"""The balanced split: what planning takes, and how even it is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benches.model import Column, Contender, Measured, Table, Target, largest
from benches.timing import seconds_of
from torchdistinput.plan.balancing import balanced_split

__all__ = ["tables"]

PLANNED, OVER = "us for 1,024 samples", "slowest over least, worst"


def plans(replicas: int, equal_counts: bool, batches: int) -> Measured:  # noqa: FBT001 - sent by place
    """Batches of 1,024 samples: the median time; and 8, 16 and 32 samples for each replica: how even they are."""
    drawn = np.random.default_rng(0)
    found = []
    for _ in range(batches):
        costs = drawn.lognormal(0, 1, 1024) ** 2
        found.append(seconds_of(lambda: balanced_split(costs, replicas, equal_counts=equal_counts)))  # noqa: B023
    over = [
        _over_least(drawn.lognormal(0, 1, replicas * each) ** power, replicas, equal_counts=equal_counts)
        for each in (8, 16, 32)
        for power in (1, 2)
        for _ in range(max(1, batches // 10))
    ]
    return {"us": 1e6 * statistics.median(found), "over": max(over)}


def _over_least(costs: Any, replicas: int, *, equal_counts: bool) -> float:
    """The slowest replica over the mean, or over the bound that the largest samples set."""
    order, sizes = balanced_split(costs, replicas, equal_counts=equal_counts)
    ends = np.cumsum(sizes)
    loads = [costs[order[end - size : end]].sum() for end, size in zip(ends, sizes, strict=True)]
    falling = np.sort(costs)[::-1]
    beside = len(costs) // replicas - 1 if equal_counts else 0  # the smallest, beside each of the largest
    parts = np.arange(1, replicas + 1)
    giants = (falling.cumsum()[:replicas] + np.append(0.0, falling[::-1].cumsum())[parts * beside]) / parts
    least = max(giants.max(), costs.sum() / replicas, sum(falling[replicas - 1 : replicas + 1]))
    return float(max(loads) / least)


def tables(*, small: bool, folder: Path) -> Sequence[Table]:
    """Planning for 2 to 64 replicas."""
    del folder
    batches = 20 if small else 400
    planned = tuple(
        Contender(f"{replicas} replicas{', equal counts' * equal}", "ours", plans, (replicas, equal, batches))
        for replicas in (2, 4, 8, 16, 32, 64)
        for equal in (False, True)
    )
    return [
        Table(
            "A batch of 1,024 samples, divided by cost",
            (Column(PLANNED, "less", largest("us")), Column(OVER, "less", largest("over"))),
            planned,
            1,
            1 if small else 3,
            tuple(
                Target(column, f"{replicas} replicas{counts}", bound)
                for column, bound in ((PLANNED, 500.0), (OVER, 1.05))
                for counts in ("", ", equal counts")
                for replicas in (2, 16, 64)
            ),
            "Lognormal costs, squared. Evenness: 8, 16 and 32 samples for each replica, linear and squared, over the "
            "mean, or over the bound that the largest samples set.",
        ),
    ]
