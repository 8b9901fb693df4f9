"""Small leaves of a batch travel together: one copy of one buffer, in the place of many.

A copy to a device costs some microseconds whatever its size, on the thread that asks for it and on the device. So
leaves below a bound are laid side by side, each where an allocation of its own could begin, in one pinned buffer; that
is copied into one buffer on the device, and the leaves are handed out as tensors over its memory. Each has the dtype,
shape, strides and bytes that a copy of its own would have. They share memory and nothing else: none is a view, and to
change one in place says nothing of its neighbours to autograd.

What they share has an end: a leaf that is kept (or saved with its storage) keeps the buffer, so that is at most
``BUFFER_BYTES`` long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, final

import torch

__all__ = ["BUFFER_BYTES", "SMALL_BYTES", "Allocator", "Bundle", "bundled"]

SMALL_BYTES = 64 * 1024
"""From here on a leaf travels alone: at 25 to 50 GB/s its copy outlasts the cost of asking for it."""

BUFFER_BYTES = 4 * 1024 * 1024

_ALIGNMENT = 256  # what an allocation of a device promises


class Allocator(Protocol):
    """Memory of one kind, by the byte."""

    def __call__(self, num_bytes: int, /) -> torch.Tensor:
        """Of dtype uint8, one dimension."""


@final
class Bundle(NamedTuple):
    """Leaves that travel as one copy.

    Args:
      leaves: on the host, dense or not; at least one.
      places: where each of them stands among the leaves of its batch.
      offsets: where each of them begins in the buffer, in bytes; a leaf alone has no buffer and no offset.
      num_bytes: of the buffer.
    """

    leaves: tuple[torch.Tensor, ...]
    places: tuple[int, ...]
    offsets: tuple[int, ...] = ()
    num_bytes: int = 0

    def over(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Tensors like the leaves over a buffer, wherever that is. Each keeps the buffer alive."""
        return [_over(buffer, leaf, offset) for leaf, offset in zip(self.leaves, self.offsets, strict=True)]

    def packed(self, allocate: Allocator) -> torch.Tensor:
        """The leaves' values in a buffer on the host."""
        buffer = allocate(self.num_bytes)
        for target, leaf in zip(self.over(buffer), self.leaves, strict=True):
            target.copy_(leaf)
        return buffer


def bundled(leaves: Sequence[torch.Tensor], small: int) -> Iterator[Bundle]:
    """The leaves in as many bundles as copies are needed.

    Args:
      leaves: dense tensors on the host.
      small: leaves of fewer bytes travel together.
    """
    together: list[tuple[int, torch.Tensor, int]] = []  # its place, the leaf, its offset
    end = 0
    for place, leaf in enumerate(leaves):
        size = leaf.numel() * leaf.element_size()
        if not 0 < size < small:
            yield Bundle((leaf,), (place,))
            continue
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        if together and offset + size > BUFFER_BYTES:
            yield _bundle(together, end)
            together, offset = [], 0
        together.append((place, leaf, offset))
        end = offset + size
    if together:
        yield _bundle(together, end)


def _bundle(together: Iterable[tuple[int, torch.Tensor, int]], end: int) -> Bundle:
    places, leaves, offsets = zip(*together, strict=True)
    return Bundle(leaves, places) if len(leaves) == 1 else Bundle(leaves, places, offsets, end)


def _over(buffer: torch.Tensor, leaf: torch.Tensor, offset: int) -> torch.Tensor:
    # Not `view` and `as_strided`: views of one tensor share its version counter.
    strides = leaf.stride() if leaf.is_contiguous() else torch.empty_like(leaf, device="meta").stride()
    empty = torch.empty(0, dtype=leaf.dtype, device=buffer.device)
    return empty.set_(buffer.untyped_storage(), offset // leaf.element_size(), leaf.shape, strides)
