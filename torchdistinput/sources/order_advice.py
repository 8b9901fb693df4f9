"""What to write so that each epoch has the same order, for frameworks that repeat the first batches of an epoch."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from torchdistinput.sources.files.mixture import RecordDataset
from torchdistinput.sources.torch_loader.settings import sampler_in

__all__ = ["order_advice"]


def order_advice(loader: DataLoader[Any]) -> str | None:
    """What to write so that each epoch of a torch loader has the same order. Local.

    Returns:
      A sentence; empty if each epoch has the same order already; ``None`` if the order is that of an iterable, or of a
      batch sampler of the user's own, which only they know.
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
