"""Ranks with uneven data end together: what a step costs; iterables of ready batches, nothing else to do."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

import torchdistinput as tdi
from benches.model import Column, Contender, Measured, Table, Target, largest
from benches.overhead import ready_batches
from benches.peers import peer
from benches.timing import meet

__all__ = ["tables"]

STEP = "us a step"


class Uneven(IterableDataset[Any]):
    """Ready batches; each rank has a few more than the one before."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(ready_batches(), self.number + 10 * dist.get_rank())


def timed(batches: Iterator[Any], number: int) -> Measured:
    """From the first batch to the end of all ranks."""
    next(batches)
    meet()
    start = time.perf_counter()
    deque(batches, maxlen=0)
    return {"us": 1e6 * (time.perf_counter() - start) / number}


def uncoordinated(number: int) -> Measured:
    """Torch's loader; the ranks end at different steps."""
    return timed(iter(DataLoader(Uneven(number), batch_size=None)), number)


def in_line(number: int, words: int) -> Measured:
    """An all_reduce before each step: who has data?"""
    return timed(_agreed(number, words), number)


def _agreed(number: int, words: int) -> Iterator[Any]:
    batches = iter(Uneven(number))
    while True:
        batch = next(batches, None)
        votes = torch.full((words,), int(batch is not None))
        dist.all_reduce(votes)
        if not int(votes[0]):
            return
        yield batch


def dispatched(number: int) -> Measured:
    """Accelerate: the first rank sends all batches."""
    loader = peer("accelerate").Accelerator(cpu=True).prepare(DataLoader(Uneven(number), batch_size=None))
    return timed(iter(loader), number)


def ours(number: int, prefetch: int | None) -> Measured:
    """Votes that are sent ahead, each for all steps that are held."""

    def uneven(_: tdi.InputContext) -> Iterable[Any]:
        return Uneven(number)

    options = tdi.InputOptions() if prefetch is None else tdi.InputOptions(prefetch=prefetch)
    with tdi.Strategy(["cpu"]).distribute_datasets_from_function(uneven, options) as dataset:
        return timed(iter(dataset), number)


def tables(*, small: bool, folder: Path) -> Sequence[Table]:
    """Worlds 2 and 4."""
    many, few = (300, 50) if small else (10_000, 1_000)
    contenders = (
        Contender("DataLoader, no coordination", "limit", uncoordinated, (many,)),
        Contender("prefetch=32", "ours", ours, (many, 32)),
        Contender("default options", "ours", ours, (many, None)),
        Contender("prefetch=2", "ours", ours, (few, 2)),
        Contender("an all_reduce each step, in line", "before", in_line, (few, 1)),
        Contender("accelerate dispatcher", "peer", dispatched, (few // 2,), ("accelerate",)),
    )
    targets = (Target(STEP, "prefetch=32", 5.0, ("an all_reduce each step, in line",)),)
    columns = (Column(STEP, "less", largest("us")),)
    rounds = 1 if small else 3
    return [Table("Uneven iterables of ready batches", columns, contenders, world, rounds, targets) for world in (2, 4)]
