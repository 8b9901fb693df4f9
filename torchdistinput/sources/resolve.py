"""Finds the kind of the user's data, makes the source that reads it, and settles the sharding policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from torchdistinput.batches.containers import is_tensor_collection
from torchdistinput.errors import BatchingError, InputError, ShardingError
from torchdistinput.plan.batching import check_batch_size
from torchdistinput.plan.options import InputOptions
from torchdistinput.plan.topology import AutoShardPolicy, Topology, resolve_policy
from torchdistinput.sources.checks import HoldsTorchLoader, MapStyle, Shards, cannot_skip, refuse_class
from torchdistinput.sources.contract import Collate, Source
from torchdistinput.sources.datasets.fragment_dataset import FragmentDataset
from torchdistinput.sources.datasets.mixture import Mixture, RecordDataset
from torchdistinput.sources.fragments import FragmentSource
from torchdistinput.sources.iterable.source import IterableSource
from torchdistinput.sources.map_style.source import MapLoaderSource
from torchdistinput.sources.map_style.table import Table, is_table, refuse_frame
from torchdistinput.sources.sample_seed import cannot_seed
from torchdistinput.sources.torch_loader.settings import LikeTorch, check_loader, not_pinning, own_iteration


def resolve_source(
    data: Any,
    options: InputOptions,
    topology: Topology,
    refuse: Callable[[object], None],
    *,
    global_batch_size: int | None,
    collate_fn: Collate | None,
    shuffle: bool = False,
    on_host: bool = True,
) -> tuple[Source, AutoShardPolicy]:
    """The source, and the policy in force. Local: no communication.

    Args:
      data: the user's data.
      options: the user's options.
      topology: the position of this worker among all workers.
      refuse: raises for objects that are not data, of classes that only higher layers know.
      global_batch_size: G, if batches are made here.
      collate_fn: makes a batch of samples.
      shuffle: whether map-style data comes in a new order in each epoch.
      on_host: whether batches stay on the host. Batches for a device are pinned when they are copied, not before.

    Raises:
      InputError: the object is not data, or its kind cannot be divided or shuffled here, or its kind does not support
        ``on_error="skip"``.
      BatchingError: a batch size is missing, given twice, or not a positive int; the tensors and arrays of a dict
        differ in length.
      ShardingError: the policy does not fit.
    """
    if global_batch_size is not None:
        check_batch_size(global_batch_size)
    like_torch = isinstance(data, LikeTorch)
    data = _unwrapped(data)
    own = own_iteration(data) if isinstance(data, DataLoader) else []
    data = data if on_host or own else not_pinning(data)
    refuse(data)
    _refuse(data)
    first = None
    if callable(data) and not isinstance(data, Iterable | Dataset | DataLoader) and not is_map_style(data):
        first = data()
        refuse(first)
        if isinstance(first, DataLoader | Dataset | Mapping | HoldsTorchLoader) or not isinstance(first, Iterable):
            try:
                return resolve_source(
                    first,
                    options,
                    topology,
                    refuse,
                    global_batch_size=global_batch_size,
                    collate_fn=collate_fn,
                    shuffle=shuffle,
                    on_host=on_host,
                )
            except InputError as error:
                kind = type(data).__name__
                raise type(error)(f"the {kind} {data!r} was called for the data: {error}") from error
    if shuffle:
        _refuse_shuffling(data)
    inner = data.dataset if isinstance(data, DataLoader) and not own else data
    files = _files_of(inner, options)
    resolved = resolve_policy(
        options.auto_shard_policy or AutoShardPolicy.AUTO,
        num_files=None if files is None else len(files),
        can_shard=isinstance(inner if first is None else first, Shards),
        num_workers=topology.num_workers,
    )
    if isinstance(data, DataLoader):
        _refuse_second_batching(data, global_batch_size, collate_fn)
        if own:
            return _ready_batches_of(data, own, resolved, topology, options), resolved
        return source_of_loader(data, resolved, topology, options, like_torch=like_torch), resolved
    place, batching = (resolved, topology, options), (global_batch_size, collate_fn)
    _refuse_without_batch_size(data, global_batch_size)
    if isinstance(data, RecordDataset):
        from torchdistinput.sources.datasets.record_source import RecordSource  # noqa: PLC0415 - imported only if files are read

        return RecordSource(data, *place, *batching), resolved
    if is_map_style(data):
        _refuse_without_length(data)
        return MapLoaderSource(_loader(data, *batching, shuffle), *place), resolved
    _refuse_without_numbers(f"an iterable ({type(data).__name__})", options)
    return IterableSource(data, *place, *batching, first=first), resolved


def _files_of(data: Any, options: InputOptions) -> Sequence[str] | None:
    """The files or fragments that policy FILE deals out; ``None`` for data without.

    Raises:
      ShardingError: an option needs files, and there are none to deal out.
    """
    if isinstance(data, FragmentDataset):
        return data.names
    if isinstance(data, Mixture) and options.auto_shard_policy is AutoShardPolicy.FILE:
        raise ShardingError(
            "policy FILE deals out whole files, and a mixture takes the records of all its sources by their weights, "
            "in one order for all ranks. Use AutoShardPolicy.DATA, or AUTO; or mix on each rank alone, with "
            "distribute_datasets_from_function."
        )
    if options.file_assignment == "by_size":
        raise ShardingError(
            'file_assignment="by_size" divides files or fragments, and the data has none; a FileDataset or a '
            "FragmentSource is needed."
        )
    return None


def _refuse_without_numbers(what: str, options: InputOptions) -> None:
    """Refuses options that need samples which are known one by one."""
    if options.skips:
        raise cannot_skip(what)
    if options.seed_samples:
        raise cannot_seed(what)


def _refuse_without_batch_size(data: Any, global_batch_size: int | None) -> None:
    """Refuses records without a batch size."""
    if isinstance(data, RecordDataset) and global_batch_size is None:
        raise BatchingError(
            f"a {type(data).__name__} yields single records, and no batch size was given. Give global_batch_size=, or "
            "a DataLoader(dataset, batch_size=G); for records that are whole batches, DataLoader(dataset, "
            "batch_size=None)."
        )


def _unwrapped(data: Any) -> Any:
    """The torch loader of a drop-in one; the dataset of a dict of tensors and arrays or of fragments; else the data."""
    if isinstance(data, LikeTorch):
        return data.loader
    if isinstance(data, HoldsTorchLoader) and isinstance(data.torch_loader, DataLoader):
        if own := own_iteration(data):
            raise InputError(
                f"found a {type(data).__name__}, a subclass of the drop-in DataLoader with its own {', '.join(own)}, "
                "which would be left out. Iterate over it, as it gives this rank's part already; or give its "
                "torch_loader."
            )
        return data.torch_loader
    return as_dataset(data)


def as_dataset(data: Any) -> Any:
    """The dataset of a dict of tensors and arrays, or of a source of fragments; any other data as it is. Local."""
    if isinstance(data, FragmentSource) and not isinstance(data, Dataset | type):
        return FragmentDataset(data)
    return Table(data) if is_table(data) else data


def _ready_batches_of(
    loader: DataLoader[Any], own: Sequence[str], policy: AutoShardPolicy, topology: Topology, options: InputOptions
) -> Source:
    """The source of a loader whose class iterates in a way of its own."""
    what = f"a {type(loader).__name__}, whose class has its own {', '.join(own)},"
    check_loader(loader, policy)
    _refuse_without_numbers(what, options)
    return IterableSource(loader, policy, topology, options)


def source_of_loader(
    loader: DataLoader[Any],
    policy: AutoShardPolicy,
    topology: Topology,
    options: InputOptions,
    *,
    like_torch: bool = False,
) -> Source:
    """The source for a loader that iterates as torch's does; see ``resolve_source``."""
    if isinstance(loader.dataset, RecordDataset):
        from torchdistinput.sources.datasets.record_source import RecordSource  # noqa: PLC0415 - imported only if files are read

        return RecordSource(loader, policy, topology, options)
    if isinstance(loader.dataset, IterableDataset):
        _refuse_without_numbers(f"a DataLoader over an iterable ({type(loader.dataset).__name__})", options)
        return IterableSource(loader, policy, topology, options, like_torch=like_torch)
    return MapLoaderSource(loader, policy, topology, options, like_torch=like_torch)


def _refuse_second_batching(loader: DataLoader[Any], global_batch_size: int | None, collate_fn: Collate | None) -> None:
    if global_batch_size is not None or collate_fn is not None:
        given = "global_batch_size" if global_batch_size is not None else "collate_fn"
        raise BatchingError(
            f"{given} was given with a DataLoader, which has its own (batch_size={loader.batch_size}). Its batch size "
            "is the global one; leave the argument out, or give the dataset instead of the loader."
        )


def is_map_style(data: Any) -> bool:
    """Whether the data has samples by index. Local."""
    if isinstance(data, Dataset):
        return not isinstance(data, IterableDataset)
    return issubclass(type(data), MapStyle) and not isinstance(data, list | tuple)  # instances have what it has


def _refuse_without_length(data: object) -> None:
    """Refuses a map-style dataset without a length: the order of its samples is drawn from the length."""
    if not isinstance(data, Sized):
        raise InputError(
            f"found a {type(data).__name__} as data, with samples by number (__getitem__) and without __len__, from "
            "which the order of the samples is made. Add __len__ to it; or give a DataLoader with a sampler of your "
            "own; or derive it from IterableDataset, with an __iter__, if the number of samples is not known."
        )


def _refuse_shuffling(data: Any) -> None:
    """Refuses to shuffle data that decides its order itself."""
    if isinstance(data, DataLoader):
        way = "build the DataLoader with shuffle=True, or give the dataset instead of the loader"
    elif isinstance(data, FragmentDataset):
        way = f"give the {type(data).__name__} shuffle_{data.kind}s=True and a shuffle_buffer"
    else:
        way = "shuffle inside of it, or give a map-style dataset (with __getitem__ and __len__)"
    if isinstance(data, DataLoader) or not is_map_style(data):
        raise InputError(
            f"shuffle=True was given with a {type(data).__name__}; it is for map-style datasets and dicts of tensors "
            f"with global_batch_size=. For this one, {way}."
        )


def _loader(
    data: Any,
    global_batch_size: int | None,
    collate_fn: Collate | None,
    shuffle: bool,  # noqa: FBT001 - the last of four that belong together
) -> DataLoader[Any]:
    if global_batch_size is None and isinstance(data, Table):
        raise BatchingError(
            f"a {type(data.columns).__name__} of tensors and arrays is a dataset of single samples, and no batch size "
            "was given. Give global_batch_size=; or put it into a list, if it is one global batch."
        )
    if global_batch_size is None:
        raise BatchingError(
            f"a map-style dataset ({type(data).__name__}) yields single samples, and no batch size was given. Give "
            "global_batch_size=, or a DataLoader(dataset, batch_size=G)."
        )
    sampler = RandomSampler(data) if shuffle else SequentialSampler(data)
    batches = BatchSampler(sampler, global_batch_size, drop_last=False)
    return DataLoader(data, batch_sampler=batches, collate_fn=collate_fn or default_collate)


def _refuse(data: Any) -> None:
    """Refuses objects that can be iterated but are not data, and objects that cannot be iterated."""
    refuse_class(data, "data")
    refuse_frame(data, "data")
    is_no_data = isinstance(data, str | bytes | Mapping | torch.Tensor | torch.nn.Module)
    if is_no_data and not is_tensor_collection(data):
        hint = "Give torch.utils.data.TensorDataset(...) with global_batch_size=, or a DataLoader."
        if isinstance(data, Mapping):
            hint = (
                "Give a dict with nothing but tensors and NumPy arrays in it (no dict), one entry per sample in each, "
                "with names as keys; for samples under the keys 0, 1, ... a DataLoader of them."
            )
        if isinstance(data, str | bytes):
            hint = "Give FileDataset(pattern, read=...) for files, or an iterable of batches."
        raise InputError(f"found data of type {type(data).__name__}, which is no dataset. {hint}")
    if not (isinstance(data, Iterable | Iterator) or callable(data) or is_map_style(data)):
        raise InputError(
            f"found data of type {type(data).__name__}; a DataLoader, a Dataset, a FileDataset, an iterable of global "
            "batches, or a function that returns one is needed."
        )
