"""Memory of loader workers that is locked in place, so that an accelerator reads it without a copy in between.

**Problem.** A copy to an accelerator runs beside the host only out of page-locked memory. What a loader worker wrote
into memory that it shares with this process (see ``pool``) would first be copied into such memory, by the thread that
sends.

**Decision.** Once a worker has sent a few batches, the memory that all of them took is its *front*, for good. When a
batch there goes to an accelerator, the front is locked, in one call; from then on its batches are read where they lie.
Those beyond it go the ordinary way. No batch lies across the end of a front: whether memory is locked is told by its
first byte, and a copy out of memory that is locked in part fails.

Only pages that were written to are locked, so that takes no more memory, and short epochs of workers that do not live
on never pay for it. A front is unlocked when its loader is closed and nothing refers to a batch of the worker any more,
by the process that locked it.

**Considered and refused.** *Locking batch by batch* takes longer than copying them, and neighbours share a page.
*Locking more as more is used*: what lies across two locks cannot be copied. *Locking all that a worker may ever use*
is up to 1 GiB of memory for a loader, whatever its batches take.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Protocol, final

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["PageLock", "PinnedRegion", "is_locked"]


class PageLock(Protocol):
    """Locks memory of this process in place, for one kind of accelerator."""

    def __call__(self, address: int, num_bytes: int, /) -> Callable[[], object] | None:
        """What unlocks it; ``None`` if it could not be locked.

        Args:
          address: of the first byte, where a page begins.
          num_bytes: whole pages.
        """


# Memory is found by its address, which means the same in the whole process.
_FRONTS: weakref.WeakValueDictionary[int, PinnedRegion] = weakref.WeakValueDictionary()


@final
class PinnedRegion:
    """The memory that the first batches of a loader worker took: the beginning of its part.

    Args:
      part: all the memory of the worker. All that is over it refers to this very array.
      length: one number, shared with the worker: the bytes of the front, whole pages; 0 until the worker knows.
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
        """In bytes; 0 where there is none yet."""
        return int(self._length[0])

    def reach(self, length: int) -> None:
        """The worker says how long it is. It never changes afterwards."""
        self._length[0] = length

    def holds(self, begin: int, end: int) -> bool:
        """Whether all memory between two addresses is of the front."""
        return self._begin <= begin and end <= self._begin + self.length

    def lock(self, lock: PageLock) -> bool:
        """Whether it is locked now. It is tried once."""
        if not self._asked:
            self._asked = True
            unlock = lock(self._begin, self.length)
            if unlock is not None:
                self._unlock = weakref.finalize(self._part, _unlock, os.getpid(), unlock)
                self._unlock.atexit = False  # the accelerator may be gone by then
        return self._unlock is not None and self._unlock.alive

    def unlock(self) -> None:
        """Nothing refers to a batch there any more. Idempotent."""
        if self._unlock is not None:
            self._unlock()


def _unlock(process: int, unlock: Callable[[], object]) -> None:
    if os.getpid() == process:  # a forked process has the memory, but not the accelerator
        unlock()


def is_locked(tensor: torch.Tensor, lock: PageLock) -> bool:
    """Whether a tensor's memory is of a front, and that is locked; it is locked now, if it was not. Local."""
    storage = tensor.untyped_storage()
    begin = storage.data_ptr()
    for reference in _FRONTS.valuerefs():
        front = reference()
        if front is not None and front.holds(begin, begin + storage.nbytes()):
            return front.lock(lock)
    return False
