"""Page-locked shared memory of loader workers, from which an accelerator reads batches without a copy in between.

**Problem.** A copy to an accelerator is asynchronous only from page-locked memory. A batch that a loader worker wrote
into memory shared with this process (see ``pool``) would first be copied into page-locked memory, by the thread that
sends it.

**Decision.** Once a loader worker has sent a few batches, the memory that all of them took is its *pinned region*,
which never changes afterwards. When a batch in it goes to an accelerator for the first time, the region is locked, in
one call. From then on its batches are read in place. Batches outside of the region are copied first, as usual. No batch
crosses the end of a region: torch decides by the first byte whether memory is locked, and a copy from memory that is
locked in part fails.

Only pages that were written to are locked, so locking takes no more memory. Short epochs of loader workers that do not
persist never pay for it. The process that locked a region unlocks it when its loader is closed and nothing refers to a
batch of the loader worker any more.

**Alternatives refused.** *Locking batch by batch* takes longer than copying the batches, and neighbours share a page.
*Locking more as more is used*: a batch that crosses two locked ranges cannot be copied. *Locking all memory that a
loader worker may use* takes up to 1 GiB for a loader, whatever the size of its batches.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import final

import numpy as np
import numpy.typing as npt
import torch

PageLock = Callable[[int, int], Callable[[], object] | None]
"""Locks memory of this process in place, for one kind of accelerator: from an address at which a page begins, so many
bytes, which are whole pages. Returns the function that unlocks it; ``None`` if it could not be locked."""

# Memory is found by its address, which means the same in the whole process.
_FRONTS: weakref.WeakValueDictionary[int, PinnedRegion] = weakref.WeakValueDictionary()


@final
class PinnedRegion:
    """The memory that the first batches of a loader worker took: the beginning of the loader worker's part.

    Args:
      part: all the memory of the loader worker. All arrays and tensors over it refer to this very array.
      length: one number, shared with the loader worker: the bytes of the region, whole pages; 0 until it is known.
    """

    def __init__(self, part: npt.NDArray[np.uint8], length: npt.NDArray[np.int64]) -> None:
        self._part = part
        self._length = length
        self._begin: int = part.__array_interface__["data"][0]
        self._asked = False
        self._unlock: weakref.finalize[[int, Callable[[], object]], npt.NDArray[np.uint8]] | None = None
        _FRONTS[self._begin] = self

    @property
    def length(self) -> int:
        """The size of the region in bytes; 0 until it is known."""
        return int(self._length[0])

    def reach(self, length: int) -> None:
        """Sets the size of the region. Called by the loader worker, once."""
        self._length[0] = length

    def holds(self, begin: int, end: int) -> bool:
        """Whether all memory between two addresses is in the region."""
        return self._begin <= begin and end <= self._begin + self.length

    def lock(self, lock: PageLock) -> bool:
        """Locks the region at the first call. Returns whether it is locked."""
        if not self._asked:
            self._asked = True
            unlock = lock(self._begin, self.length)
            if unlock is not None:
                self._unlock = weakref.finalize(self._part, _unlock, os.getpid(), unlock)
                self._unlock.atexit = False  # the accelerator may be gone by then
        return self._unlock is not None and self._unlock.alive

    def unlock(self) -> None:
        """Unlocks the region, once nothing refers to a batch in it. Idempotent."""
        if self._unlock is not None:
            self._unlock()


def _unlock(process: int, unlock: Callable[[], object]) -> None:
    if os.getpid() == process:  # a forked process has the memory, but not the accelerator
        unlock()


def is_locked(tensor: torch.Tensor, lock: PageLock) -> bool:
    """Whether a tensor's memory is in a locked region; locks the region at the first call. Local."""
    storage = tensor.untyped_storage()
    begin = storage.data_ptr()
    for reference in _FRONTS.valuerefs():
        front = reference()
        if front is not None and front.holds(begin, begin + storage.nbytes()):
            return front.lock(lock)
    return False
