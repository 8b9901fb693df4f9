"""A faster form of torch's ``default_convert`` for ready batches that it does not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.data import default_convert

_torch_converted: Callable[[Any], Any] = default_convert


def fast_collate(collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function, or a faster one with the same results: torch's spends microseconds on abstract class checks."""
    return _converted if collate is default_convert else collate


def _converted(batch: Any) -> Any:
    """Converts as ``default_convert`` does: it copies containers, and turns tuples into lists."""
    cls = type(batch)
    if cls is Tensor:
        return batch
    if cls is tuple or cls is list:
        for leaf in batch:
            if type(leaf) is not Tensor:
                return _torch_converted(batch)
        return [*batch]
    return _torch_converted(batch)
