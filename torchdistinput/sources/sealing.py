"""Batches that nobody looks into: what a collate function made, on its way through one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torchdistinput import tree
from torchdistinput.errors import BatchingError
from torchdistinput.flow import Sealed

__all__ = ["Sealing"]


@final
class Sealing:
    """A collate function that seals what another one makes.

    Args:
      collate: makes the batch.
      counts: whether it is given a list of samples; else it converts a batch, which is then measured.
    """

    def __init__(self, collate: Callable[[Any], Any], *, counts: bool) -> None:
        self.collate = collate
        self._counts = counts

    def __call__(self, samples: Any) -> Sealed:
        """The batch, with the number of its samples."""
        batch = self.collate(samples)
        return Sealed(batch, len(samples) if self._counts else _size(batch))


def _size(batch: Any) -> int:
    try:
        return tree.batch_size(batch)
    except BatchingError:  # a single sample (torch's batch_size=None), or a thing that cannot be measured: it is one
        return 1
