"""The loader alone: what a step costs when the batch is ready. One process without read-ahead; 2 with all of it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import torchdistinput as tdi
from benches.model import Column, Contender, Measured, Table, Target, largest
from benches.peers import peer
from benches.timing import calibrated, steps, waits

__all__ = ["Ready", "ready_batches", "tables"]

STEP = "us a step"
WAIT = "us in next, p50"
WAIT_99 = "p99"
LOADER = "DataLoader, iterable"
ALONE = "DataLoader, no coordination"
TRAINING_SECONDS = 500e-6


def ready_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same batch again and again, without end."""
    return itertools.repeat((torch.zeros(256, 8), torch.zeros(256, dtype=torch.int64)))


class Ready(IterableDataset[Any]):
    """Ready batches, as an iterable dataset."""

    def __iter__(self) -> Iterator[Any]:
        return ready_batches()


class ReadyItems(Dataset[Any]):
    """Ready batches, as the items of a map-style dataset."""

    def __init__(self) -> None:
        self.batch = next(ready_batches())

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> Any:
        return self.batch


def bare(number: int) -> Measured:
    """A generator."""
    return steps((batch for batch in ready_batches()), number, warm=100)


def torch_loader(number: int, data: Dataset[Any]) -> Measured:
    """Torch's loader."""
    return steps(iter(DataLoader(data, batch_size=None)), number, warm=100)


def accelerated(number: int) -> Measured:
    """Accelerate's."""
    loader = peer("accelerate").Accelerator(cpu=True).prepare(DataLoader(ReadyItems(), batch_size=None))
    return steps(iter(loader), number, warm=100)


def nodes(number: int) -> Measured:
    """Torchdata's nodes."""
    of = peer("torchdata.nodes")
    return steps(iter(of.Loader(of.IterableWrapper(Ready()))), number, warm=100)


def grain(number: int) -> Measured:
    """Grain."""
    batch = next(ready_batches())
    data = peer("grain").MapDataset.range(number + 100).map(lambda _: batch)
    return steps(iter(data), number, warm=100)


def distributed(number: int, data: Any, prefetch: int | None) -> Measured:
    """Ours, by a strategy."""
    with tdi.Strategy(["cpu"]).distribute_dataset(data, _options(prefetch)) as dataset:
        return steps(iter(dataset), number, warm=100)


def drop_in(number: int) -> Measured:
    """Ours, instead of torch's."""
    with tdi.DataLoader(Ready(), batch_size=None) as loader:
        return steps(iter(loader), number, warm=100)


def _options(prefetch: int | None) -> tdi.InputOptions:
    return tdi.InputOptions() if prefetch is None else tdi.InputOptions(prefetch=prefetch)


def of_function(_: tdi.InputContext) -> Iterable[Any]:
    """A dataset function: each worker has ready batches of its own."""
    return ready_batches()


def beside(number: int, open_batches: Callable[[], Iterator[Any]], computes: bool) -> Measured:  # noqa: FBT001 - sent by place
    """What ``next`` takes beside a training step, on the CPU or (the host sleeps) elsewhere."""
    train = calibrated(TRAINING_SECONDS) if computes else partial(time.sleep, TRAINING_SECONDS)
    return waits(open_batches(), number, train, warm=200)


def of_generator() -> Iterator[Any]:
    """No loader."""
    return (batch for batch in ready_batches())


def of_torch() -> Iterator[Any]:
    """Torch's loader, no coordination."""
    return iter(DataLoader(Ready(), batch_size=None))


def of_accelerate() -> Iterator[Any]:
    """Accelerate's, which sends each batch from the first rank."""
    return iter(peer("accelerate").Accelerator(cpu=True).prepare(DataLoader(Ready(), batch_size=None)))


def of_strategy() -> Iterator[Any]:
    """Ours at default options: all ranks agree on each step."""
    return iter(tdi.Strategy(["cpu"]).distribute_datasets_from_function(of_function))


def of_map_style() -> Iterator[Any]:
    """Ours at default options, over a dataset that is divided."""
    return iter(tdi.Strategy(["cpu"]).distribute_dataset(DataLoader(ReadyItems(), batch_size=None)))


def tables(*, small: bool, folder: Path) -> Sequence[Table]:
    """One process, and two beside a training step."""
    number = 500 if small else 20_000
    rounds = 1 if small else 3
    alone = (
        Contender("bare generator", "limit", bare, (number,)),
        Contender("distribute_dataset(iterable), prefetch=0", "ours", distributed, (number, Ready(), 0)),
        Contender("distribute_dataset(iterable)", "ours", distributed, (number, Ready(), None)),
        Contender("tdi.DataLoader, iterable", "ours", drop_in, (number,)),
        Contender(LOADER, "peer", torch_loader, (number, Ready())),
        Contender("DataLoader, map-style", "peer", torch_loader, (number, ReadyItems())),
        Contender("torchdata nodes", "peer", nodes, (number,), ("torchdata",)),
        Contender("grain", "peer", grain, (number,), ("grain",)),
        Contender("accelerate", "peer", accelerated, (number,), ("accelerate",)),
    )
    return [
        Table(
            "A ready batch",
            (Column(STEP, "less", largest("us")),),
            alone,
            1,
            rounds,
            tuple(Target(STEP, each.name, 1.0, (LOADER,)) for each in alone if each.kind == "ours"),
        ),
        *(_beside(computes, small) for computes in (False, True)),
    ]


def _beside(computes: bool, small: bool) -> Table:  # noqa: FBT001 - two words of one table
    number = 200 if small else 2_000
    contenders = (
        Contender("bare generator", "limit", beside, (number, of_generator, computes)),
        Contender("distribute_datasets_from_function", "ours", beside, (number, of_strategy, computes)),
        Contender("distribute_dataset, map-style", "ours", beside, (number, of_map_style, computes)),
        Contender(ALONE, "before", beside, (number, of_torch, computes)),
        Contender("accelerate dispatcher", "peer", beside, (number, of_accelerate, computes), ("accelerate",)),
    )
    return Table(
        f"A ready batch beside a step of 500 us {'on the CPU' if computes else 'elsewhere, the host sleeps'}",
        (Column(WAIT, "less", largest("us")), Column(WAIT_99, "less", largest("us_99"))),
        contenders,
        2,
        1 if small else 3,
        tuple(Target(WAIT, each.name, 1.0, (ALONE,)) for each in contenders if each.kind == "ours"),
        "At default options: prefetch, and a vote of all ranks on each step.",
    )
