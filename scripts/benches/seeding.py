"""``seed_samples=True``: what seeding three generators adds to a sample, beside the bare calls that seed them."""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

import torchdistinput as tdi
from benches.model import Column, Contender, Measured, Table, Target, largest
from benches.timing import seconds_of

__all__ = ["tables"]

EXTRA = "us more for each sample"
BARE = "the three seed functions, called in a loop"
REPEATS = 7


class Numbers(Dataset[int]):
    """Samples that cost nothing."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def seeded(length: int, batch: int) -> Measured:
    """An epoch with ``seed_samples``, less one without, in turns."""
    strategy = tdi.Strategy(["cpu"])
    loaders = [
        strategy.distribute_dataset(
            Numbers(length), tdi.InputOptions(seed_samples=seeds), global_batch_size=batch, collate_fn=list
        )
        for seeds in (True, False)
    ]
    differences = []
    for _ in range(REPEATS):
        with_seeds, without = (seconds_of(partial(deque, loader, maxlen=0)) for loader in loaders)
        differences.append(with_seeds - without)
    return {"extra": 1e6 * statistics.median(differences) / length}


def bare(length: int) -> Measured:
    """What no exact seeding of each sample can beat."""

    def seed_all() -> None:
        for number in range(length):
            torch.default_generator.manual_seed(number)
            np.random.seed(number)
            random.seed(number)

    return {"extra": 1e6 * statistics.median(seconds_of(seed_all) for _ in range(REPEATS)) / length}


def tables(*, small: bool, folder: Path) -> Sequence[Table]:
    """Batches of a usual size, and small ones, for each of which the generators' states are saved and restored."""
    length = 512 if small else 20_480
    contenders = [Contender(BARE, "limit", bare, (length,))]
    contenders += [Contender(f"batches of {batch}", "ours", seeded, (length, batch)) for batch in (256, 32)]
    columns = (Column(EXTRA, "less", largest("extra")),)
    rounds = 1 if small else 3
    targets = (Target(EXTRA, "batches of 256", 5.0),)
    return [Table("Seeding torch, NumPy and random for each sample", columns, tuple(contenders), 1, rounds, targets)]
