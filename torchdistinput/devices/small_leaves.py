"""Copies the small leaves of a batch to a device in one buffer, in place of one copy for each leaf.

A copy to a device costs a few microseconds whatever its size, on the calling thread and on the device. So leaves below
a bound are written side by side into one pinned buffer, each aligned like an allocation of its own. The buffer is
copied into one buffer on the device, and the leaves are tensors over its memory. Each has the dtype, shape, strides and
bytes that a copy of its own would have. The leaves share memory and nothing else: none is a view, and a change in place
of one leaf does not affect the others in autograd.

A leaf that is kept (or saved with its storage) keeps the whole buffer. So a buffer is at most ``BUFFER_BYTES`` long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, final

import torch

SMALL_BYTES = 64 * 1024
"""Leaves from this size on are copied alone: at 25 to 50 GB/s the copy takes longer than the call that begins it."""

BUFFER_BYTES = 4 * 1024 * 1024

_ALIGNMENT = 256  # bytes; the alignment of a device's allocations


@final
class Bundle(NamedTuple):
    """Leaves that are copied in one buffer.

    Args:
      leaves: tensors on the host, dense or not; at least one.
      places: the position of each leaf among the leaves of its batch.
      offsets: the offset of each leaf in the buffer, in bytes; a single leaf has no buffer and no offset.
      num_bytes: the size of the buffer.
    """

    leaves: tuple[torch.Tensor, ...]
    places: tuple[int, ...]
    offsets: tuple[int, ...] = ()
    num_bytes: int = 0

    def over(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Tensors like the leaves over a buffer on any device. Each keeps the buffer alive."""
        return [_over(buffer, leaf, offset) for leaf, offset in zip(self.leaves, self.offsets, strict=True)]

    def packed(self, allocate: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """The leaves' values in a buffer on the host; ``allocate`` returns one of so many bytes, uint8."""
        buffer = allocate(self.num_bytes)
        for target, leaf in zip(self.over(buffer), self.leaves, strict=True):
            target.copy_(leaf)
        return buffer


def bundled(leaves: Sequence[torch.Tensor], small: int) -> Iterator[Bundle]:
    """The leaves in bundles, one for each copy.

    Args:
      leaves: dense tensors on the host.
      small: leaves of fewer bytes are bundled.
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
