"""Advice for frameworks that repeat the first batches of an epoch: how to give each epoch the same order."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from torchdistinput.sources.datasets.stream_mixture import RecordDataset
from torchdistinput.sources.torch_loader.settings import sampler_in


def order_advice(loader: DataLoader[Any]) -> str | None:
    """The change of a script that gives each epoch of a torch loader the same order. Local.

    Returns:
      A sentence; empty if each epoch has the same order already; ``None`` if only the user's own iterable or batch
      sampler determines the order.
    """
    if isinstance(loader.dataset, RecordDataset):
        return loader.dataset.order_advice
    batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    inner = sampler_in(batches)
    if isinstance(inner, SequentialSampler):
        return ""
    if isinstance(loader.dataset, IterableDataset) or inner is loader.batch_sampler:
        return None
    return "Give the DataLoader shuffle=False (and no sampler)."
