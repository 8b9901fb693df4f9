"""Decoding on two workers: about 200 us of numpy a sample, samples of 12 KB and of 588 KB."""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, default_collate

import torchdistinput as tdi
from benches.model import Column, Contender, Measured, Table, Target, rate
from benches.peers import peer
from benches.timing import epochs, seconds_of

__all__ = ["tables"]

EPOCH = "samples/s, whole epochs"
STEADY = "samples/s, steady"
LIMIT = "2 processes, no loader"
KEPT = "2 processes, no loader, batches kept"
BATCHES_KEPT = 3
BATCH = 32
DECODE_SECONDS = 200e-6


class Decoded(Dataset[torch.Tensor]):
    """Samples that are computed.

    Args:
      length: how many.
      floats: float32 of a sample.
      turns: how often the numbers are turned; see ``turns_for``.
    """

    def __init__(self, length: int, floats: int, turns: int) -> None:
        self.length, self.floats, self.turns = length, floats, turns
        self.seeds = np.linspace(0, 1, 2048, dtype=np.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        seeds = self.seeds
        for _ in range(self.turns):
            seeds = np.sin(seeds)
        sample = np.empty(self.floats, np.float32)
        sample.fill(seeds[0] + index)
        return torch.from_numpy(sample)


def turns_for(floats: int) -> int:
    """So many that a sample takes as long as it should, here and now."""

    def seconds(turns: int) -> float:
        data = Decoded(50, floats, turns)
        # None is kept, as the limit keeps none: memory that is used again is much faster than fresh memory.
        return min(seconds_of(lambda: deque(map(data.__getitem__, range(50)), maxlen=0)) for _ in range(15)) / 50

    one = (seconds(30) - seconds(0)) / 30
    return max(1, round((DECODE_SECONDS - seconds(0)) / one))


def _decode(data: Decoded, indices: range, barrier: Barrier) -> None:
    barrier.wait()
    for index in indices:
        data[index]
    barrier.wait()


def _stack(data: Decoded, indices: range, barrier: Barrier) -> None:
    """Each sample goes to its row of a batch; the memory of a batch is used again after some others."""
    kept = [torch.zeros(BATCH, data.floats) for _ in range(BATCHES_KEPT)]
    barrier.wait()
    for index in indices:
        batch, row = divmod(index, BATCH)
        kept[batch % BATCHES_KEPT][row].copy_(data[index])
    barrier.wait()


def bare(length: int, floats: int, turns: int, work: Callable[[Decoded, range, Barrier], None] = _decode) -> Measured:
    """The limit: what two processes decode if nobody wants to have it; with ``_stack``, if it is kept for a while."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    barrier, data = context.Barrier(3), Decoded(length, floats, turns)
    halves = [range(length // 2), range(length // 2, length)]
    processes = [context.Process(target=work, args=(data, half, barrier)) for half in halves]
    for process in processes:
        process.start()
    barrier.wait()
    start = time.perf_counter()
    barrier.wait()
    seconds = time.perf_counter() - start
    for process in processes:
        process.join()
    return {"samples": length, "seconds": seconds, "steady_samples": length, "steady_seconds": seconds}


def timed(loader: Iterable[Any], length: int, repeats: int) -> Measured:
    """Whole epochs, and their last nine tenths."""
    return epochs(loader, len, repeats=repeats, steps_ahead=length // BATCH // 10)


def torch_loader(length: int, floats: int, turns: int) -> Measured:
    """Torch."""
    data = Decoded(length, floats, turns)
    return timed(DataLoader(data, BATCH, num_workers=2, persistent_workers=True), length, 2)


def drop_in(length: int, floats: int, turns: int) -> Measured:
    """Ours, instead of torch's."""
    data = Decoded(length, floats, turns)
    with tdi.DataLoader(data, BATCH, num_workers=2, persistent_workers=True) as loader:
        return timed(loader, length, 2)


def distributed(length: int, floats: int, turns: int) -> Measured:
    """Ours, by a strategy."""
    loader = DataLoader(Decoded(length, floats, turns), BATCH, num_workers=2, persistent_workers=True)
    with tdi.Strategy(["cpu"]).distribute_dataset(loader) as dataset:
        return timed(dataset, length, 2)


def nodes(length: int, floats: int, turns: int, method: str) -> Measured:
    """Torchdata's nodes: whole batches mapped in parallel."""
    of, data = peer("torchdata.nodes"), Decoded(length, floats, turns)
    batches = of.IterableWrapper(list(BatchSampler(SequentialSampler(data), BATCH, drop_last=False)))
    mapper = of.ParallelMapper(batches, _Fetch(data), num_workers=2, method=method)
    return timed(of.Loader(of.Prefetcher(mapper, prefetch_factor=2)), length, 1)


class _Fetch:
    """Makes the batch of some indices."""

    def __init__(self, data: Decoded) -> None:
        self.data = data

    def __call__(self, indices: list[int]) -> Any:
        return default_collate([self.data[index] for index in indices])


class _Sample:
    """Makes the sample of an index, for those who batch arrays."""

    def __init__(self, data: Decoded) -> None:
        self.data = data

    def __call__(self, index: int) -> Any:
        return self.data[index].numpy()


def grain(length: int, floats: int, turns: int, processes: bool) -> Measured:  # noqa: FBT001 - sent by place
    """Grain."""
    of = peer("grain")
    data = of.MapDataset.range(length).map(_Sample(Decoded(length, floats, turns)))
    threads = of.ReadOptions(num_threads=0 if processes else 2, prefetch_buffer_size=0 if processes else 2 * BATCH)
    batches = data.to_iter_dataset(threads).batch(BATCH)
    if processes:
        peer("absl.flags").FLAGS(["bench"], known_only=True)
        batches = batches.mp_prefetch(of.MultiprocessingOptions(num_workers=2))
    return timed(batches, length, 1)


def spdl(length: int, floats: int, turns: int) -> Measured:
    """SPDL: two threads."""
    return timed(_Spdl(Decoded(length, floats, turns)), length, 1)


class _Spdl:
    """A pipeline anew for each epoch, as it cannot be run again."""

    def __init__(self, data: Decoded) -> None:
        self.data = data

    def __iter__(self) -> Any:
        builder = peer("spdl.pipeline").PipelineBuilder().add_source(range(len(self.data)))
        builder = builder.pipe(self.data.__getitem__, concurrency=2).aggregate(BATCH).pipe(default_collate)
        pipeline = builder.add_sink(4).build(num_threads=2)
        with pipeline.auto_stop():
            yield from pipeline


def tables(*, small: bool, folder: Path) -> Sequence[Table]:
    """Small and large samples."""
    found = []
    for kilobytes, length in ((12, 6_400), (588, 1_600)):
        floats = kilobytes * 256
        args = (200 if small else length, floats, turns_for(floats))
        contenders = (
            Contender(LIMIT, "limit", bare, args),
            Contender(KEPT, "limit", bare, (*args, _stack)),
            Contender("tdi.DataLoader, 2 workers", "ours", drop_in, args),
            Contender("distribute_dataset, 2 workers", "ours", distributed, args),
            Contender("DataLoader, 2 workers", "peer", torch_loader, args),
            Contender("torchdata nodes, 2 processes", "peer", nodes, (*args, "process"), ("torchdata",), once=True),
            Contender("torchdata nodes, 2 threads", "peer", nodes, (*args, "thread"), ("torchdata",), once=True),
            Contender("grain, 2 processes", "peer", grain, (*args, True), ("grain",), once=True),
            Contender("grain, 2 threads", "peer", grain, (*args, False), ("grain",), once=True),
            Contender("spdl, 2 threads", "peer", spdl, args, ("spdl",), once=True),
        )
        peers = tuple(contender.name for contender in contenders if contender.kind == "peer")
        aims = [(0.85, (LIMIT,))] if kilobytes == 12 else [(0.75, (LIMIT,)), (2.0, peers)]
        ours = [contender.name for contender in contenders if contender.kind == "ours"]
        targets = tuple(Target(STEADY, name, *aim) for name in ours for aim in aims)
        columns = (
            Column(STEADY, "more", rate("steady_samples", "steady_seconds")),
            Column(EPOCH, "more", rate("samples", "seconds")),
        )
        title = f"Decoding, samples of {kilobytes} KB"
        found.append(Table(title, columns, contenders, 1, 1 if small else 3, targets))
    return found
