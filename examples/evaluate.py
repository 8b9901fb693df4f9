"""Exact evaluation and ordered predictions, on any number of processes.

    python examples/evaluate.py
    torchrun --standalone --nproc-per-node 2 examples/evaluate.py

Nothing is trained. A fixed model classifies points; the last batch is short, so that processes have parts of different
sizes. An accuracy could be summed up part by part, a median could not: it needs every error, once.
All outputs come back in the order of the dataset, so any metric of one process gives exactly the value of one process.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import torchdistinput as tdi

NUM_POINTS = 1003
GLOBAL_BATCH = 64
QUADRANTS = ["south-west", "south-east", "north-west", "north-east"]


class Points(Dataset[tuple[Tensor, int]]):
    """Points of the plane, jittered by their own seeds; the class of a point is its quadrant."""

    def __len__(self) -> int:
        return NUM_POINTS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        point = torch.randn(2, generator=torch.Generator().manual_seed(index))
        jitter = torch.randn(2, generator=torch.Generator().manual_seed(tdi.sample_seed()))
        quadrant = int(point[0] > 0) + 2 * int(point[1] > 0)
        return point + 0.1 * jitter, quadrant


class ByDistance(nn.Module):
    """Judges a point by its distances to the middles of the quadrants; by itself, whatever else is in its batch."""

    def forward(self, points: Tensor) -> Tensor:
        """The logits, (batch, 4), for points (batch, 2)."""
        centers = torch.tensor([[-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]])
        return -(points[:, None] - centers).square().sum(dim=2)


@torch.no_grad()
def predict(strategy: tdi.Strategy, model: nn.Module) -> dict[str, Tensor | list[str]]:
    """The outputs for every point, in the order of the dataset, the same in every process."""
    generator = torch.Generator().manual_seed(0)  # the order of reading, and the seeds of the samples
    loader = DataLoader(Points(), batch_size=GLOBAL_BATCH, shuffle=True, generator=generator)
    indices, losses, right = [], [], []
    names: list[str] = []
    for index, (points, quadrants) in strategy.distribute_dataset(loader, tdi.InputOptions(with_index=True)):
        logits = model(points)
        guesses = logits.argmax(dim=1)
        indices.append(index)
        losses.append(nn.functional.cross_entropy(logits, quadrants, reduction="none"))
        right.append(guesses == quadrants)
        names += [QUADRANTS[guess] for guess in guesses.tolist()]
    outputs = {"loss": torch.cat(losses), "right": torch.cat(right), "name": names}
    found: dict[str, Tensor | list[str]] = strategy.gather_ordered(torch.cat(indices), outputs)
    return found


def main() -> None:
    """Evaluates, and prints the metrics in one process."""
    strategy = tdi.Strategy(devices=["cpu"])
    torch.set_num_threads(1)
    found = predict(strategy, ByDistance())
    loss, right = torch.as_tensor(found["loss"]), torch.as_tensor(found["right"])
    if strategy.input_pipeline_id == 0:
        print(f"{len(loss)} points, each once")
        print(f"accuracy    {int(right.sum())} of {len(right)}")
        print(f"median loss {loss.median().item()!r}")
        print(f"mean loss   {loss.mean().item()!r}")
        print(f"the first predictions: {', '.join(found['name'][:5])}")


if __name__ == "__main__":
    main()
