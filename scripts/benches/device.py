"""To the device: how much of the copy hides behind the computation, beside loops by hand. Needs an accelerator."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

import torchdistinput as tdi
from benches.model import Column, Contender, Measured, Table, Target, largest

__all__ = ["tables"]

STEP = "step over max(copy, compute)"
BANDWIDTH = "of the bare pinned bandwidth, nothing computed"
GROWTH = "MiB more reserved after 1,000 steps"
WRONG = "wrong values in 300 batches"
MILLISECONDS = "ms a step"
SIZES_MB = (1, 4, 16, 64, 256)
STEPS = 40
MANY_STEPS = 1_000

Batch = dict[str, torch.Tensor]
Loop = Callable[[Iterable[Batch], torch.device], Iterator[Batch]]


def naive(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """``.to``."""
    return ({name: leaf.to(device) for name, leaf in batch.items()} for batch in batches)


def pinned(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Pinned and ``non_blocking``, on one stream."""
    return (_moved(batch, device) for batch in batches)


def _moved(batch: Batch, device: torch.device) -> Batch:
    return {name: leaf.pin_memory().to(device, non_blocking=True) for name, leaf in batch.items()}


def side_stream(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """By hand: the next batch on a side stream while this one computes, with ``record_stream``."""
    stream, consumer = torch.Stream(device), torch.accelerator.current_stream(device)
    coming: Batch | None = None
    for batch in [*batches, None]:
        current, ready = coming, stream.record_event()
        torch.accelerator.set_stream(stream)
        coming = None if batch is None else _moved(batch, device)
        torch.accelerator.set_stream(consumer)
        if current is not None:
            consumer.wait_event(ready)
            for leaf in current.values():
                leaf.record_stream(consumer)
            yield current


def ours(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """The library at default options."""
    with tdi.Strategy([device]).distribute_dataset(list(batches)) as dataset:
        yield from dataset


def host_batches(megabytes: int, leaves: int, *, page_locked: bool) -> list[Batch]:
    """Four batches, of so many leaves."""
    each = megabytes * 250_000 // leaves
    batches = [{f"{leaf}": torch.randint(0, 9, (8, each // 8), dtype=torch.int32) for leaf in range(leaves)}] * 4
    return [{name: leaf.pin_memory() if page_locked else leaf.clone() for name, leaf in one.items()} for one in batches]


def seconds_per_call(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """With the device at rest before and after."""
    call()  # warm: allocators, kernels
    torch.accelerator.synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.accelerator.synchronize(device)
    return (time.perf_counter() - start) / calls


def epoch(loop: Loop, batches: list[Batch], device: torch.device, compute: Callable[[], None]) -> None:
    """Steps that depend on their batches."""
    for batch in loop(batches, device):
        next(iter(batch.values()))[0].sum()
        compute()


def multiply(square: torch.Tensor, times: int) -> None:
    """The training step."""
    for _ in range(times):
        torch.mm(square, square)


def measured(loop: Loop, megabytes: int, leaves: int, page_locked: bool) -> Measured:  # noqa: FBT001 - sent by place
    """A step beside a computation that lasts about as long as the copy; and with none."""
    device = accelerator()
    host = host_batches(megabytes, leaves, page_locked=page_locked)
    whole = torch.empty(megabytes * 1_000_000, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(whole, device=device)
    copy = seconds_per_call(partial(target.copy_, whole, non_blocking=True), device, 20)
    square = torch.randn(2048, 2048, device=device)
    one = seconds_per_call(partial(multiply, square, 1), device, 50)
    compute = partial(multiply, square, max(1, round(copy / one)))
    computing = seconds_per_call(compute, device, 20)
    steps = host * (STEPS // len(host))
    step = seconds_per_call(partial(epoch, loop, steps, device, compute), device, 2) / STEPS
    alone = seconds_per_call(partial(epoch, loop, steps, device, _nothing), device, 2) / STEPS
    return {"ms": 1e3 * step, "over": step / max(copy, computing), "bandwidth": copy / alone}


def _nothing() -> None:
    pass


def accelerator() -> torch.device:
    """The one of this machine."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        raise RuntimeError("there is no accelerator here")
    return device


def kept(loop: Loop) -> Measured:
    """The memory that the allocator holds more, over steps of changing size; and whether the data is right.

    Some batches are kept for a while, and scratch memory is written in between.
    """
    device = accelerator()
    rng = random.Random(0)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    hosts = (
        {f"{leaf}": torch.full((4, rng.choice([1, 1 << 8, 1 << 14])), step) for leaf in range(16)}
        for step in range(300)
    )
    held: list[tuple[int, Batch]] = []
    for step, batch in enumerate(loop(list(hosts), device)):
        held.append((step, batch))
        torch.full((rng.choice([1, 1 << 18]),), -1, device=device)
        for number, each in held:
            for leaf in each.values():
                wrong += (leaf != number).sum()
        if len(held) > 4:
            held.pop(rng.randrange(len(held)))
    held.clear()
    return {"wrong": float(wrong), **growth(loop, device)}


def growth(loop: Loop, device: torch.device) -> Measured:
    """Of the memory that the allocator holds, over steps of changing size."""
    hosts = [host_batches(megabytes, 64, page_locked=False)[0] for megabytes in (1, 2, 4, 8)]
    epoch(loop, hosts * 32, device, _nothing)
    before = torch.accelerator.memory_reserved(device)
    epoch(loop, (hosts * MANY_STEPS)[:MANY_STEPS], device, _nothing)
    return {"mib": (torch.accelerator.memory_reserved(device) - before) / 2**20}


LOOPS: dict[str, tuple[Loop, bool]] = {
    "distribute_dataset": (ours, False),
    "distribute_dataset, of pinned batches": (ours, True),
    "naive .to": (naive, False),
    "pinned, non_blocking, one stream": (pinned, False),
    "side stream by hand": (side_stream, False),
}


def tables(*, small: bool, folder: Path) -> Sequence[Table]:
    """Batches of 1 to 256 MB, of one leaf and of many; none where there is no accelerator."""
    if not torch.accelerator.is_available():
        return []
    columns = (
        Column(STEP, "less", largest("over")),
        Column(BANDWIDTH, "more", largest("bandwidth")),
        Column(MILLISECONDS, "less", largest("ms")),
    )
    found = []
    for megabytes in SIZES_MB[:1] if small else SIZES_MB:
        for leaves in (1, 256):
            contenders = tuple(
                Contender(
                    name, "ours" if loop is ours else "before", measured, (loop, megabytes, leaves, locked), fresh=False
                )
                for name, (loop, locked) in LOOPS.items()
            )
            best = "distribute_dataset, of pinned batches"
            targets = (Target(STEP, best, 1.05), Target(BANDWIDTH, best, 0.95))
            title = f"To the device: {megabytes} MB in {leaves} {'leaf' if leaves == 1 else 'leaves'}"
            found.append(Table(title, columns, contenders, 1, 1 if small else 3, targets))
    growing = tuple(
        Contender(name, "ours" if loop is ours else "before", kept, (loop,))
        for name, (loop, locked) in LOOPS.items()
        if not locked
    )
    both = (Column(GROWTH, "less", largest("mib")), Column(WRONG, "less", largest("wrong")))
    bounds = tuple(Target(column.name, "distribute_dataset", 0.0) for column in both)
    found.append(Table("To the device: memory", both, growing, 1, 1, bounds))
    return found
