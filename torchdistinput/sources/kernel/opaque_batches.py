"""Opaque batches: in one process a collated batch is handed on whole, and its contents are not inspected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torchdistinput.batches import pytree
from torchdistinput.errors import BatchingError
from torchdistinput.sources.kernel.converting import fast_collate
from torchdistinput.step_types import OpaqueBatch


@final
class OpaqueCollate:
    """A collate function that wraps the result of another one as an ``OpaqueBatch``.

    Args:
      collate: makes the batch.
      counts: whether ``collate`` gets a list of samples, which are counted; else it converts a ready batch, whose size
        is then measured.
    """

    def __init__(self, collate: Callable[[Any], Any], *, counts: bool) -> None:
        self.collate = collate
        self._make = fast_collate(collate)
        self._counts = counts
        self._known = pytree.KnownShapes()

    def __call__(self, samples: Any) -> OpaqueBatch:
        """The batch, with the number of its samples."""
        batch = self._make(samples)
        size = len(samples) if self._counts else self._size_of(batch)
        return tuple.__new__(OpaqueBatch, (batch, size))  # half the time of OpaqueBatch(batch, size)

    def _size_of(self, batch: Any) -> int:
        if self._known.leaves_of(batch) is None:
            self._known.remember(batch, _size(batch))
        return self._known.size


def _size(batch: Any) -> int:
    try:
        return pytree.batch_size(batch)
    except BatchingError:  # a single sample (torch's batch_size=None), or a value without a size: it counts as one
        return 1
