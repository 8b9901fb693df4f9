"""A shuffled order over N samples: the time to the first batch, the memory, the cost of 1024 indices."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from torch.utils.data import RandomSampler

import torchdistinput as tdi
from benches.memory_use import peak_mib, reset_peak
from benches.model import Column, Contender, Measured, Table, Target, largest
from benches.peers import peer
from benches.timing import seconds_of

__all__ = ["tables"]

FIRST = "ms to the first 1024"
MEMORY = "MiB over the start"
EACH = "us per 1024, amortized"
BATCH = 1024
BLOCK = 65_536
OURS = "tdi.ShuffleSampler"
BLOCKS = "tdi.ShuffleSampler, in blocks"
"""Its first batch, as each epoch pays for it."""


def measured(order: Callable[[], Iterable[Any]], batches: int, batch: int = BATCH) -> Measured:
    """Of the second order that is made: what is made once for a process is there."""
    next(iter(order()))
    gc.collect()
    before = reset_peak()
    start = time.perf_counter()
    indices = iter(order())
    deque(islice(indices, batch), maxlen=0)
    first = time.perf_counter() - start
    each = seconds_of(lambda: deque(islice(indices, batch * batches), maxlen=0)) / batches
    return {"first": 1e3 * first, "memory": max(0.0, peak_mib() - before), "each": 1e6 * each * BATCH / batch}


def sampler(length: int, batches: int) -> Measured:
    """Ours, an index at a time, as a ``DataLoader`` takes it."""
    return measured(lambda: tdi.ShuffleSampler(length, seed=1), batches)


def in_blocks(length: int, batches: int) -> Measured:
    """Ours as arrays, as the library itself takes it."""
    blocks = max(1, min(batches * BATCH, length) // BLOCK)
    block = min(BLOCK, length)
    gc.collect()
    before = reset_peak()
    start = time.perf_counter()
    order = tdi.ShuffleSampler(length, seed=1).order(0)
    order.block(0, min(BATCH, length))
    first = time.perf_counter() - start
    drawn = (order.block(k * block, (k + 1) * block) for k in range(blocks))
    each = seconds_of(lambda: deque(drawn, maxlen=0)) / blocks  # each is used and dropped before the next
    return {"first": 1e3 * first, "memory": max(0.0, peak_mib() - before), "each": 1e6 * each * BATCH / block}


def torchs(length: int, batches: int) -> Measured:
    """torch's, which draws all of it."""
    return measured(lambda: RandomSampler(range(length)), batches)


def grain(length: int, batches: int) -> Measured:
    """Grain's."""
    return measured(lambda: peer("grain").MapDataset.range(length).shuffle(seed=1), batches)


def tables(*, small: bool, folder: Path) -> Sequence[Table]:
    """From a million to a million millions."""
    batches = 64 if small else 1024
    columns = (
        Column(FIRST, "less", largest("first")),
        Column(MEMORY, "less", largest("memory")),
        Column(EACH, "less", largest("each")),
    )
    bounds = (Target(FIRST, OURS, 10.0), Target(MEMORY, OURS, 16.0), Target(EACH, BLOCKS, 20.0))
    found = []
    for exponent in (4,) if small else (6, 7, 9, 12):
        length = 10**exponent
        contenders = [
            Contender(OURS, "ours", sampler, (length, batches)),
            Contender(BLOCKS, "ours", in_blocks, (length, batches)),
        ]
        if exponent <= 7:
            contenders.append(Contender("torch RandomSampler", "peer", torchs, (length, batches // 8)))
        if exponent <= 9:
            contenders.append(Contender("grain", "peer", grain, (length, 2), ("grain",)))
        title = f"A shuffled order over 10^{exponent} samples"
        found.append(Table(title, columns, tuple(contenders), 1, 1 if small else 3, bounds))
    return found
