"""A loader worker's part of the shared memory: allocates blocks for batches, and stacks samples in them."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
import torch

from torchdistinput.coordination.private_names import look_up
from torchdistinput.sources.torch_loader.shared_memory.pool import ENTRIES, NUMPYS, Free, SharedPool, Token, tensor_over

_SMALL: Final = 1 << 14
"""The largest size in bytes of tensors that are pickled inline: no slower, and keeping small labels pins no memory."""
_LARGE: Final = 1 << 16
"""The smallest size in bytes of a sample that is copied into its row as soon as it is read."""
_WIDE: Final = 64
"""The longest list in a sample that is searched for large leaves."""

_SETTLED: Final = 8
"""The number of batches after which later batches usually find room in the memory of earlier ones."""

_NUMBERS: Final = frozenset(NUMPYS.values())

_TENSORS: Final = {torch.Tensor}

collate_tensor_fn: Final = look_up("torch.utils.data._utils.collate.collate_tensor_fn")

_LeafPath = tuple[Any, ...]


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
        self._front = shared_pool.front(worker)
        if self._front.length:  # an earlier worker has set the region
            self._free.set_boundary(self._front.length)
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
        if self.number >= _SETTLED and not self._front.length:
            self._front.reach(self._free.set_boundary())
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
class _StackedPiece:
    """A piece that is being read, row by row.

    Args:
      piece: the memory of the piece.
      kind: the type of its samples: NumPy arrays or tensors.
    """

    def __init__(self, piece: torch.Tensor, kind: type[Any]) -> None:
        self.piece = piece
        self.kind = kind
        # Made once: looking up a row takes as long as copying a tenth of it.
        self.rows: Sequence[Any] = list(piece.numpy()) if kind is np.ndarray else piece.unbind(0)
        self._dtype = self.rows[0].dtype
        self._shape = self.rows[0].shape

    def filled(self, row: int, leaf: Any) -> Any:
        """The row, filled with the contents of a leaf; or the leaf, if stacking would not make such a row of it."""
        if type(leaf) is not self.kind or leaf.dtype != self._dtype:
            return leaf
        kept = self.rows[row]
        if self.kind is np.ndarray:
            if leaf.shape != self._shape or not leaf.flags.c_contiguous:
                return leaf
            np.copyto(kept, leaf)
        else:
            if not is_plain(leaf) or leaf.shape != self._shape:
                return leaf
            kept.copy_(leaf)
        return kept

    def are(self, batch: Sequence[torch.Tensor]) -> bool:
        """Whether stacking these tensors would make this piece."""
        rows, piece = self.rows, self.piece
        if len(batch) != len(rows) or batch[0].shape != piece.shape[1:]:
            return False
        if batch[0] is rows[0] and all(map(operator.is_, batch, rows)):  # the usual case
            return True
        begin, step = piece.data_ptr(), piece.stride(0) * piece.element_size()
        return all(
            each.data_ptr() == begin + row * step and each.dtype == piece.dtype and each.is_contiguous()
            for row, each in enumerate(batch)
        )


@final
class Stack:
    """Stacks tensors as ``default_collate`` does in a loader worker, in memory of the pool.

    Large samples that are read one by one are copied into their rows at once. Their own memory is then free for the
    next sample, and still in the processor's cache. The memory of a whole batch would go back to the system each time.

    Args:
      allocator: allocates the memory.
    """

    def __init__(self, allocator: PoolAllocator) -> None:
        self._allocator = allocator
        self._rows: dict[_LeafPath, _StackedPiece] = {}  # of the piece that is being read, by the leaf's path

    def keep(self, sample: Any, row: int, rows: int) -> Any:
        """See ``piece_dataset.MoveSample``."""
        if row == 0:
            self._rows = {}
        elif whole := self._rows.get(()):  # the sample is a leaf
            return whole.filled(row, sample)
        kept = self._kept(sample, (), row, rows)
        return kept if self._rows else None

    def _kept(self, value: Any, path: _LeafPath, row: int, rows: int) -> Any:
        kind = type(value)
        if kind is np.ndarray or (kind is torch.Tensor and value.layout is torch.strided):  # others may lack nbytes
            return self._in_row(value, path, row, rows) if value.nbytes >= _LARGE else value
        if (kind is tuple or kind is list) and len(value) <= _WIDE:
            return kind(self._kept(each, (*path, key), row, rows) for key, each in enumerate(value))
        if kind is dict:
            return {key: self._kept(each, (*path, key), row, rows) for key, each in value.items()}
        return value

    def _in_row(self, leaf: Any, path: _LeafPath, row: int, rows: int) -> Any:
        """The leaf, moved into its row of the piece; unchanged if it differs in kind from the leaf before it."""
        if row == 0:
            begun = self._begun(leaf, rows)
            if begun is None:
                return leaf
            self._rows[path] = begun
        else:
            begun = self._rows.get(path)
        return leaf if begun is None else begun.filled(row, leaf)

    def _begun(self, leaf: Any, rows: int) -> _StackedPiece | None:
        """A new piece for leaves like this one; ``None`` if there can be none."""
        if type(leaf) is np.ndarray and not (leaf.dtype in _NUMBERS and leaf.flags.c_contiguous):
            return None
        tensor = torch.as_tensor(leaf, device="cpu") if type(leaf) is np.ndarray else leaf
        if not is_plain(tensor):
            return None
        piece = self._allocator.new_tensor((rows, *tensor.shape), tensor.dtype)
        return None if piece is None else _StackedPiece(piece, type(leaf))

    def __call__(self, batch: Any, *, collate_fn_map: Any = None) -> Any:
        """See ``torch.utils.data._utils.collate.collate_tensor_fn``."""
        first = batch[0]
        if set(map(type, batch)) != _TENSORS or not is_plain(first):
            return collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
        for path, begun in self._rows.items():
            if begun.are(batch):
                return self._rows.pop(path).piece
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
