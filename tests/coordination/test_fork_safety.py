"""What a fork does before it knows that it is one: nothing in its parent's name."""

from __future__ import annotations

import datetime
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from torchdistinput.coordination import fork_safety
from torchdistinput.coordination.fork_safety import register_for_forks
from torchdistinput.coordination.store import prefixed


@pytest.fixture(autouse=True)
def _collector_as_it_was() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.enable()


def forked(call: Callable[[], bool]) -> bool:
    """What a call gives in a fork."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if call() else 1)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0


class InACircle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.circle = self


class Told:
    """Makes so many objects when it is told of a fork that the collector would come."""

    def __init__(self, ended: list[str]) -> None:
        self._ended = ended
        self.ended_before: list[str] | None = None
        self.collected = True

    def leave_to_parent(self) -> None:
        [[] for _ in range(5_000)]
        self.ended_before, self.collected = [*self._ended], gc.isenabled()


def test_nothing_is_collected_in_a_fork_before_it_knows_what_is_its_parents() -> None:
    gc.collect()
    gc.set_threshold(2_000)
    ended: list[str] = []
    told = Told(ended)
    register_for_forks(told)
    weakref.finalize(InACircle(), ended.append, "in the parent's name").atexit = False

    def knew_first() -> bool:
        [[] for _ in range(5_000)]
        return told.ended_before == [] and not told.collected and ended != []

    assert forked(knew_first)
    assert told.ended_before is None


def test_a_fork_that_collects_a_store_leaves_its_file_to_the_parent(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = cast(Any, dist).FileStore(str(path), 1)
    store.set_timeout(datetime.timedelta(seconds=2))  # for a file that is not there
    garbage: list[Any] = [prefixed("a part", store.clone())]
    garbage.append(garbage)
    gc.disable()
    del garbage
    for _ in range(3):
        assert forked(lambda: gc.collect() > 0)
        assert path.exists()
    store.set("key", "value")
    gc.collect()
    assert store.get("key") == b"value"


@pytest.mark.parametrize("on", [False, True])
def test_the_collector_is_afterwards_as_it_was(on: bool) -> None:
    if not on:
        gc.disable()
    assert forked(lambda: gc.isenabled() == on)
    assert gc.isenabled() == on


def test_it_is_so_after_a_fork_in_the_middle_of_a_fork() -> None:
    fork_safety._FORKING.before()
    fork_safety._FORKING.before()  # a signal's handler
    fork_safety._FORKING.in_parent()
    assert not gc.isenabled()
    fork_safety._FORKING.in_parent()
    assert gc.isenabled()


class Alarm(Exception):
    """What a handler of signals raises."""


def ring(*_: object) -> None:
    raise Alarm


def hears_of_a_signal_that_comes_while_it_forks() -> bool:
    """In a process of its own, as what is registered for forks stays."""
    signal.signal(signal.SIGALRM, ring)
    busy = partial(sum, range(1_000_000))  # milliseconds in which no Python code runs
    os.register_at_fork(after_in_parent=partial(signal.setitimer, signal.ITIMER_REAL, 1e-4))
    os.register_at_fork(after_in_parent=busy)
    undone: list[int] = []
    lock = threading.RLock()
    fork_safety.ForkHandlers(lambda: partial(undone.append, 1), lambda _: None, lock)
    heard = False
    try:
        if os.fork() == 0:
            os._exit(0)
    except Alarm:
        heard = True
    released: list[bool] = []
    other = threading.Thread(target=lambda: released.append(lock.acquire(blocking=False)))
    other.start()
    other.join()
    return heard and undone == [1] and released == [True]


def test_a_signal_that_comes_while_a_process_is_forked_is_heard_and_leaves_no_lock_taken() -> None:
    assert forked(hears_of_a_signal_that_comes_while_it_forks)
