"""A step beside max(copy, compute) and beside the peers' loops, with a kernel of a known length; and the bare copy."""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import torchdistinput as tdi
from gpu.accelerator import Figures, busy, device, is_real, milliseconds_of

__all__ = ["run"]

_SECONDS = 140.0  # after which no further input is begun
_LEAST_MS = 2.0  # of the kernel: a training step is not shorter
_OVER_LIMIT, _OVER_BEST, _BANDWIDTH = 1.05, 1.02, 0.95

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Input:
    """Batches, and how they come.

    Args:
      megabytes: of each batch.
      leaves: tensors in it.
      num_workers: loader workers; 0: four batches that lie in memory, in turn.
      seconds: how long a loader worker takes for a batch.
    """

    megabytes: int
    leaves: int
    num_workers: int = 0
    seconds: float = 0.0

    def batch(self, number: int) -> Batch:
        """float32, (8, ...) each; one leaf is a batch of images."""
        if self.leaves == 1:
            side = 64
            return {
                "0": torch.full((self.megabytes * 1_000_000 // (3 * side * side * 4), 3, side, side), float(number))
            }
        each = self.megabytes * 250_000 // self.leaves // 8
        return {f"{leaf}": torch.full((8, each), float(number)) for leaf in range(self.leaves)}

    def __str__(self) -> str:
        source = f"{self.num_workers} loader workers" if self.num_workers else "in process"
        late = ", just in time" if self.seconds else ""
        return f"{self.megabytes} MB in {self.leaves} leaves, {source}{late}"


@lru_cache(maxsize=1)
def batches_of(of: Input) -> list[Batch]:
    """Four batches; those that lie in memory are pinned before the clock starts, for everybody."""
    batches = [of.batch(each) for each in range(4)]
    return batches if of.num_workers else [{name: leaf.pin_memory() for name, leaf in each.items()} for each in batches]


class Batches(Dataset[Batch]):
    """Four batches in turn."""

    def __init__(self, of: Input, number: int) -> None:
        self._batches = batches_of(of)
        self._number = number
        self._seconds = of.seconds
        self._in_worker = of.num_workers > 0

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> Batch:
        time.sleep(self._seconds)
        batch = self._batches[index % 4]
        # A loader worker that sends the same tensors again would send memory that is shared already.
        return {name: leaf.clone() for name, leaf in batch.items()} if self._in_worker else batch


def ours(of: Input, number: int, where: torch.device) -> Iterator[Batch]:
    """The library at default options."""
    with tdi.Strategy([where]).distribute_dataset(_loader(of, number, pin_memory=False)) as dataset:
        yield from dataset


def pin_memory(of: Input, number: int, where: torch.device) -> Iterator[Batch]:
    """The loader of torch with ``pin_memory=True``, and ``.to(non_blocking=True)``."""
    return (_moved(batch, where) for batch in _loader(of, number, pin_memory=True))


def apex(of: Input, number: int, where: torch.device) -> Iterator[Batch]:
    """As apex's example: the next batch on a side stream while this one computes, with ``record_stream``."""
    stream, consumer = torch.Stream(where), torch.accelerator.current_stream(where)
    coming: Batch | None = None
    for batch in _and_end(_loader(of, number, pin_memory=True)):
        current, ready = coming, stream.record_event()
        torch.accelerator.set_stream(stream)
        coming = None if batch is None else _moved(batch, where)
        torch.accelerator.set_stream(consumer)
        if current is not None:
            consumer.wait_event(ready)
            for leaf in current.values():
                leaf.record_stream(consumer)
            yield current


def timm(of: Input, number: int, where: torch.device) -> Iterator[Batch]:
    """The ``PrefetchLoader`` of timm, for batches of images."""
    from timm.data.loader import PrefetchLoader  # type: ignore[import-not-found] # noqa: PLC0415 - not everywhere

    loader = _loader(of, number, pin_memory=True, collate_fn=_image_and_target)
    prefetching = PrefetchLoader(loader, mean=(0.0, 0.0, 0.0), std=(1 / 255, 1 / 255, 1 / 255), device=where)
    return ({"0": image} for image, _ in prefetching)


def accelerate(of: Input, number: int, where: torch.device) -> Iterator[Batch]:
    """What accelerate's ``prepare`` returns, with ``non_blocking=True``."""
    from accelerate import Accelerator  # noqa: PLC0415 - not everywhere
    from accelerate.utils import DataLoaderConfiguration  # noqa: PLC0415

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True))
    found: Iterator[Batch] = iter(accelerator.prepare(_loader(of, number, pin_memory=True)))
    return found


def _image_and_target(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return batch["0"], torch.zeros(len(batch["0"]), dtype=torch.int64)


def _moved(batch: Batch, where: torch.device) -> Batch:
    return {name: leaf.to(where, non_blocking=True) for name, leaf in batch.items()}


def _and_end(batches: Iterable[Batch]) -> Iterator[Batch | None]:
    yield from batches
    yield None


def _loader(of: Input, number: int, *, pin_memory: bool, **settings: Any) -> Any:
    """The loader of torch over the batches; those in memory are pinned already."""
    pin_memory = pin_memory and of.num_workers > 0
    return DataLoader(
        Batches(of, number), batch_size=None, num_workers=of.num_workers, pin_memory=pin_memory, **settings
    )


Loop = Callable[[Input, int, torch.device], Iterator[Batch]]
PEERS: dict[str, Loop] = {"pin_memory": pin_memory, "apex": apex, "timm": timm, "accelerate": accelerate}


def _ms_a_step(loop: Loop, of: Input, steps: int, where: torch.device, kernel: Callable[[], None]) -> float:
    """Steps that read their batch, in the middle of an epoch."""
    warm = min(8, steps // 2)
    batches = loop(of, warm + steps + 4, where)
    wrong = torch.zeros((), dtype=torch.int64, device=where)

    def epoch(first: int, number: int) -> None:
        for step, batch in enumerate(islice(batches, number)):
            leaf = next(iter(batch.values()))
            wrong.add_((leaf.reshape(-1)[:1] * (255 if loop is timm else 1) != (first + step) % 4).sum())
            kernel()

    epoch(0, warm)
    torch.accelerator.synchronize(where)
    start = time.perf_counter()
    epoch(warm, steps)
    torch.accelerator.synchronize(where)
    found = 1e3 * (time.perf_counter() - start) / steps
    list(batches)
    if int(wrong) and loop is ours:
        raise RuntimeError(f"{of}: {int(wrong)} batches were not those of their steps")
    return found


def _copy_ms(of: Input, where: torch.device) -> float:
    host = torch.empty(of.megabytes * 1_000_000, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(host, device=where)
    return milliseconds_of(lambda: target.copy_(host, non_blocking=True), where, 20)


def compare(of: Input, where: torch.device, spin: Callable[[float], None], *, rounds: int) -> Figures:
    """Ours beside the peers that are here, in turns."""
    copy = _copy_ms(of, where)
    compute = max(copy, _LEAST_MS)
    if of.num_workers and not of.seconds:  # the loader workers, not the device, are the limit of large batches
        compute = max(compute, 1.2 * _ms_a_step(pin_memory, of, 8, where, lambda: None))
    if of.seconds:
        compute = max(compute, 1e3 * of.seconds / of.num_workers)
    asked, compute = compute, milliseconds_of(partial(spin, compute), where, 20)
    steps = max(10, min(100, round(400 / compute)))
    loops = {"ours": ours, **{name: loop for name, loop in PEERS.items() if _is_here(name, of)}}
    found: dict[str, list[float]] = {name: [] for name in loops}
    failures = {}
    for round_number in range(rounds):
        for name, loop in loops.items():
            if name in failures:
                continue
            print(f"{of}: round {round_number + 1}: {name}", file=sys.stderr, flush=True)
            try:
                found[name].append(_ms_a_step(loop, of, steps, where, partial(spin, asked)))
            except Exception as error:
                if loop is ours:
                    raise
                failures[name] = f"{type(error).__name__}: {error}"[:200]
    medians = {name: statistics.median(each) for name, each in found.items() if each}
    best = min((ms for name, ms in medians.items() if name != "ours"), default=medians["ours"])
    limit = max(copy, compute)
    return {
        "input": str(of),
        "copy_ms": copy,
        "compute_ms": compute,
        "ms": medians,
        "over_limit": medians["ours"] / limit,
        "over_best": medians["ours"] / best,
        "failures": failures,
        "met": medians["ours"] / limit <= _OVER_LIMIT and medians["ours"] / best <= _OVER_BEST,
    }


def _is_here(name: str, of: Input) -> bool:
    if name in ("timm", "accelerate") and importlib.util.find_spec(name) is None:
        return False
    return name != "timm" or of.leaves == 1


def inputs(small: bool) -> list[Input]:  # noqa: FBT001 - as all parts
    """1 to 256 MB, in 1 to 256 leaves, from memory, from loader workers, and just in time."""
    if small:
        return [Input(1, 114), Input(1, 1, 2)]
    memory = [Input(megabytes, leaves) for megabytes in (1, 16, 256) for leaves in (1, 114, 256)]
    return [*memory, Input(16, 1, 4), Input(16, 1, 4, 0.02), Input(16, 114, 4), Input(64, 1, 4)]


def run(small: bool) -> Figures:  # noqa: FBT001 - as all parts
    """Each input, and the bare copy of 256 MB."""
    where = device()
    if not is_real(where):
        for of in inputs(small):
            _ms_a_step(ours, of, 6, where, lambda: None)
        return {"ok": True, "left_out": "a simulated accelerator has no time"}
    spin = busy(where)
    bare = {}
    for megabytes in (16, 64, 256):
        of = Input(megabytes, 1)
        bare[f"{megabytes} MB"] = _copy_ms(of, where) / _ms_a_step(ours, of, 60, where, lambda: None)
    found, until, wanted = [], time.monotonic() + _SECONDS, inputs(small)
    while wanted and time.monotonic() < until:
        found.append(compare(wanted.pop(0), where, spin, rounds=2))
    return {
        "steps": found,
        "no_time_for": [str(each) for each in wanted],
        "of_bare_copy": bare,
        "ok": True,
        "met": not wanted and all(each["met"] for each in found) and bare["256 MB"] >= _BANDWIDTH,
    }
