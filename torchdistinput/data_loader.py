"""The drop-in ``DataLoader``: torch's ``DataLoader`` for one or many ranks; each rank gets its part of each batch.

Problem. A script that was written for one process should run on many after one changed import, and train the same. But
frameworks build loaders before the process group exists, and some frameworks divide every
``torch.utils.data.DataLoader`` that they see.

Decisions.
- It holds a torch loader made of the same arguments, so torch itself checks them. It is not a subclass of torch's
  loader: accelerate and Lightning would divide a subclass a second time.
- The ranks are determined when the first epoch begins. If a process group appears later, the next epoch uses it.
- All loaders of a run with the same device share one strategy, because a strategy holds connections, and a run makes
  many loaders.
- In one process nothing is cut, so a batch may be any object, as in torch. It is *sealed* (``OpaqueBatch``): passed
  through unchanged, with the number of its samples beside it. Batches that are gathered from memory, without user
  code, are not sealed.
- In one process an exception of user code is raised unchanged. With several ranks all ranks raise the same
  ``SourceError``; on the rank that failed, its ``__cause__`` is the original exception. The epoch ends with it.
- With persistent loader workers, torch has one iterator for all epochs. So has this loader in one process.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast, final, overload

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate, default_convert

from torchdistinput.coordination import launch
from torchdistinput.dataset import DistributedDataset, check_number
from torchdistinput.errors import InputError
from torchdistinput.frameworks import GivenCollate, GivenSampler, check_gathering, own
from torchdistinput.inspection.sample_lookup import SampleStep, StepSamples
from torchdistinput.iterator import delivered
from torchdistinput.loader_iterator import Divided, LoaderIterator
from torchdistinput.pipeline.metrics import Metrics
from torchdistinput.plan.batching import num_steps
from torchdistinput.plan.options import InputOptions, Step, check_options
from torchdistinput.plan.topology import AutoShardPolicy
from torchdistinput.sources.checks import length_of
from torchdistinput.sources.datasets.mixture import RecordDataset
from torchdistinput.sources.kernel.collating import OpaqueCollate
from torchdistinput.sources.kernel.explanation import Explanation
from torchdistinput.sources.map_style.in_memory import gathers
from torchdistinput.sources.map_style.table import refuse_frame
from torchdistinput.sources.resolve import as_dataset
from torchdistinput.sources.set_epoch import EpochSetter
from torchdistinput.sources.torch_loader.private_names import set_in_spite_of_init
from torchdistinput.sources.torch_loader.settings import TORCH_SAMPLERS, LikeTorch, check_loader, sampler_in
from torchdistinput.strategy import Strategy

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_OWN_DATASETS = (TensorDataset, torch.Tensor, np.ndarray, range)
_OWN_COLLATES = (default_collate, default_convert)


class _OfTorch(Generic[T]):
    """An attribute of the torch loader inside, as in torch. It can be set where torch allows it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, loader: None, owner: type) -> _OfTorch[T]: ...

    @overload
    def __get__(self, loader: DataLoader[Any], owner: type) -> T: ...

    def __get__(self, loader: DataLoader[Any] | None, owner: type) -> Any:
        return self if loader is None else getattr(loader.torch_loader, self._name)

    def __set__(self, loader: DataLoader[Any], value: T) -> None:
        loader._set(self._name, value)  # noqa: SLF001 - an attribute of this class


@final
class _GivenOfTorch(_OfTorch[T]):
    """An attribute that refuses, on several ranks, to be used by others: in another torch loader nothing divides it.

    Args:
      given: makes the wrapper that other code gets on several ranks.
    """

    def __init__(self, given: Callable[[Any], object]) -> None:
        self._given = given

    def __get__(self, loader: DataLoader[Any] | None, owner: type) -> Any:
        value = super().__get__(loader, owner)
        hidden = loader is not None and value is not None and loader._is_divided  # noqa: SLF001 - as above
        return self._given(value) if hidden else value

    def __set__(self, loader: DataLoader[Any], value: T) -> None:
        super().__set__(loader, cast(T, own(value)))


class DataLoader(Generic[T_co]):
    """torch's ``DataLoader`` for any number of ranks: write it for one process, with the global batch size.

    In one process it behaves as torch's loader: the same batches, random draws and exceptions. An exception ends the
    epoch; ``InputOptions(on_error="skip")`` leaves out what cannot be read. Under torchrun or in an initialised process
    group each rank gets its part of the same global batches, on the CPU (pinned, if asked for) unless ``device`` or
    ``strategy`` is given. There a batch without samples (an empty list of a batch sampler, an item of length 0 with
    ``batch_size=None``) is passed over, and each ``next`` is collective: every rank iterates, in the same order.
    Construction, ``len`` and ``set_epoch`` are local.

    >>> loader = tdi.DataLoader(range(5), batch_size=3)  # 3 over all ranks
    >>> for batch in loader:
    ...     print(batch, loader.step.index, loader.step.global_size)
    tensor([0, 1, 2]) 0 3
    tensor([3, 4]) 1 2

    Random augmentation of map-style data: the loader workers of each rank are seeded apart, from one seed that all
    ranks draw, so no two draw the same numbers. Without loader workers it draws from the random states of this process:
    seed them apart, as with torch's loader. ``InputOptions(seed_samples=True)`` makes it the same at any number of
    ranks.

    The arguments up to ``in_order`` are those of ``torch.utils.data.DataLoader``, in its order, and torch checks them.
    The attributes of torch's loader are attributes of this loader. Those that torch lets users set (``num_workers``,
    ``collate_fn``, ...) can be set, on every rank, until the first epoch begins.

    Args:
      dataset: the data, map-style or iterable; or a dict of tensors and arrays, one entry for each sample in each.
      batch_size: samples of a batch over all ranks.
      shuffle: see torch, as for all up to ``in_order``.
      sampler: the sampler of one process; the user's own object runs on every rank.
      batch_sampler: the batch sampler of one process; its batches are the global ones.
      num_workers: loader workers of each rank.
      collate_fn: makes a batch of a list of samples; it gets the samples of one part.
      pin_memory: whether tensors are copied into pinned memory.
      drop_last: whether a short last (global) batch is dropped.
      timeout: seconds to wait for a loader worker.
      worker_init_fn: is called in each loader worker.
      multiprocessing_context: how loader workers are started.
      generator: draws for the sampler and the seeds of loader workers.
      prefetch_factor: batches that each loader worker reads ahead.
      persistent_workers: whether loader workers outlive an epoch.
      pin_memory_device: without effect, as in torch.
      in_order: must be True on several ranks, whose parts of a step belong to the same batch. Where it is False, a
        state can be saved at the ends of epochs only.
      device: where this process's batches go; by default they stay on the CPU.
      strategy: the replicas to divide the data among; their devices get the batches.
      options: how the data is divided and read ahead, as for ``Strategy.distribute_dataset``.

    Raises:
      ValueError: what torch raises for its arguments; both ``device`` and ``strategy``.
      TypeError: what torch raises; ``options`` or a ``strategy`` of another type.
      InputError: a class in place of a dataset; on several ranks, by ``next``, ``in_order=False``.
      ShardingError: a ``DistributedSampler`` or another sampler for one rank is inside; it would be divided again. With
        ``auto_shard_policy=AutoShardPolicy.OFF`` it is taken as it is: each rank's own data, in steps of ``batch_size``
        over all.
    """

    dataset = _OfTorch[Any]()
    batch_size = _OfTorch[int | None]()
    sampler = _GivenOfTorch[Any](GivenSampler)
    batch_sampler = _GivenOfTorch[Any](GivenSampler)
    num_workers = _OfTorch[int]()
    collate_fn = _GivenOfTorch[Any](GivenCollate)
    pin_memory = _OfTorch[bool]()
    drop_last = _OfTorch[bool]()
    timeout = _OfTorch[float]()
    worker_init_fn = _OfTorch[Any]()
    multiprocessing_context = _OfTorch[Any]()
    generator = _OfTorch[torch.Generator | None]()
    prefetch_factor = _OfTorch[int | None]()
    persistent_workers = _OfTorch[bool]()
    pin_memory_device = _OfTorch[str]()
    in_order = _OfTorch[bool]()

    # torch's name: with it, subclasses in well-known projects set attributes that torch locks after init.
    __initialized = False

    def __init__(  # noqa: PLR0913, PLR0917 - torch's signature
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,  # noqa: FBT001 - as in torch
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,  # noqa: FBT001, FBT002 - as in torch
        drop_last: bool = False,  # noqa: FBT001, FBT002 - as in torch
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        device: str | torch.device | None = None,
        strategy: Strategy | None = None,
        options: InputOptions | None = None,
    ) -> None:
        if not isinstance(strategy, Strategy | None):
            raise TypeError(f"strategy is a {type(strategy).__name__}; a torchdistinput.Strategy is needed, or None.")
        if device is not None and strategy is not None:
            raise ValueError("both device and strategy were given; a strategy has its devices. Give one of them.")
        check_options(options)
        refuse_frame(dataset, "the dataset of a DataLoader")  # before torch calls its len()
        self._loader: TorchDataLoader[T_co]
        self._take(
            TorchDataLoader(
                as_dataset(dataset),
                batch_size,
                shuffle,
                own(sampler),
                own(batch_sampler),
                num_workers,
                own(collate_fn),
                pin_memory,
                drop_last,
                timeout,
                worker_init_fn,
                multiprocessing_context,
                generator,
                prefetch_factor=prefetch_factor,
                persistent_workers=persistent_workers,
                pin_memory_device=pin_memory_device,
                in_order=in_order,
            )
        )
        options = options or InputOptions()
        self._policy = options.auto_shard_policy or AutoShardPolicy.DATA
        self._options = replace(options, auto_shard_policy=self._policy)
        check_loader(self._loader, self._policy, alone=True)
        self._device = device
        self._given_strategy = strategy
        self._divided: Divided | None = None
        self._wanted_epoch: int | None = None
        self.__initialized = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__initialized and isinstance(getattr(type(self), name, None), _OfTorch):
            setattr(copy.copy(self._loader), name, value)  # torch refuses attributes that are locked
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """A copy is divided anew when its first epoch begins, for the same strategy if one was given."""
        return {**self.__dict__, "_divided": None}

    @property
    def torch_loader(self) -> TorchDataLoader[T_co]:
        """The torch loader of one process that this one holds. Iterating it reads everything on every rank."""
        return self._loader

    def _set(self, name: str, value: Any) -> None:
        """Sets an attribute of the torch loader. Local.

        Raises:
          ValueError: torch does not take the value.
          InputError: ``in_order=False``; or an epoch has begun.
          ShardingError: a sampler for one rank.
        """
        if self._divided is not None:
            raise InputError(
                f"{name} was set on a DataLoader whose data is divided among the ranks already. Set it before the "
                "first epoch begins, or make another DataLoader."
            )
        changed = copy.copy(self._loader)
        set_in_spite_of_init(changed, name, value)  # __setattr__ has refused locked attributes
        check_loader(changed, self._policy, alone=True)
        self._take(changed)

    def _take(self, loader: TorchDataLoader[T_co]) -> None:
        """Reads the data of another torch loader from now on, and notices ``set_epoch`` of its sampler and dataset."""
        self._loader, self._user_epoch = loader, EpochSetter(loader)

    def __iter__(self) -> LoaderIterator:
        """The next epoch, which begins at the first ``next``, collectively. Local.

        ``next`` raises the errors of ``DistributedDataset``; in one process those of torch.
        """
        return LoaderIterator(self._ready_to_read, self._num_batches)

    @property
    def _is_divided(self) -> bool:
        """Whether several ranks share the data, or will by the launcher's environment. Local."""
        if self._divided is not None:
            return not self._divided.alone
        strategy = self._given_strategy
        return launch.expected_ranks() > 1 if strategy is None else strategy.num_input_pipelines > 1

    @property
    def has_equal_parts(self) -> bool:
        """Whether the parts of each step are known to be of one size. Local; never before the first epoch."""
        parts = 0 if self._divided is None else self._divided.parts
        return parts == 1 or (parts > 1 and self._is_even(parts))

    def _is_even(self, parts: int) -> bool:
        """Whether the parts of each step are known to be of one size. Local."""
        size = self.batch_size
        if size is None or size % parts or self._policy is not AutoShardPolicy.DATA:
            return False
        if self._options.skips or (self._options.balance is not None and not self._options.equal_counts):
            return False
        length = None if isinstance(self.dataset, IterableDataset) else length_of(self._loader.sampler)
        return length is not None and (self.drop_last or length % size % parts == 0)

    def _num_batches(self) -> int:
        """As ``len``, except where torch counts batches by the sampler also for an iterable dataset with a length."""
        if self._counts_as_torch and not isinstance(self.dataset, RecordDataset):
            batches = self._loader.batch_sampler
            return len(cast(Sized, self._loader.sampler if batches is None else batches))
        return len(self)

    def _ready(self) -> Divided:
        """The data, divided among the ranks. Collective when the ranks are determined."""
        divided = self._divided
        if divided is None or self._is_moved(divided):
            divided = self._divided = self._divide(divided)
        wanted, self._wanted_epoch = self._wanted_epoch, None
        if wanted is not None and self._user_epoch.set_by_user() is None:  # else the sampler or dataset was told later
            divided.dataset.set_epoch(wanted)
        return divided

    def _ready_to_read(self) -> Divided:
        divided = self._ready()
        check_gathering(equal=self.has_equal_parts)
        return divided

    def _is_moved(self, divided: Divided) -> bool:
        """Whether there is another process group than when the data was divided."""
        return self._given_strategy is None and divided.group is not launch.default_group()

    def __len__(self) -> int:
        """The steps of an epoch, as torch counts them: by the length of the sampler. Local.

        The steps of a ``FileDataset`` are counted by the records of its files, where their format tells how many.

        Raises:
          TypeError: the dataset has no length, or some file does not tell it; or several ranks read different data
            (policies OFF, HINT, FILE).
        """
        if self._counts_as_torch:
            return self._steps_as_torch()
        if self._divided is None:
            raise TypeError(
                f"under policy {self._policy.name} the number of steps depends on the ranks, which are known from the "
                "first epoch on."
            )
        return len(self._divided.dataset)

    def _steps_as_torch(self) -> int:
        if isinstance(self.dataset, RecordDataset):
            size = self.batch_size
            opens = not self._options.skips  # records that may be left out are not counted
            records = None if size is None else self.dataset.num_records(opens=opens)
            steps = num_steps(records, size or 1, drop_last=self.drop_last)
            if steps is None:
                raise TypeError(
                    "the number of steps is not known before the files are read. With a batch size it is known of "
                    "parquet, npy_rows and fixed_length_records that are not compressed, but not with on_error='skip', "
                    "which may leave records out."
                )
            return steps
        try:
            return len(self._loader)
        except Exception as error:
            if isinstance(error, TypeError) or not isinstance(self.dataset, IterableDataset):
                raise
            raise TypeError(f"the length of the {type(self.dataset).__name__} is not known: {error!r}") from error

    @property
    def _counts_as_torch(self) -> bool:
        """Whether an epoch has as many steps as with torch's loader."""
        return self._policy is AutoShardPolicy.DATA or (self._divided is not None and self._divided.alone)

    @property
    def step(self) -> Step:
        """The step of the last batch: its epoch, index and sizes. Local.

        Raises:
          InputError: no batch was delivered yet.
        """
        return delivered(None) if self._divided is None else self._divided.dataset.step

    @property
    def epoch(self) -> int:
        """The number of the epoch that a loop reads now, or that the next loop reads. Local.

        A script that may go on from a state writes ``for epoch in range(loader.epoch, num_epochs)``.
        """
        if self._divided is not None:
            return self._divided.dataset.epoch
        by_user = self._user_epoch.set_by_user()
        return (self._wanted_epoch or 0) if by_user is None else by_user

    def stats(self) -> dict[str, float]:
        """The measurements of this process in the last epoch; see ``DistributedDataset.stats``. Local."""
        return Metrics().stats(0, alone=True) if self._divided is None else self._divided.dataset.stats()

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch, also on the sampler and dataset where they have ``set_epoch``.

        Local; the same on every rank. This call is optional: each loop reads the next epoch. A ``set_epoch`` of a
        sampler, batch sampler or dataset that shows its attribute ``epoch`` does the same; the last call counts.

        Raises:
          ValueError: not an int of 0 or more.
        """
        check_number("epoch", epoch)
        self._user_epoch.forget_calls()
        if self._divided is None:
            self._wanted_epoch = epoch
        else:
            self._divided.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position after the steps delivered so far. May be collective; see ``DistributedDataset.state_dict``.

        Also collective if it is the first call of the loader, which determines the ranks.
        """
        # A loader that was divided answers for itself, also when its process group has gone.
        return (self._divided or self._ready()).dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:  # noqa: FBT001, FBT002 - as in torch
        """Makes the next loop continue at the saved position; see ``DistributedDataset.load_state_dict``.

        Every rank calls this with the same state. Collective if it is the first call of the loader.

        Raises:
          StateMismatch: the state does not fit; the field and both values are named.
          InputError: an iterator of this loader is alive.
        """
        self._ready().dataset.load_state_dict(state, strict)

    def seek(self, epoch: int, step: int = 0) -> None:
        """Makes the next loop begin at a step of an epoch; see ``DistributedDataset.seek``."""
        self._ready().dataset.seek(epoch, step)

    def explain(self, world_size: int | None = None) -> Explanation:
        """The plan of the next epoch; see ``DistributedDataset.explain``. Collective as ``samples_of``."""
        return self._ready().dataset.explain(world_size)

    def samples_of(self, epoch: int, step: int, rank: int | None = None, world_size: int | None = None) -> StepSamples:
        """The samples of a step, without reading; see ``DistributedDataset.samples_of``.

        Local; collective if it is the first call of the loader, which determines the ranks.
        """
        return self._ready().dataset.samples_of(epoch, step, rank, world_size)

    def steps_of(self, sample: Any, epoch: int, world_size: int | None = None) -> list[SampleStep]:
        """The steps of a sample in an epoch; see ``DistributedDataset.steps_of``, and ``samples_of``."""
        return self._ready().dataset.steps_of(sample, epoch, world_size)

    def close(self) -> None:
        """Ends every iteration and all loader workers. Local, idempotent; a later ``iter`` begins anew."""
        if self._divided is not None:
            self._divided.dataset.close()

    def __enter__(self) -> DataLoader[T_co]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _divide(self, before: Divided | None) -> Divided:
        """Determines the ranks, and divides the data among them; keeps the place of ``before``. Collective."""
        self.close()
        strategy = self._given_strategy or _SHARED.get(self._device)
        alone = strategy.num_input_pipelines == 1
        one_on_host = strategy.num_replicas_in_sync == 1 and strategy.device.type == "cpu"
        sealed = one_on_host and not gathers(self._loader) and not self._options.looks_inside
        loader = copy.copy(self._loader)
        if sealed:
            loader.collate_fn = OpaqueCollate(self._loader.collate_fn, counts=loader.batch_sampler is not None)
        if strategy.input_pipeline_id == 0:
            self._tell(strategy)
        options = replace(self._options, prefetch=self._steps_ahead(strategy))
        parts = strategy.num_replicas_in_sync
        dataset = strategy.distribute_dataset(LikeTorch(loader) if parts == 1 else loader, options)
        if before is not None:  # another world is no reason to begin anew
            epoch = before.dataset.epoch
            state = None if options.coordination == "off" else before.dataset.state_dict()
            if state is not None and state["epoch"] == epoch:
                dataset.load_state_dict(state, strict=state["step"] > 0)
            else:  # the last epoch was left, or each rank was at a step of its own
                dataset.set_epoch(epoch)
        return Divided(dataset, launch.default_group(), parts, alone=alone, sealed=sealed)

    def _steps_ahead(self, strategy: Strategy) -> int | None:
        if self._options.prefetch is not None:
            return self._options.prefetch
        if strategy.num_input_pipelines == 1 and strategy.device.type == "cpu":
            return 0
        return 0 if self.num_workers == 0 and not _fetch_is_ours(self._loader) else None

    def _tell(self, strategy: Strategy) -> None:
        """Warns where each rank reads all of the data."""
        workers = strategy.num_input_pipelines
        opaque = isinstance(self.dataset, IterableDataset) and not isinstance(self.dataset, RecordDataset)
        if workers == 1 or not opaque or self._policy not in (AutoShardPolicy.DATA, AutoShardPolicy.AUTO):
            return
        warnings.warn(
            f"{type(self.dataset).__name__} is an iterable that only it can divide: under policy DATA each of the "
            f"{workers} ranks, and each of their loader workers, iterates over all of it. Use a map-style dataset or a "
            "FileDataset; or give InputOptions(auto_shard_policy=...): AutoShardPolicy.HINT with a dataset that has "
            "shard(num_shards, index), AutoShardPolicy.OFF with one that divides itself by rank.",
            UserWarning,
            stacklevel=7,
        )


@final
class _SharedStrategies:
    """The strategies of loaders without a ``strategy`` argument: one for each device, for the present default group."""

    def __init__(self) -> None:
        self._group: Any = None
        self._by_device: dict[torch.device, Strategy] = {}

    def get(self, device: str | torch.device | None) -> Strategy:
        """The strategy of all loaders with this device; without a group, one of this process only. Collective."""
        try:
            wanted = torch.device("cpu" if device is None else device)
        except (RuntimeError, TypeError, ValueError):
            return Strategy([cast(Any, device)])  # raises the error for the device on every rank
        found = self._by_device.get(wanted)
        if found is not None and self._group is launch.default_group():
            return found
        strategy = Strategy([wanted])
        group = launch.default_group()  # under torchrun the strategy has made it
        if group is not self._group:
            self._group, self._by_device = group, {}
        if group is not None:
            self._by_device[wanted] = strategy
        return strategy


_SHARED = _SharedStrategies()


def shared_strategy(device: str | torch.device | None = None) -> Strategy:
    """The strategy of all loaders that are given none; see ``_SharedStrategies``. Collective."""
    return _SHARED.get(device)


def dataset_of(loader: DataLoader[Any] | DistributedDataset) -> DistributedDataset:
    """What the loader divides. Collective if it is the first call of a ``DataLoader``, which determines the ranks."""
    if isinstance(loader, DistributedDataset):
        return loader
    return loader._ready().dataset  # noqa: SLF001 - no attribute that users see


def _fetch_is_ours(loader: TorchDataLoader[Any]) -> bool:
    """Whether making a batch runs no code of the user: tensors and arrays, torch's samplers and collate functions."""
    batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    ours = type(loader.dataset) in _OWN_DATASETS and loader.collate_fn in _OWN_COLLATES
    return type(sampler_in(batches)) in TORCH_SAMPLERS and (ours or gathers(loader))
