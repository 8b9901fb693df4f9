"""A loader worker's part of the shared memory: allocates blocks for batches, and stacks samples in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
import torch

from torchdistinput.coordination.private_names import look_up
from torchdistinput.sources.torch_loader.shared_memory.pool import ENTRIES, Free, SharedPool, Token, tensor_over

_SMALL: Final = 1 << 14
"""The largest size in bytes of tensors that are pickled inline: no slower, and keeping small labels pins no memory."""
_TENSORS: Final = {torch.Tensor}

collate_tensor_fn: Final = look_up("torch.utils.data._utils.collate.collate_tensor_fn")


class DoesNotFit(Exception):
    """The contents cannot be put into the pool."""


@final
class PoolBlock:
    """Memory taken from a worker's part.

    Args:
      lo: the offset of the first byte.
      size: in bytes.
      token: shows when this process no longer uses the memory.
    """

    def __init__(self, lo: int, size: int, token: Token) -> None:
        self.lo = lo
        self.size = size
        self.token = token
        self.batches = 0
        """How many batches in the ledger use this block."""


@final
class PoolAllocator:
    """Allocates memory in a loader worker's part of the pool, and records which batches use it.

    Args:
      shared_pool: the shared memory.
      worker: the number of this worker.
    """

    def __init__(self, shared_pool: SharedPool, worker: int) -> None:
        self.worker = worker
        self._shared_pool = shared_pool
        self._ledger = shared_pool.ledger(worker)
        memory = shared_pool.part(worker)
        self._base: int = memory.__array_interface__["data"][0]
        self._size = memory.nbytes
        self._free = Free(self._size)
        self._blocks: dict[int, PoolBlock] = {}
        self._batches: dict[int, list[PoolBlock]] = {}  # by entry
        self.number = 0
        """How many items took memory so far."""

    @staticmethod
    def is_small(size: int) -> bool:
        """Whether a content of this size is better sent in the message."""
        return size <= _SMALL

    def new_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """A new contiguous tensor in the pool; ``None`` if no memory is left."""
        size = math.prod(shape) * dtype.itemsize
        lo = self._take(size)
        if lo is None:
            return None
        token = self._blocks[lo].token
        tensor = tensor_over(token.buffer(lo, lo + size), dtype, shape)
        token.handed_out()
        return tensor

    def _take(self, size: int) -> int | None:
        lo = self._free.take(size)
        if lo is not None:
            self._blocks[lo] = PoolBlock(lo, size, Token(self._shared_pool.part(self.worker)))
        return lo

    def place(self, contents: memoryview) -> PoolBlock:
        """The block that holds the contents. They are copied into a new block, unless they lie in one already.

        Raises:
          DoesNotFit: there is no room.
        """
        array = np.frombuffer(contents, np.uint8)
        block = self._blocks.get(array.__array_interface__["data"][0] - self._base)
        if block is not None and block.size == array.nbytes:
            return block
        lo = self._take(array.nbytes)
        if lo is None:
            raise DoesNotFit
        block = self._blocks[lo]
        np.copyto(np.frombuffer(block.token.buffer(lo, lo + array.nbytes), np.uint8), array)
        block.token.handed_out()
        return block

    def enter(self, blocks: list[PoolBlock]) -> int:
        """Writes an item made of these blocks into the ledger. Returns the number of the entry.

        Raises:
          DoesNotFit: too many batches are in use.
        """
        entry = next((entry for entry in range(ENTRIES) if entry not in self._batches), None)
        if entry is None:
            raise DoesNotFit
        self.number += 1
        for block in blocks:
            block.batches += 1
        self._batches[entry] = blocks
        self._ledger[entry] = self.number
        return entry

    def take_back(self) -> None:
        """Frees the blocks that nobody uses any more."""
        ledger, batches = self._ledger, self._batches
        for entry in [*batches]:
            if not ledger[entry]:
                for block in batches.pop(entry):
                    block.batches -= 1
        for block in [*self._blocks.values()]:
            if not block.batches and block.token.is_free:
                del self._blocks[block.lo]
                self._free.give_back(block.lo, block.size)


@final
class Stack:
    """Stacks tensors as ``default_collate`` does in a loader worker, in memory of the pool.

    Args:
      allocator: allocates the memory.
    """

    def __init__(self, allocator: PoolAllocator) -> None:
        self._allocator = allocator

    def __call__(self, batch: Any, *, collate_fn_map: Any = None) -> Any:
        """See ``torch.utils.data._utils.collate.collate_tensor_fn``."""
        first = batch[0]
        if set(map(type, batch)) != _TENSORS or not is_plain(first):
            return collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
        shape = (len(batch), *first.shape)
        if self._allocator.is_small(len(batch) * first.nbytes):
            # This memory is not shared, as torch's would be.
            new: torch.Tensor | None = torch.empty(shape, dtype=first.dtype, device="cpu")
        else:
            new = self._allocator.new_tensor(shape, first.dtype)
        if new is None:
            return collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
        return torch.stack(batch, 0, out=new)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain one: only numbers, in this process's memory."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.requires_grad)
    )
