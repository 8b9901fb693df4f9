"""Finds loader workers that hang in their fork, and forks them again.

Problem. A fork copies locks as they are. The C library frees most of its own locks in the child, but not all, and
nobody frees the locks of other libraries. A lock that another thread held at the moment of the fork, for example
because torch used a function for the first time, stays locked in the child, and the loader worker hangs before its
first batch (pytorch/pytorch#75147, #130610). A process with threads meets this once in some thousand forks, and process
groups have threads. Torch waits without a bound.

Decision. A forked worker first does what every worker does first, which takes these locks. Then it records in memory
shared with its parent that it came up. The parent waits for this record right after the fork. It kills a worker that
does not come up, and forks another one with the same queues, which the first one had not touched.

Considered and refused. Other start methods by default: they take seconds, and need datasets that can be pickled.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
import mmap
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch

from torchdistinput.coordination.private_names import look_up
from torchdistinput.errors import InputError
from torchdistinput.sources.torch_loader.worker_processes import words_for

# ruff: noqa: SLF001 - torch has no public way to its loader workers

_LOG = logging.getLogger("torchdistinput")
_SECONDS: Final = 10.0
_ATTEMPTS: Final = 3

_remove_worker_pids: Final = look_up("torch._C._remove_worker_pids")
_set_worker_pids: Final = look_up("torch._C._set_worker_pids")
_worker_loop: Final = look_up("torch.utils.data._utils.worker._worker_loop")


@final
class StuckForks:
    """Which loader workers came up: one byte for each, in memory that forked processes share.

    Args:
      num_workers: how many there are.
    """

    def __init__(self, num_workers: int) -> None:
        self._came = mmap.mmap(-1, num_workers)
        self._num_workers = num_workers

    def arrive(self, worker: int) -> None:
        """Records that a worker came up, once it has taken the locks that it will need. Called in the worker."""
        if sys.platform == "linux":
            # This registers a function for the exit of the process, which takes the lock of pytorch#130610.
            # The function never runs: a loader worker never comes to its exit functions.
            library = ctypes.CDLL(None)
            library["__cxa_atexit"](library["abs"], None, None)
        thread = threading.Thread(target=_nothing)
        thread.start()
        thread.join()
        torch.zeros(1, device="cpu").share_memory_()  # type: ignore[no-untyped-call] # torch has no types for it
        self._came[worker] = 1

    def missing(self) -> list[int]:
        """The workers that have not come up yet."""
        return [worker for worker in range(self._num_workers) if not self._came[worker]]


def _nothing() -> None:
    pass


def arrivals_of(context: Any, num_workers: int) -> StuckForks | None:
    """The record for workers that a ``multiprocessing`` context will start; ``None`` where they are not forked."""
    method = (multiprocessing if context is None else context).get_start_method()
    return StuckForks(num_workers) if method == "fork" and num_workers else None


def see_in(iterator: Any, arrivals: StuckForks) -> None:
    """Waits until all loader workers came up or died, and forks again the others. Local: on the thread that forks.

    Args:
      iterator: torch's new iterator, with its loader workers.
      arrivals: the record of its workers.

    Raises:
      InputError: a worker did not come up, and neither did the workers forked in its place.
    """
    for _ in range(_ATTEMPTS):
        missing = _wait(iterator, arrivals)
        if not missing:
            return
        names = ", ".join(map(str, missing))
        _LOG.warning(
            "loader worker %s did not come up within %g seconds after its fork, and is forked again: a fork can copy a "
            "lock that nobody frees. multiprocessing_context='forkserver' avoids that. It was %s.",
            names,
            _SECONDS,
            _found(iterator, missing),
        )
        _fork_anew(iterator, missing)
    missing = _wait(iterator, arrivals)
    if missing:
        raise InputError(
            f"loader worker {', '.join(map(str, missing))} did not come up within {_SECONDS:g} seconds, nor did "
            f"{_ATTEMPTS} others in its place: {_found(iterator, missing)}. Look at it with py-spy dump --pid; or "
            "start workers otherwise, with multiprocessing_context='forkserver'."
        )


def _found(iterator: Any, missing: Sequence[int]) -> str:
    return ", ".join(words_for(worker, iterator._workers[worker]) for worker in missing)


def _wait(iterator: Any, arrivals: StuckForks) -> list[int]:
    """The workers that are alive and did not come up in time."""
    until = time.monotonic() + _SECONDS
    pause = 0.0002
    while missing := [worker for worker in arrivals.missing() if iterator._workers[worker].is_alive()]:
        if time.monotonic() > until:
            return missing
        try:
            time.sleep(pause)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            # torch's signal handler reports a worker that died. The first request for an item reports it too.
            _LOG.debug("while loader workers came up: %s", error)
        pause = min(2 * pause, 0.005)
    return []


def _fork_anew(iterator: Any, missing: Sequence[int]) -> None:
    """Puts other processes in the places of the workers, started as torch starts them."""
    _remove_worker_pids(id(iterator))  # torch's signal handler must not report their end
    for worker in missing:
        old = iterator._workers[worker]
        old.kill()
        old.join()
        arguments = _arguments_of(_worker_loop, iterator, worker)
        new = multiprocessing.get_context("fork").Process(target=_worker_loop, kwargs=arguments, daemon=True)
        new.start()
        iterator._workers[worker] = new
    pids = tuple(process.pid for process in iterator._workers)
    _set_worker_pids(id(iterator), pids)


def _arguments_of(loop: Callable[..., None], iterator: Any, worker: int) -> dict[str, Any]:
    """The arguments of torch's worker loop, by name: they differ between releases of torch."""
    known = {
        "dataset_kind": iterator._dataset_kind,
        "dataset": iterator._dataset,
        "dataset_holder": [iterator._dataset],  # since torch 2.15: the worker empties it
        "index_queue": iterator._index_queues[worker],
        "data_queue": iterator._worker_result_queue,
        "done_event": iterator._workers_done_event,
        "auto_collation": iterator._auto_collation,
        "collate_fn": iterator._collate_fn,
        "drop_last": iterator._drop_last,
        "base_seed": iterator._base_seed,
        "init_fn": iterator._worker_init_fn,
        "worker_id": worker,
        "num_workers": iterator._num_workers,
        "persistent_workers": iterator._persistent_workers,
        "shared_seed": iterator._shared_seed,
    }
    return {name: known[name] for name in inspect.signature(loop).parameters}
