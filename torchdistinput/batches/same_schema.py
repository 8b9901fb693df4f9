"""Batches that are exactly like the last one, which are known at a look."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, final

import torch
from torch import Tensor

__all__ = ["SameSchema"]

_Looks = tuple[type | None, list[Any] | None, int, Any]
"""Of a batch: its type, its keys (``None`` of a tuple or list, none of a tensor), its size, and a chain: the dtype and
shape of the first leaf, and the chain of those after it."""

_KINDS: Final = (Tensor, dict, list, tuple)

_NO_BATCH: Final[_Looks] = (None, None, 0, ())


@final
class SameSchema:
    """How the last batch looked: a tensor, or a tuple, list or dict of tensors, with these dtypes and shapes.

    Most batches are exactly like the one before, and whatever was found out of that one holds for them, too.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """No batch is like the last one. Any thread."""
        self._looks = _NO_BATCH
        self.mark: object = None
        """What somebody notes of the last batch, and of all that are like it but for their size; forgotten with it."""

    def remember(self, batch: Any, size: int) -> None:
        """This is the last batch, of so many samples. One of another kind is forgotten at once."""
        self.forget()
        cls, keys, leaves = type(batch), None, batch
        if cls is Tensor:
            keys, leaves = [], [batch]
        elif cls is dict:
            keys, leaves = [*batch], [*batch.values()]
        plain = all(type(leaf) is Tensor and not leaf.is_nested for leaf in leaves) if cls in _KINDS else False
        if plain and leaves:
            self._looks = (cls, keys, size, _chain((leaf.dtype, leaf.shape) for leaf in leaves))

    def size_of(self, batch: Any) -> int | None:
        """The size of a batch that is exactly like the last one; else ``None``: look closer. For every step."""
        cls, keys, size, known = self._looks
        if type(batch) is not cls:
            return None
        leaves: Any = batch if keys is None else _opened(batch, keys)
        for leaf in leaves:
            if not known:
                return None
            dtype, shape, known = known  # zip() takes half as long as all the rest, a counter a tenth
            if type(leaf) is not Tensor or leaf.dtype is not dtype or leaf.shape != shape:
                return None
        return None if known else size

    def resized(self, batch: Any) -> int | None:
        """The size of a batch that is like the last one but for it, and is the last one from now on; else ``None``.

        The size is that of dim 0 of every leaf.
        """
        cls, keys, _, known = self._looks
        if type(batch) is not cls:
            return None
        size, found = None, []
        leaves: Any = batch if keys is None else _opened(batch, keys)
        for leaf in leaves:
            if not known:
                return None
            dtype, (_, *inner), known = known
            if type(leaf) is not Tensor or leaf.dtype is not dtype or not leaf.dim():
                return None
            shape = leaf.shape
            rows, *dims = shape
            if dims != inner or (size is not None and rows != size):
                return None
            size = rows
            found.append((dtype, shape))
        if known or size is None:
            return None
        self._looks = (cls, keys, size, _chain(found))
        return size


def _opened(batch: Any, keys: list[Any]) -> Iterable[Any]:
    """The leaves of a tensor, or of a dict; none of a dict with other keys."""
    if not keys:
        return (batch,)
    return batch.values() if [*batch] == keys else ()


def _chain(leaves: Iterable[tuple[torch.dtype, torch.Size]]) -> Any:
    chain: Any = ()
    for dtype, shape in reversed([*leaves]):
        chain = (dtype, shape, chain)
    return chain
