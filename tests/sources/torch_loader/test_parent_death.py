"""Loader workers end with their parent process, whenever it dies and whoever started them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import signal_handling

import torchdistinput as tdi
from tests.data import Mapped
from tests.support.platforms import linux_processes
from tests.support.scenes import members_of
from tests.support.waiting import wait_for

pytestmark = linux_processes

BOUND_SECONDS = 120.0


def note_worker(place: Path) -> None:
    """A loader worker says that it has begun a sample."""
    info = get_worker_info()
    assert info is not None
    (place / str(info.id)).touch()


def busy(place: Path, _: int) -> None:
    """Takes for ever."""
    note_worker(place)
    time.sleep(10 * BOUND_SECONDS)


def long(place: Path, _: int) -> str:
    """Batches of these do not fit into a pipe."""
    note_worker(place)
    return "x" * 100_000


def _loader(data: Any, method: str | None) -> DataLoader[Any]:
    return DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context=method)


def of_loader(data: Any, method: str | None = None) -> Any:
    return tdi.Strategy(["cpu"]).distribute_dataset(_loader(data, method))


def of_function(data: Any, method: str | None = None) -> Any:
    return tdi.Strategy(["cpu"]).distribute_datasets_from_function(lambda _: _loader(data, method))


@contextlib.contextmanager
def parent(begin: Callable[[], object]) -> Iterator[int]:
    """A process that begins to read; the number of its process group, which its workers are in, too."""

    def run() -> None:
        os.setpgid(0, 0)
        torch.set_num_threads(1)
        multiprocessing.set_start_method("fork", force=True)
        cast(Any, forkserver)._forkserver._forkserver_pid = None  # that of the tests is none of its children
        begin()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    try:
        yield process.pid or 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


def begin_and_die_at_once(make: Callable[..., Any]) -> None:
    """The parent dies while its workers are set up: they see that it has gone before they know who it was."""
    parent = os.getpid()
    set_up = cast(Any, signal_handling)._set_worker_signal_handlers

    def late() -> None:
        os.kill(parent, signal.SIGKILL)
        wait_for(lambda: os.getppid() != parent, "the parent lives on")
        set_up()

    cast(Any, signal_handling)._set_worker_signal_handlers = late
    next(iter(make(range(100))))


@pytest.mark.parametrize("make", [of_loader, of_function])
def test_a_worker_whose_parent_dies_while_it_is_forked_ends(make: Callable[..., Any]) -> None:
    with parent(lambda: begin_and_die_at_once(make)) as group:
        wait_for(lambda: not members_of(group), "a worker lives on")


def read(make: Callable[..., Any], data: Any, method: str | None) -> None:
    iterator = iter(make(data, method))
    next(iterator)
    time.sleep(10 * BOUND_SECONDS)


def read_on_a_thread(make: Callable[..., Any], data: Any, method: str | None) -> None:
    """Workers live on when the thread has ended that started them."""
    kept: list[Any] = []
    starts = threading.Thread(target=lambda: kept.append(iter(make(data, method))))
    starts.start()
    starts.join()
    next(kept[0])
    time.sleep(10 * BOUND_SECONDS)


@pytest.mark.parametrize(
    ("make", "data", "reads", "method"),
    [
        (of_loader, busy, read, None),
        (of_loader, busy, read_on_a_thread, None),
        (of_loader, busy, read, "forkserver"),
        pytest.param(of_loader, long, read_on_a_thread, None, marks=pytest.mark.long),
        (of_function, busy, read, None),
        pytest.param(of_function, busy, read_on_a_thread, None, marks=pytest.mark.long),
        (of_function, long, read, None),
    ],
)
def test_a_worker_that_is_busy_when_its_parent_dies_ends(
    make: Callable[..., Any], data: Any, reads: Callable[..., None], method: str | None, tmp_path: Path
) -> None:
    with parent(lambda: reads(make, Mapped(100, partial(data, tmp_path)), method)) as group:
        wait_for(lambda: all((tmp_path / str(worker)).exists() for worker in range(2)), "no worker reads")
        time.sleep(0.2)  # so that what can be sent is on its way
        os.kill(group, signal.SIGKILL)
        wait_for(lambda: not members_of(group), "a worker lives on")


def test_a_worker_of_a_users_own_loader_is_set_up_as_the_user_says() -> None:
    """And finds the user's dataset, and the loader is as it was."""
    data: Any = range(8)
    seen: list[Any] = []

    def init(worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is data
        assert info.id == worker

    loader: DataLoader[Any] = DataLoader(data, batch_size=4, num_workers=1, worker_init_fn=init)
    dataset = tdi.Strategy(["cpu"]).distribute_datasets_from_function(lambda _: loader)
    seen += [batch.tolist() for batch in dataset]
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert loader.worker_init_fn is init
