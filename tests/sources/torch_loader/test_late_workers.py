"""Loader workers that stand still: who is named, how long a rank waits for them, and that closing ends them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

import torchdistinput as tdi
from tests.data import Numbers
from tests.support import faults
from tests.support.platforms import linux_processes
from tests.support.scenes import Footprint, left_since
from tests.support.waiting import wait_for
from torchdistinput.sources.kernel.batcher import as_is
from torchdistinput.sources.map_style.map_stream import IndexFeed
from torchdistinput.sources.map_style.piece_dataset import PieceDataset
from torchdistinput.sources.torch_loader import open_runs
from torchdistinput.sources.torch_loader.loader_runs import LoaderRun, LoaderRuns
from torchdistinput.sources.torch_loader.worker_processes import is_stopped
from torchdistinput.step_types import ReadFailure

pytestmark = linux_processes

BOUND_SECONDS = 60.0


def stopping(at: int) -> Numbers:
    return Numbers(100, {at: faults.stop_worker})


SLOW = Numbers(3, {0: lambda: time.sleep(1.0)})


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No child, no file and no shared memory stays."""
    Footprint.now()  # what is imported or opened for the first time stays
    before = Footprint.now()
    yield
    assert left_since(before, frozenset()) == []


class _Requests:
    """What is asked for, one index at a time."""

    def __init__(self, count: int) -> None:
        self.left = [(0, index, 0) for index in reversed(range(count))]

    def take_request(self) -> Any:
        if not self.left:
            raise StopIteration
        return self.left.pop()


def runs_over(data: Dataset[Any], **settings: Any) -> tuple[LoaderRuns, LoaderRun]:
    feed = IndexFeed()
    feed.draws = _Requests(len(data))  # type: ignore[arg-type, assignment] # sized; and all that is asked of it
    user: DataLoader[Any] = DataLoader(data, **{"num_workers": 2, **settings})
    made = LoaderRuns(user, sampler=feed)
    return made, made.start(PieceDataset(data, as_is))


@pytest.mark.parametrize("persistent", [False, True])
def test_a_bounded_run_names_the_worker_and_what_it_reads_and_ends(persistent: bool) -> None:
    made, run = runs_over(stopping(3), persistent_workers=persistent)
    assert [next(run) for _ in range(3)] == [0, 1, 2]
    workers: Any = run.workers
    wait_for(lambda: is_stopped(workers._workers[1]))
    made.consumers[run] = time.perf_counter()
    made.bound(1.0)
    with pytest.raises(ReadFailure) as caught:
        next(run)
    pid = workers._workers[1].pid
    assert str(caught.value) == f"loader worker 1 (pid {pid}, stopped by a signal), samples 3"
    assert caught.value.origin[:4] == ((3,), None, None, 1)
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert "did not answer within 0.8 seconds" in str(caught.value.__cause__)
    made.finish(run)
    made.consumers.clear()
    later = made.start(PieceDataset(SLOW, as_is))  # with workers of its own
    made.finish(later)
    made.close()


def test_time_counts_only_while_the_consumer_waits() -> None:
    made, run = runs_over(SLOW)
    made.bound(0.2)
    assert [next(run) for _ in range(3)] == [0, 1, 2]
    made.finish(run)
    made, run = runs_over(SLOW)
    made.consumers[made] = time.perf_counter() + BOUND_SECONDS  # when it comes back from its training
    made.bound(0.5)
    assert [next(run) for _ in range(3)] == [0, 1, 2]
    made.finish(run)


def test_a_timeout_of_the_users_own_counts_instead() -> None:
    made, run = runs_over(stopping(3), timeout=BOUND_SECONDS)
    made.consumers[run] = time.perf_counter()
    made.bound(0.1)
    assert [next(run) for _ in range(3)] == [0, 1, 2]
    run._timeout = 1  # now that the workers have started, which a busy machine does slowly
    with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
        next(run)
    made.finish(run)


def drop_in(data: Any, **settings: Any) -> Any:
    return tdi.DataLoader(data, batch_size=2, num_workers=2, **settings)


def distributed(data: Any, **settings: Any) -> Any:
    loader: DataLoader[Any] = DataLoader(data, batch_size=2, num_workers=2, **settings)
    return tdi.Strategy(["cpu"], timeout_seconds=1).distribute_dataset(loader)


def of_function(data: Any, **settings: Any) -> Any:
    loader: DataLoader[Any] = DataLoader(data, batch_size=2, num_workers=2, **settings)
    return tdi.Strategy(["cpu"], timeout_seconds=1).distribute_datasets_from_function(lambda _: loader)


@pytest.mark.parametrize(
    ("make", "persistent"),
    [
        *((drop_in, False), (distributed, True), (of_function, False)),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((drop_in, True), (distributed, False))),
        pytest.param(of_function, True, marks=pytest.mark.long),
    ],
)
def test_ctrl_c_ends_the_wait_for_a_stopped_worker_in_one_process(make: Callable[..., Any], persistent: bool) -> None:
    data = make(stopping(6), persistent_workers=persistent)
    main = threading.main_thread().ident or 0
    ended = threading.Event()

    def press() -> None:
        """Again and again, as a person would: Python drops what is raised in a callback of its own."""
        while not ended.wait(1.5):  # no bound counts in one process
            signal.pthread_kill(main, signal.SIGINT)

    presses = threading.Thread(target=press, daemon=True)
    found: list[Any] = []

    def read() -> None:
        for batch in data:
            if not found:  # the workers have started
                presses.start()
            found.append(batch.tolist())

    began = time.monotonic()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            read()
    finally:
        ended.set()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a last one may be on its way
        if presses.ident is not None:
            presses.join()
        signal.signal(signal.SIGINT, before)
    assert found[:1] == [[0, 1]]  # what the stopped worker sent may be in its own memory
    assert time.monotonic() - began < BOUND_SECONDS
    if persistent:  # other workers take the place of those that were ended
        assert next(iter(data)).tolist() == [0, 1]
    data.close()


def later(index: int) -> None:
    if index >= 2:
        time.sleep(0.5)


def test_persistent_workers_that_hang_after_an_epoch_was_left_end_with_the_dataset_of_a_function() -> None:
    """Its loader worker stops a while after the first batch was sent."""
    data = of_function(Numbers(100, {2: faults.stop_worker}, later), persistent_workers=True)
    assert next(iter(data)).tolist() == [0, 1]
    wait_for(lambda: any(map(is_stopped, multiprocessing.active_children())))
    data.close()


def test_in_one_process_a_warning_names_the_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(open_runs, "_WARN_SECONDS", 0.5)
    data = distributed(stopping(6))
    over = threading.Event()

    def told() -> list[str]:
        """A busy machine may have been warned of a start, too."""
        return [text for text in map(logging.LogRecord.getMessage, caplog.records) if "stopped by a signal" in text]

    def go_on() -> None:
        while not over.wait(0.1):
            if told():
                for worker in multiprocessing.active_children():
                    os.kill(worker.pid or 0, signal.SIGCONT)
                return

    later = threading.Thread(target=go_on)
    later.start()
    try:
        with data, caplog.at_level(logging.WARNING, "torchdistinput"):
            assert len(list(data)) == 50
    finally:
        over.set()
        later.join()
    (text,) = told()
    assert text.startswith("waiting for loader worker 1 (pid ")
    assert "stopped by a signal), samples 6, 7 for " in text
