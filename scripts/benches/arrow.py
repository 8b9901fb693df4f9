"""A dataset of Hugging Face in torch's format, shuffled, beside the loader of torch, over one rank and two."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import torchdistinput as tdi
from benches.model import Column, Contender, Measured, Table, Target, rate
from benches.peers import peer
from benches.timing import epochs

__all__ = ["tables"]

RATE, BY_HAND = "samples/s", "DataLoader of torch, DistributedSampler"
GLOBAL_BATCH, FLOATS = 512, 32


def dataset(path: str) -> Any:
    """The rows, in torch's format."""
    return peer("datasets").load_from_disk(path).with_format("torch")


def measured(loader: Any, repeats: int) -> Measured:
    """Whole epochs."""
    return epochs(loader, lambda batch: len(batch["label"]), repeats=repeats, steps_ahead=0)


def ours(path: str, repeats: int) -> Measured:
    """The drop-in."""
    torch.manual_seed(0)
    return measured(tdi.DataLoader(dataset(path), GLOBAL_BATCH, shuffle=True), repeats)


def by_hand(path: str, repeats: int) -> Measured:
    """What users write by hand; it pads."""
    data = dataset(path)
    size = dist.get_world_size() if dist.is_initialized() else 1
    make = partial(DataLoader, data, GLOBAL_BATCH // size)
    if size == 1:
        return measured(make(shuffle=True), repeats)
    return measured(make(sampler=DistributedSampler(data)), repeats)


def write(path: Path, samples: int) -> str:
    """The files of the dataset."""
    random = np.random.default_rng(0)
    rows = {"x": random.random((samples, FLOATS), dtype="f4"), "label": random.integers(0, 10, samples)}
    datasets = peer("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(rows).save_to_disk(str(path))
    return str(path)


def tables(*, small: bool, folder: Path) -> Sequence[Table]:
    """One rank and two."""
    args = (write(folder / "rows", 2_000 if small else 50_000), 1 if small else 3)
    contenders = (
        Contender(BY_HAND, "before", by_hand, args, ("datasets",)),
        Contender("tdi.DataLoader", "ours", ours, args, ("datasets",)),
    )
    columns = (Column(RATE, "more", rate("samples", "seconds")),)
    target = Target(RATE, "tdi.DataLoader", 0.9, (BY_HAND,))
    return [
        Table(f"Hugging Face, {size} process(es)", columns, contenders, size, 1 if small else 3, (target,))
        for size in (1, 2)
    ]
