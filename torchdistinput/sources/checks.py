"""Run-time checks of the user's arguments, which may break their type annotations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader, Dataset, IterDataPipe
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import get_all_graph_pipes

from torchdistinput.errors import InputError


@runtime_checkable
class _Indexed(Protocol):
    def __getitem__(self, index: Any) -> Any: ...


def refuse_class(data: object, what: str) -> None:
    """Refuses a class that was given in place of its instance. Local.

    A class may be data itself, if its metaclass says so, as that of an ``Enum``: torch iterates over it, too.

    Args:
      data: the user's object.
      what: the role in which the object was given, for the message.

    Raises:
      InputError: the object is a class, which cannot be indexed or iterated.
    """
    if isinstance(data, type) and not issubclass(type(data), Iterable | _Indexed):
        name = data.__name__
        raise InputError(f"found the class {name} as {what}; an instance of it is needed. Give {name}(...).")


def refuse_plain_iterable(data: object) -> None:
    """Refuses a plain iterable as the dataset of a ``DataLoader``: torch would take it for map-style data. Local.

    Raises:
      InputError: the object has no samples by number, and is not an ``IterableDataset``.
    """
    if isinstance(data, DataLoader):
        raise InputError(
            "found a DataLoader as the dataset of a DataLoader. Give its dataset, loader.dataset, with the arguments "
            "of the loader; or write Strategy().distribute_dataset(loader) for the loader as it is."
        )
    if isinstance(data, Iterable) and not isinstance(data, Dataset | _Indexed | type):
        name = type(data).__name__
        raise InputError(
            f"found a {name} as the dataset of a DataLoader, which has no samples by number (__getitem__) and is no "
            "torch IterableDataset. Write Strategy().distribute_dataset(data, global_batch_size=G) for one that yields "
            "samples, Strategy().distribute_dataset(data) for one that yields batches."
        )


def refuse_sharding_filter(data: object) -> None:
    """Refuses a DataPipe with a ``sharding_filter``, to which only torch's own loader tells its part. Local.

    Raises:
      InputError: there is one; the message says what to write.
    """
    if isinstance(data, IterDataPipe) and any(
        hasattr(each, "apply_sharding") for each in get_all_graph_pipes(traverse_dps(data))
    ):
        raise InputError(
            "the DataPipe has a sharding_filter, to which only torch's own DataLoader tells its part. "
            "Leave it out: each rank then reads all, and keeps its part of each batch. To divide the reading, write an "
            "IterableDataset that takes its part by torch.utils.data.get_worker_info(), or has "
            "shard(num_shards=, index=) for AutoShardPolicy.HINT."
        )


def refuse_ray(data: object, what: str) -> None:
    """Refuses the data of Ray, which Ray reads and divides itself; torch would fail at the first sample. Local.

    Args:
      data: the user's object.
      what: the role in which the object was given, for the message.

    Raises:
      InputError: the object is a dataset of Ray, or an iterator of one; the message says what to write.
    """
    names = {base.__name__ for base in type(data).__mro__ if base.__module__.startswith("ray.data.")}
    if not names & {"Dataset", "DataIterator"}:
        return
    divide = ""
    if "Dataset" in names:
        divide = (
            "Make a shard for each rank: data.streaming_split(number_of_ranks), or "
            'ray.train.get_dataset_shard("train"). '
        )
    raise InputError(
        f"found a {type(data).__name__} of ray.data as {what}, which Ray reads and divides itself. {divide}Each "
        "rank reads its shard: strategy.distribute_datasets_from_function(lambda context: shard.iter_torch_batches("
        "batch_size=context.get_per_replica_batch_size(G))); see examples/ray_train.py."
    )


def cannot_skip(what: str) -> InputError:
    """The error for data that does not support ``on_error="skip"``."""
    return InputError(
        f'on_error="skip" was given with {what}, for which it is not known where a sample begins or how to go on '
        "after an error. It is for map-style datasets and FileDatasets; catch the error in your own dataset, and go on "
        "to the next sample there."
    )


def checked_int(name: str, value: object, at_least: int | None = None) -> int:
    """The value, if it is an int. Local.

    Raises:
      TypeError: the value is not an int.
      ValueError: the value is less than ``at_least``.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}")
    return value


def as_object(value: object) -> object:
    """The value as a plain ``object`` for type checkers: callers may break an annotation. Local."""
    return value


def check_callable(name: str, value: object) -> None:
    """Refuses a value that cannot be called. Local.

    Raises:
      TypeError: the value cannot be called.
    """
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {type(value).__name__}: {value!r:.100}")
