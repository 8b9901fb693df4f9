"""Shared memory between the main process and its loader workers, and how the end of its use is detected.

**Problem.** PyTorch gives every tensor that leaves a loader worker a shared-memory file of its own. The system then
zeroes and maps each page of each batch, in both processes, and takes the page back when the batch is dropped. For
batches of some MB this takes most of a loader's time. Reused memory keeps its pages, but must not be written to while
anybody reads it.

**Decision.** There is one anonymous file (``memfd``) for each loader, for the life of its workers; each worker has a
part of it. The file never had a name, so nothing is left in ``/dev/shm`` whichever process is killed. It is large and
empty at first: the system gives a page when the page is first written to. A worker puts a batch at the lowest free
address of its part, so no more pages are touched than batches were in use at one time. It writes the batch's number
into a free entry of its *ledger*, at the front of the file, and sends the number. The main process sets the entry to 0
when nothing refers to the batch any more; the worker then takes the memory back. One side sets an entry and the other
clears it, and the number travels through a pipe, so no lock is needed.

*When nothing refers to a batch.* All tensors and arrays over its memory hold one object through the buffer protocol. A
weak reference to this object, the ``Token``, shows when it is gone. ``share_memory_()``, or sending a tensor to another
process, moves the contents elsewhere and releases the buffer, while a NumPy array made before still reads the old
place. Such an array holds the tensor, so torch's storage object holds the buffer once more, as an attribute. Tokens are
checked when the next batch is requested; nothing runs when a batch is dropped.

*Forks.* A forked process, for example a worker of another loader, keeps seeing the memory of the batches in use at the
time of the fork. So this memory is not reused before the loader is closed. Our own loader workers do not read the
batches of their parent, so their forks do not count, if they are made within ``forks_of_workers``.

**Considered and refused.** *A torch shared-memory storage over the file* can be sent to a third process without a copy;
the third process would then read what the worker writes next. *Slots of one size* require the size of a batch
beforehand, and waste the difference where sizes vary. *Copying each batch out* in the main process costs as many new
pages as before.

**Limits.** Linux only. The number of entries and the size of the file are bounds: a batch that does not fit takes new
memory, as in torch. A closed loader keeps only the memory of batches that are still in use. Torch 2.8 keeps the memory
of a tensor that was sent to another process until some hundred more were sent.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
import weakref
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from io import FileIO
from multiprocessing import reduction
from typing import Any, Final, cast, final

import numpy as np
import numpy.typing as npt
import torch

from torchdistinput.sources.torch_loader.private_names import POOL

ENTRIES: Final = 64
"""How many batches of one worker may be in use at a time."""

_MOST_BYTES: Final = 1 << 30
_PAGE: Final = mmap.PAGESIZE
_ALIGNMENT: Final = 64

NUMPYS: Final = {
    getattr(torch, name): np.dtype(name)
    for name in ("float32", "float64", "float16", "uint8", "int8", "int16", "int32", "int64", "bool")
}
"""The tensor types that NumPy has too, with NumPy's names for them."""
_MOST_DIMENSIONS: Final = 32
"""The most dimensions of an array, in every version of NumPy."""

_ByteArray = npt.NDArray[np.uint8]


@final
class SharedPool:
    """The memory of one loader. A worker that is forked inherits it; to others its file is sent.

    Args:
      open_file: gives a descriptor of the file, which is closed by ``seal``, or when this is garbage.
      workers: loader workers.
      part: bytes for each.
    """

    _file: FileIO | None = None  # until there is one

    def __init__(self, open_file: Callable[[], int], workers: int, part: int) -> None:
        # A file of Python's has its descriptor from the call that makes it to that which closes it.
        self._file = file = FileIO("torchdistinput", "r+", opener=lambda *_: open_file())
        self.workers = workers
        self._part = part
        self._begin = begin = _before_parts(workers)
        file.truncate(begin + workers * part)
        self._map = mmap.mmap(file.fileno(), begin + workers * part)
        self._ledgers = np.frombuffer(self._map, np.int64, workers * ENTRIES).reshape(workers, ENTRIES)
        self._parts = [np.frombuffer(self._map, np.uint8, part, begin + number * part) for number in range(workers)]

    @classmethod
    def for_workers(cls, workers: int) -> SharedPool | None:
        """New memory; ``None`` where the system has none of this kind, or no room for it in the address space."""
        if sys.platform != "linux":
            return None
        part = _MOST_BYTES // workers // _PAGE * _PAGE
        try:
            return cls(partial(os.memfd_create, "torchdistinput", os.MFD_CLOEXEC), workers, part)
        except (OSError, ValueError):  # a sandbox may forbid it; a limit on the size of files, or on the address space
            return None

    def __del__(self) -> None:
        # The caller that seals it may have been interrupted.
        self.seal()

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (reduction.DupFd(cast(FileIO, self._file).fileno()), self.workers, self._part)

    def seal(self) -> None:
        """Closes the descriptor: all workers have the memory. Idempotent."""
        if self._file is not None:
            self._file.close()

    def ledger(self, worker: int) -> npt.NDArray[np.int64]:
        """The numbers of a worker's batches that are in use, in any order; 0 for a free entry."""
        row: npt.NDArray[np.int64] = self._ledgers[worker]
        return row

    def part(self, worker: int) -> _ByteArray:
        """A worker's memory, as a new array. Torch and NumPy keep it alive while anything over it is in use."""
        return self._parts[worker][:]

    def give_up(self, worker: int, used: Iterable[tuple[int, int]]) -> None:
        """Gives the pages of a worker's part back to the system, except the bytes ``[lo, hi)`` in ``used``."""
        used, begin = sorted(used), 0
        for lo, hi in (*used, (self._part, self._part)):
            end = lo // _PAGE * _PAGE
            if begin < end:
                self._map.madvise(mmap.MADV_REMOVE, self._begin + worker * self._part + begin, end - begin)
            begin = max(begin, _up(hi, _PAGE))


def _attach(file: Any, workers: int, part: int) -> SharedPool:
    shared_pool = SharedPool(file.detach, workers, part)
    shared_pool.seal()
    return shared_pool


def _before_parts(workers: int) -> int:
    """Bytes of the file in front of the workers' parts."""
    return _up(workers * ENTRIES * 8, _PAGE)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


@final
class Free:
    """The free ranges of a worker's part; allocation takes the first range that is large enough.

    Args:
      size: the bytes of the part.
    """

    def __init__(self, size: int) -> None:
        self._holes = [(0, size)]

    def take(self, size: int) -> int | None:
        """Takes a range of ``size`` bytes; ``None`` if no free range is large enough."""
        size = _up(size, _ALIGNMENT)
        for number, (lo, hi) in enumerate(self._holes):
            if hi - lo >= size:
                self._holes[number : number + 1] = [(lo + size, hi)] if hi - lo > size else []
                return lo
        return None

    def give_back(self, lo: int, size: int) -> None:
        """Frees a range that was taken."""
        insort(self._holes, (lo, lo + _up(size, _ALIGNMENT)))
        merged = self._holes[:1]
        for begin, end in self._holes[1:]:
            if begin == merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((begin, end))
        self._holes = merged


@final
class Token:
    """Shows when nothing refers to some memory any more.

    Args:
      memory: an array that nobody else refers to; only buffers of it may be handed out.
    """

    def __init__(self, memory: _ByteArray) -> None:
        # A view of an array refers to the owner of the memory, but a view of a memoryview refers to the memoryview.
        self._memory = weakref.ref(memory)
        self._buffer: memoryview | None = memory.data
        self._is_kept = False
        with _LOCK:
            _TOKENS.add(self)

    def buffer(self, lo: int, hi: int) -> memoryview:
        """The bytes from ``lo`` to ``hi``; to be called before ``handed_out``."""
        assert self._buffer is not None
        return self._buffer[lo:hi]

    def handed_out(self) -> None:
        """Notes that all tensors and arrays are made: the token itself lets go of the memory."""
        self._buffer = None

    def keep(self) -> None:
        """Notes that a forked process may read the memory."""
        self._is_kept = True

    @property
    def is_in_use(self) -> bool:
        """Whether this process refers to the memory."""
        return self._memory() is not None

    @property
    def is_free(self) -> bool:
        """Whether the memory can be written to."""
        return self._memory() is None and not self._is_kept


def storage_over(buffer: memoryview | bytearray) -> torch.UntypedStorage:
    """A storage over the memory. It keeps the memory alive, also when its contents are moved elsewhere."""
    return tensor_over(buffer, torch.uint8, (len(buffer),)).untyped_storage()


def tensor_over(buffer: memoryview | bytearray, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A contiguous tensor that covers a buffer.

    Args:
      buffer: the memory, with exactly the bytes of the tensor.
      dtype: the type of the tensor.
      shape: the shape of the tensor.
    """
    number = NUMPYS.get(dtype)
    if number is not None and len(shape) <= _MOST_DIMENSIONS:  # torch takes several times as long to set a shape
        tensor = torch.from_numpy(np.ndarray(shape, number, buffer))
    else:
        tensor = torch.frombuffer(buffer, dtype=dtype).view(shape)
    tensor.untyped_storage().buffer = buffer  # type: ignore[attr-defined] # torch keeps this attribute with the storage
    return tensor


def pool_is_usable() -> bool:
    """Whether this release of torch has all that the pool needs, and keeps attributes of storages. Local."""
    tensor = torch.empty(1, device="cpu")
    with contextlib.suppress(AttributeError):
        tensor.untyped_storage().buffer = b""  # type: ignore[attr-defined] # as in tensor_over
    return POOL.is_usable(tensor.untyped_storage())


# A fork concerns the whole process, so the tokens that must learn of it are global.
_TOKENS: weakref.WeakSet[Token] = weakref.WeakSet()
_LOCK = threading.RLock()
_FORKING = threading.local()


@contextlib.contextmanager
def forks_of_workers() -> Iterator[None]:
    """Marks the processes that this thread forks inside as not reading batches that are in use."""
    _FORKING.workers = True
    try:
        yield
    finally:
        _FORKING.workers = False


def _before_fork() -> None:
    if not _FORKING.__dict__.get("workers", False):
        for token in _TOKENS:
            if token.is_in_use:
                token.keep()


if sys.platform != "win32":
    os.register_at_fork(before=_before_fork, after_in_child=_TOKENS.clear)
    # The child must not find the lock held by a thread that it does not have. What is registered last runs first before
    # a fork, and last after it.
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)
