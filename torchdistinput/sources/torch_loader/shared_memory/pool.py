"""Memory that the main process shares with its loader workers, and how the end of its use is seen.

**Problem.** PyTorch gives every tensor that leaves a loader worker a shared-memory file of its own. The system then
zeroes and maps each page of each batch, in both processes, and takes it back when the batch is dropped: for batches
of some MB that is most of the time of a loader. Memory that is used again has its pages, but must not be written to
while anybody reads it.

**Decision.** One anonymous file (``memfd``) for a loader and the life of its workers, of which each worker has a part.
The file never had a name, so nothing is left in ``/dev/shm`` whoever is killed. It is large and empty at first: the
system gives a page when it is first written to. A worker puts a batch where its part is free, lowest address first, so
that no more pages are touched than batches were in use at one time. It writes the batch's number into a free entry of
its *ledger*, at the front of the file, and sends the number. The main process sets the entry to 0 when nothing refers
to the batch any more; the worker then takes the memory back. An entry is set by one side and cleared by the other, and
the number travels through a pipe, so no lock is needed.

*When nothing refers to a batch.* All tensors and arrays over it hold one object through the buffer protocol; a weak
reference to it, the ``Token``, tells when it is gone. ``share_memory_()``, or sending a tensor to another process,
moves its contents elsewhere and lets go of the buffer, while a NumPy array made before still reads the old place. Such
an array holds the tensor, so torch's storage object holds the buffer once more, as an attribute. Tokens are looked at
when the next batch is asked for; nothing runs when a batch is dropped.

*Forks.* A process that is forked, the worker of another loader, say, keeps seeing the memory of the batches in use at
that time. So that memory is not used again before it has ended, and whatever it forked, or has become another program:
until then each of them has the writing end of a pipe. Loader workers of ours do not look at the batches of their
parent; their forks do not count, if they are made within ``forks_of_workers``.

*For an accelerator* a part of it is locked in place, see ``pinned_memory``.

**Considered and refused.** *A shared-memory storage of torch's over the file* can be sent to a third process without a
copy, which would then read what the worker writes next. *Slots of one size* would have to know the size of a batch
beforehand, and waste the difference where sizes vary. *Copying each batch out* in the main process costs as many new
pages as before.

**Limits.** Linux. The number of entries and the size of the file are bounds: a batch that does not fit takes fresh
memory, the ordinary way. What is left of a closed loader is the memory of the batches that are still in use. A forked
process must not close all files that it finds open, and then go on to read a batch of its parent.
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
from functools import cache, partial
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import torch

from torchdistinput.coordination.fork_safety import AroundForks, Undo
from torchdistinput.devices.pinned_memory import PinnedRegion
from torchdistinput.sources.torch_loader.private_names import POOL

__all__ = [
    "ENTRIES",
    "NUMPYS",
    "Free",
    "SharedPool",
    "Token",
    "forks_of_workers",
    "pool_is_usable",
    "storage_over",
    "tensor_over",
]

ENTRIES: Final = 64
"""Batches of one worker that may be in use at a time."""

_ROW: Final = ENTRIES + 1
"""Numbers that the file has of a worker: its ledger, and how long its front is."""

_MOST_BYTES: Final = 1 << 30
_PAGE: Final = mmap.PAGESIZE
_ALIGNMENT: Final = 64

NUMPYS: Final = {
    getattr(torch, name): np.dtype(name)
    for name in ("float32", "float64", "float16", "uint8", "int8", "int16", "int32", "int64", "bool")
}
"""The types of tensors whose memory NumPy can show, as it calls them."""
_MOST_DIMENSIONS: Final = 32
"""Of an array, in every version of NumPy."""

_Bytes = npt.NDArray[np.uint8]


@final
class SharedPool:
    """The memory of one loader. A worker that is forked inherits it; to others its file is sent.

    Args:
      open_file: gives a descriptor of the file, which is closed by ``seal``, or when this is garbage.
      workers: loader workers.
      part: bytes for each.
    """

    _file = -1  # until there is one

    def __init__(self, open_file: Callable[[], int], workers: int, part: int) -> None:
        self._file = file = open_file()
        self.workers = workers
        self._part = part
        self._begin = begin = _before_parts(workers)
        os.ftruncate(file, begin + workers * part)
        self._map = mmap.mmap(file, begin + workers * part)
        self._ledgers = np.frombuffer(self._map, np.int64, workers * _ROW).reshape(workers, _ROW)
        self._parts = [np.frombuffer(self._map, np.uint8, part, begin + number * part) for number in range(workers)]
        self._fronts = [PinnedRegion(own, row[ENTRIES:]) for own, row in zip(self._parts, self._ledgers, strict=True)]

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
        # Whoever was to seal it may have been interrupted.
        self.seal()

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (reduction.DupFd(self._file), self.workers, self._part)

    def seal(self) -> None:
        """Closes the descriptor: all workers have the memory. Idempotent."""
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def ledger(self, worker: int) -> npt.NDArray[np.int64]:
        """The numbers of a worker's batches that are in use, in any order; 0 for a free entry."""
        row: npt.NDArray[np.int64] = self._ledgers[worker, :ENTRIES]
        return row

    def front(self, worker: int) -> PinnedRegion:
        """The memory that a worker's first batches took."""
        return self._fronts[worker]

    def part(self, worker: int) -> _Bytes:
        """A worker's memory, as a new array. Torch and NumPy keep it alive while anything over it is in use."""
        return self._parts[worker][:]

    def give_up(self, worker: int, used: Iterable[tuple[int, int]]) -> None:
        """Gives the pages of a worker's part back to the system, but for the bytes of each pair, ``lo`` to ``hi``."""
        used, begin = sorted(used), 0
        if not used:
            self._fronts[worker].unlock()
        for lo, hi in (*used, (self._part, self._part)):
            end = lo // _PAGE * _PAGE
            if begin < end:
                self._map.madvise(mmap.MADV_REMOVE, self._begin + worker * self._part + begin, end - begin)
            begin = max(begin, _up(hi, _PAGE))


def _attach(file: Any, workers: int, part: int) -> SharedPool:
    arena = SharedPool(file.detach, workers, part)
    arena.seal()
    return arena


def _before_parts(workers: int) -> int:
    """Bytes of the file in front of the workers' parts."""
    return _up(workers * _ROW * 8, _PAGE)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


@final
class Free:
    """The free places of a worker's part: the first that fits is taken.

    Args:
      size: bytes of the part.
    """

    def __init__(self, size: int) -> None:
        self._holes = [(0, size)]
        self._wall = 0
        self._top = 0  # the end of all that was ever taken

    def wall_off(self, at: int = 0) -> int:
        """No place lies across a wall from now on: one at ``at``, or behind all places so far. Where it stands."""
        at = self._wall = at or _up(self._top, _PAGE)
        self._holes = [
            part for lo, hi in self._holes for part in ([(lo, at), (at, hi)] if lo < at < hi else [(lo, hi)])
        ]
        return at

    def take(self, size: int) -> int | None:
        """A place for so many bytes; ``None`` if none is large enough."""
        size = _up(size, _ALIGNMENT)
        for number, (lo, hi) in enumerate(self._holes):
            if hi - lo >= size:
                self._holes[number : number + 1] = [(lo + size, hi)] if hi - lo > size else []
                self._top = max(self._top, lo + size)
                return lo
        return None

    def give_back(self, lo: int, size: int) -> None:
        """A place that was taken is free again."""
        insort(self._holes, (lo, lo + _up(size, _ALIGNMENT)))
        merged = self._holes[:1]
        for begin, end in self._holes[1:]:
            if begin == merged[-1][1] != self._wall:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((begin, end))
        self._holes = merged


@final
class Token:
    """Tells when nothing refers to some memory any more.

    Args:
      memory: an array that nobody else refers to; only buffers of it may be handed out.
    """

    def __init__(self, memory: _Bytes) -> None:
        # A view of an array refers to the owner of the memory, but a view of a memoryview refers to the memoryview.
        self._memory = weakref.ref(memory)
        self._buffer: memoryview | None = memory.data
        self._forks: list[_Fork] = []
        with _LOCK:
            _TOKENS.add(self)

    def buffer(self, lo: int, hi: int) -> memoryview:
        """The bytes from ``lo`` to ``hi``, to be used until ``handed_out``."""
        assert self._buffer is not None
        return self._buffer[lo:hi]

    def handed_out(self) -> None:
        """All tensors and arrays are made."""
        self._buffer = None

    def keep(self, fork: _Fork) -> None:
        """Processes that are forked now may look at the memory."""
        self._forks.append(fork)

    @property
    def is_in_use(self) -> bool:
        """Whether this process refers to the memory."""
        return self._memory() is not None

    @property
    def is_free(self) -> bool:
        """Whether the memory can be written to."""
        if self._memory() is not None:
            return False
        if not self._forks:
            return True
        self._forks = [fork for fork in self._forks if not fork.is_over]
        return not self._forks


@final
class _Fork:
    """The processes that come of one fork: each has the writing end of a pipe, until it ends or is another program."""

    def __init__(self) -> None:
        self._ends: tuple[Connection, int] | None = None
        self._is_over = False
        with contextlib.suppress(OSError):  # too many files are open: then nobody knows, and it is never over
            reader, writer = os.pipe()
            self._ends = Connection(reader, writable=False), writer

    def in_parent(self) -> Undo:
        """What closes the writing end here. It was made then, or could not be."""
        return int if self._ends is None else partial(os.close, self._ends[1])

    def in_child(self) -> None:
        """This is one of them."""
        if self._ends is not None:
            self._ends[0].close()

    @property
    def is_over(self) -> bool:
        """Whether all of them are gone."""
        with _LOCK:
            if self._ends is not None and not self._is_over and self._ends[0].poll():
                self._is_over = True
                self._ends[0].close()
            return self._is_over


def storage_over(buffer: memoryview | bytearray) -> torch.UntypedStorage:
    """A storage over the memory, which it keeps alive, also when its contents are moved elsewhere."""
    return tensor_over(buffer, torch.uint8, (len(buffer),)).untyped_storage()


def tensor_over(buffer: memoryview | bytearray, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A contiguous tensor that is all of such a storage.

    Args:
      buffer: the memory, of as many bytes as the tensor has.
      dtype: of the tensor.
      shape: of the tensor.
    """
    number = NUMPYS.get(dtype)
    if number is not None and len(shape) <= _MOST_DIMENSIONS:  # torch's own way to a shape takes several times as long
        tensor = torch.from_numpy(np.ndarray(shape, number, buffer))
    else:
        tensor = torch.frombuffer(buffer, dtype=dtype).view(shape)
    tensor.untyped_storage().buffer = buffer  # type: ignore[attr-defined] # torch keeps what is put there with it
    return tensor


@cache
def pool_is_usable() -> bool:
    """Whether this release has all that the pool needs, and storages keep what is put to them. Local."""
    tensor = torch.empty(1, device="cpu")
    with contextlib.suppress(AttributeError):
        tensor.untyped_storage().buffer = b""  # type: ignore[attr-defined] # as in tensor_over
    return POOL.is_usable(tensor.untyped_storage())


# A fork concerns the whole process, so what it must be told is known to the whole process.
_TOKENS: weakref.WeakSet[Token] = weakref.WeakSet()
_LOCK = threading.RLock()
_FORKING = threading.local()


@contextlib.contextmanager
def forks_of_workers() -> Iterator[None]:
    """Processes that this thread forks inside do not look at batches that are in use."""
    _FORKING.workers = True
    try:
        yield
    finally:
        _FORKING.workers = False


def _before_fork() -> Undo:
    _FORKING.fork = None
    if _FORKING.__dict__.get("workers", False):
        return int
    used = [token for token in _TOKENS if token.is_in_use]
    if not used:
        return int
    fork = _Fork()
    for token in used:
        token.keep(fork)
    _FORKING.fork = weakref.ref(fork)  # the tokens keep it for as long as it is of use
    return fork.in_parent()


def _in_child(_: Undo) -> None:
    known = _FORKING.__dict__.get("fork")
    fork = None if known is None else known()
    if fork is not None:
        fork.in_child()
    _TOKENS.clear()


if sys.platform != "win32":
    # What is forked must not find the lock taken by a thread that it does not have.
    AroundForks(_before_fork, _in_child, _LOCK)
