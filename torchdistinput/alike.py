"""Batches that are exactly like the last one, which are known at a look."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

__all__ = ["Alike"]


@final
class Alike:
    """How the last batch looked: a tensor, or a tuple, list or dict of tensors, with these dtypes and shapes.

    Most batches are exactly like the one before, and whatever was found out of that one holds for them, too.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """No batch is like the last one."""
        self._type: type | None = None
        self._keys: list[Any] = []
        self._leaves: list[tuple[torch.dtype, torch.Size]] = []
        self._size = 0
        self.mark: object = None
        """What somebody notes of the last batch, and of all that are like it but for their size; forgotten with it."""

    def remember(self, batch: Any, size: int) -> None:
        """This is the last batch, of so many samples. One of another kind is forgotten at once."""
        self.forget()
        cls = type(batch)
        leaves = [batch] if cls is Tensor else list(batch.values()) if cls is dict else batch
        if cls in (Tensor, dict, list, tuple) and all(type(leaf) is Tensor for leaf in leaves):
            self._type, self._size = cls, size
            self._keys = list(batch) if cls is dict else []
            self._leaves = [(leaf.dtype, leaf.shape) for leaf in leaves]

    def size_of(self, batch: Any) -> int | None:
        """The size of a batch that is exactly like the last one; else ``None``: look closer. For every step."""
        cls = type(batch)
        if cls is not self._type:
            return None
        leaves = batch
        if cls is Tensor:
            leaves = (batch,)
        elif cls is dict:
            if list(batch) != self._keys:
                return None
            leaves = batch.values()
        known = self._leaves
        if len(leaves) != len(known):
            return None
        place = 0  # counted by hand, as zip() takes a third of the time of a look, enumerate() a fifth
        for leaf in leaves:
            dtype, shape = known[place]
            if type(leaf) is not Tensor or leaf.dtype is not dtype or leaf.shape != shape:
                return None
            place += 1  # noqa: SIM113 - see above
        return self._size

    def resized(self, batch: Any) -> int | None:
        """The size of a batch that is like the last one but for it, and is the last one from now on; else ``None``.

        The size is that of dim 0 of every leaf.
        """
        cls = type(batch)
        if cls is not self._type or (cls is dict and list(batch) != self._keys):
            return None
        leaves: Any = (batch,) if cls is Tensor else batch.values() if cls is dict else batch
        if len(leaves) != len(self._leaves):
            return None
        size, found = None, []
        for leaf, (dtype, (_, *inner)) in zip(leaves, self._leaves, strict=True):
            if type(leaf) is not Tensor or leaf.dtype is not dtype or not leaf.dim():
                return None
            shape = leaf.shape
            rows, *dims = shape
            if dims != inner or (size is not None and rows != size):
                return None
            size = rows
            found.append((dtype, shape))
        if size is not None:
            self._leaves, self._size = found, size
        return size
