"""The private names of torch's loader and of multiprocessing: the table, and the pieces of this library that need them.

A *part* is a piece of this room that can be left out: torch then does by itself what it did, slower, and the batches
are the same. A part is left out where this release lacks one of its names, which is logged once, and with
``TORCHDISTINPUT_LOADER_INTERNALS=0`` in the environment.

Names that only objects have, and not their classes, are looked for in the first object that is met.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, Final

from torchdistinput.coordination.launch import find_launch
from torchdistinput.coordination.private_names import Part, log_missing, look_up

__all__ = [
    "ENDING",
    "LASTING",
    "NEXT",
    "PINNING",
    "PIPES",
    "POOL",
    "PRIVATE_NAMES",
    "RESTING",
    "STUCK_FORKS",
    "children_of_this_process",
    "is_of_loader_workers",
    "set_dataset_of_worker",
    "set_in_spite_of_init",
]

_ITERATOR: Final = "torch.utils.data.dataloader._MultiProcessingDataLoaderIter"
_QUEUE: Final = "multiprocessing.queues.Queue"
_REDUCERS: Final = "multiprocessing.reduction.ForkingPickler._extra_reducers"

PRIVATE_NAMES: Final = {
    _ITERATOR: "tells torch's iterator over loader workers from the one without; its attributes follow",
    f"{_ITERATOR}._workers": "the processes: which one died, is stopped, or is late; to end them; to fork one anew",
    f"{_ITERATOR}._worker_pids_set": "whether torch's signal handler knows the processes, so that it can forget them",
    f"{_ITERATOR}._timeout": "whether the user gave a timeout, which then counts instead of ours",
    f"{_ITERATOR}._pin_memory": "whether a thread of torch's reads the results, and pins them",
    f"{_ITERATOR}._task_info": "which loader worker sends the next batch, for messages; whether all of them rest",
    f"{_ITERATOR}._rcvd_idx": "the number of the next batch, for the same",
    f"{_ITERATOR}._send_idx": "how many batches are asked for, to name the samples that a late worker reads",
    f"{_ITERATOR}._index_sampler": "what was asked for, for the same; it is begun anew by workers that live on",
    f"{_ITERATOR}._shutdown": "whether torch ended the workers; set where we did, or where they are a parent's",
    f"{_ITERATOR}._shutdown_workers": "torch's own end, which follows ours",
    f"{_ITERATOR}._workers_done_event": "tells the workers to leave, all at once; an argument of a worker",
    f"{_ITERATOR}._index_queues": "wakes each worker, so that it sees that; an argument of a worker",
    f"{_ITERATOR}._worker_result_queue": "wakes the thread that waits for a worker; an argument of a worker",
    f"{_ITERATOR}._data_queue": "wakes the thread that waits for the thread that pins",
    f"{_ITERATOR}._worker_init_fn": "finds our own, which knows which workers came up; an argument of a worker",
    f"{_ITERATOR}._next_data": "the next batch without the range for the profiler, a tenth of the time of a batch",
    f"{_ITERATOR}._dataset_kind": "whether the dataset is map-style; an argument of a worker",
    f"{_ITERATOR}._sampler_iter": "begins an epoch of workers that live on, without waiting for their answers",
    f"{_ITERATOR}._num_yielded": "for the same",
    f"{_ITERATOR}._worker_queue_idx_cycle": "for the same",
    f"{_ITERATOR}._prefetch_factor": "for the same",
    f"{_ITERATOR}._try_put_index": "for the same",
    f"{_ITERATOR}._num_workers": "for the same; an argument of a worker",
    f"{_ITERATOR}._dataset": "an argument of a worker that is forked anew",
    f"{_ITERATOR}._auto_collation": "for the same",
    f"{_ITERATOR}._collate_fn": "for the same",
    f"{_ITERATOR}._drop_last": "for the same",
    f"{_ITERATOR}._base_seed": "for the same",
    f"{_ITERATOR}._persistent_workers": "for the same",
    f"{_ITERATOR}._shared_seed": "for the same",
    f"{_ITERATOR}._pin_memory_thread_done_event": "lets torch's thread that pins leave, where the workers were killed",
    "torch.utils.data.dataloader._DatasetKind": "whether a dataset is map-style, as torch's iterator says it",
    "torch.utils.data.DataLoader._iterator": "the iterator of workers that live on, to begin it anew, or drop it",
    "torch.utils.data.DataLoader.__setattr__": "what a copy of a loader refuses once it is made is set beside it",
    "torch.utils.data._utils.python_exit_status": "whether the interpreter ends, where torch asks no worker to leave",
    "torch.utils.data._utils.worker._worker_loop": "the program of a loader worker, to fork one anew",
    "torch.utils.data._utils.pin_memory.pin_memory": "pins what came packed, which torch's thread cannot see into",
    "torch.utils.data._utils.collate.collate_tensor_fn": "how torch stacks, where samples are not stacked in the pool",
    "torch.utils.data._utils.collate.default_collate_fn_map": "lets default_collate stack in the pool; written to",
    "torch.utils.data._utils.worker.WorkerInfo.dataset": (
        "get_worker_info() shows the user's dataset, not the one of ours around it; a frozen dataclass, written to"
    ),
    "torch._C._remove_worker_pids": "torch's signal handler forgets workers that we end",
    "torch._C._set_worker_pids": "it learns those that are forked anew",
    "torch._C._autograd._profiler_enabled": "whether a profiler runs, for which torch's own next() is called",
    "torch.UntypedStorage.buffer": "a storage keeps what it was made over, so that its end is seen; written to",
    _REDUCERS: "what was registered to be pickled in another way, for messages that we pickle ourselves",
    f"{_QUEUE}._reader": "the pipe of a queue: to wait with a bound, to wake, to write without a thread in between",
    f"{_QUEUE}._writer": "for the same",
    f"{_QUEUE}._wlock": "for the same",
    "multiprocessing.process._children": "a forked process forgets the loader workers of its parent, or would end them",
}
"""The private names that are used in ``sources/torch_loader/``, and why."""


@cache
def _is_on() -> bool:
    return find_launch().loader_internals


def _of_iterator(*names: str) -> list[str]:
    return [f"{_ITERATOR}.{name}" for name in names]


_part = partial(Part, is_on=_is_on)

ENDING: Final = _part(
    "torch alone ends loader workers, which may take seconds, and those that are late or dead are not named",
    [
        _ITERATOR,
        "torch._C._remove_worker_pids",
        "torch.utils.data._utils.python_exit_status",
    ],
    _of_iterator(
        *("_workers", "_worker_pids_set", "_timeout", "_pin_memory", "_task_info", "_rcvd_idx", "_send_idx"),
        *("_index_sampler", "_shutdown", "_shutdown_workers", "_workers_done_event", "_index_queues"),
        *("_worker_result_queue", "_data_queue"),
    ),
)
"""Loader workers are ended at once, from any thread, and named where they are late or died."""

PINNING: Final = _part("torch alone ends loader workers", [], _of_iterator("_pin_memory_thread_done_event"))
"""The same where a thread of torch's pins."""

PIPES: Final = _part(
    "messages to and from loader workers go through a thread, and torch alone ends loader workers",
    [_REDUCERS],
    [f"{_QUEUE}._reader", f"{_QUEUE}._writer", f"{_QUEUE}._wlock"],
)
"""Messages are written to the pipe of a queue by who sends them."""

LASTING: Final = _part(
    "loader workers that live on are begun anew by torch alone", [], ["torch.utils.data.DataLoader._iterator"]
)
"""The iterator of loader workers that live on is looked at."""

RESTING: Final = _part(
    "loader workers that live on are asked for their answers before each epoch",
    [_ITERATOR, "torch.utils.data.dataloader._DatasetKind"],
    _of_iterator(
        *("_dataset_kind", "_task_info", "_shutdown", "_sampler_iter", "_index_sampler", "_num_yielded"),
        *("_worker_queue_idx_cycle", "_num_workers", "_prefetch_factor", "_try_put_index"),
    ),
)
"""An epoch of workers that live on begins without waiting for them."""

NEXT: Final = _part(
    "each batch of loader workers is announced to the profiler, also where none runs",
    [_ITERATOR, "torch.utils.data.dataloader._DatasetKind", "torch._C._autograd._profiler_enabled"],
    _of_iterator("_dataset_kind", "_next_data"),
)
"""The next batch without what torch does for its profiler."""

STUCK_FORKS: Final = _part(
    "a loader worker that hangs in its fork is waited for as torch does, without a bound",
    [
        _ITERATOR,
        "torch._C._remove_worker_pids",
        "torch._C._set_worker_pids",
        "torch.utils.data._utils.worker._worker_loop",
    ],
    _of_iterator(
        *("_workers", "_worker_init_fn", "_dataset_kind", "_dataset", "_index_queues", "_worker_result_queue"),
        *("_workers_done_event", "_auto_collation", "_collate_fn", "_drop_last", "_base_seed", "_num_workers"),
        *("_persistent_workers", "_shared_seed"),
    ),
)
"""Loader workers that hang in their fork are forked anew."""

POOL: Final = _part(
    "each batch of loader workers comes in fresh shared memory",
    [
        "torch.utils.data._utils.collate.collate_tensor_fn",
        "torch.utils.data._utils.collate.default_collate_fn_map",
        "torch.utils.data._utils.pin_memory.pin_memory",
        _REDUCERS,
    ],
    ["torch.UntypedStorage.buffer"],
)
"""Batches come in shared memory that is used again."""

_MultiProcessingIterator: Final = look_up(_ITERATOR)


def is_of_loader_workers(iterator: object) -> bool:
    """Whether it is torch's iterator over loader workers, as far as that is known. Local."""
    if _MultiProcessingIterator is None:
        return ENDING.is_usable()  # it is not, and says so
    return isinstance(iterator, _MultiProcessingIterator)


def set_in_spite_of_init(loader: Any, name: str, value: Any) -> None:
    """Sets an attribute of a copy of a torch ``DataLoader``, which refuses some once it is made. Local."""
    object.__setattr__(loader, name, value)


def set_dataset_of_worker(info: Any, dataset: Any) -> None:
    """Lets ``get_worker_info()`` show another dataset, where this release lets anybody. Called in the loader worker."""
    try:
        object.__setattr__(info, "dataset", dataset)  # it refuses a plain assignment
    except (AttributeError, TypeError):
        if info.id == 0:  # one line, and not one for each worker
            log_missing(
                ["torch.utils.data._utils.worker.WorkerInfo.dataset"],
                "get_worker_info().dataset in a loader worker is one of torchdistinput's, whose .dataset is yours",
            )


def children_of_this_process() -> set[Any]:
    """The processes that multiprocessing ends when this one ends; to be changed. Local."""
    children: set[Any] | None = look_up("multiprocessing.process._children")
    if children is None:
        log_missing(["multiprocessing.process._children"], "a forked process may end the loader workers of its parent")
    return set() if children is None else children
