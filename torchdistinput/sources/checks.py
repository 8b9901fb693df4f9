"""What this library asks of the objects that users give, and refuses: arguments may break their type annotations."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sized
from typing import Any, Protocol, cast, runtime_checkable

from torch.utils.data import IterDataPipe
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import get_all_graph_pipes

from torchdistinput.coordination.failures import in_one_line
from torchdistinput.errors import InputError, ShardingError


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


_LOG = logging.getLogger("torchdistinput")


@runtime_checkable
class MapStyle(Protocol):
    """Data of the user's with samples by index. A class counts by its methods: ``issubclass(type(data), MapStyle)``."""

    def __getitem__(self, index: Any) -> Any: ...

    def __len__(self) -> int: ...


@runtime_checkable
class HoldsTorchLoader(Protocol):
    """The drop-in ``DataLoader``. Its class lies in a higher layer, which this module may not import."""

    @property
    def torch_loader(self) -> Any:
        """The torch loader of one process."""


@runtime_checkable
class Shards(Protocol):
    """A source that shards itself, as Hugging Face datasets do (policy HINT)."""

    def shard(self, num_shards: int, index: int) -> Any:
        """Part ``index`` of ``num_shards`` parts."""


def own_shard(data: object, num_shards: int, index: int) -> Any:
    """Policy HINT: this worker's own part of the data, as the data divides itself. Local.

    Raises:
      ShardingError: the data cannot give this part, as some with fewer parts than there are workers.
    """
    try:
        return cast(Shards, data).shard(num_shards=num_shards, index=index)
    except InputError:
        raise
    except Exception as error:
        raise ShardingError(
            f"policy HINT: shard(num_shards={num_shards}, index={index}) of the {type(data).__name__} failed: "
            f"{in_one_line(error)}. If it has fewer parts than there are ranks ({num_shards}), divide it into more, "
            "or use AutoShardPolicy.DATA."
        ) from error


def length_of(data: object) -> int | None:
    """The length of the user's object; ``None`` where it has none, or ``len`` raises. Reading does not need the length.

    A dataset made of other datasets, such as torch's ``ChainDataset``, raises the error of a member without a length.
    Base classes raise ``NotImplementedError``.
    """
    if not isinstance(data, Sized):
        return None
    try:
        return len(data)
    except Exception as error:
        _LOG.debug("len() of a %s raised, so its length is not known: %r", type(data).__name__, error)
        return None
