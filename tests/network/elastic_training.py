"""A training that agents of torchelastic start on each host; it writes down what it reads, and may end on the way.

``elastic_training.py FOLDER GROUP SECONDS [HOW RANK STEP]``: ``GROUP`` is ``own`` where the script makes the default
group, a step takes so many seconds, and that rank ends in that way, once, after that step of the first epoch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import torchdistinput as tdi

EPOCHS, SAMPLES, BATCH, SAVE_EVERY = 2, 203, 16, 2


def end(how: str, folder: Path) -> None:
    mark = folder / "ended"
    if mark.exists():
        return
    mark.touch()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(7)
    raise ZeroDivisionError


def main() -> None:
    folder, group, seconds, *ending = sys.argv[1:]
    out = Path(folder)
    if group == "own":
        dist.init_process_group("gloo")
    strategy = tdi.Strategy(["cpu"], timeout_seconds=30)
    torch.manual_seed(7)
    loader = strategy.distribute_dataset(DataLoader(list(range(SAMPLES)), batch_size=BATCH, shuffle=True))  # type: ignore[arg-type]
    checkpoint, first = out / "checkpoint.json", 0
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        loader.load_state_dict(saved["loader"])
        first = saved["epoch"]
    with (out / f"rows-{os.uname().nodename}-{os.getpid()}.jsonl").open("a") as log:
        for epoch in range(first, EPOCHS):
            for x in loader:
                step = loader.step.index
                row = {"epoch": epoch, "step": step, "rank": strategy.rank, "world": strategy.world_size}
                print(json.dumps({**row, "ids": x.tolist(), "time": time.time()}), file=log, flush=True)
                time.sleep(float(seconds))
                strategy.reduce("SUM", torch.ones(1))
                if step % SAVE_EVERY == 0:
                    save(checkpoint, strategy, loader, epoch)
                if ending and (epoch, step, strategy.rank) == (0, int(ending[2]), int(ending[1])):
                    end(ending[0], out)
            save(checkpoint, strategy, loader, epoch + 1)


def save(checkpoint: Path, strategy: tdi.Strategy, loader: tdi.DistributedDataset, epoch: int) -> None:
    state = {"loader": loader.state_dict(), "epoch": epoch}
    if strategy.rank == 0:
        begun = checkpoint.with_suffix(".tmp")
        begun.write_text(json.dumps(state))
        begun.replace(checkpoint)


if __name__ == "__main__":
    main()
