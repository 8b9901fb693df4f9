"""How much of the host-to-device copy hides behind the computation: this library beside three loops written by hand.

For batches of 1 to 256 MB: the bare pinned copy, the computation alone (tuned to last about as long), and the time of a
step with each loop, in ms and as a multiple of max(copy, compute), which no loop can beat:

    naive    batch.to(device)
    pinned   batch.pin_memory().to(device, non_blocking=True), on one stream
    side     by hand: the next batch on a side stream while this one computes, with record_stream
    library  Transfer with a background thread, two steps ahead
    ready    the same from batches that are pinned already; the others start from pageable memory

First it checks the library's data there: batches of changing size, kept and dropped at random. Needs an accelerator.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from torchdistinput.backends.devices import make_copier, resolve_devices, set_current
from torchdistinput.stages.transfer import Transfer

SIZES_MB = (1, 4, 16, 64, 256)
STEPS = 40

Loop = Callable[[Iterable[torch.Tensor], torch.device], Iterator[torch.Tensor]]


def _side(batches: Iterable[torch.Tensor], device: torch.device) -> Iterator[torch.Tensor]:
    stream, consumer = torch.Stream(device), torch.accelerator.current_stream(device)

    def start(batch: torch.Tensor) -> torch.Tensor:
        torch.accelerator.set_stream(stream)
        copied = batch.pin_memory().to(device, non_blocking=True)
        torch.accelerator.set_stream(consumer)
        return copied

    coming: torch.Tensor | None = None
    for batch in [*batches, None]:
        current, ready = coming, stream.record_event()
        coming = None if batch is None else start(batch)
        if current is not None:
            consumer.wait_event(ready)
            current.record_stream(consumer)
            yield current


def _library(batches: Iterable[torch.Tensor], device: torch.device) -> Iterator[torch.Tensor]:
    transfer = Transfer([make_copier(device)])
    ready: queue.Queue[object] = queue.Queue(2)

    def send() -> None:
        transfer.enter_thread()
        for batch in batches:
            ready.put(transfer.send([batch]))
        ready.put(None)

    thread = threading.Thread(target=send)
    thread.start()
    while True:
        transfer.begin_step()
        parcels = ready.get()
        if not isinstance(parcels, list):
            break
        yield transfer.hand_over(parcels)[0]
    thread.join()
    transfer.close()


def _seconds_per_call(call: Callable[[], object], device: torch.device, calls: int = 10) -> float:
    call()  # warm: allocators, kernels
    torch.accelerator.synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.accelerator.synchronize(device)
    return (time.perf_counter() - start) / calls


def _epoch(loop: Loop, batches: list[torch.Tensor], device: torch.device, compute: Callable[[], None]) -> None:
    for batch in loop(batches, device):
        batch[:1024].sum()  # a step depends on its batch
        compute()


def _multiply(square: torch.Tensor, times: int) -> None:
    for _ in range(times):
        torch.mm(square, square)


def _check(device: torch.device) -> None:
    """The sums of 300 batches of changing size; some are kept for a while, and scratch memory is written in between."""
    rng = random.Random(0)
    sizes = [rng.choice([1 << 10, 1 << 16, 1 << 20]) for _ in range(300)]
    kept: list[tuple[int, torch.Tensor]] = []
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    host = (torch.full((size,), step, dtype=torch.int64) for step, size in enumerate(sizes))
    for step, batch in enumerate(_library(host, device)):
        kept.append((step, batch))
        torch.full((rng.choice(sizes),), -1, dtype=torch.int64, device=device)
        for number, tensor in kept:
            wrong += (tensor != number).sum()
        if len(kept) > 4:
            kept.pop(rng.randrange(len(kept)))
    print(f"check: {int(wrong)} wrong values in {len(sizes)} batches")
    if int(wrong):
        raise SystemExit("the library delivered wrong data")


def main() -> None:
    """Checks, measures, prints."""
    if not torch.accelerator.is_available():
        print("bench_device: no accelerator here, nothing measured.")
        return
    device = resolve_devices(None, 0)[0]
    set_current(device)
    _check(device)
    loops: dict[str, Loop] = {
        "naive": lambda batches, device: (batch.to(device) for batch in batches),
        "pinned": lambda batches, device: (batch.pin_memory().to(device, non_blocking=True) for batch in batches),
        "side": _side,
        "library": _library,
        "ready": _library,
    }
    print(f"{device}, torch {torch.__version__}, {STEPS} steps; ms per step (multiple of max(copy, compute))")
    print("   MB   GB/s    copy compute" + "".join(f"{name:>18}" for name in loops))
    square = torch.randn(2048, 2048, device=device)
    one = _seconds_per_call(lambda: square @ square, device, calls=50)
    for megabytes in SIZES_MB:
        host = [torch.randint(0, 9, (megabytes * 250_000,), dtype=torch.int32) for _ in range(4)]
        page_locked = [batch.pin_memory() for batch in host]
        target = torch.empty_like(host[0], device=device)
        copy = _seconds_per_call(partial(target.copy_, page_locked[0], non_blocking=True), device)
        compute = partial(_multiply, square, max(1, round(copy / one)))
        computing = _seconds_per_call(compute, device)
        row = f"{megabytes:5d} {megabytes / copy / 1e3:6.1f} {copy * 1e3:7.2f} {computing * 1e3:7.2f}"
        for name, loop in loops.items():
            batches = (page_locked if name == "ready" else host) * (STEPS // 4)
            step = _seconds_per_call(partial(_epoch, loop, batches, device, compute), device, calls=1) / STEPS
            row += f"{step * 1e3:10.2f} ({step / max(copy, computing):4.1f}x)"
        print(row, flush=True)


if __name__ == "__main__":
    main()
