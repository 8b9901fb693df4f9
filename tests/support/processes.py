"""Ranks that may die, in processes of their own: ``run_ranks`` would end the others. And forks of this process."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any


def run_to_the_end(rank: Callable[..., None], arguments: Sequence[tuple[Any, ...]], seconds: float = 60.0) -> None:
    """Runs a function in one process for each tuple of arguments; none may take longer than so many seconds."""
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=rank, args=each) for each in arguments]
    deadline = time.monotonic() + seconds
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        assert not any(process.is_alive() for process in ranks), "a rank hangs"
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()


def in_fork(call: Callable[[], Any], seconds: float = 30.0) -> Any:
    """What the call returns, or the exception that it raises, as a text, in a process that is forked for it."""
    reader, writer = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        try:
            writer.send(call())
        except Exception as error:
            writer.send(repr(error))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    try:
        assert reader.poll(seconds), "a fork hangs"
        process.join(seconds)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == 0
    return reader.recv()
