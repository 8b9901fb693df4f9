"""What a step costs over thousands of ranks and 10^12 samples: the exchange, simulated; the plan, run as it is.

    python scripts/simulate.py [--latency-us 50] [--jitter 0.5] [--skew-us 100] [--json FILE]

**The exchange** (``coordination.recursive_doubling``): ``log2 W`` rounds, and two more where W is no power of
two. The reports and the decision are the real ones (``plan.step_agreement``); what is simulated is the network: each
message takes a latency with a lognormal jitter, and the ranks come to a vote at different times. The rounds go through
the schedule of the channels rank by rank, so a late rank delays those that depend on it and no others. Beside it the
ring that gloo's all_reduce is, ``2 (W - 1)`` rounds. A vote covers one step at ``prefetch=2`` and half of the steps
ahead at ``prefetch=32``.

**The plan**: each policy's arithmetic for one worker at W workers, in this process, with its own memory: which files,
which rows of a batch, which indices of a shuffled order. Nothing is simulated there.

A rank is connected with those that it exchanges messages with: the most are shown, for each live iterator. Beside the
votes, every 64 rows the ranks tell each other where they stand, in a row of memory for each of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchdistinput.coordination.recursive_doubling import partners
from torchdistinput.pipeline.metrics import Metrics, StatsSync
from torchdistinput.plan.batching import Cutter, num_batches, split
from torchdistinput.plan.permutation import Permutation
from torchdistinput.plan.sharding import deal
from torchdistinput.plan.step_agreement import StepReport, decide, weight_of
from torchdistinput.plan.topology import Topology

WORLDS = (8, 12, 64, 512, 1000, 4096)
SAMPLES = 10**12
FILES = 10**6
PER_REPLICA = 32
SLOTS = 32
_ROW = len(StatsSync(Metrics(), None).mine(64)) + 64  # what a rank tells of itself, with longer numbers

Table = list[dict[str, Any]]
Words = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]


def doubling(words: Words, came: Seconds, latency: Callable[[int], Seconds]) -> tuple[Words, Seconds, int]:
    """All ranks through the schedule of ``ProcessGroupChannel``: their sums, when each has them, and the rounds.

    Args:
      words: ``(W, words)``, what each rank says.
      came: when each rank comes to the exchange.
      latency: of so many messages that are sent together, in seconds.
    """
    ranks = len(words)
    power = 1 << (ranks.bit_length() - 1)
    beyond = ranks - power
    sums, now, rounds = words.copy(), came.copy(), 0
    if beyond:
        sums[:beyond] += sums[power:]
        now[:beyond] = np.maximum(now[:beyond], now[power:] + latency(beyond))
        rounds += 1
    near = np.arange(power)
    distance = 1
    while distance < power:
        peer = near ^ distance
        arrives = now[peer] + latency(power)
        now[:power] = np.maximum(now[:power], arrives)
        sums[:power] = sums[:power] + sums[peer]
        distance *= 2
        rounds += 1
    if beyond:
        sums[power:] = sums[:beyond]
        now[power:] = np.maximum(now[power:], now[:beyond] + latency(beyond))
        rounds += 1
    return sums, now, rounds


def exchange(latency_us: float, jitter: float, skew_us: float, worlds: Sequence[int], votes: int = 20) -> Table:
    """The exchange at each world.

    Args:
      latency_us: of a message, at the median.
      jitter: sigma of its logarithm.
      skew_us: over how long the ranks come to a vote.
      worlds: numbers of ranks.
      votes: how many are simulated for each.
    """
    rng = np.random.default_rng(0)

    def latency(messages: int) -> Seconds:
        return 1e-6 * latency_us * rng.lognormal(0.0, jitter, messages)

    table: Table = []
    for ranks in worlds:
        reports = [StepReport((PER_REPLICA,) * SLOTS, digest=7, draw_digests=tuple(range(SLOTS))) for _ in range(ranks)]
        said = np.array([each.words(SLOTS, weight_of(r, ranks)) for r, each in enumerate(reports)], dtype=np.int64)
        took, rounds = [], 0
        for _ in range(votes):
            came = 1e-6 * skew_us * rng.random(ranks)
            sums, done, rounds = doubling(said, came, latency)
            decision = decide([int(word) for word in sums[ranks // 2]], ranks)
            if decision.steps != (PER_REPLICA * ranks,) * SLOTS or not (sums == sums[0]).all():
                raise AssertionError(f"{ranks} ranks did not agree: {decision}")
            took.append(done.max() - came.max())
        vote_us, ring_us = 1e6 * float(np.median(took)), 2 * (ranks - 1) * latency_us
        table.append(
            {
                "W": ranks,
                "rounds": rounds,
                "bytes sent by a rank": 8 * said.shape[1] * rounds,
                "us a vote, p50": vote_us,
                "us a vote, most": 1e6 * max(took),
                "us a step, prefetch 2": vote_us,
                "us a step, prefetch 32": vote_us / (SLOTS // 2),
                "us a ring all_reduce": ring_us,
                "connections of a rank": len(partners(0, ranks)),
                "bytes held by a rank": 2 * 8 * said.shape[1],
                "bytes told every 64 rows": _ROW * ranks,
            }
        )
    return table


def measured(work: Callable[[], Any], times: int = 5) -> tuple[float, int]:
    """Microseconds of a call, the least of some, and the bytes that it takes at most."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    tracemalloc.start()
    work()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return 1e6 * min(took), peak


def plans(topology: Topology) -> dict[str, tuple[Callable[[], Any], int]]:
    """For each policy the work of the plan for one worker, and over how many steps it is spread."""
    replicas = topology.num_replicas
    batch = PER_REPLICA * replicas
    order, last = Permutation(SAMPLES, 0, 0), num_batches(SAMPLES, batch) - 2
    shared, own = Cutter(topology, shared=True, global_batch_size=batch), Cutter(topology, False, batch)

    def piece_of_shuffled() -> Any:
        ((lo, hi),) = shared.rows(batch)[0]
        return order.at(np.arange(last * batch + lo, last * batch + hi))

    steps_of_batch = replicas // topology.replicas_per_worker
    return {
        "DATA: which rows of a global batch": (lambda: shared.rows(batch), 1),
        "DATA: a shuffled piece at the end, random access": (piece_of_shuffled, 1),
        "DATA: all indices of a shuffled batch, as an opaque sampler draws them": (
            lambda: order.block(last * batch, (last + 1) * batch).tolist(),
            1,
        ),
        "FILE, HINT, OFF: a batch of the worker's own, cut for all": (lambda: own.rows(batch), steps_of_batch),
        "FILE, HINT, OFF: a short batch at the end": (lambda: own.rows(batch - 1), steps_of_batch),
        "FILE: the worker's files of 10^6, once an epoch": (lambda: deal(range(FILES), replicas, topology.worker), 0),
        "any: the split of one replica": (lambda: split(batch, replicas, replicas - 1), 1),
    }


def plan(worlds: Sequence[int]) -> Table:
    """The plan at each world, for the last worker but one."""
    table: Table = []
    for workers in worlds:
        topology = Topology(num_workers=workers, replicas_per_worker=1, worker=workers - 2)
        for name, (work, steps) in plans(topology).items():
            took, peak = measured(work)
            per_step = took / steps if steps else None
            table.append({"W": workers, "plan": name, "us": took, "us a step": per_step, "peak KiB": peak / 1024})
    return table


def show(title: str, table: Table) -> None:
    """Prints it."""
    texts = [[_text(each) for each in row.values()] for row in table]
    heads = list(table[0])
    widths = [max(len(head), *(len(row[place]) for row in texts)) for place, head in enumerate(heads)]
    print(f"\n{title}")
    for row in [heads, *texts]:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def _text(cell: Any) -> str:
    return "once" if cell is None else f"{cell:.1f}" if isinstance(cell, float) else str(cell)


def main(arguments: list[str]) -> dict[str, Table]:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency-us", type=float, default=50.0, help="median latency of a message")
    parser.add_argument("--jitter", type=float, default=0.5, help="sigma of the logarithm of the latency")
    parser.add_argument("--skew-us", type=float, default=100.0, help="over how long ranks come to a vote")
    parser.add_argument("--worlds", type=int, nargs="+", default=list(WORLDS), help="numbers of ranks")
    parser.add_argument("--json", type=Path, help="writes the tables there too")
    asked = parser.parse_args(arguments)
    found = {
        "the exchange": exchange(asked.latency_us, asked.jitter, asked.skew_us, asked.worlds),
        f"the plan of a step, N = 10^12, {PER_REPLICA} samples a replica": plan(asked.worlds),
    }
    for title, table in found.items():
        show(title, table)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
