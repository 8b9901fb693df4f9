"""Batches in memory that is used again are what the ordinary way gives, and stay so as long as anybody has them."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import signal
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from functools import cache, partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef, shared_cache
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data._utils.pin_memory import pin_memory

import torchdistinput as tdi
from tests.data import Mapped, Stream
from tests.support.platforms import linux_memory
from tests.support.scenes import owner_of
from tests.support.structures import Batch, Pair
from torchdistinput.sources.kernel.batcher import as_is
from torchdistinput.sources.kernel.read_failures import Failure
from torchdistinput.sources.map_style.piece_dataset import PieceDataset
from torchdistinput.sources.torch_loader.loader_runs import LoaderRuns
from torchdistinput.sources.torch_loader.shared_memory import pool
from torchdistinput.sources.torch_loader.shared_memory import worker as worker_part
from torchdistinput.sources.torch_loader.shared_memory.pool import (
    Free,
    SharedPool,
    Token,
    forks_of_workers,
    storage_over,
)
from torchdistinput.sources.torch_loader.shared_memory.transport import BatchDecoder, BatchEncoder, Fresh, PickledItem
from torchdistinput.step_types import OpaqueBatch

pytestmark = linux_memory

BIG = 300  # entries of a row, so that contents are not sent in the message


@pytest.fixture(autouse=True)
def torchs_own_stacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a loader worker it is replaced for good. And what counts as small is so small here that tests are fast."""
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, default_collate_fn_map[torch.Tensor])
    monkeypatch.setattr(worker_part, "_SMALL", 1 << 8)


class Pipe:
    """A loader worker and the main process, in one process."""

    def __init__(self, workers: int = 1) -> None:
        shared_pool = SharedPool.for_workers(workers)
        assert shared_pool is not None
        shared_pool.seal()
        self.shared_pool, self.decoder = shared_pool, BatchDecoder(shared_pool)
        self.encoders = [BatchEncoder(shared_pool, as_is) for _ in range(workers)]
        for number, encoder in enumerate(self.encoders):
            encoder.begin(number)

    def send(self, item: Any, worker: int = 0) -> PickledItem | Fresh:
        sent: PickledItem | Fresh = ForkingPickler.loads(ForkingPickler.dumps(self.encoders[worker](item)))
        return sent

    def through(self, item: Any, worker: int = 0) -> Any:
        self.decoder.take_back()
        return self.decoder.open(self.send(item, worker))

    def holds(self, tensor: torch.Tensor) -> bool:
        part = self.shared_pool.part(0)
        begin = part.__array_interface__["data"][0]
        return bool(begin <= tensor.data_ptr() < begin + part.nbytes)


def facts(leaf: Any) -> Any:
    """All that can be seen of a leaf."""
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        bits = (
            leaf.detach().contiguous().view(-1).view(torch.uint8).tolist() if leaf.numel() and not leaf.is_meta else []
        )
        layout = (
            leaf.shape,
            leaf.stride(),
            leaf.storage_offset(),
            leaf.untyped_storage().nbytes(),
            leaf.is_contiguous(),
        )
        return type(leaf), leaf.dtype, layout, leaf.requires_grad, leaf.is_leaf, bits
    if isinstance(leaf, torch.Tensor):
        return type(leaf), leaf.layout, facts(leaf.to_dense()), leaf.is_coalesced()
    if isinstance(leaf, np.ndarray):
        return type(leaf), leaf.dtype, leaf.shape, leaf.strides, leaf.flags.writeable, plain(leaf)
    if isinstance(leaf, dict):
        return type(leaf), [(key, facts(value)) for key, value in leaf.items()]
    if isinstance(leaf, list | tuple):
        return type(leaf), [facts(each) for each in leaf]
    if dataclasses.is_dataclass(leaf):
        return type(leaf), facts(vars(leaf))
    return type(leaf), leaf


def plain(array: Any) -> Any:
    return array.tolist() if array.dtype.hasobject else array.tobytes()


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)


def twice() -> Any:
    x = numbers(4, BIG)
    return [x, x[1:3], x.view(-1), {"same": x}]


def part_first() -> Any:
    x = numbers(4, BIG)
    return [x[1:3], x, x.view(-1), (x[2:], x)]


class Own(torch.Tensor):
    """A subclass without anything of its own."""


ITEMS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: numbers(4, BIG),
    "small": lambda: numbers(4),
    "empty": lambda: numbers(0, BIG),
    "scalar": lambda: torch.tensor(3.5),
    **{
        str(dtype): partial(numbers, 4, BIG, dtype=dtype)
        for dtype in (torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float64, torch.complex64)
    },
    "strides": lambda: numbers(4, BIG).T,
    "offset": lambda: numbers(4, BIG)[1:, 7:],
    "expanded": lambda: numbers(BIG).expand(4, BIG),
    "one storage": twice,
    "one storage, its part first": part_first,
    "rows of one element": lambda: [numbers(1, BIG), numbers(BIG, 1), numbers(1, 1, BIG, 1), numbers(1)],
    "strides of one element": lambda: [
        numbers(BIG).as_strided((1, BIG), (7, 1)),
        numbers(9).as_strided((1, 9), (5, 1)),
    ],
    "many dimensions": lambda: numbers(BIG).view(*[1] * 40, BIG),
    "negative": lambda: torch.full((BIG,), 2j).conj().imag,
    "parameter": lambda: torch.nn.Parameter(numbers(4, BIG)),
    "requires grad": lambda: numbers(4, BIG).requires_grad_(),
    "subclass": lambda: numbers(4, BIG).as_subclass(Own),
    "sparse": lambda: numbers(4, BIG).to_sparse(),
    "array": lambda: numbers(4, BIG).numpy(),
    "small array": lambda: np.arange(3),
    "array, Fortran's order": lambda: np.asfortranarray(numbers(4, BIG).numpy()),
    "array, strides": lambda: numbers(4, BIG).numpy()[::2, ::3],
    "array, read only": lambda: np.frombuffer(bytes(4 * BIG), np.int32),
    "arrays, read only, whose memory is no one piece": lambda: [
        np.frombuffer(bytes(4 * BIG), np.int32)[::2],
        np.broadcast_to(np.arange(3.0), (2, 3)),
        np.frombuffer(bytes(6 * BIG), np.int16).reshape(3, BIG).T,
    ],
    "array, the other byte order": lambda: [
        np.arange(BIG, dtype=">i4"),
        np.arange(6, dtype=">f8")[::-2],
        np.array([">"]),
    ],
    "array of objects": lambda: np.array(["a", None, 3], dtype=object),
    "array of texts": lambda: np.array(["a", "bcd"]),
    "array of records": lambda: np.zeros(BIG, dtype=[("a", "i4"), ("b", "f8", 3)]),
    "nested": lambda: {"a": [numbers(4, BIG), ("s", 1.5, None)], "b": Pair(numbers(2, BIG), numbers(2)), 3: b"bytes"},
    "ordered": lambda: OrderedDict(z=numbers(4, BIG), a=["x"] * 4),
    "data class": lambda: Batch(numbers(4, BIG, dtype=torch.int64), ["x"] * 4),
    "nothing": lambda: None,
    "texts": lambda: ["x" * 10_000, "y"],
    "bytes": lambda: [bytes(10_000), bytearray(10_000)],
    "many": lambda: [numbers(k % 3 + 1, BIG) for k in range(30)],
    "sealed": lambda: OpaqueBatch([numbers(4, BIG), {"y": numbers(4)}], 4),
    "sealed, unusual": lambda: OpaqueBatch(OrderedDict(x=numbers(4, BIG)), 4),
    "containers": lambda: {"a": (numbers(4, BIG), [], ()), 3: [numbers(4), {}], None: {True: -0.0, 2.5: 1 << 70}},
    "keys": lambda: {("a", 1): numbers(4, BIG)},
    "sizes": lambda: [numbers(4, BIG).shape, numbers(4, BIG)],
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", ITEMS)
def test_an_item_is_what_the_ordinary_way_gives(name: str) -> None:
    pipe = Pipe()
    ordinary = ForkingPickler.loads(ForkingPickler.dumps(ITEMS[name]()))
    for _ in range(3):  # into fresh pages, and into used ones
        found = pipe.through(ITEMS[name]())
        assert facts(found) == facts(ordinary)


def test_tensors_of_one_storage_stay_tensors_of_one_storage() -> None:
    x, part, flat, more = Pipe().through(twice())
    part.fill_(-1)
    assert (flat.view(4, -1)[1:3] == -1).all()
    assert more["same"].data_ptr() == x.data_ptr()
    part, x, flat, (rest, same) = Pipe().through(part_first())
    part.fill_(-1)
    assert (flat.view(4, -1)[1:3] == -1).all()
    assert (rest[0] == -1).all()
    assert same is x


@pytest.mark.parametrize("size", [4, BIG])
def test_a_storage_stays_that_of_its_tensor(size: int) -> None:
    x = numbers(size)
    for order in (1, -1):
        tensor, storage = Pipe().through([x, x.untyped_storage()][::order])[::order]
        assert storage is tensor.untyped_storage()
        assert torch.equal(tensor, x)


@pytest.mark.parametrize("item", [numbers(4, BIG), "text"])
def test_what_torchs_thread_that_pins_makes_of_it_is_opened_as_well(item: Any) -> None:
    pipe = Pipe()
    for _ in range(3):
        assert facts(pipe.decoder.open(pin_memory(pipe.send(item)))) == facts(item)  # type: ignore[no-untyped-call] # torch's


def test_what_cannot_be_pickled_fails_at_its_step() -> None:
    def local() -> None: ...

    failure = Pipe().through([numbers(4, BIG), local])
    assert isinstance(failure, Failure)
    assert "local" in str(failure.error)
    assert "sending" in failure.where


Named = namedtuple("Named", ["x", "y"])  # noqa: PYI024 - as users have them

SAMPLES: dict[str, Callable[[int], Any]] = {
    "tensor": lambda k: numbers(3, BIG) + k,
    "large": lambda k: numbers(5, BIG) + k,
    "array": lambda k: (numbers(5, BIG).numpy() * k, k),
    "dict": lambda k: {"x": numbers(5, BIG) * k, "y": [k, f"s{k}"], "z": np.arange(3_000) + k},
    "named": lambda k: Named(numbers(5, BIG) * k, 0.5 * k),
    "list": lambda k: [numbers(5, BIG) * k, numbers(2) * k],
    "strides": lambda k: (numbers(10, BIG)[::2] * k, (numbers(BIG, 5) * k).T, numbers(10, BIG).numpy()[::2] * k),
    "twice": lambda k: (x := numbers(5, BIG) * k, x, x[1:]),
    "sizes of one element": lambda k: torch.full((1, 2_000), k, dtype=torch.int16),
    "bfloat16": lambda k: torch.full((4_000,), k, dtype=torch.bfloat16),
    "complex": lambda k: torch.full((2_000,), k * 1j),
    "conjugated": lambda k: torch.full((2_000,), k * 1j).conj(),
    "bool": lambda k: np.full(7_000, k % 2 == 0),
    "other dtype later": lambda k: torch.full((2_000,), k, dtype=torch.float64 if k < 2 else torch.float32),
    "array, then tensor": lambda k: np.full(2_000, k, "f4") if k < 2 else torch.full((2_000,), float(k)),
    "tensor, then array": lambda k: torch.full((2_000,), float(k)) if k < 2 else np.full(2_000, k, "f4"),
    "backwards later": lambda k: np.arange(2_000, dtype="i8")[:: 1 if k < 2 else -1],
    "strides later": lambda k: (np.full((20, 200), k).T if k % 2 else np.full((200, 20), k), numbers(5, BIG).T),
    "small, then large": lambda k: torch.full((10 if k < 2 else 2_000,), float(k))[:10],
    "subclass": lambda k: (numbers(5, BIG) * k).as_subclass(Own),
    "scalars": lambda k: (k, 0.5 * k, np.float32(k), f"text {k}"),
    "ragged": lambda k: torch.zeros(2_000 + k),
    "ragged, then not": lambda k: torch.zeros(2_000 + (k == 0)),
    "sizes of tuples": lambda k: (numbers(5, BIG),) * (1 + k % 2),
    "big endian": lambda k: np.full(2_000, k, ">f4"),
    "long double": lambda k: np.full(2_000, k, np.longdouble),
    "texts in an array": lambda k: np.full(2_000, "abc"),
    "backwards": lambda k: np.arange(2_000)[::-1],
    "sparse": lambda k: (numbers(5, BIG) * k).to_sparse(),
    "without memory": lambda k: (torch.empty(5, BIG, device="meta"), k),
    "other types": lambda k: numbers(5, BIG) if k == 0 else 3,
}


def outcome(item: Any) -> Any:
    return (type(item.error), str(item.error), item.where) if isinstance(item, Failure) else facts(item)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("name", SAMPLES)
def test_stacking_in_place_is_stacking(name: str) -> None:
    request = (True, [0, 1, 2, 3], 0)
    expected = outcome(PieceDataset(Mapped(4, SAMPLES[name]), default_collate)[request])
    pieces = PieceDataset(Mapped(4, SAMPLES[name]), default_collate)
    pipe = Pipe()
    for _ in range(3):
        assert outcome(pipe.through(pieces[request])) == expected
    short = (True, [2], 0)
    assert outcome(pipe.through(pieces[short])) == outcome(
        PieceDataset(Mapped(4, SAMPLES[name]), default_collate)[short]
    )


def check(kept: list[tuple[int, Any]]) -> None:
    for expected, holder in kept:
        each = holder["a"][0] if isinstance(holder, dict) else holder
        assert (each == expected).all()


@pytest.mark.parametrize("seed", range(8))
def test_whoever_keeps_a_batch_keeps_it_whoever_drops_it_frees_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(pool, "_MOST_BYTES", 2 * 40 * 4096)
    pipe = Pipe(workers=2)
    kept: list[tuple[int, Any]] = []
    on_the_way: list[list[tuple[int, PickledItem | Fresh]]] = [[], []]
    inside: list[tuple[int, Any]] = []  # that the dataset keeps in its worker
    fresh, sent = 0, None
    for number in range(150):
        worker = draw.randrange(2)
        rows = draw.randint(1, 4)
        x = torch.full((rows, 2000), float(number))
        if draw.random() < 0.5:
            x = default_collate([torch.full((2000,), float(number))] * rows)
        if draw.random() < 0.1:
            inside.append((number, x))
        on_the_way[worker].append((number, pipe.send([x, number], worker)))
        del x
        for waiting in on_the_way:
            if waiting and draw.random() < 0.6:
                pipe.decoder.take_back()
                expected, sent = waiting.pop(0)
                if draw.random() < 0.1:
                    continue  # as torch does with what an epoch left
                fresh += isinstance(sent, Fresh)
                x, found = pipe.decoder.open(sent)
                assert found == expected
                holders = (x, x[0], x.numpy(), x.view(-1)[::7], {"a": [x]}, x.numpy()[-1:, 5:])
                kept.append((expected, draw.choice(holders)))
                del holders, x
        draw.shuffle(kept)
        del kept[draw.choice((3, 10, 40)) :]
        draw.shuffle(inside)
        del inside[5:]
        check(kept + inside)
    assert fresh
    del kept, inside
    for waiting in on_the_way:
        while waiting:
            pipe.decoder.open(waiting.pop(0)[1])
    del sent  # in one process what came in fresh memory is the very storage that was sent
    forget_sent_storages()
    for worker in (0, 1):  # all is free again, so that one batch may have it all
        pipe.through(numbers(2000), worker)
        pipe.through(0, worker)
        assert not isinstance(pipe.send(torch.zeros(40 * 4096 // 4), worker), Fresh)


def test_of_what_nobody_has_the_pages_are_given_back_when_the_loader_is_closed() -> None:
    pipe = Pipe()
    first, second = pipe.through(numbers(4, BIG)), pipe.through(numbers(4, BIG) + 1)
    place = second.data_ptr() - pipe.shared_pool.part(0).__array_interface__["data"][0]
    del first
    pipe.decoder.close()
    pipe.decoder.close()
    assert facts(second) == facts(numbers(4, BIG) + 1)
    assert place >= 4 * 4 * BIG
    assert not pipe.shared_pool.part(0)[: place // 4096 * 4096].any()
    with pytest.raises(StopIteration):
        pipe.decoder.open(pipe.send(numbers(4, BIG)))


def of_one_worker() -> Iterator[Any]:
    """Samples of every kind of leaf, from one loader worker."""
    for k in range(0 if torch.utils.data.get_worker_info().id else 30):  # type: ignore[union-attr] # in a worker
        yield {"x": numbers(5, BIG) * k, "y": (k, f"s{k}"), "z": np.arange(300) + k}


def sample(k: int) -> Any:
    return {"x": numbers(5, BIG) * k, "y": (k, f"s{k}"), "z": np.arange(300) + k, "n": Named(numbers(2) * k, k)}


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("data", [Mapped(30, sample), Stream(of_one_worker)], ids=["map", "iterable"])
def test_epochs_are_those_of_torchs_loader_also_after_one_that_was_left(data: Any, persistent: bool) -> None:
    settings: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "persistent_workers": persistent}
    expected = [facts(batch) for batch in DataLoader(data, **settings)]
    with tdi.Strategy(["cpu"]).distribute_dataset(DataLoader(data, **settings)) as loader:
        kept: list[Any] = []
        for epoch in range(3):
            batches = []
            for step, batch in enumerate(loader):
                batches.append(batch)
                if epoch == 1 and step == 2:
                    break
            kept.append(batches)
    assert [list(map(facts, batches)) for batches in kept] == [expected, expected[:3], expected]


def runs_over(dataset: Dataset[Any], *, lasting: bool) -> LoaderRuns:
    user = DataLoader(dataset, num_workers=2, persistent_workers=lasting, prefetch_factor=2)
    return LoaderRuns(user, sampler=requests())


def requests() -> list[Any]:
    return [(True, [4 * step + k for k in range(4)], 0) for step in range(20)]


def test_a_consumer_that_drops_its_batches_never_gets_fresh_memory_and_sees_few_places() -> None:
    runs = runs_over(Mapped(80, SAMPLES["large"]), lasting=True)
    places = set()
    for epoch in range(4):
        run = runs.start(PieceDataset(Mapped(80, SAMPLES["large"]), default_collate))
        for step, batch in enumerate(run):
            assert (batch == torch.stack([SAMPLES["large"](4 * step + k) for k in range(4)])).all()
            places.add(batch.data_ptr())
            if epoch % 2 and step == 5:
                break
        runs.finish(run)
    runs.close()
    assert runs.fresh_batches() == 0
    assert len(places) <= 12  # of 54


def test_a_consumer_that_keeps_all_gets_fresh_memory_which_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_MOST_BYTES", 2 * 18 * 4096)  # three batches a worker
    runs = runs_over(Mapped(80, SAMPLES["large"]), lasting=False)
    run = runs.start(PieceDataset(Mapped(80, SAMPLES["large"]), default_collate))
    batches = list(run)
    runs.finish(run)
    for step, batch in enumerate(batches):
        assert (batch == torch.stack([SAMPLES["large"](4 * step + k) for k in range(4)])).all()
    assert runs.fresh_batches() == 20 - 2 * 3


def test_a_worker_that_is_killed_leaves_nothing_and_what_came_stays() -> None:
    before = {*os.listdir("/dev/shm")}
    runs = runs_over(Mapped(80, SAMPLES["large"]), lasting=False)
    run = runs.start(PieceDataset(Mapped(80, SAMPLES["large"]), default_collate))
    first = next(run)
    workers: Any = run.workers
    pids = [process.pid for process in workers._workers]

    def kill_and_read() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        list(run)

    # Torch's signal handler raises its own words wherever this thread is then: between two kills, or two items.
    with pytest.raises(Exception, match=r"killed by signal(: Killed| 9)"):
        kill_and_read()
    runs.finish(run)
    assert (first == torch.stack([SAMPLES["large"](k) for k in range(4)])).all()
    came = {*os.listdir("/dev/shm")} - before  # also of other programs
    assert not [name for name in came if owner_of(name) in (*pids, os.getpid())]


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


def forget_sent_storages() -> None:
    """Lets torch 2.8 let go of the attributes of storages that were sent; later releases have let go of them.

    Torch has weak references to sent storages in a cache, from which the dead ones are removed when there are 128. In
    torch 2.8 an attribute of a storage, such as the memory of a batch, lives for as long as a weak reference to it.
    """
    if _attributes_outlive_storages():
        shared_cache.free_dead_references()  # type: ignore[no-untyped-call] # torch's


@cache
def _attributes_outlive_storages() -> bool:
    class Attribute:
        """What is attached."""

    attribute = Attribute()
    found = weakref.ref(attribute)
    tensor = torch.empty(1)
    tensor.untyped_storage().attribute = attribute  # type: ignore[attr-defined] # torch keeps it with the storage
    weak = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call] # torch's
    del attribute, tensor
    outlives = found() is not None
    del weak
    return outlives
