"""NCCL with one rank: the weights after a training beside those of the CPU, in float64."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from gpu.accelerator import Figures, device, is_real

__all__ = ["run"]

_BOUND = 1e-10  # float64; the two devices add in different orders


def _weights(where: torch.device, *, wrapped: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(203, 32, dtype=torch.float64), torch.randn(203, dtype=torch.float64))
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).double().to(where)
    trained = DistributedDataParallel(model) if wrapped else model
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(2)
    loader = DataLoader(data, 16, shuffle=True, generator=generator)
    with tdi.Strategy([where]).distribute_dataset(loader) as dataset:
        for _ in range(3):
            for x, y in dataset:
                losses = (trained(x).squeeze(1) - y).square()
                tdi.average_loss(losses, dataset.step).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def run(small: bool) -> Figures:  # noqa: FBT001 - as all parts
    """Three epochs of AdamW."""
    where = device()
    alone = _weights(torch.device("cpu"), wrapped=False)
    backend = "nccl" if is_real(where) else "gloo"
    with TemporaryDirectory() as folder:
        store = dist.FileStore(  # type: ignore[attr-defined]
            str(Path(folder) / "store"), 1
        )
        os.environ.setdefault("LOCAL_RANK", "0")
        dist.init_process_group(
            f"cpu:gloo,cuda:{backend}" if is_real(where) else backend, store=store, rank=0, world_size=1
        )
        try:
            found = _weights(where, wrapped=is_real(where))
        finally:
            dist.destroy_process_group()
    largest = max(float((a - b).abs().max()) for a, b in zip(found, alone, strict=True))
    return {"backend": backend, "largest_difference": largest, "bound": _BOUND, "ok": largest <= _BOUND}
