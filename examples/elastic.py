"""Training that goes on where it was: after a crash, and on another number of processes.

    python examples/elastic.py --checkpoint runs/elastic
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/elastic.py --checkpoint runs/elastic

Kill a process, or all of them, at any time; start again with 1, 2 or 3 processes and the same folder. Every sample of
every epoch is trained on once, in the order of a run that was never interrupted, and the weights come out the same.
Steps since the last checkpoint are repeated, as their effect was lost with the processes.

The log in the folder proves it: each process writes down, per step, which samples it was given.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import torchdistinput as tdi

NUM_POINTS = 203
GLOBAL_BATCH = 12  # points in a step, over all processes
KEPT = 2  # checkpoints


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Noisy points of a plane in space, (4,) and (1,), each made from its index."""

    def __len__(self) -> int:
        return NUM_POINTS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(4, generator=generator, dtype=torch.float64)
        noise = 0.1 * torch.randn(1, generator=generator, dtype=torch.float64)
        return x, x.sum(dim=0, keepdim=True) + noise


class Checkpoints:
    """The checkpoints in a folder, by the number of the step after which they were written.

    Args:
      folder: the folder; made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def newest(self) -> dict[str, Any] | None:
        """The last one that was written in full, if there is one."""
        found = self._written()
        return torch.load(found[-1], weights_only=True) if found else None

    def write(self, step: int, content: dict[str, Any]) -> None:
        """Writes one beside the others, and then gives it its name: a half-written file has none."""
        unfinished = self._folder / "unfinished"
        with unfinished.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self._folder / f"step-{step:08}.pt")
        for old in self._written()[:-KEPT]:
            old.unlink()

    def _written(self) -> list[Path]:
        return sorted(self._folder.glob("step-*.pt"))


def open_log(strategy: tdi.Strategy, folder: Path) -> TextIO:
    """This process's log of this attempt: a line for each step. Every process calls this."""
    clock = torch.tensor([time.time_ns()])
    attempt = int(strategy.gather(clock, axis=0)[0])  # the first process's clock names the attempt for all
    return (folder / f"log-{attempt}-{strategy.input_pipeline_id}.jsonl").open("w")


def write_line(log: TextIO, step: tdi.Step, index: Tensor) -> None:
    """Which samples this process was given in a step."""
    log.write(json.dumps({"epoch": step.epoch, "step": step.index, "samples": index.tolist()}) + "\n")
    log.flush()


def train(strategy: tdi.Strategy, arguments: argparse.Namespace) -> tuple[nn.Module, int]:
    """Trains from the newest checkpoint to the end. Returns the model and the number of steps since the beginning."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double().to(strategy.device)
    parallel = DistributedDataParallel(model) if strategy.num_input_pipelines > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # No seed here: the loader's state has the generator's.
    points = DataLoader(Points(), GLOBAL_BATCH, shuffle=True, generator=torch.Generator().manual_seed(7))
    loader = strategy.distribute_dataset(points, tdi.InputOptions(with_index=True))

    checkpoints = Checkpoints(arguments.checkpoint)
    steps = 0
    if (saved := checkpoints.newest()) is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])  # the same for any number of processes
        steps = saved["steps"]

    with open_log(strategy, arguments.checkpoint) as log:
        while loader.epoch < arguments.epochs:
            for index, (x, y) in loader:
                # Before the gradients meet: so a step that ended anywhere was written down everywhere.
                write_line(log, loader.step, index)
                optimizer.zero_grad()
                losses = F.mse_loss(parallel(x), y, reduction="none").sum(dim=1)
                tdi.average_loss(losses, loader.step).backward()
                optimizer.step()
                steps += 1
                if steps % arguments.every == 0 and strategy.input_pipeline_id == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    checkpoints.write(steps, {**state, "loader": loader.state_dict(), "steps": steps})
    return model, steps


@torch.no_grad()
def loss_of(model: nn.Module) -> float:
    """The mean loss over all points."""
    x, y = (torch.stack(each) for each in zip(*map(Points().__getitem__, range(NUM_POINTS)), strict=True))
    return F.mse_loss(model(x), y).item()


def main() -> None:
    """Trains, and prints how well in one process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="FOLDER", help="where to go on, and to save")
    parser.add_argument("--every", type=int, default=5, metavar="STEPS", help="steps from checkpoint to checkpoint")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()

    strategy = tdi.Strategy(devices=["cpu"])
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same first weights everywhere
    model, steps = train(strategy, arguments)
    if strategy.input_pipeline_id == 0:
        print(f"{steps} steps in {arguments.epochs} epochs, loss {loss_of(model):.9f}")


if __name__ == "__main__":
    main()
