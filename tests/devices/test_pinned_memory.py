"""What loader workers wrote is locked where it is: all of a batch or nothing, once, and for as long as it is in use."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.collate import default_collate_fn_map

import torchdistinput as tdi
from tests.data import Mapped
from tests.support.platforms import linux_memory
from tests.support.streams import FakeDevice
from torchdistinput.devices.accelerators import page_lock
from torchdistinput.devices.copy_ahead import StreamCopier
from torchdistinput.devices.pinned_memory import is_locked
from torchdistinput.sources.kernel.cut import as_is
from torchdistinput.sources.torch_loader.shared_memory.pool import SharedPool
from torchdistinput.sources.torch_loader.shared_memory.transport import BatchDecoder, BatchEncoder

pytestmark = linux_memory

ROW = 5_000
"""Float32 numbers of a sample, so that a batch is more than what is sent in a message."""


class Locks:
    """An accelerator's, which remembers what it was asked."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.locked: dict[int, int] = {}
        self.calls = 0

    def __call__(self, address: int, num_bytes: int, /) -> Callable[[], object] | None:
        self.calls += 1
        assert not any(address < lo + size and lo < address + num_bytes for lo, size in self.locked.items())
        if self.refuses:
            return None
        self.locked[address] = num_bytes
        return partial(self.locked.pop, address)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether all of it is in one lock."""
        begin, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        return any(lo <= begin and begin + size <= lo + length for lo, length in self.locked.items())


class Pipe:
    """A loader worker and the main process, in one process."""

    def __init__(self) -> None:
        shared_pool = SharedPool.for_workers(1)
        assert shared_pool is not None
        shared_pool.seal()
        self.shared_pool, self.decoder = shared_pool, BatchDecoder(shared_pool)
        self.new_worker()

    def new_worker(self) -> None:
        self.encoder = BatchEncoder(self.shared_pool, as_is)
        stacking = default_collate_fn_map[torch.Tensor]
        self.encoder.begin(0, None)
        default_collate_fn_map[torch.Tensor] = stacking  # which a real worker replaces for good

    def through(self, rows: int = 4, value: float = 0.0) -> torch.Tensor:
        self.decoder.take_back()
        sent = self.encoder(torch.full((rows, ROW), value))
        tensor: torch.Tensor = self.decoder.open(ForkingPickler.loads(ForkingPickler.dumps(sent)))
        return tensor

    def settle(self) -> None:
        """So many batches that the worker knows its front."""
        kept = [self.through() for _ in range(3)]
        for _ in range(9):
            kept = [*kept[1:], self.through()]


def test_all_of_the_first_batches_is_locked_in_one_call_and_what_lies_beyond_is_not() -> None:
    pipe, locks = Pipe(), Locks()
    assert not is_locked(pipe.through(), locks)  # nobody knows yet how much there will be
    pipe.settle()
    inside = pipe.through()
    assert is_locked(inside, locks)
    assert is_locked(inside[1:, ::7], locks)
    assert locks.holds(inside)
    assert locks.calls == 1
    [(address, size)] = locks.locked.items()
    assert address % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
    kept = [pipe.through(rows) for rows in (1, 4, 3, 2, 4, 4, 7, 1)]
    told = [is_locked(each, locks) for each in kept]
    assert told == [locks.holds(each) for each in kept]
    assert set(told) == {True, False}
    assert locks.calls == 1


def test_a_worker_that_takes_over_keeps_to_the_front_of_the_one_before() -> None:
    pipe, locks = Pipe(), Locks()
    pipe.settle()
    assert is_locked(pipe.through(), locks)
    pipe.new_worker()
    kept = [pipe.through(rows) for rows in (3, 4, 2, 9, 1)]
    assert [is_locked(each, locks) for each in kept] == [locks.holds(each) for each in kept]
    ends = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in kept]
    [(address, size)] = locks.locked.items()
    assert not any(begin < address + size < end for begin, end in ends)


@pytest.mark.parametrize("closed", [False, True])
def test_it_stays_locked_while_anybody_has_a_batch_of_it(closed: bool) -> None:
    pipe, locks = Pipe(), Locks()
    pipe.settle()
    batch = pipe.through(value=5.0)
    assert is_locked(batch, locks)
    if closed:
        pipe.decoder.close()
    del pipe
    gc.collect()
    assert locks.holds(batch)
    assert (batch == 5).all()
    row = batch[2]
    del batch
    assert locks.locked
    del row
    assert not locks.locked


def test_a_forked_process_unlocks_nothing() -> None:
    pipe, locks = Pipe(), Locks()
    pipe.settle()
    assert is_locked(pipe.through(), locks)
    child = os.fork()
    if child == 0:
        pipe.decoder.close()
        del pipe
        gc.collect()
        os._exit(0 if locks.locked else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert locks.locked


@pytest.mark.parametrize("seed", range(8))
def test_its_memory_is_not_used_again_before_its_copy_is_done(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(random.Random(seed))

    def copy(sources: list[torch.Tensor], targets: list[torch.Tensor], stream: Any) -> None:
        for source, target in zip(sources, targets, strict=True):
            device._write(target, unowned(source), stream)

    monkeypatch.setattr(device, "pin", lambda tensor: tensor)
    monkeypatch.setattr(device, "copy", copy)
    copier, pipe = StreamCopier(device), Pipe()
    for value in range(40):
        copier.begin_step()
        batch = copier.hand_over(copier.send(pipe.through(value=float(value))))
        device.read(batch, torch.full((4, ROW), float(value)))
    device.finish()
    assert device.violations == []
    copier.close()


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, by a tensor that does not keep it from being used again."""
    numbers = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    return torch.frombuffer(numbers, dtype=torch.float32).view(tensor.shape)


def test_batches_of_real_workers_are_locked_and_right() -> None:
    locks = Locks()
    data = torch.arange(160.0)[:, None].expand(-1, ROW)
    loader = DataLoader(Mapped(len(data), lambda index: data[index].clone()), 4, num_workers=2)
    with tdi.Strategy(["cpu"]).distribute_dataset(loader) as dataset:
        told = []
        for step, batch in enumerate(dataset):
            told.append(is_locked(batch, locks))
            assert told[-1] == locks.holds(batch)
            assert torch.equal(batch[:, 0], torch.arange(4.0 * step, 4.0 * step + 4))
    assert sum(told) > 5
    assert locks.locked  # the last batch is in use
    del batch, dataset
    gc.collect()
    assert not locks.locked


class FakeCudart:
    """CUDA's runtime, which says that it works, or does not."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.calls: list[Any] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        self.calls.append(("register", address, num_bytes, flags, *FakeCudaDevice.current))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        self.calls.append(("unregister", address, *FakeCudaDevice.current))
        return 0


class FakeCudaDevice:
    """``torch.cuda.device``."""

    current: ClassVar[list[torch.device]] = []

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> None:
        self.current.append(self._device)

    def __exit__(self, *_: object) -> None:
        self.current.pop()


@pytest.mark.parametrize("code", [0, 2])
def test_cuda_is_asked_for_memory_of_all_contexts_with_the_device_current(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart, device = FakeCudart(code), torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device", FakeCudaDevice)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)

    def zeros(*_: object, device: torch.device) -> None:
        cudart.calls.append(("kernel", device))
        raise RuntimeError("CUDA error: out of memory")  # of the call before, as CUDA has it

    monkeypatch.setattr(torch, "zeros", zeros)
    lock = page_lock(device)
    assert lock is not None
    unlock = lock(4096, 8192)
    assert cudart.calls[0] == ("register", 4096, 8192, 1, device)
    if code:
        assert unlock is None
        assert cudart.calls[1:] == [("kernel", device)]
    else:
        assert unlock is not None
        unlock()
        assert cudart.calls[1:] == [("unregister", 4096, device)]
