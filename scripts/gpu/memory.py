"""What the allocator holds after 32 epochs, beside what it held after the first."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from gpu.accelerator import Figures, device, is_real
from gpu.values import Batches

__all__ = ["run"]


def run(small: bool) -> Figures:  # noqa: FBT001 - as all parts
    """Epochs of batches of changing size, to the end and left in the middle."""
    where, epochs, steps = device(), 4 if small else 32, 100
    loader = DataLoader(Batches(steps), batch_size=None)
    held = []
    with tdi.Strategy([where]).distribute_dataset(loader) as dataset:
        for epoch in range(epochs):
            for step, batch in enumerate(dataset):
                sum((leaf.sum() for leaf in batch.values()), start=torch.zeros((), dtype=torch.int64, device=where))
                del batch
                if epoch % 3 == 1 and step == 10:
                    break
            torch.accelerator.synchronize(where)
            held.append(torch.accelerator.memory_reserved(where) if is_real(where) else 0)
    return {
        "epochs": epochs,
        "mib_after_first": held[0] / 2**20,
        "mib_growth": (max(held) - held[0]) / 2**20,
        "ok": max(held) == held[0],
    }
