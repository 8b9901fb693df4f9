"""``tdi.analyze``: beside NumPy, Python and Ray Data."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from benches.model import Column, Contender, Measured, Table, Target, rate
from benches.peers import peer
from benches.timing import seconds_of
from torchdistinput.statistics import Counts, Moments, Quantiles

__all__ = ["tables"]

RATE = "million a second"
MOMENTS, QUANTILES = "moments", "moments and quantiles"
Q = [0.01, 0.5, 0.99]
SORTED, ONE_PASS = "NumPy: mean, var, quantile (a sort)", "NumPy: mean, var"
SKETCH, EXACT = "Ray Data, ApproximateQuantile", "Ray Data, Quantile"
COUNTER, RAY_COUNTS = "collections.Counter", "Ray Data, groupby().count()"


def measured(count: int, call: Callable[[], object]) -> Measured:
    """The seconds of one call."""
    return {"items": count / 1e6, "seconds": seconds_of(call)}


def numbers(count: int) -> Any:
    """Normal float32 numbers."""
    return np.random.default_rng(0).standard_normal(count, np.float32)


def ours(count: int, what: str) -> Measured:
    """Exact moments, and exact quantiles too."""
    data = torch.from_numpy(numbers(count))
    spec = [Moments(), Quantiles(Q)] if what == QUANTILES else [Moments()]
    return measured(count, lambda: tdi.analyze(data, spec))


def by_numpy(count: int, what: str) -> Measured:
    """All at once in memory; the sums are rounded."""
    data = numbers(count)

    def call() -> None:
        data.mean(dtype=np.float64)
        data.var(dtype=np.float64)
        if what == QUANTILES:
            np.quantile(data, Q)

    return measured(count, call)


def by_ray(count: int, name: str) -> Measured:
    """Mean, standard deviation and quantiles of Ray Data."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    ray = peer("ray")
    data, aggregate = peer("ray.data"), peer("ray.data.aggregate")
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    data.DataContext.get_current().enable_progress_bars = False
    dataset = data.from_numpy(np.array_split(numbers(count), 16)).materialize()
    wanted = [aggregate.Mean("data"), aggregate.Std("data")]
    if name == SKETCH:
        wanted.append(aggregate.ApproximateQuantile("data", Q))
    else:
        wanted += [aggregate.Quantile("data", q, alias_name=str(q)) for q in Q]
    found = measured(count, lambda: dataset.aggregate(*wanted))
    ray.shutdown()
    return found


def words(count: int) -> list[str]:
    """Words of a Zipf law."""
    return [f"word{number}" for number in (np.random.default_rng(0).zipf(1.3, count) % 1_000_000).tolist()]


def our_counts(count: int) -> Measured:
    """By ``analyze``."""
    data: Any = words(count)
    loader = DataLoader(data, 65_536, collate_fn=list)
    return measured(count, lambda: tdi.analyze(loader, Counts(top=10_000)))


def counter(count: int) -> Measured:
    """A bare counter, of a list in memory."""
    data = words(count)
    return measured(count, lambda: Counter(data).most_common(10_000))


def ray_counts(count: int) -> Measured:
    """A group by word."""
    ray, data, pyarrow = peer("ray"), peer("ray.data"), peer("pyarrow")
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    data.DataContext.get_current().enable_progress_bars = False
    table = pyarrow.table({"word": words(count)})
    parts = [table.slice(start, count // 16 + 1) for start in range(0, count, count // 16 + 1)]
    dataset = data.from_arrow(parts).materialize()
    found = measured(count, lambda: dataset.groupby("word").count().sort("count()", descending=True).take(10_000))
    ray.shutdown()
    return found


def tables(*, small: bool, folder: Path) -> Sequence[Table]:
    """One process of ours: Ray Data has two."""
    del folder
    columns = (Column(RATE, "more", rate("items", "seconds")),)
    rounds = 1 if small else 3
    size, text = (128_000, 10_000) if small else (10**8, 10**7)
    analyze, both = "tdi.analyze: Moments", "tdi.analyze: Moments, Quantiles"
    moments = (
        Contender(ONE_PASS, "before", by_numpy, (size, MOMENTS)),
        Contender(SORTED, "before", by_numpy, (size, QUANTILES)),
        Contender(analyze, "ours", ours, (size, MOMENTS)),
        Contender(both, "ours", ours, (size, QUANTILES)),
        Contender(SKETCH, "peer", by_ray, (size, SKETCH), ("ray", "datasketches"), fresh=True, once=True),
        Contender(EXACT, "peer", by_ray, (size, EXACT), ("ray",), fresh=True, once=True),
    )
    counts = (
        Contender(COUNTER, "before", counter, (text,)),
        Contender("tdi.analyze: Counts", "ours", our_counts, (text,)),
        Contender(RAY_COUNTS, "peer", ray_counts, (text,), ("ray",), fresh=True, once=True),
    )
    targets = (Target(RATE, both, 1.0, (SKETCH,)), Target(RATE, both, 5.0, (EXACT,)))
    return [
        Table(f"Statistics of {size:,} float32 numbers", columns, moments, 1, rounds, targets),
        Table(f"Counts of {text:,} words of a Zipf law", columns, counts, 1, rounds),
    ]
