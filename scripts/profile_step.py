"""Where the time of a step goes, part by part: of a ready one without read-ahead, of one from memory, and over ranks.

    python scripts/profile_step.py [--steps 3000] [--ranks 2] [--step-us 500] [--json FILE]

In one process each part is called by itself, in chunks of 50 calls; the least of the chunks counts, as the least is
what the machine can do when nothing else runs. Indented parts are within the one above. Over ranks: what the training
thread sees of ``next``, what all threads of a rank compute, votes, and an ``all_reduce`` in line beside them.
"""

# ruff: noqa: SLF001 - it measures the rooms of the house from inside
from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import torchdistinput as tdi
from torchdistinput.plan.step_agreement import StepReport, decide
from torchdistinput.sources.kernel.index_array import IndexArray
from torchdistinput.step_types import LocalStep, Start
from torchdistinput.testing import run_ranks

CHUNK = 50


def least_us(call: Callable[[], Any], steps: int) -> float:
    """Microseconds of a call, in the best chunk."""
    chunks = []
    for _ in range(max(1, steps // CHUNK)):
        began = time.perf_counter()
        for _ in range(CHUNK):
            call()
        chunks.append((time.perf_counter() - began) / CHUNK)
    return 1e6 * min(chunks)


def endless(batch: Any) -> Callable[[], Iterator[Any]]:
    """A dataset of one ready batch, again and again."""

    def batches() -> Iterator[Any]:
        while True:
            yield batch

    return batches


def one_process(steps: int) -> dict[str, float]:
    """The parts of a step with ``prefetch=0``, in microseconds."""
    batch = (torch.zeros(256, 16), torch.zeros(256, dtype=torch.int64))
    dataset = tdi.Strategy(devices=["cpu"]).distribute_dataset(endless(batch), tdi.InputOptions(prefetch=0))
    iterator = iter(dataset)
    for _ in range(2 * CHUNK):
        next(iterator)
    # The rooms of the house, as the iterator holds them.
    buffer, progress, elements = iterator._executor, iterator._progress, iterator._elements
    fetch, votes = buffer._upstream.draw.__self__, buffer._voter._votes  # type: ignore[attr-defined]
    stream = dataset._source.open(0, lambda call: call(), Start())
    row, sizes = [batch], (256,)
    sent = LocalStep([], sizes, row, global_size=256, rows=1)
    parts: dict[str, Callable[[], Any]] = {
        "next()": lambda: next(iterator),
        "  take: what the stages do": buffer.take,
        "    draw: the step, complete": fetch.draw,
        "      the source: read, cut and noted": stream.draw,
        "    settle: the decision of one rank": lambda: votes.settle(sent),
        "  bytes of the step": lambda: elements.num_bytes(256, row),
        "  progress and stats": lambda: progress.add(sent, 256, 1),
        "    a reading of the clock": time.perf_counter,
        "aside: a call of an empty function": lambda: None,
        "aside: making loader.step, when asked": lambda: iterator.step,
        "aside: stats()": dataset.stats,
        "aside: state_dict()": dataset.state_dict,
        "aside: the words of a report of 32 steps": lambda: StepReport((256,) * 32, digest=7).words(32),
        "aside: the decision from them": lambda: decide(words, 1),
    }
    words = StepReport((256,) * 32, digest=7).words(32)
    found = {name: least_us(call, steps) for name, call in parts.items()}
    iterator.close()
    return found


def in_memory(steps: int) -> dict[str, float]:
    """The parts of a step of 1024 shuffled rows of 64 float32 and a label, gathered from memory, in microseconds."""
    samples, size = 200_000, 1024
    x, y = torch.zeros(samples, 64), torch.arange(samples)
    data = TensorDataset(x, y)
    endless_order = RandomSampler(data, num_samples=10**12)
    dataset = tdi.Strategy(devices=["cpu"]).distribute_dataset(DataLoader(data, size, sampler=endless_order))
    iterator = iter(dataset)
    next(iterator)
    order = torch.randperm(samples)
    rows = IndexArray(order[:size].numpy())
    stream = iterator._executor._upstream.draw.__self__._stream  # type: ignore[attr-defined]
    draws, pieces = stream._draws, dataset._source._pieces  # type: ignore[attr-defined]
    starts = itertools.cycle(range(0, samples - size, size))

    def bare() -> None:
        start = next(starts)
        wanted = order[start : start + size]
        x.index_select(0, wanted)
        y.index_select(0, wanted)

    def gathered() -> None:
        start = next(starts)
        pieces[True, IndexArray(order.numpy()[start : start + size]), 0]

    def drawn() -> None:
        draws.take_row()
        draws.take_request()

    parts: dict[str, Callable[[], Any]] = {
        "the limit: index_select of the rows by hand": bare,
        "next()": lambda: next(iterator),
        "  the source": stream.draw,
        "    draw: the rows, and this rank's of them": drawn,
        "    gather": gathered,
        "aside: the digest of the rows, when asked": rows.digest,
    }
    found = {name: least_us(call, steps) for name, call in parts.items()}
    iterator.close()
    return found


def one_rank(steps: int, step_seconds: float, prefetch: int | None) -> dict[str, float]:
    """What one of several ranks sees, in microseconds a step."""
    torch.set_num_threads(1)
    strategy = tdi.Strategy(timeout_seconds=120)
    batch = torch.zeros(256, 16)
    dataset = strategy.distribute_dataset(lambda: iter([batch] * steps), tdi.InputOptions(prefetch=prefetch))
    iterator = iter(dataset)
    next(iterator)
    waits, computed = [], 0.0
    began, busy = time.perf_counter(), time.process_time()
    while True:
        asked, here = time.perf_counter(), time.thread_time()
        if next(iterator, None) is None:
            break
        waits.append(time.perf_counter() - asked)
        computed += time.thread_time() - here
        if step_seconds:
            time.sleep(step_seconds)
    took, busy = time.perf_counter() - began, time.process_time() - busy
    meter, depth = dataset.stats(), iterator._executor._depth
    votes = iterator._executor._voter._votes._channel.num_exchanges  # type: ignore[union-attr]
    one, counted = torch.zeros(1, dtype=torch.int64), min(steps, 300)
    reducing = time.perf_counter()
    for _ in range(counted):
        dist.all_reduce(one)
    reducing = (time.perf_counter() - reducing) / counted
    dataset.close()
    waits.sort()
    return {
        "next(), p50": 1e6 * waits[len(waits) // 2],
        "next(), mean": 1e6 * sum(waits) / len(waits),
        "next(), p95": 1e6 * waits[int(0.95 * len(waits))],
        "computed in next() by the training thread": 1e6 * computed / steps,
        "computed by all threads of the rank": 1e6 * busy / steps,
        "the step in all": 1e6 * took / steps,
        "reading": 1e6 * meter["seconds_reading"] / steps,
        "in votes, beside the training": 1e6 * meter["seconds_coordinating"] / steps,
        "votes a step": votes / steps,
        "steps read ahead at the end": float(depth),
        "an all_reduce in line": 1e6 * reducing,
        "all_reduce / the input's part of the step": reducing / max(1e-9, took / steps - step_seconds),
    }


def many_ranks(ranks: int, steps: int, step_seconds: float) -> dict[str, dict[str, float]]:
    """The first rank's figures, for a bare loop with ``prefetch=32`` and a training step with the default options."""
    cases: dict[str, tuple[float, int | None]] = {
        "prefetch=32, nothing but the loop": (0.0, 32),
        f"default options, a training step of {1e6 * step_seconds:.0f} us": (step_seconds, None),
    }
    return {name: run_ranks(ranks, one_rank, steps, *case, timeout_seconds=300)[0] for name, case in cases.items()}


def show(title: str, figures: dict[str, float]) -> None:
    """Prints a table."""
    print(f"\n{title}")
    for name, figure in figures.items():
        print(f"  {name:<48}{figure:>10.2f}")


def main(arguments: list[str]) -> dict[str, Any]:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000, help="steps of each measurement")
    parser.add_argument("--ranks", type=int, default=2, help="ranks; 1 leaves out what needs several")
    parser.add_argument("--step-us", type=float, default=500.0, help="the training step, in microseconds")
    parser.add_argument("--json", type=Path, help="writes the figures there too")
    asked = parser.parse_args(arguments)
    found: dict[str, Any] = {
        "one process, prefetch=0 (us)": one_process(asked.steps),
        "1024 rows from memory, one process (us)": in_memory(asked.steps),
    }
    if asked.ranks > 1:
        named = many_ranks(asked.ranks, asked.steps, asked.step_us / 1e6)
        found |= {f"{asked.ranks} ranks, {name} (us a step)": figures for name, figures in named.items()}
    for title, figures in found.items():
        show(title, figures)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
