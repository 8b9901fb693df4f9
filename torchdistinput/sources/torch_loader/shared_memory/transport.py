"""Sends batches of loader workers through reused shared memory, instead of new shared memory for each batch.

A worker pickles an item as PyTorch does, except for the contents of tensors and arrays. These are put into the worker's
part of the ``SharedPool`` (see ``pool``), and only their places are sent. ``default_collate`` stacks samples directly
in the pool. An item that does not fit there, or cannot be sent so, is sent as torch sends it.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, Final, NamedTuple, cast, final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from torchdistinput.coordination.private_names import look_up
from torchdistinput.sources.kernel.read_failures import Failure
from torchdistinput.sources.torch_loader.settings import WorkerInit
from torchdistinput.sources.torch_loader.shared_memory.pool import (
    SharedPool,
    Token,
    pool_is_usable,
    storage_over,
)
from torchdistinput.sources.torch_loader.shared_memory.worker import (
    DoesNotFit,
    PoolAllocator,
    PoolBlock,
    Stack,
    collate_tensor_fn,
    is_plain,
)

_OTHER_ORDER: Final = ">" if sys.byteorder == "little" else "<"
"""The prefix of NumPy's types whose bytes are in the other order than this machine's."""

_DTYPES: Final = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
}
"""Common types of tensors; the others are sent as PyTorch does."""

_stacking: Final[dict[type[Any], Any]] = look_up("torch.utils.data._utils.collate.default_collate_fn_map")
"""The functions with which ``default_collate`` stacks, by type."""

_REDUCERS: Final[dict[type[Any], Callable[[Any], Any]]] = (
    look_up("multiprocessing.reduction.ForkingPickler._extra_reducers") or {}
)
"""The reducers registered with ``ForkingPickler``: the live table, which grows with later registrations."""


def _reduction_of(obj: Any) -> Any:
    """The result of an object's reducer, where ``ForkingPickler`` differs from ``pickle``; else ``NotImplemented``."""
    cls = type(obj)
    reduce = None if cls is type or cls is FunctionType else _REDUCERS.get(cls)  # handled before reducers
    return NotImplemented if reduce is None else reduce(obj)


Spans = Sequence[tuple[int, int]]
"""The places of contents in a worker's part: for each the first byte, and the byte after the last."""

PickledItem = bytes
"""An item of a loader worker whose tensors lie in the pool, pickled. It is a tuple of: the worker; how many of its
items took memory so far; the entry in the ledger (``None`` if this item took no memory); the places of the contents;
and the rest of the item, pickled.

The tuple is a plain one: the name of a class would take as long to send as all of it."""


class Fresh(NamedTuple):
    """An item of a loader worker that is sent as torch sends it. A named tuple, so that torch pins its tensors."""

    item: Any
    worker: int
    number: int
    """How many of the worker's items took memory so far."""


@final
class _Contents:
    """The places of the contents of an item's tensors and arrays.

    Args:
      allocator: allocates memory in the pool.
    """

    def __init__(self, allocator: PoolAllocator) -> None:
        self._allocator = allocator
        self.blocks: list[PoolBlock] = []
        """The blocks of the contents that are not in the message."""

    def are_inside(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether contents become a part of the message; the pickler calls this for each buffer in turn."""
        contents = buffer.raw()
        if self._allocator.is_small(contents.nbytes):
            return True
        self.blocks.append(self._allocator.place(contents))
        return False


@final
class _BatchPickler(pickle.Pickler):
    """Pickles as PyTorch does between processes, but with the contents of tensors and arrays as separate buffers.

    Args:
      message: the pickler writes to it.
      contents: collects the contents. It must not refer to the pickler: the cycle would keep the item alive.
    """

    def __init__(self, message: io.BytesIO, contents: _Contents) -> None:
        super().__init__(message, pickle.HIGHEST_PROTOCOL, buffer_callback=contents.are_inside)

    def reducer_override(self, obj: Any) -> Any:
        """Reduces a storage to a buffer of bytes, a plain tensor to its storage, other objects as PyTorch does."""
        if type(obj) is torch.Tensor:
            if obj.dtype not in _DTYPES or not is_plain(obj) or obj.is_neg():
                return _reduction_of(obj)
            # Torch has one object for a storage while it is alive, so pickle knows a storage that comes again.
            return _tensor, (obj.untyped_storage(), obj.dtype, obj.storage_offset(), tuple(obj.shape), obj.stride())
        if type(obj) is np.ndarray:
            return _reduction_of_array(obj)
        if type(obj) is not torch.UntypedStorage or not obj.nbytes():
            return _reduction_of(obj)
        return storage_over, (pickle.PickleBuffer(_memory_of(obj)),)


def _reduction_of_array(array: npt.NDArray[Any]) -> Any:
    """Reduces an array so that it arrives as by pickle's default protocol, which is torch's way.

    By protocol 4 every array arrives writable and in this machine's byte order. By protocol 5, the default from Python
    3.14 on, an array in one piece keeps its byte order, and stays read-only if it is.
    """
    if pickle.DEFAULT_PROTOCOL >= 5:
        if not array.flags.writeable and array.flags.forc and not array.dtype.hasobject:
            return _read_only, (array.copy("A"),)
    elif array.dtype.byteorder == _OTHER_ORDER:
        return array.astype(array.dtype.newbyteorder("="), "A").__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    elif not array.flags.writeable:
        return array.copy("A").__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return _reduction_of(array)


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array


def _memory_of(storage: torch.UntypedStorage) -> memoryview:
    """The contents of a storage.

    Raises:
      DoesNotFit: torch can send the storage without a copy.
    """
    if storage.device.type != "cpu" or storage.is_shared():
        raise DoesNotFit
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy().data


def _tensor(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, stride)


@final
class BatchEncoder:
    """Encodes the items of a loader worker: its ``collate_fn``, which runs last.

    Args:
      shared_pool: the shared memory of the loader.
      collate: the loader's own ``collate_fn``.
    """

    def __init__(self, shared_pool: SharedPool, collate: Callable[[Any], Any]) -> None:
        self._shared_pool = shared_pool
        self._collate = collate
        self._allocator: PoolAllocator | None = None

    def begin(self, worker: int) -> None:
        """Lets ``default_collate`` stack into the pool, in this worker. See ``settings.WorkerInit``."""
        self._allocator = PoolAllocator(self._shared_pool, worker)
        if _stacking.get(torch.Tensor) is collate_tensor_fn:
            _stacking[torch.Tensor] = Stack(self._allocator)

    def __call__(self, data: Any) -> PickledItem | Fresh:
        """The encoded item."""
        assert self._allocator is not None
        item = self._collate(data)
        del data
        try:
            return self._packed(item, self._allocator)
        finally:
            del item
            self._allocator.take_back()

    @staticmethod
    def _packed(item: Any, allocator: PoolAllocator) -> PickledItem | Fresh:
        try:
            return _packed(item, allocator)
        except DoesNotFit:
            return Fresh(item, allocator.worker, allocator.number)
        except Exception as error:  # torch's thread would print it, and the main process would wait for ever
            return _packed(Failure(error, "sending what was read to the main process"), allocator)


def _packed(item: Any, allocator: PoolAllocator) -> PickledItem:
    contents, message = _Contents(allocator), io.BytesIO()
    _BatchPickler(message, contents).dump(item)
    entry = allocator.enter(contents.blocks) if contents.blocks else None
    places = tuple([(block.lo, block.lo + block.size) for block in contents.blocks])
    packed = allocator.worker, allocator.number, entry, places, message.getvalue()
    return pickle.dumps(packed, pickle.HIGHEST_PROTOCOL)


def send_through_pool(loader: DataLoader[Any]) -> BatchDecoder | None:
    """Makes a loader's workers send through reused memory; returns the decoder, ``None`` where this cannot be.

    Args:
      loader: a new loader, not started yet, with the settings of ``settings.settings_of``.
    """
    init = loader.worker_init_fn
    usable = isinstance(init, WorkerInit) and pool_is_usable()
    shared_pool = SharedPool.for_workers(loader.num_workers) if usable else None
    if shared_pool is None:
        return None
    encoder = BatchEncoder(shared_pool, cast("Callable[[Any], Any]", loader.collate_fn))
    loader.collate_fn, cast(WorkerInit, init).begin = encoder, encoder.begin
    return BatchDecoder(shared_pool)


@final
class BatchDecoder:
    """Decodes the items of a loader's workers in the main process.

    Args:
      shared_pool: the shared memory of the loader.
    """

    def __init__(self, shared_pool: SharedPool) -> None:
        self._shared_pool = shared_pool
        # The tokens by worker and entry of the ledger, each with the places of its item.
        self._tokens: dict[tuple[int, int], tuple[Token, Spans]] = {}
        self._numbers = [0] * shared_pool.workers
        self._closed = False
        # torch sets things up at the first use of a function; another thread must not do so while a worker is forked.
        storage_over(bytearray(1))

    def seal(self) -> None:
        """Closes the pool's file once all workers have mapped it. Idempotent."""
        self._shared_pool.seal()

    def take_back(self) -> None:
        """Gives the memory of unreferenced batches back to the workers."""
        for (worker, entry), (token, _) in list(self._tokens.items()):
            if token.is_free:
                del self._tokens[worker, entry]
                self._shared_pool.ledger(worker)[entry] = 0

    def open(self, sent: PickledItem | Fresh) -> Any:
        """The item that a worker sent. Torch's pinning thread may have made a list of the named tuple.

        Raises:
          StopIteration: the loader was closed.
        """
        if isinstance(sent, Fresh):
            self._count(sent.worker, sent.number, took=False)
            return sent.item
        worker, number, entry, places, rest = pickle.loads(sent)
        self._count(worker, number, took=entry is not None)
        if entry is None:
            return pickle.loads(rest)
        token = Token(self._shared_pool.part(worker))
        self._tokens[worker, entry] = token, places
        if self._closed:  # after the token is stored: close() sets _closed first and looks for tokens then
            raise StopIteration
        buffers = [token.buffer(lo, hi) for lo, hi in places]
        token.handed_out()
        return pickle.loads(rest, buffers=buffers)

    def _count(self, worker: int, number: int, *, took: bool) -> None:
        """Notes that an item came; ``number`` of the worker's items have taken memory so far."""
        if number != self._numbers[worker] + took:
            self._forget(worker, number - took)
        self._numbers[worker] = number

    def _forget(self, worker: int, number: int) -> None:
        """Frees what an earlier epoch sent and torch threw away: items come in order, so a missing one never comes."""
        ledger = self._shared_pool.ledger(worker)
        for entry in np.flatnonzero((ledger > 0) & (ledger <= number)).tolist():
            if (worker, entry) not in self._tokens:
                ledger[entry] = 0

    def close(self) -> None:
        """Gives the memory back to the system, except for batches that are in use. Idempotent; any thread."""
        self._closed = True
        used: list[list[tuple[int, int]]] = [[] for _ in range(self._shared_pool.workers)]
        for (worker, _), (token, places) in list(self._tokens.items()):
            if not token.is_free:
                used[worker].extend(places)
        for worker, taken in enumerate(used):
            self._shared_pool.give_up(worker, taken)
