"""Settings shared by all sources over a torch ``DataLoader``: which loaders are refused, and what is kept."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple, cast, final

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from torchdistinput.devices.accelerators import Accelerators
from torchdistinput.errors import InputError, ShardingError
from torchdistinput.plan.topology import AutoShardPolicy
from torchdistinput.sources.checks import refuse_class, refuse_sharding_filter
from torchdistinput.sources.map_style.samplers import DistributedBatchSampler, ShuffleSampler
from torchdistinput.sources.map_style.table import refuse_frame
from torchdistinput.sources.torch_loader.open_runs import LOOK_SECONDS
from torchdistinput.sources.torch_loader.private_names import set_dataset_of_worker
from torchdistinput.sources.torch_loader.worker_processes import Parent, end_with, parent_for

TORCH_SAMPLERS: Final = (
    RandomSampler,
    SequentialSampler,
    ShuffleSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
"""Samplers without user code. They draw from the default random state at their first index only, or never."""


@final
class LikeTorch(NamedTuple):
    """A torch loader that is read as torch reads it: an empty batch is a batch, and batches may come in any order.

    Args:
      loader: the loader.
    """

    loader: DataLoader[Any]


def check_loader(loader: DataLoader[Any], policy: AutoShardPolicy, *, alone: bool = False) -> None:
    """Refuses a ``DataLoader`` that cannot be divided.

    Args:
      loader: the user's.
      policy: the policy in force.
      alone: whether the loader may be read without being divided, so that its batches may come in any order.

    Raises:
      InputError: ``in_order=False``: batches would pair up with the wrong steps; or a class in place of a dataset.
      ShardingError: a per-rank sampler is inside; its part would be divided again. Policy OFF divides nothing.
    """
    if not (loader.in_order or alone):
        raise InputError(
            "the DataLoader has in_order=False, so its batches come in any order and the ranks' parts of a step would "
            "belong to different batches. Build it with in_order=True."
        )
    refuse_class(loader.dataset, "the dataset of a DataLoader")
    refuse_frame(loader.dataset, "the dataset of a DataLoader")
    refuse_sharding_filter(loader.dataset)
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    for inner in (sampler, loader.sampler):
        per_rank = isinstance(inner, DistributedSampler | DistributedBatchSampler)
        if per_rank and policy is not AutoShardPolicy.OFF:
            raise ShardingError(
                f"the DataLoader has a {type(inner).__name__}, which already takes one rank's part; it would be "
                "divided twice. Give the sampler of one process (or shuffle=True) and the global batch size; or "
                "AutoShardPolicy.OFF, which takes each rank's part as it is."
            )


_ITERATION: Final = ("__iter__", "__len__", "_get_iterator", "_index_sampler")
_KNOWN: Final = ("torch", "torchdata", "torchdistinput")


def own_iteration(loader: object) -> list[str]:
    """The names of torch's loader that decide what it yields and that the loader's class defines anew. Local.

    Such a loader (one that normalises or repeats its batches, or turns indices into graphs) is an iterable of ready
    batches for this library: its dataset, sampler and batch size do not tell what comes.

    Empty for classes of torch and torchdata, and for subclasses that change other things, such as their arguments.
    """
    found: list[str] = []
    for kind in type(loader).__mro__:
        if kind.__module__.partition(".")[0] in _KNOWN:
            break
        found += [name for name in _ITERATION if name in vars(kind)]
    return found


def keeps_order(loader: DataLoader[Any]) -> bool:
    """Whether the batches come in the order in which they were drawn. Local."""
    return loader.in_order or loader.num_workers < 2


def sampler_in(batches: Any) -> Any:
    """The object that yields single indices: the sampler in torch's own batch sampler, else the object itself."""
    return batches.sampler if type(batches) is BatchSampler else batches


def generator_digest(generator: torch.Generator | None) -> str | None:
    """A short text that is equal for equal generator states."""
    if generator is None:
        return None
    return hashlib.sha256(bytes(generator.get_state().numpy())).hexdigest()[:16]


_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


def keep_freed_memory() -> None:
    """Lets this process keep what it frees (glibc only). Called in the loader worker.

    By default the memory of the samples of each batch goes back to the system, and is taken again for the next batch.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest that glibc takes
            libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)


@final
class WorkerInit:
    """The user's ``worker_init_fn``, run in a loader worker that ends with its parent; see ``worker_processes``.

    Args:
      init: the user's.
      parent: the process that starts the worker.
    """

    def __init__(self, init: Callable[[int], None] | None, parent: Parent) -> None:
        self._init = init
        self._parent = parent
        self.begin: Callable[[int], None] | None = None
        """Called last, with the number of the worker."""

    def __call__(self, worker: int) -> None:
        """Called by torch in the loader worker, before anything is read."""
        end_with(self._parent)
        keep_freed_memory()
        info = get_worker_info()
        dataset: Any = None if info is None else info.dataset
        if info is not None:
            set_dataset_of_worker(info, dataset.dataset)
        if self._init is not None:
            self._init(worker)
        if self.begin is not None:
            self.begin(worker)


def not_pinning(data: Any) -> Any:
    """A copy of a ``DataLoader`` that does not pin memory; any other object as it is. Local."""
    if not isinstance(data, DataLoader) or not data.pin_memory:
        return data
    loader = copy.copy(data)
    loader.pin_memory = False
    return loader


def is_read_here(loader: DataLoader[Any]) -> bool:
    """Whether torch's loader would only read in this process: it has no workers, and pins nothing. Local.

    Without an accelerator, and for mps, torch pins nothing, and warns. Scripts ask for pinned memory all the same.
    """
    return not loader.num_workers and not (loader.pin_memory and Accelerators.detect().kind not in {None, "mps"})


def let_torch_warn(loader: DataLoader[Any], generator: torch.Generator) -> None:
    """Lets torch warn about pinned memory, as it would when an epoch of a loader begins that ``is_read_here``. Local.

    Args:
      loader: the user's.
      generator: torch draws the seed of the epoch from it.
    """
    if loader.pin_memory:
        iter(
            DataLoader(
                cast(Any, ()),
                batch_size=None,
                pin_memory=True,
                pin_memory_device=loader.pin_memory_device,
                generator=generator,
            )
        )


@final
class RebuiltLoader(DataLoader[Any]):
    """A torch loader that reads for the user's. Making it repeats no warning that making the user's loader gave."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.check_worker_number_rationality = _say_nothing  # type: ignore[method-assign] # torch calls it there
        super().__init__(*args, **settings)
        del self.check_worker_number_rationality


def _say_nothing() -> None:
    pass


def settings_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments of a ``DataLoader`` that stay as they are. Called where the loader workers are started."""
    workers = {"prefetch_factor": loader.prefetch_factor} if loader.num_workers else {}
    init: Callable[[int], None] | None = loader.worker_init_fn
    if loader.num_workers:
        init = WorkerInit(init, parent_for(loader.multiprocessing_context))
    return {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "pin_memory_device": loader.pin_memory_device,
        "timeout": min(loader.timeout or LOOK_SECONDS, LOOK_SECONDS) if loader.num_workers else 0,
        "worker_init_fn": init,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "persistent_workers": loader.persistent_workers,
        "in_order": loader.in_order,
        **workers,
    }
