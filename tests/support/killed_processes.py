"""``examples/elastic.py`` in processes that die by SIGKILL where the test wants it; started again by torchrun.

``killed_processes.py WORLD RESTARTS ...`` starts so many processes as ``torchrun --standalone`` does, but by a fork:
they need not import torch. The environment names a file with the deaths, as JSON: ``[place, at, rank]``, each once:

- ``["logged", step, rank]``: right after that rank wrote down that step, counted over the epochs;
- ``["saving", count, 0]``: with half of that attempt's checkpoint of that number on the disk;
- ``["reading", index, None]``: whoever reads that sample.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import elastic
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

DEATHS = "DEATHS"
STEPS_PER_EPOCH = -(-elastic.NUM_POINTS // elastic.GLOBAL_BATCH)


def mark_of(plan: Path, number: int) -> Path:
    """The file that says that a death was died."""
    return plan.with_suffix(f".{number}")


def die_at(place: str, at: int) -> None:
    plan = Path(os.environ[DEATHS])
    for number, (its_place, its_at, rank) in enumerate(json.loads(plan.read_text())):
        mine = (its_place, its_at) == (place, at) and rank in (None, int(os.environ["RANK"]))
        if mine and not mark_of(plan, number).exists():
            mark_of(plan, number).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train() -> None:
    write_line, read, save, count = elastic.write_line, elastic.Points.__getitem__, torch.save, itertools.count(1)

    def write_line_and_die(log: Any, step: Any, index: torch.Tensor) -> None:
        write_line(log, step, index)
        die_at("logged", step.epoch * STEPS_PER_EPOCH + step.index)

    def read_and_die(points: Any, index: int) -> Any:
        die_at("reading", index)
        return read(points, index)

    def save_and_die(content: Any, file: Any) -> None:
        file.write(b"half")
        file.flush()
        die_at("saving", next(count))
        file.seek(0)
        save(content, file)

    torch.save = save_and_die  # type: ignore[assignment]
    elastic.write_line = write_line_and_die
    elastic.Points.__getitem__ = read_and_die  # type: ignore[method-assign]
    elastic.main()


def main() -> None:
    world, restarts = (int(sys.argv.pop(1)) for _ in range(2))
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        max_restarts=restarts,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="killed",
        start_method="fork",
    )
    elastic_launch(launch, train)()


if __name__ == "__main__":
    main()
