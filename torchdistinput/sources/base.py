"""The interface of a source: how the pipeline opens, resumes, compares and closes the data of one dataset."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, Protocol, cast, runtime_checkable

import torch

from torchdistinput.coordination.failures import in_one_line
from torchdistinput.errors import InputError, ShardingError
from torchdistinput.plan.seed_schedule import SeedSchedule
from torchdistinput.sources.rng import Draw
from torchdistinput.sources.set_epoch import EpochSetter
from torchdistinput.sources.torch_loader.open_runs import OpenRuns
from torchdistinput.step_types import Start, Stream

_LOG = logging.getLogger("torchdistinput")

Collate = Callable[[Any], Any]
"""Makes a batch of samples."""

CallOnEachRank = Callable[[Callable[[], Any]], list[Any]]
"""Calls a function on every rank and returns the plain values of all ranks. If a call fails, all ranks raise alike."""


class Source(ABC):
    """The data of one distributed dataset, as one worker reads it. Defaults are for data without the feature."""

    draws_from_default_generator: bool
    """Whether making a stream draws from torch's default random state (all ranks then use the state of rank 0)."""
    needs_default_state: bool
    """Whether the order of an epoch may depend on torch's default random state."""
    bound_to_world: bool
    """Whether a saved position fits the same number of workers only."""
    collective_state: bool
    """Whether each worker has a position of its own, so that ``state_dict`` is collective."""
    certain_piece_size: int | None = None
    """The size of every piece, if all pieces have the same size for certain."""
    largest_piece_size: int | None = None
    """The largest possible size of a piece, if it is known."""
    of_one_batch: bool = True
    """Whether the pieces of a step are cut out of one batch; else each local replica gets a batch of its own."""
    draws_order: bool = False
    """Whether ``open`` uses ``draws`` to begin an epoch, and then to draw each batch of indices. The first batch is
    drawn at the first ``next`` at the latest."""
    draws_alone: bool = False
    """Whether each worker draws from random states of its own. Each worker's position then has its states."""
    workers: OpenRuns | None = None
    """The loader workers of this process; ``None`` where it cannot have any."""
    epoch_setter: EpochSetter
    """The epochs that the user's objects were set to."""

    # Facts about the data.

    @abstractmethod
    def fingerprint(self) -> Mapping[str, Any]:
        """Plain facts that must be equal on all ranks."""

    def epoch_fingerprint(self) -> Mapping[str, Any]:
        """Plain facts that must be equal on all ranks at the start of an epoch, such as a generator's state."""
        return {}

    def lists(self) -> Mapping[str, Sequence[str]]:
        """Lists of the fingerprint, which has their digests under the same names."""
        return {}

    def epoch_lists(self) -> Mapping[str, Sequence[str]]:
        """Lists of texts that must be equal on all ranks at the start of an epoch: what is read, entry by entry."""
        return {}

    @property
    def part(self) -> str:
        """A text that identifies the samples of map-style data, if all workers must have the same samples; else empty.

        It is also empty where the samples cannot be identified without reading them.
        """
        return ""

    @property
    def way_out(self) -> str:
        """Advice for the user if the workers read different data, where every worker may have to read all of it.

        Empty if they need not read the same data, or the data is divided before it is read.
        """
        return ""

    @property
    def order_advice(self) -> str | None:
        """Advice how to give each epoch the same order; empty if each has it already; ``None`` if it is not known."""
        return None

    @abstractmethod
    def may_lack_samples(self) -> bool:
        """Whether some replica may be left without a sample at some step."""

    def num_steps(self) -> int | None:
        """The number of steps of an epoch, if it is known before the epoch is read."""
        return None

    def num_steps_of(self, position: Sequence[Any] | None) -> int | None:
        """``num_steps`` for the epoch of a saved position, if any, which another number of workers may have begun."""
        return self.num_steps()

    def count_steps(self) -> int | None:
        """The number of steps of an epoch, for ``len``, if it can be found without reading the epoch."""
        return self.num_steps()

    def counts(self, rows: int) -> dict[str, dict[str, int]] | None:
        """Samples and tokens of each part of a mixture up to so many rows of the epoch begun last; else ``None``."""
        return None

    # What lasts from epoch to epoch.

    def set_epoch(self, epoch: int) -> None:
        """Calls ``set_epoch`` of the user's sampler or dataset with the next epoch, as users of ``DataLoader`` do."""
        self.epoch_setter.tell(epoch)

    @property
    def seeds(self) -> SeedSchedule:
        """When torch's loader draws the base seed of its loader workers, from the next epoch on."""
        return SeedSchedule.EVERY_EPOCH

    def generators(self) -> Sequence[torch.Generator]:
        """The generators on which the order of an epoch depends, each once."""
        return ()

    @property
    def sample_seed(self) -> int | None:
        """The base seed for ``sample_seed()`` of the last epoch that was begun, or of the state that was loaded.

        ``None`` before; also where the data has no such seed, or has it in its own arguments.
        """
        return None

    def give_sample_seed(self, seed: int | None) -> None:  # noqa: B027 - most have none
        """Sets the base seed of this and later epochs; ``None``: it is taken from the random state."""

    def go_on_from(self, before: Source) -> None:
        """Takes over the facts of the source ``before``, which had the same data and which this one replaces. Local."""
        self.epoch_setter.go_on_from(before.epoch_setter)

    def close(self) -> None:  # noqa: B027 - most have none
        """Ends persistent loader workers. Idempotent; the next ``open`` starts new ones."""

    # Positions.

    @abstractmethod
    def check(self, position: Sequence[Any]) -> None:
        """Refuses a position from which the data cannot be read on. Local.

        Raises:
          StateMismatch: the position is malformed, or the data at the position has changed since.
        """

    def first_position(self) -> list[Any]:
        """The position at the start of an epoch that starts now, where each worker draws alone. Caller's thread."""
        raise NotImplementedError

    def restore(self, position: Sequence[Any]) -> None:
        """Sets this worker's random states to those of a position, where it draws alone. Caller's thread."""
        raise NotImplementedError

    @property
    def keeps_between(self) -> bool:
        """Whether the data keeps a state of its own from epoch to epoch."""
        return False

    def front(self) -> list[Any]:
        """The position at which the next epoch begins, where the data keeps a state. Caller's thread."""
        raise NotImplementedError

    def resume(self, epoch: int, start: Start, call_on_each_rank: CallOnEachRank) -> Start:
        """Prepares an ``open`` that starts in the middle of an epoch. Caller's thread.

        Args:
          epoch: the number of the epoch.
          start: where the epoch is to begin.
          call_on_each_rank: see ``CallOnEachRank``.

        Returns:
          the start to pass to ``open``.

        Raises:
          StateMismatch: the data cannot be read on from the position.
        """
        return start

    @abstractmethod
    def open(self, epoch: int, draws: Draw, start: Start) -> Stream:
        """Opens a stream of one epoch. Caller's thread.

        Args:
          epoch: the number of the epoch.
          draws: calls user code that may draw from the default random state.
          start: where in the epoch the stream begins.
        """


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
