"""What a fork does before it knows that it is one: nothing in its parent's name."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from torchdistinput.coordination.fork_safety import register_for_forks


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


@pytest.mark.parametrize("on", [False, True])
def test_the_collector_is_afterwards_as_it_was(on: bool) -> None:
    if not on:
        gc.disable()
    assert forked(lambda: gc.isenabled() == on)
    assert gc.isenabled() == on


def interrupted_in_logging(frame: Any, event: str, _: Any) -> None:
    if event == "call" and frame.f_code.co_name == "_releaseLock":
        sys.settrace(None)
        raise KeyboardInterrupt


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="logging runs no function of Python at a fork")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interruption_where_logging_lets_go_of_its_lock_at_a_fork_keeps_no_other_thread_waiting() -> None:
    sys.settrace(interrupted_in_logging)
    try:
        assert forked(lambda: True)
    finally:
        was_interrupted = sys.gettrace() is None
        sys.settrace(None)
    assert was_interrupted
    asks = threading.Thread(target=logging.getLogger, args=("another",), daemon=True)
    asks.start()
    asks.join(30.0)
    assert not asks.is_alive()
