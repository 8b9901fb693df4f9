"""Samples of 588 KB from 8 loader workers to the device, beside torch's loader."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import torchdistinput as tdi
from gpu.accelerator import Figures, busy, device, is_real

__all__ = ["run"]

_SHAPE = (3, 224, 224)  # float32: 588 KiB
_BATCH = 64

Make = Callable[["Images", int, torch.device], Iterable[Any]]


class Images(Dataset[torch.Tensor]):
    """Each is filled with its index, which costs less than any decoding."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full(_SHAPE, float(index % 997))


def ours(images: Images, num_workers: int, where: torch.device) -> Iterable[Any]:
    """The library at default options."""
    loader = DataLoader(images, _BATCH, num_workers=num_workers, persistent_workers=True)
    return tdi.Strategy([where]).distribute_dataset(loader)


def torchs(images: Images, num_workers: int, where: torch.device) -> Iterable[Any]:
    """The loader of torch, whose own thread pins."""
    return Moved(DataLoader(images, _BATCH, num_workers=num_workers, persistent_workers=True, pin_memory=True), where)


class Moved:
    """Batches of another loader, moved without waiting."""

    def __init__(self, loader: Iterable[torch.Tensor], where: torch.device) -> None:
        self._loader = loader
        self._where = where

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (batch.to(self._where, non_blocking=True) for batch in self._loader)


def _measured(make: Make, images: Images, where: torch.device, kernel: Callable[[], None], epochs: int) -> Figures:
    loader = make(images, 8 if is_real(where) else 2, where)
    wrong = torch.zeros((), dtype=torch.int64, device=where)
    seconds: list[float] = []
    for epoch in range(epochs):
        torch.accelerator.synchronize(where)
        start = time.perf_counter()
        for step, batch in enumerate(loader):
            if epoch == 0:
                expected = (torch.arange(_BATCH, device=where) + step * _BATCH).remainder(997).float()
                wrong += (batch.amin((1, 2, 3)) != expected[: len(batch)]).sum()
                wrong += (batch.amax((1, 2, 3)) != expected[: len(batch)]).sum()
            kernel()
        torch.accelerator.synchronize(where)
        seconds.append(time.perf_counter() - start)
    if isinstance(loader, tdi.DistributedDataset):
        loader.close()
    timed = sorted(seconds[1:])
    return {"ms_a_step": 1e3 * timed[len(timed) // 2] / (len(images) / _BATCH), "wrong": int(wrong)}


def run(small: bool) -> Figures:  # noqa: FBT001 - as all parts
    """Nothing computed, and a kernel of 10 ms beside each batch of 38 MB."""
    where, epochs = device(), 2 if small else 3
    images = Images((3 if small else 60) * _BATCH)
    spin = busy(where)
    found: Figures = {}
    kernels: dict[str, Callable[[], None]] = {"nothing": lambda: None, "10 ms": lambda: spin(10.0)}
    for beside, kernel in kernels.items() if is_real(where) else [("nothing", kernels["nothing"])]:
        found[f"ours, beside {beside}"] = _measured(ours, images, where, kernel, epochs)
        found[f"torch's pin_memory, beside {beside}"] = _measured(torchs, images, where, kernel, epochs)
    return {"found": found, "ok": not any(each["wrong"] for each in found.values())}
