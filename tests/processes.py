"""Ranks that may die, in processes of their own: ``run_ranks`` would end the others. They write what they saw."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any


def run_to_the_end(rank: Callable[..., None], arguments: Sequence[tuple[Any, ...]], seconds: float = 60.0) -> None:
    """Runs a function in one process for each tuple of arguments; none may take longer than so many seconds."""
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=rank, args=each) for each in arguments]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + seconds
    try:
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        assert not any(process.is_alive() for process in ranks), "a rank hangs"
    finally:
        for process in ranks:
            process.kill()
            process.join()
