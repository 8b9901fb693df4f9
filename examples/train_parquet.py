"""Trains on columns of Parquet files, on any number of processes, and goes on in the middle of an epoch.

    pip install torchdistinput[parquet]
    python examples/train_parquet.py
    torchrun --standalone --nproc-per-node 2 examples/train_parquet.py

The files are made first. A point is inside a ring or not; a small network learns which. Only three of the five columns
are read, and no Python code runs for a record. The run leaves the second epoch in its middle and makes a new dataset,
which goes on there: here in the same processes, in yours after a crash, and in any number of processes.
The weights are the same in any number of processes, but for the rounding of sums.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

import torchdistinput as tdi

FILES, RECORDS, ROW_GROUP = 4, 2000, 500
GLOBAL_BATCH = 64
EPOCHS = 4


def write_files(folder: Path) -> None:
    """Files of points with their class, and two columns that nobody needs. All processes write the same."""
    folder.mkdir(exist_ok=True)
    for number in range(FILES):
        random = np.random.default_rng(number)
        points = random.normal(size=(RECORDS, 2)).astype("float32")
        inside = np.abs(np.hypot(points[:, 0], points[:, 1]) - 1) < 0.4
        name = [f"point {number * RECORDS + each}" for each in range(RECORDS)]
        noise = random.normal(size=RECORDS)
        columns = {"x": points[:, 0], "y": points[:, 1], "inside": inside, "name": name, "noise": noise}
        unfinished = folder / f"{number}.parquet.{os.getpid()}"
        pq.write_table(pa.table(columns), unfinished, row_group_size=ROW_GROUP)
        unfinished.replace(folder / f"{number}.parquet")


def distributed(strategy: tdi.Strategy, folder: Path) -> tdi.DistributedDataset:
    """The files, shuffled, as global batches that are the same in any number of processes."""
    files = tdi.FileDataset(
        str(folder / "*.parquet"),
        tdi.readers.parquet(["x", "y", "inside"]),
        shuffle_files=True,
        shuffle_buffer=ROW_GROUP,
        seed=1,
    )
    options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.DATA)
    return strategy.distribute_dataset(files, options, global_batch_size=GLOBAL_BATCH)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: tdi.DistributedDataset, last_step: int | None = None
) -> torch.Tensor:
    """Trains to the end of an epoch, or to a step. Returns the sum of this process's losses, and their number."""
    totals = torch.zeros(2)
    for number, batch in enumerate(loader):
        logits = model(torch.stack([batch["x"], batch["y"]], dim=1))[:, 0]
        losses = binary_cross_entropy_with_logits(logits, batch["inside"].float(), reduction="none")
        tdi.average_loss(losses, loader.step).backward()
        optimizer.step()
        optimizer.zero_grad()
        totals += torch.tensor([losses.detach().sum(), len(losses)])
        if number == last_step:
            break
    return totals


def main() -> None:
    """Makes the files, trains, and prints the loss of each epoch in one process."""
    torch.set_num_threads(1)
    strategy = tdi.Strategy(devices=["cpu"])
    folder = Path(tempfile.gettempdir()) / "torchdistinput-points"
    write_files(folder)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    if strategy.num_replicas_in_sync > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = distributed(strategy, folder)
    for epoch in range(EPOCHS):
        totals = torch.zeros(2)
        if epoch == 1:
            totals += train(model, optimizer, loader, last_step=50)
            state = loader.state_dict()
            loader = distributed(strategy, folder)
            loader.load_state_dict(state)
        totals += train(model, optimizer, loader)
        loss, count = strategy.reduce("sum", totals).tolist()
        if strategy.input_pipeline_id == 0:
            print(f"epoch {epoch}: loss {loss / count:.3f} over {count:.0f} records")


if __name__ == "__main__":
    main()
