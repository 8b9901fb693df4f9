"""What all sources over a torch ``DataLoader`` have in common: which are refused, and what is kept of the user's."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, cast, final

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

from torchdistinput.backends.devices import Accelerators
from torchdistinput.errors import InputError, ShardingError
from torchdistinput.plan.sharding import AutoShardPolicy
from torchdistinput.sources.arrivals import Arrivals, arrivals_of
from torchdistinput.sources.checks import refuse_class
from torchdistinput.sources.messages import context_for
from torchdistinput.sources.samplers import DistributedBatchSampler
from torchdistinput.sources.shuffle import ShuffleSampler

__all__ = [
    "TORCH_SAMPLERS",
    "WorkerInit",
    "check_loader",
    "generator_digest",
    "is_read_here",
    "let_torch_warn",
    "not_pinning",
    "sampler_in",
    "settings_of",
]

TORCH_SAMPLERS: Final = (
    RandomSampler,
    SequentialSampler,
    ShuffleSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
"""Samplers without code of the user's. They draw from the default random state at their first index only, or never."""


_PR_SET_PDEATHSIG: Final = 1


def check_loader(loader: DataLoader[Any], policy: AutoShardPolicy) -> None:
    """Refuses a ``DataLoader`` that cannot be divided.

    Raises:
      InputError: ``in_order=False``: batches would pair up with the wrong steps; or a class in place of a dataset.
      ShardingError: a per-rank sampler is inside; its part would be divided again. Policy OFF divides nothing.
    """
    if not loader.in_order:
        raise InputError(
            "the DataLoader has in_order=False, so its batches come in any order and the ranks' parts of a step would "
            "belong to different batches. Build it with in_order=True."
        )
    refuse_class(loader.dataset, "the dataset of a DataLoader")
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    for inner in (sampler, loader.sampler):
        per_rank = isinstance(inner, DistributedSampler | DistributedBatchSampler)
        if per_rank and policy is not AutoShardPolicy.OFF:
            raise ShardingError(
                f"the DataLoader has a {type(inner).__name__}, which already takes one rank's part; it would be "
                "divided twice. Give the sampler of one process (or shuffle=True) and the global batch size; or "
                "AutoShardPolicy.OFF, which takes each rank's part as it is."
            )


def sampler_in(batches: Any) -> Any:
    """What yields the single indices: the sampler in torch's own batch sampler, else the object itself."""
    return batches.sampler if type(batches) is BatchSampler else batches


def generator_digest(generator: torch.Generator | None) -> str | None:
    """A short text that is equal for equal generator states."""
    if generator is None:
        return None
    return hashlib.sha256(bytes(generator.get_state().numpy())).hexdigest()[:16]


@final
class WorkerInit:
    """The user's ``worker_init_fn``, which finds the user's dataset in ``get_worker_info()``, not the wrapped one.

    On Linux the worker ends with its parent. Torch's own look at the parent comes between two items only, and until the
    worker is gone, its copies of the parent's sockets keep the other ranks from noticing that a rank died.

    Args:
      init: the user's.
      parent: the process that forks the worker, from its main thread; else ``None``: the kernel counts the thread that
        forked as the parent, and others may end while the workers live on.
      arrivals: where forked workers say that they came up.
    """

    def __init__(self, init: Callable[[int], None] | None, parent: int | None, arrivals: Arrivals | None) -> None:
        self._init = init
        self._parent = parent
        self.arrivals = arrivals
        self.begin: Callable[[int, Any], None] | None = None
        """Called last, with the number of the worker and the dataset that it reads."""

    def __call__(self, worker: int) -> None:
        """Called by torch in the loader worker, before anything is read."""
        if sys.platform == "linux" and os.getppid() == self._parent:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._parent:  # it died just before
                os.kill(os.getpid(), signal.SIGKILL)
        if self.arrivals is not None:
            self.arrivals.arrive(worker)
        info = get_worker_info()
        dataset: Any = None if info is None else info.dataset
        if info is not None:
            # WorkerInfo refuses a plain assignment.
            object.__setattr__(info, "dataset", dataset.dataset)
        if self._init is not None:
            self._init(worker)
        if self.begin is not None:
            self.begin(worker, dataset)


def not_pinning(data: Any) -> Any:
    """A ``DataLoader`` that pins as one that does not, anything else as it is. Local."""
    if not isinstance(data, DataLoader) or not data.pin_memory:
        return data
    loader = copy.copy(data)
    loader.pin_memory = False
    return loader


def is_read_here(loader: DataLoader[Any]) -> bool:
    """Whether torch's loader would do nothing but read in this process: it has no workers, and pins nothing. Local.

    Without an accelerator torch pins nothing, nor for mps, and warns of it. Scripts ask for it all the same.
    """
    return not loader.num_workers and not (loader.pin_memory and Accelerators.detect().kind not in {None, "mps"})


def let_torch_warn(loader: DataLoader[Any], generator: torch.Generator) -> None:
    """An epoch of a loader begins that ``is_read_here``: torch says what it would say of its pinning. Local.

    Args:
      loader: the user's.
      generator: the seed is drawn from it that torch draws when an epoch begins.
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


def settings_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments of a ``DataLoader`` that stay as they are. To be asked for where the loader workers are started."""
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
    workers = {"prefetch_factor": loader.prefetch_factor} if loader.num_workers else {}
    arrivals = arrivals_of(loader.multiprocessing_context, loader.num_workers)
    init = WorkerInit(loader.worker_init_fn, parent, arrivals) if loader.num_workers else loader.worker_init_fn
    return {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "pin_memory_device": loader.pin_memory_device,
        "timeout": loader.timeout,
        "worker_init_fn": init,
        "multiprocessing_context": context_for(
            loader.multiprocessing_context, loader.num_workers, loader.prefetch_factor
        ),
        "generator": loader.generator,
        "persistent_workers": loader.persistent_workers,
        **workers,
    }
