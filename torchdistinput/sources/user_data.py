"""What this library asks of the objects that users give as data: by index, by length, by their own division."""

from __future__ import annotations

import logging
from collections.abc import Sized
from typing import Any, Protocol, cast, runtime_checkable

from torchdistinput.coordination.failures import in_one_line
from torchdistinput.errors import InputError, ShardingError

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
