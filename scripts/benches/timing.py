"""Clocks: how an epoch, its steps, and the waits in it are timed."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["calibrated", "epochs", "meet", "seconds_of", "steps", "waits"]


def meet() -> None:
    """All ranks begin together."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def seconds_of(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def epochs(loader: Iterable[Any], count: Callable[[Any], int], *, repeats: int, steps_ahead: int) -> dict[str, float]:
    """Whole epochs, the start included; the first one is counted, and timed by itself.

    Args:
      loader: is iterated anew for each epoch.
      count: the samples of a batch.
      repeats: how many epochs are timed; their medians count.
      steps_ahead: after so many steps the figures of the steady state begin.

    Returns:
      ``samples`` and ``seconds`` of an epoch, ``first``, the seconds of the first one, and of the steady part of an
      epoch ``steady_samples`` and ``steady_seconds``.
    """
    meet()
    start = time.perf_counter()
    sizes = [count(batch) for batch in loader]
    first = time.perf_counter() - start
    whole, steady = [], []
    for _ in range(repeats):
        meet()
        start = time.perf_counter()
        batches = iter(loader)
        deque(islice(batches, steps_ahead), maxlen=0)
        middle = time.perf_counter()
        deque(batches, maxlen=0)
        end = time.perf_counter()
        whole.append(end - start)
        steady.append(end - middle)
    return {
        "samples": sum(sizes),
        "seconds": statistics.median(whole),
        "first": first,
        "steady_samples": sum(sizes[steps_ahead:]),
        "steady_seconds": statistics.median(steady),
    }


def steps(batches: Iterator[Any], number: int, *, warm: int) -> dict[str, float]:
    """So many steps with nothing in between, after some that are not timed; ``us`` of a step in the median chunk."""
    deque(islice(batches, warm), maxlen=0)
    meet()
    chunk = max(1, number // 40)
    found = [seconds_of(lambda: deque(islice(batches, chunk), maxlen=0)) for _ in range(number // chunk)]
    return {"us": 1e6 * statistics.median(found) / chunk}


def waits(batches: Iterator[Any], number: int, train: Callable[[], object], *, warm: int) -> dict[str, float]:
    """What ``next`` takes beside a training step: ``us``, the median, and ``us_99``."""
    found = []
    for step in range(warm + number):
        start = time.perf_counter()
        next(batches)
        if step >= warm:
            found.append(time.perf_counter() - start)
        train()
    found.sort()
    return {"us": 1e6 * statistics.median(found), "us_99": 1e6 * found[len(found) * 99 // 100]}


def calibrated(seconds: float) -> Callable[[], object]:
    """A training step on the CPU that takes about so long where nothing else runs; it releases the interpreter."""
    square = torch.rand(64, 64)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(square, square)

    multiply(100)
    once = min(seconds_of(lambda: multiply(50)) for _ in range(5)) / 50
    return lambda: multiply(max(1, round(seconds / once)))
