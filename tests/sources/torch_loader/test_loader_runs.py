"""Runs of a loader: the end of one while a thread waits for its workers; the next one of workers that live on."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import torchdistinput as tdi
from tests.data import Mapped, Numbers, Repeated
from tests.support.launched import Scenes, launched
from tests.support.platforms import linux_memory
from tests.support.processes import in_fork
from torchdistinput.pipeline.end_errors import left_to_parent
from torchdistinput.sources.kernel.batcher import as_is
from torchdistinput.sources.map_style.piece_dataset import PieceDataset
from torchdistinput.sources.torch_loader import loader_runs as runs_module
from torchdistinput.sources.torch_loader.loader_runs import LoaderRuns

BOUND_SECONDS = 60.0


SLOW = Numbers(100, each=lambda _: time.sleep(0.5))


@pytest.mark.parametrize("left_by_a_worker", ["nothing", "the lock", "the lock and half a message"])
def test_a_thread_that_waits_for_a_run_leaves_when_it_is_closed(
    left_by_a_worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_module, "_LEAVE_SECONDS", 0.5)
    user = DataLoader(SLOW, num_workers=1, prefetch_factor=1)
    requests: list[Any] = [(False, k, 0) for k in range(100)]
    runs = LoaderRuns(user, sampler=requests)
    run = runs.start(PieceDataset(SLOW, as_is))
    assert next(run) == 0
    workers: Any = run.workers
    results = workers._worker_result_queue
    if left_by_a_worker != "nothing":
        assert results._wlock.acquire(timeout=BOUND_SECONDS)
    if left_by_a_worker == "the lock and half a message":
        results._writer._write(results._writer.fileno(), struct.pack("!i", 1000) + bytes(10))
    ended = threading.Event()

    def wait() -> None:
        list(run)
        ended.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.05)  # so that it waits
    runs.finish(run)
    assert ended.wait(BOUND_SECONDS)
    assert list(run) == []


def test_torch_forgets_workers_that_had_all_been_killed_when_their_run_was_closed() -> None:
    """It knows them by the id of their iterator, which another one may come to have, and would then be refused."""
    runs = LoaderRuns(DataLoader(SLOW, num_workers=2), sampler=[(False, k, 0) for k in range(100)])
    run = runs.start(PieceDataset(SLOW, as_is))
    workers: Any = run.workers
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises in here
    try:
        for process in workers._workers:
            process.kill()
            process.join(BOUND_SECONDS)
    finally:
        signal.signal(signal.SIGCHLD, before)
    runs.finish(run)
    with pytest.raises(ValueError, match="information"):
        torch._C._remove_worker_pids(id(workers))


def drawn(index: int) -> torch.Tensor:
    """Who read a sample, a draw of that worker, and the index."""
    info = get_worker_info()
    return torch.tensor([-1 if info is None else info.id, torch.rand(()), index])


def loader_of(kind: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    return kind(Mapped(26, drawn), 4, shuffle=True, num_workers=2, persistent_workers=True, generator=generator)


def open_pools() -> int:
    links = (os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink())
    return sum("memfd:torchdistinput" in link for link in links)


@linux_memory
@pytest.mark.filterwarnings("ignore:Got pickle error")
@pytest.mark.parametrize("lasting", [False, True])
def test_workers_that_cannot_be_started_leave_no_file_open_and_are_started_anew(lasting: bool) -> None:
    settings: dict[str, Any] = {"persistent_workers": lasting, "multiprocessing_context": "spawn"}
    user = DataLoader(SLOW, num_workers=1, worker_init_fn=lambda _: None, **settings)
    runs = LoaderRuns(user, sampler=[])
    before = open_pools()
    for _ in range(2):
        with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
            runs.start(PieceDataset(SLOW, lambda samples: samples))
    assert open_pools() == before


@pytest.fixture
def resets(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each time that torch's iterator is reset, whether it is its first."""
    found: list[bool] = []
    reset = _MultiProcessingDataLoaderIter._reset

    def note(iterator: Any, loader: Any, first_iter: bool = False) -> None:
        found.append(first_iter)
        reset(iterator, loader, first_iter)

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_reset", note)
    return found


def test_workers_that_sent_everything_go_on_as_torchs_do(resets: list[bool]) -> None:
    with loader_of(tdi.DataLoader) as ours:
        found = [list(ours) for _ in range(3)]
    assert resets == [True, False, False]
    torchs = loader_of(DataLoader)
    for each in found:
        assert [batch.tolist() for batch in each] == [batch.tolist() for batch in torchs]


def fail() -> None:
    raise ValueError("no sample")


@pytest.mark.parametrize("ask", [list, lambda iterator: [iterator.element_spec]])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_that_failed_is_gone_when_nobody_refers_to_it(ask: Any, workers: int) -> None:
    before = set(multiprocessing.active_children())
    data = DataLoader(Numbers(20, {2: fail}), 4, num_workers=workers, persistent_workers=workers > 0)
    dataset = tdi.Strategy(["cpu"]).distribute_dataset(data)
    iterator = iter(dataset)
    gone = weakref.ref(iterator)
    try:
        ask(iterator)
    except tdi.SourceError:
        del iterator, dataset, data
    gc.collect()  # the error and the iterator refer to each other
    assert gone() is None
    assert set(multiprocessing.active_children()) <= before


class EndsOrFails(IterableDataset[int]):
    """The part of loader worker 0 ends early, so torch ends this worker; that of worker 1 cannot be read on later."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        yield 0
        if worker is not None and worker.id:
            time.sleep(1.0)
            raise RuntimeError("no more elements")


def test_a_loader_worker_whose_data_ended_is_not_named_where_another_one_fails() -> None:
    loader = DataLoader(EndsOrFails(), 1, num_workers=2)
    dataset = tdi.Strategy(["cpu"]).distribute_datasets_from_function(lambda _: loader)
    with pytest.raises(tdi.SourceError, match="no more elements") as caught:
        list(dataset)
    assert "exited" not in str(caught.value)


def _drop_in() -> Any:
    return tdi.DataLoader(range(8), batch_size=4, num_workers=1, persistent_workers=True)  # type: ignore[arg-type] # a dataset by its methods


def _map_style() -> Any:
    loader = DataLoader(range(8), batch_size=4, num_workers=1, persistent_workers=True)  # type: ignore[arg-type, var-annotated] # as above
    return tdi.Strategy(["cpu"]).distribute_dataset(loader)


def _iterable() -> Any:
    loader = DataLoader(Repeated(8), batch_size=4, num_workers=1, persistent_workers=True)
    return tdi.Strategy(["cpu"]).distribute_dataset(loader)


def _of_function(data: Any = Repeated(8)) -> Any:  # noqa: B008 - it has no state
    def loader(_context: tdi.InputContext) -> DataLoader[int]:
        return DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)

    return tdi.Strategy(["cpu"]).distribute_datasets_from_function(loader)


def test_loader_workers_that_torch_was_interrupted_in_ending_end_at_the_next_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(iterator: Any) -> None:
        iterator._shutdown = True
        raise KeyboardInterrupt

    before = set(multiprocessing.active_children())
    dataset = _map_style()
    next(iter(dataset))
    with monkeypatch.context() as patch:
        patch.setattr(runs_module, "_ask_to_leave", interrupted)
        with pytest.raises(KeyboardInterrupt):
            dataset.close()
    workers = set(multiprocessing.active_children()) - before
    assert workers
    dataset.close()
    assert not workers & set(multiprocessing.active_children())


@pytest.mark.parametrize(
    ("lasting", "ahead"),
    [(False, 2), (True, 0), *(pytest.param(*each, marks=pytest.mark.long) for each in ((False, 0), (True, 2)))],
)
def test_what_a_fork_does_with_a_run_of_its_parent_leaves_the_parents_loader_workers_alone(
    lasting: bool, ahead: int
) -> None:
    """And it is told the same, whether a thread would read for it or it would itself."""
    data: Any = range(60)
    options = tdi.InputOptions(prefetch=ahead)
    loader = tdi.DataLoader(data, batch_size=4, num_workers=1, persistent_workers=lasting, options=options)
    held = {"iterator": iter(loader)}
    assert next(held["iterator"]).tolist() == [0, 1, 2, 3]

    def drop() -> int:
        held.clear()
        return gc.collect() and 0

    def read_anew() -> list[int]:
        return [len(list(loader)) for _ in range(2)]

    assert in_fork(drop) == 0
    assert in_fork(loader.close) is None
    assert in_fork(read_anew) == [15, 15]
    told = in_fork(lambda: next(held["iterator"]))
    assert told.startswith("InputError(")
    assert str(left_to_parent()) in told
    assert [batch.tolist()[0] for batch in held["iterator"]] == list(range(4, 60, 4))
    assert in_fork(read_anew) == [15, 15]
    assert len(list(loader)) == 15


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_the_end_of_a_forked_process_leaves_its_parents_loader_workers_alone() -> None:
    """Python ends the children that ``multiprocessing`` knows of: the parent's, too, where ``os`` forked."""
    batches = iter(tdi.DataLoader(TensorDataset(torch.arange(60)), 4, num_workers=1))
    next(batches)
    child = os.fork()
    if not child:
        os._exit(len(multiprocessing.active_children()))
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(batches)) == 14


@pytest.mark.parametrize("make", [_drop_in, _map_style, _iterable, _of_function])
def test_workers_that_live_on_end_with_their_loader_as_torchs_do(make: Callable[[], Any]) -> None:
    """When the last reference goes, not at some garbage collection later."""
    gc.collect()
    before = set(multiprocessing.active_children())
    gc.disable()
    try:
        loader = make()
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        workers = set(multiprocessing.active_children()) - before
        assert len(workers) == 1
        del loader
        assert not workers & set(multiprocessing.active_children())
    finally:
        gc.enable()


COUNT, SIZE = 22, 4
AT_ONCE = tdi.InputOptions(prefetch=0)  # a class may draw as it is read, so reading ahead would draw more


class Normalising(DataLoader[Any]):
    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch / 2


class Limited(DataLoader[Any]):
    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Any:
        return islice(super().__iter__(), 2)


class OnlyLength(DataLoader[Any]):
    def __len__(self) -> int:
        return 2


class OwnIterator(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return (batch / 2 for batch in super()._get_iterator())


class Endless(DataLoader[Any]):
    def __iter__(self) -> Any:
        while True:
            yield from super().__iter__()


class OwnIndices(DataLoader[Any]):
    @property
    def _index_sampler(self) -> Any:
        return [[3, 1, 2], [5, 6, 4]]


class Other(DataLoader[Any]):
    """What torch's loader yields."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.name = "other"


KINDS = [Normalising, Limited, OnlyLength, OwnIterator, Endless, OwnIndices, Other]


def made(kind: Any, **settings: Any) -> Any:
    data: Any = [torch.tensor([float(number)]) for number in range(COUNT)]
    return kind(data, batch_size=SIZE, shuffle=True, **settings)


def taken(loader: Any, steps: int | None = None) -> list[list[float]]:
    return [batch.flatten().tolist() for batch in islice(loader, steps)]


def by_torch(kind: Any, **settings: Any) -> list[list[float]]:
    torch.manual_seed(3)
    loader = made(kind, **settings)
    return [*taken(loader, 9), *taken(loader, 9)]


def distributed(settings: dict[str, Any]) -> dict[str, Any]:
    """The parts of this rank in two epochs, and again after a resume in the second one; the last lengths."""
    found: dict[str, Any] = {}
    strategy = tdi.Strategy(["cpu"], timeout_seconds=60)
    for kind in KINDS:
        torch.manual_seed(3 + 10 * strategy.input_pipeline_id)
        loader = strategy.distribute_dataset(made(kind, **settings), AT_ONCE)
        parts = taken(loader, 9)
        iterator = iter(loader)
        parts += taken(iterator, 1)
        state = loader.state_dict()
        rest = taken(iterator, 8)
        iterator.close()
        resumed = strategy.distribute_dataset(made(kind, **settings), AT_ONCE)
        resumed.load_state_dict(state)
        found[kind.__name__] = parts, rest, taken(resumed, 8), len(resumed)
    return found


@pytest.mark.filterwarnings("ignore:.*read again from its front")
@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 0), (2, 1)])
def test_what_a_subclass_yields_is_divided_as_it_comes(world: int, workers: int, scenes: Scenes) -> None:
    ranks, settings = scenes(world, f"{workers} workers"), {"num_workers": workers}
    for kind in KINDS:
        of_ranks = [found[kind.__name__] for found in ranks]
        first, rest, again = (
            [[*chain.from_iterable(step)] for step in zip(*(one[part] for one in of_ranks), strict=True)]
            for part in range(3)
        )
        assert first + rest == by_torch(kind, **settings)
        assert again == rest
        assert of_ranks[0][3] == len(made(kind))


class DropIn(tdi.DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter([batch / 2 for batch in super().__iter__()])


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "skip": (Normalising, {"on_error": "skip"}, "Normalising, whose class has its own __iter__"),
    "seeds": (OwnIterator, {"seed_samples": True}, "OwnIterator, whose class has its own _get_iterator"),
    "costs": (Normalising, {"balance": len}, "balance"),
    "padding": (Normalising, {"partial_batch": "pad"}, "known global batch size"),
    "files": (Normalising, {"auto_shard_policy": tdi.AutoShardPolicy.FILE}, "files"),
    "drop-in": (DropIn, {}, "DropIn, a subclass of the drop-in DataLoader with its own __iter__"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(name: str) -> None:
    kind, options, message = REFUSED[name]
    with pytest.raises(tdi.InputError, match=message):
        tdi.Strategy(["cpu"]).distribute_dataset(made(kind), tdi.InputOptions(**options))


def refused_on_ranks() -> list[str]:
    found = []
    data: Any = range(COUNT)
    different: list[dict[str, Any]] = [{"in_order": False, "num_workers": 2}, {"sampler": DistributedSampler(data)}]
    for settings in different:
        with pytest.raises(tdi.InputError) as caught:
            tdi.Strategy(["cpu"]).distribute_dataset(Normalising(data, SIZE, **settings))
        found.append(str(caught.value))
    return found


def scenes_of(world: int, _: Path) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {
        f"{workers} workers": partial(distributed, {"num_workers": workers}) for workers in range(world)
    }
    return found if world == 1 else {**found, "refused": refused_on_ranks}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    return launched((1, 2), scenes_of, tmp_path_factory.mktemp("nothing"))


def test_a_subclass_in_any_order_or_of_one_rank_is_refused(scenes: Scenes) -> None:
    for order, per_rank in scenes(2, "refused"):
        assert "in_order=False" in order
        assert "DistributedSampler" in per_rank
