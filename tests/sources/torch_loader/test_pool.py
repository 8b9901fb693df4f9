"""Memory that is used again: what keeps it from being, and that nothing of it stays behind."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.platforms import linux_memory
from tests.support.sent_storages import forget_sent_storages
from torchdistinput.sources.torch_loader.shared_memory.pool import (
    Free,
    SharedPool,
    Token,
    forks_of_workers,
    storage_over,
)

pytestmark = linux_memory


def new_pool(workers: int = 1) -> SharedPool:
    shared_pool = SharedPool.for_workers(workers)
    assert shared_pool is not None
    shared_pool.seal()
    return shared_pool


@pytest.mark.parametrize("seed", range(20))
def test_places_do_not_overlap_and_are_one_again_in_the_end(seed: int) -> None:
    draw, whole = random.Random(seed), 1 << 14
    free, taken = Free(whole), dict[int, int]()
    for _ in range(400):
        if draw.random() < 0.55:
            size = draw.randint(1, 3000)
            lo = free.take(size)
            if lo is None:
                continue
            assert lo >= 0
            assert lo + size <= whole
            assert lo % 64 == 0
            assert all(lo + size <= other or other + taken[other] <= lo for other in taken)
            taken[lo] = size
        elif taken:
            lo = draw.choice(list(taken))
            free.give_back(lo, taken.pop(lo))
    for lo, size in taken.items():
        free.give_back(lo, size)
    assert free.take(whole) == 0


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the tensor": lambda x: x,
    "a view": lambda x: x.view(4, 8)[2:, ::2],
    "one row": lambda x: x[3],
    "an iterator over it": iter,
    "other numbers of its bytes": lambda x: x.view(torch.int32),
    "its transpose": lambda x: x.view(8, 4).T,
    "its storage": lambda x: x.untyped_storage(),
    "a NumPy array of it": lambda x: x.numpy(),
    "a view of a NumPy array": lambda x: x.numpy().reshape(4, 8)[1:, 3],
    "a memoryview": lambda x: x.numpy().data,
    "a tensor of an array of it": lambda x: torch.from_numpy(x.numpy()[5:]),
    "a list in a list": lambda x: [[x[:2]]],
    "a parameter": torch.nn.Parameter,
    "a detached one": lambda x: x.detach(),
    "what autograd saved": lambda x: (x * torch.ones(32, requires_grad=True)).grad_fn,
    "a bound method": lambda x: x.sum,
    "dlpack": lambda x: x.__dlpack__(),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_memory_is_not_free_while_anything_refers_to_it(name: str) -> None:
    shared_pool = new_pool()
    token = Token(shared_pool.part(0))
    storage = storage_over(token.buffer(64, 192))
    token.handed_out()
    x = torch.empty(0).set_(storage)
    x.copy_(torch.arange(32.0))
    holder = HOLDERS[name](x)
    del x, storage
    assert not token.is_free
    del holder
    assert token.is_free


@pytest.mark.parametrize("moved", ["share_memory_", "sent"])
def test_an_array_holds_memory_that_its_tensor_left(moved: str) -> None:
    token = Token(new_pool().part(0))
    storage = storage_over(token.buffer(0, 64))
    token.handed_out()
    x = torch.empty(0).set_(storage)
    x.fill_(7)
    del storage
    array = x.numpy()
    if moved == "sent":
        received = ForkingPickler.loads(ForkingPickler.dumps(x))
        assert received.tolist() == [7.0] * 16
        del received
    else:
        x.share_memory_()  # type: ignore[no-untyped-call] # torch's
    del x
    forget_sent_storages()
    assert not token.is_free
    assert array.tolist() == [7.0] * 16
    del array
    forget_sent_storages()
    assert token.is_free


def forked(life: Callable[[int], object], until: int) -> int:
    child = os.fork()
    if not child:
        life(until)
        os._exit(0)
    return child


def waits(until: int) -> None:
    os.read(until, 1)


def in_use(shared_pool: SharedPool) -> tuple[Token, torch.UntypedStorage]:
    token = Token(shared_pool.part(0))
    storage = storage_over(token.buffer(0, 64))
    token.handed_out()
    return token, storage


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_memory_in_use_at_a_fork_is_not_free_any_more() -> None:
    shared_pool = new_pool()
    until, end = os.pipe()
    token, storage = in_use(shared_pool)
    dropped = Token(shared_pool.part(0))
    dropped.handed_out()
    child = forked(waits, until)
    later = Token(shared_pool.part(0))
    later.handed_out()
    del storage
    found = [dropped.is_free, later.is_free, token.is_free]
    os.write(end, b".")
    os.waitpid(child, 0)
    os.close(until)
    os.close(end)
    assert found == [True, True, False]
    assert not token.is_free


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forks_of_workers_do_not_look_at_memory_in_use() -> None:
    token, storage = in_use(new_pool())
    until, end = os.pipe()
    with forks_of_workers():
        child = forked(waits, until)
    del storage
    found = token.is_free
    os.write(end, b".")
    os.waitpid(child, 0)
    os.close(until)
    os.close(end)
    assert found


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def maps() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:torchdistinput (deleted)")  # a file without a name


def test_nothing_is_left_in_the_system() -> None:
    gc.collect()
    before = open_files(), maps()
    shared_pool = new_pool(3)
    shared_pool.part(2)[:5000] = 1
    assert maps() == before[1] + 1
    del shared_pool
    assert (open_files(), maps()) == before
