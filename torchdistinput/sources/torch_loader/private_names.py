"""The private names of torch's loader and of multiprocessing that this library uses, and which parts need them.

A *part* is a piece of this room that can be left out: torch then does the same work itself, more slowly, with the same
batches. A part is left out where this release of torch lacks one of its names (logged once), and where the environment
has ``TORCHDISTINPUT_LOADER_INTERNALS=0``.

Some names exist only on objects, not on their classes. They are looked for in the first object that is met.
"""

from __future__ import annotations

import os
from functools import cache, partial
from typing import Any, Final

from torchdistinput.coordination.private_names import OptionalFeature, log_missing, look_up

_ITERATOR: Final = "torch.utils.data.dataloader._MultiProcessingDataLoaderIter"
_QUEUE: Final = "multiprocessing.queues.Queue"
_REDUCERS: Final = "multiprocessing.reduction.ForkingPickler._extra_reducers"

PRIVATE_NAMES: Final = {
    _ITERATOR: "the class of torch's iterator over loader workers, to recognise it; its attributes follow",
    f"{_ITERATOR}._workers": "the processes: to find a dead, stopped or late one, and to end them",
    f"{_ITERATOR}._workers_status": "whether torch counts on a worker: one that ended with code 0 may have died",
    f"{_ITERATOR}._worker_pids_set": "whether torch's signal handler knows the processes, to remove them there",
    f"{_ITERATOR}._timeout": "persistent workers get longer to answer when an epoch begins; written to",
    f"{_ITERATOR}._pin_memory": "whether a thread of torch's reads the results and pins them",
    f"{_ITERATOR}._task_info": "the worker that sends the next batch, for messages",
    f"{_ITERATOR}._rcvd_idx": "the number of the next batch, to find its worker",
    f"{_ITERATOR}._send_idx": "how many batches were requested, to name the samples that a late worker reads",
    f"{_ITERATOR}._index_sampler": "the requested indices, to name them",
    f"{_ITERATOR}._shutdown": "whether the workers were ended; set where we ended them, or where a parent has them",
    f"{_ITERATOR}._shutdown_workers": "torch's own way to end the workers, called after ours",
    f"{_ITERATOR}._workers_done_event": "asks all workers to leave",
    f"{_ITERATOR}._index_queues": "wakes each worker, so that it sees this request",
    f"{_ITERATOR}._worker_result_queue": "the queue in which the workers answer, for its pipe",
    f"{_ITERATOR}._pin_memory_thread_done_event": "lets torch's pinning thread leave, where the workers were killed",
    "torch.utils.data.DataLoader._get_iterator": "a class that defines it anew yields batches of its own",
    "torch.utils.data.DataLoader.__setattr__": "refuses some attributes of a finished loader; they are set without it",
    "torch.utils.data._utils.python_exit_status": "whether the interpreter ends; then torch asks no worker to leave",
    "torch.utils.data._utils.pin_memory.pin_memory": "pins packed batches, which torch's pinning thread cannot open",
    "torch.utils.data._utils.collate.collate_tensor_fn": "stacks as torch does, for samples that are not in the pool",
    "torch.utils.data._utils.collate.default_collate_fn_map": "lets default_collate stack in the pool; written to",
    "torch.utils.data._utils.worker.WorkerInfo.dataset": (
        "lets get_worker_info() show the user's dataset, not our wrapper; a frozen dataclass, written to"
    ),
    "torch._C._remove_worker_pids": "removes workers that we end from torch's signal handler",
    "torch.UntypedStorage.buffer": "keeps the memory of a storage alive, which shows the end of its use; written to",
    _REDUCERS: "the registered reducers, for messages that we pickle ourselves",
    f"{_QUEUE}._writer": "the workers' end of the pipe: closed after them, so that no thread waits for half a message",
    "multiprocessing.process._children": "a forked process removes its parent's loader workers, or would end them",
}
"""The private names that are used in ``sources/torch_loader/``, and why."""


@cache
def _is_on() -> bool:
    return os.environ.get("TORCHDISTINPUT_LOADER_INTERNALS") != "0"


def _of_iterator(*names: str) -> list[str]:
    return [f"{_ITERATOR}.{name}" for name in names]


_part = partial(OptionalFeature, is_on=_is_on)

ENDING: Final = _part(
    "only torch ends loader workers, which may take seconds, and late or dead loader workers are not named",
    [
        _ITERATOR,
        "torch._C._remove_worker_pids",
        "torch.utils.data._utils.python_exit_status",
    ],
    _of_iterator(
        *("_workers", "_worker_pids_set", "_timeout", "_pin_memory", "_task_info", "_rcvd_idx", "_send_idx"),
        *("_index_sampler", "_shutdown", "_shutdown_workers", "_workers_done_event", "_index_queues"),
        *("_worker_result_queue", "_workers_status"),
    ),
)
"""Ends loader workers at once, from any thread, and names the late and dead ones."""

PINNING: Final = _part("only torch ends loader workers", [], _of_iterator("_pin_memory_thread_done_event"))
"""``ENDING``, where a thread of torch's pins memory."""

PIPE: Final = _part("only torch ends loader workers", [], [f"{_QUEUE}._writer"])
"""``ENDING``: the pipe of the queue in which the workers answer."""

POOL: Final = _part(
    "each batch of loader workers comes in new shared memory",
    [
        "torch.utils.data._utils.collate.collate_tensor_fn",
        "torch.utils.data._utils.collate.default_collate_fn_map",
        "torch.utils.data._utils.pin_memory.pin_memory",
        _REDUCERS,
    ],
    ["torch.UntypedStorage.buffer"],
)
"""Batches come in shared memory that is reused."""

_MultiProcessingIterator: Final = look_up(_ITERATOR)


def is_of_loader_workers(iterator: object) -> bool:
    """Whether it is torch's iterator over loader workers; ``False`` where that cannot be known. Local."""
    if _MultiProcessingIterator is None:
        return ENDING.is_usable()  # it is not usable, and logs that
    return isinstance(iterator, _MultiProcessingIterator)


def set_in_spite_of_init(loader: Any, name: str, value: Any) -> None:
    """Sets an attribute of a torch ``DataLoader`` that its ``__setattr__`` refuses after ``__init__``. Local."""
    object.__setattr__(loader, name, value)


def set_dataset_of_worker(info: Any, dataset: Any) -> None:
    """Lets ``get_worker_info()`` show another dataset, where this torch allows it. Called in the loader worker."""
    try:
        object.__setattr__(info, "dataset", dataset)  # the frozen dataclass refuses a plain assignment
    except (AttributeError, TypeError):
        if info.id == 0:  # one log line in all, not one for each worker
            log_missing(
                ["torch.utils.data._utils.worker.WorkerInfo.dataset"],
                "get_worker_info().dataset in a loader worker is one of torchdistinput's, whose .dataset is yours",
            )


def children_of_this_process() -> set[Any]:
    """The set of processes that multiprocessing ends when this process ends; the caller may change it. Local."""
    children: set[Any] | None = look_up("multiprocessing.process._children")
    if children is None:
        log_missing(["multiprocessing.process._children"], "a forked process may end the loader workers of its parent")
    return set() if children is None else children
