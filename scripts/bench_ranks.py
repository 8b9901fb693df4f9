#!/usr/bin/env python
"""What it costs many ranks on one machine to begin: sockets, seconds, requests at the store.

    python scripts/bench_ranks.py [--ranks 2 32 128] [--eager]

The ranks are forks of this process, which hosts the store, as torchrun does. Figures are of the rank with the most;
seconds hold for as many processors as there are here, and fall with more. ``--eager`` lets the default group connect
each rank with all others, as torch does by itself. ``requests`` are those of this library; ``keys`` is what torch and
this library left at the store for each rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from datetime import date
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch would like to know the name of this host

import torch
import torch.distributed as dist

import torchdistinput as tdi
from torchdistinput.coordination import launch, process_group
from torchdistinput.coordination import store as board

LONG_SECONDS = 300.0

Figures = dict[str, dict[str, float]]


class Counting:
    """A store, and how often it was asked."""

    requests = 0

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        asked = getattr(self._store, name)

        def ask(*args: Any) -> Any:
            Counting.requests += 1
            return asked(*args)

        return ask


def counted(prefix: str, store: Any) -> Any:
    """See ``board.prefixed``; what the library asks is counted, the part of torch's own group stays as it is."""
    part = board.prefixed(prefix, store)
    return part if prefix.endswith("/default_pg") else Counting(part)


def num_sockets() -> int:
    """Sockets of this process that are connected or listen."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            found += os.readlink(descriptor).startswith("socket:")
    return found


def measured(call: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What a call returns, and what it cost."""
    sockets, requests, began = num_sockets(), Counting.requests, time.perf_counter()
    result = call()
    cost = {"seconds": time.perf_counter() - began, "requests": Counting.requests - requests}
    return result, {**cost, "sockets": num_sockets() - sockets}


def rank_main(rank: int, world: int, port: int, pipe: Connection) -> None:
    """One rank: makes a strategy, distributes a dataset, and begins two epochs."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    torch.set_num_threads(1)
    process_group.prefixed = launch.prefixed = counted  # type: ignore[attr-defined]
    found: Figures = {}
    strategy, found["Strategy()"] = measured(lambda: tdi.Strategy(timeout_seconds=LONG_SECONDS))
    data = {"x": torch.arange(10 * world)}
    dataset, found["distribute_dataset"] = measured(lambda: strategy.distribute_dataset(data, global_batch_size=world))
    iterator, found["iter, the first"] = measured(lambda: iter(dataset))
    _, found["ten steps"] = measured(lambda: [None for _ in iterator])
    _, found["iter, later"] = measured(lambda: next(iter(dataset)))
    pipe.send(found)
    strategy.reduce("SUM", 1.0)  # nobody ends before all are done
    os._exit(0)


def run(world: int) -> tuple[Figures, float]:
    """The largest figures over the ranks, and the keys at the store for each rank."""
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    pipes = []
    for rank in range(world):
        receiving, sending = Pipe(duplex=False)
        if os.fork() == 0:
            try:
                rank_main(rank, world, store.port, sending)
            finally:
                os._exit(1)
        sending.close()
        pipes.append(receiving)
    told: list[Figures] = [pipe.recv() for pipe in pipes if pipe.poll(LONG_SECONDS)]
    keys = store.num_keys() / world
    for _ in range(world):
        os.wait()
    if len(told) != world:
        raise SystemExit(f"{world - len(told)} of {world} ranks failed")
    return {
        name: {figure: max(each[name][figure] for each in told) for figure in told[0][name]} for name in told[0]
    }, keys


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 32, 128])
    parser.add_argument("--eager", action="store_true", help="let the default group connect all with all")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    if options.eager:
        os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    print(
        f"{date.today()}, {os.cpu_count()} processors, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{sys.platform}"
    )
    everything = {}
    for world in options.ranks:
        figures, keys = run(world)
        everything[world] = {**figures, "keys": keys}
        print(f"\n{world} ranks; {keys:.1f} keys at the store for each")
        for name, cost in figures.items():
            print(
                f"  {name:20} {cost['seconds']:8.3f} s {cost['requests']:6.0f} requests {cost['sockets']:6.0f} sockets"
            )
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
