"""In memory: 10^6 samples of 64 float32 and a label, global batches of 1024, shuffled; worlds 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

import torchdistinput as tdi
from benches.model import Column, Contender, Measured, Table, Target, rate
from benches.peers import peer
from benches.timing import epochs

__all__ = ["tables"]

EPOCH = "samples/s, whole epochs"
STEADY = "samples/s, steady"
LIMIT = "bare index_select"
TRICK = "DataLoader, BatchSampler as sampler, batch_size=None"
USERS = "DataLoader per sample"
GLOBAL_BATCH = 1024
MANY = 4096

Order = Literal["drawn", "given", "in order"]
Pair = tuple[torch.Tensor, torch.Tensor]


def place() -> tuple[int, int]:
    """The rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def data(samples: int) -> Pair:
    """The samples and their labels."""
    return torch.arange(samples * 64, dtype=torch.float32).view(samples, 64), torch.arange(samples)


class WithGetitems(Dataset[Pair]):
    """A dataset that makes all the samples of a batch at once."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Pair:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: list[int]) -> Pair:
        return self.x[indices], self.y[indices]


class Epochs:
    """Tells the sampler of each new epoch, as users do."""

    def __init__(self, loader: Any, sampler: Any) -> None:
        self.loader, self.sampler, self.epoch = loader, sampler, 0

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        return iter(self.loader)


class Selected:
    """The loop without a loader.

    Args:
      x: the samples.
      y: their labels.
      order: whether it is drawn in each epoch, drawn before, or that of the samples.
    """

    def __init__(self, x: torch.Tensor, y: torch.Tensor, order: Order) -> None:
        self.x, self.y, self.draws = x, y, order == "drawn"
        self.order = torch.arange(len(y)) if order == "in order" else torch.randperm(len(y))

    def __iter__(self) -> Iterator[Pair]:
        rank, world = place()
        order = torch.randperm(len(self.y)) if self.draws else self.order
        share = GLOBAL_BATCH // world
        for start in range(rank * share, len(order), GLOBAL_BATCH):
            rows = order[start : start + share]
            yield self.x.index_select(0, rows), self.y.index_select(0, rows)


def sampler_of(dataset: Any, *, shuffle: bool = True) -> Sampler[int]:
    """Of this rank."""
    if place()[1] > 1:
        return DistributedSampler(dataset, shuffle=shuffle)
    return RandomSampler(dataset) if shuffle else SequentialSampler(dataset)


def timed(loader: Any, samples: int, repeats: int) -> Measured:
    """Whole epochs, and their last nine tenths."""
    return epochs(loader, _labels, repeats=repeats, steps_ahead=samples // GLOBAL_BATCH // 10)


def _labels(batch: Any) -> int:
    return len(batch["y"] if isinstance(batch, dict) else batch[1])


def bare(samples: int, repeats: int, order: Order) -> Measured:
    """The limit."""
    return timed(Selected(*data(samples), order), samples, repeats)


def drop_in(samples: int, repeats: int, workers: int) -> Measured:
    """Ours, as users write it."""
    with tdi.DataLoader(TensorDataset(*data(samples)), GLOBAL_BATCH, shuffle=True, num_workers=workers) as loader:
        return timed(loader, samples, repeats)


def distributed(samples: int, repeats: int) -> Measured:
    """Ours, by a strategy."""
    strategy = tdi.Strategy(["cpu"])
    loader = DataLoader(TensorDataset(*data(samples)), GLOBAL_BATCH, shuffle=True)
    with strategy.distribute_dataset(loader) as dataset:
        return timed(dataset, samples, repeats)


def in_order(samples: int, repeats: int, arrays: bool) -> Measured:  # noqa: FBT001 - sent by place
    """Ours, of a dict as it is."""
    x, y = data(samples)
    columns: dict[str, Any] = {"x": x.numpy(), "y": y.numpy()} if arrays else {"x": x, "y": y}
    with tdi.Strategy(["cpu"]).distribute_dataset(columns, global_batch_size=GLOBAL_BATCH) as dataset:
        return timed(dataset, samples, repeats)


def batch_sampler(samples: int, repeats: int, shuffle: bool) -> Measured:  # noqa: FBT001 - sent by place
    """Torch with ready batches of indices for the dataset."""
    dataset = TensorDataset(*data(samples))
    sampler = sampler_of(dataset, shuffle=shuffle)
    batches = BatchSampler(sampler, GLOBAL_BATCH // place()[1], drop_last=False)
    return timed(Epochs(DataLoader(dataset, batch_size=None, sampler=batches), sampler), samples, repeats)


def getitems(samples: int, repeats: int) -> Measured:
    """Torch with a dataset that has ``__getitems__``."""
    dataset = WithGetitems(*data(samples))
    sampler = sampler_of(dataset)
    loader = DataLoader(dataset, GLOBAL_BATCH // place()[1], sampler=sampler, collate_fn=_itself)
    return timed(Epochs(loader, sampler), samples, repeats)


def many_at_once(samples: int, repeats: int, kind: type[Any]) -> Measured:
    """A loader of torch's arguments, 4,096 samples a batch, over a dataset that makes them at once."""
    loader = kind(WithGetitems(*data(samples)), MANY, shuffle=True, collate_fn=_itself)
    return epochs(loader, _labels, repeats=repeats, steps_ahead=samples // MANY // 10)


def _itself(batch: Any) -> Any:
    return batch


def per_sample(samples: int, repeats: int, workers: int) -> Measured:
    """Torch as most users have it."""
    dataset = TensorDataset(*data(samples))
    sampler = sampler_of(dataset)
    loader = DataLoader(dataset, GLOBAL_BATCH // place()[1], sampler=sampler, num_workers=workers)
    return timed(Epochs(loader, sampler), samples, repeats)


def accelerated(samples: int, repeats: int, ready: bool) -> Measured:  # noqa: FBT001 - sent by place
    """Accelerate, with ``__getitems__`` or per sample."""
    x, y = data(samples)
    dataset = WithGetitems(x, y) if ready else TensorDataset(x, y)
    loader = DataLoader(dataset, GLOBAL_BATCH // place()[1], shuffle=True, collate_fn=_itself if ready else None)
    accelerator = peer("accelerate").Accelerator(cpu=True)
    return timed(accelerator.prepare(loader), samples, repeats)


def stateful(samples: int, repeats: int) -> Measured:
    """Torchdata's StatefulDataLoader."""
    dataset = TensorDataset(*data(samples))
    sampler = sampler_of(dataset)
    batches = BatchSampler(sampler, GLOBAL_BATCH // place()[1], drop_last=False)
    loader = peer("torchdata.stateful_dataloader").StatefulDataLoader(dataset, batch_size=None, sampler=batches)
    return timed(Epochs(loader, sampler), samples, repeats)


def grain(samples: int, repeats: int) -> Measured:
    """Grain, a fiftieth of an epoch: it has no start that would weigh."""
    x, y = (tensor.numpy() for tensor in data(samples))
    rank, world = place()
    part = peer("grain").MapDataset.range(samples).shuffle(seed=1)[rank::world][: samples // world // 50]
    loader = part.map(lambda index: (x[index], y[index])).batch(GLOBAL_BATCH // world)
    return timed(loader, samples // 50, repeats)


def tables(*, small: bool, folder: Path) -> Sequence[Table]:
    """Worlds 1 and 2."""
    samples = 20_000 if small else 1_000_000
    few = samples if small else samples // 5  # for those who need seconds for all of them
    fast, slow = (1, 1) if small else (7, 1)
    columns = (
        Column(EPOCH, "more", rate("samples", "seconds")),
        Column(STEADY, "more", rate("steady_samples", "steady_seconds")),
    )
    contenders = (
        Contender(LIMIT, "limit", bare, (samples, fast, "given")),
        Contender("randperm + index_select by hand", "before", bare, (samples, fast, "drawn")),
        Contender("tdi.DataLoader", "ours", drop_in, (samples, fast, 0)),
        Contender("distribute_dataset", "ours", distributed, (samples, fast)),
        Contender(TRICK, "peer", batch_sampler, (samples, slow, True)),
        Contender("DataLoader with __getitems__", "peer", getitems, (samples, slow)),
        Contender("StatefulDataLoader, BatchSampler", "peer", stateful, (samples, slow), ("torchdata",)),
        Contender("accelerate with __getitems__", "peer", accelerated, (samples, slow, True), ("accelerate",)),
        Contender("accelerate per sample", "peer", accelerated, (few, slow, False), ("accelerate",), once=True),
        Contender(USERS, "before", per_sample, (few, slow, 0), once=True),
        Contender("DataLoader per sample, 2 workers", "before", per_sample, (few, slow, 2), once=True),
        Contender("grain MapDataset", "peer", grain, (samples, slow), ("grain",), once=True),
    )
    peers = tuple(contender.name for contender in contenders if contender.kind == "peer")
    rounds = 1 if small else 3
    shuffled = [
        Table("In memory, shuffled", columns, contenders, world, rounds, tuple(_targets(of_limit, of_users, peers)))
        for world, of_limit, of_users in ((1, 0.6, 40.0), (2, 0.5, 20.0))
    ]
    return [*shuffled, _in_order(samples, columns, rounds), _together(samples, columns, rounds)]


def _targets(of_limit: float, of_users: float, peers: tuple[str, ...]) -> Iterator[Target]:
    for ours in ("tdi.DataLoader", "distribute_dataset"):
        yield Target(STEADY, ours, of_limit, (LIMIT,))
        yield Target(EPOCH, ours, 4.0, peers)
        yield Target(EPOCH, ours, of_users, (USERS,))


def _in_order(samples: int, columns: tuple[Column, ...], rounds: int) -> Table:
    repeats = 7 if rounds > 1 else 1
    dicts = {"distribute_dataset of a dict of tensors": False, "distribute_dataset of a dict of arrays": True}
    contenders = (
        Contender(LIMIT, "limit", bare, (samples, repeats, "in order")),
        *(Contender(name, "ours", in_order, (samples, repeats, arrays)) for name, arrays in dicts.items()),
        Contender(TRICK, "peer", batch_sampler, (samples, 1, False)),
    )
    targets = tuple(
        target for name in dicts for target in (Target(STEADY, name, 0.5, (LIMIT,)), Target(EPOCH, name, 4.0, (TRICK,)))
    )
    return Table("In memory, in order", columns, contenders, 2, rounds, targets)


def _together(samples: int, columns: tuple[Column, ...], rounds: int) -> Table:
    contenders = (
        Contender("DataLoader", "before", many_at_once, (samples, 3, DataLoader)),
        Contender("tdi.DataLoader", "ours", many_at_once, (samples, 3, tdi.DataLoader)),
    )
    targets = (Target(EPOCH, "tdi.DataLoader", 1.0, ("DataLoader",)),)
    return Table("A dataset with __getitems__, 4,096 samples a batch", columns, contenders, 1, rounds, targets)
