"""Ray decodes on as many machines as it has, and the workers of Ray Train train on it.

    python examples/ray_train.py

What a host cannot decode fast enough is decoded by Ray's tasks, on other hosts if need be. Each worker of the trainer
reads its own shard of the rows; each row comes once, however many there are. The shards need not be equal: who has none
left gets batches of size 0, so that all make the same steps.
"""

from __future__ import annotations

import tempfile
from typing import Any

import ray
import ray.data
import ray.train
import torch
import torch.nn.functional as F
from ray.train.torch import TorchTrainer
from torch.nn.parallel import DistributedDataParallel

import torchdistinput as tdi

ROWS, GLOBAL_BATCH, WORKERS = 103, 10, 2


class Uneven(ray.train.DataConfig):  # type: ignore[misc] # its types are not read
    """Ray Train's own splits are of equal length, and drop the rows that are left over."""

    def configure(self, datasets: Any, world_size: int, worker_handles: Any, worker_node_ids: Any, **_: Any) -> Any:
        """The shards of each worker, by the names of the datasets."""
        split = datasets["train"].streaming_split(world_size, equal=False, locality_hints=worker_node_ids)
        return [{"train": shard} for shard in split]


def decode(rows: dict[str, Any]) -> dict[str, Any]:
    """Runs in Ray's tasks; of real data this is where images are decoded, or texts tokenized."""
    x = rows["id"].astype("float32")
    return {"id": rows["id"], "x": x[:, None] / ROWS, "y": 2 * x[:, None] / ROWS + 1}


def train(config: dict[str, Any]) -> list[str]:
    """One worker: the process group is there already, and ``Strategy()`` takes it. Returns a line for each epoch."""
    strategy, shard = tdi.Strategy(), ray.train.get_dataset_shard("train")
    loader = strategy.distribute_datasets_from_function(
        lambda context: shard.iter_torch_batches(
            batch_size=context.get_per_replica_batch_size(GLOBAL_BATCH), device=torch.device("cpu")
        )
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1).to(strategy.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    lines = []
    for epoch in range(config["epochs"]):
        steps, samples, ids = 0, 0, torch.zeros(ROWS)
        for batch in loader:
            per_sample = F.mse_loss(model(batch["x"]), batch["y"], reduction="none").sum(dim=1)
            tdi.average_loss(per_sample, loader.step).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps, samples = steps + 1, samples + (loader.step.global_size or 0)
            ids[batch["id"].cpu()] += 1
        once = bool((strategy.reduce("SUM", ids) == 1).all())
        lines.append(f"epoch {epoch}: {steps} steps, {samples} samples, each row once: {once}")
    return lines


def main() -> None:
    """Trains two epochs on two workers."""
    ray.init(num_cpus=WORKERS + 2, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        rows = ray.data.range(ROWS, override_num_blocks=7).map_batches(decode)
        scaling = ray.train.ScalingConfig(num_workers=WORKERS)
        trainer = TorchTrainer(
            train,
            train_loop_config={"epochs": 2},
            scaling_config=scaling,
            run_config=ray.train.RunConfig(storage_path=folder),
            datasets={"train": rows},
            dataset_config=Uneven(),
        )
        print("\n".join(trainer.fit().return_value))
    ray.shutdown()


if __name__ == "__main__":
    main()
