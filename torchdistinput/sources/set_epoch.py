"""Calls ``set_epoch`` of the user's samplers and datasets, and takes the epochs that the user sets on them.

When an epoch begins, ``set_epoch`` of the sampler, the batch sampler and the dataset is called, in one process as on
many ranks. An object without ``set_epoch`` may hold one that has it: a ``BatchSampler`` its sampler, a ``Subset`` its
dataset. Persistent loader workers have copies of the dataset; they read the epoch from shared memory.

A ``set_epoch`` that the user calls on such an object, or on one inside of it, counts as ``set_epoch`` of the loader. It
is seen by the attribute ``epoch``, as torch's samplers have it: its number differs from the one after the last call of
this library, or at the end of the last epoch, as some objects count epochs by themselves while they are read. Before
the first call of this library any number other than 0 is the user's.

An object that does not show its epoch is its owner's to tell, as with torch's loader: nobody could see what the user
told it, and telling it another number would undo that in silence. It is told what ``set_epoch`` or ``seek`` of the
loader is given, and nothing else.

Datasets of this library in plain torch count ``iter()`` by an ``EpochCounter``.
"""

from __future__ import annotations

import mmap
from collections import deque
from typing import Any, Final, Protocol, final, runtime_checkable

import torch
from torch.utils.data import get_worker_info

from torchdistinput.sources.checks import checked_int


def loader_worker() -> tuple[int, int]:
    """The number of this loader worker, and how many there are: 0 and 1 in a process that is none."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


@final
class SharedEpoch:
    """The epoch that was announced last.

    It is in memory that forked loader workers share, so that persistent loader workers see it; torch's own pickling
    moves it to memory that spawned loader workers share. An anonymous map costs no file descriptor.
    """

    def __init__(self) -> None:
        self._heard = 0
        self._announced = _new_memory()

    def announce(self, epoch: int, *, asked: bool = True) -> None:
        """Announces an epoch to every process that shares the memory, and whether the user asked for it."""
        self._announced[0] = epoch
        self._announced[2] = asked
        self._announced[1] += 1

    @property
    def last(self) -> int:
        """The epoch that was announced last, by any process; 0 if none was."""
        return int(self._announced[0])

    @property
    def is_asked(self) -> bool:
        """Whether the user asked for the epoch that was announced last."""
        return bool(self._announced[2])

    def announced(self) -> int | None:
        """The epoch that was announced since the last call in this process; ``None`` if none was."""
        epoch, announcements, _ = self._announced.tolist()
        if announcements == self._heard:
            return None
        self._heard = announcements
        return int(epoch)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._announced.is_shared():  # type: ignore[no-untyped-call] # a copy: its workers are not forked yet
            self._announced = _new_memory().copy_(self._announced)


@final
class EpochCounter:
    """The epoch of the next ``iter()``: one more than the last one's, or what was announced since."""

    def __init__(self) -> None:
        self._next = 0
        self._shared = SharedEpoch()

    def announce(self, epoch: int) -> None:
        """Sets the next epoch, in every process that shares the memory.

        Raises:
          TypeError: it is no int.
        """
        self._shared.announce(checked_int("epoch", epoch))

    @property
    def last(self) -> int:
        """The epoch that was announced last; 0 if none was."""
        return self._shared.last

    def take(self) -> int:
        """The epoch that starts now."""
        announced = self._shared.announced()
        epoch = self._next if announced is None else announced
        self._next = epoch + 1
        return epoch


def _new_memory() -> torch.Tensor:
    """A tensor with the epoch, the number of announcements, and whether the user asked for the epoch."""
    with torch.inference_mode(mode=False):  # an inference tensor could not be written outside of inference mode
        return torch.frombuffer(mmap.mmap(-1, 24), dtype=torch.int64)


_HOLDERS: Final = ("sampler", "batch_sampler", "dataset", "datasets", "given")
_MOST_LOOKED_INTO: Final = 256


@runtime_checkable
class SetsEpoch(Protocol):
    """A sampler or dataset with torch's ``set_epoch``."""

    def set_epoch(self, epoch: int) -> Any:
        """Takes the number of the coming epoch."""


def wants_epochs(*objects: Any, inside: bool = False) -> list[SetsEpoch]:
    """The objects with ``set_epoch``. An object without it is searched: its sampler, batch sampler and datasets. Local.

    Args:
      *objects: samplers, loaders or datasets.
      inside: whether objects with ``set_epoch`` are searched too.
    """
    found: list[SetsEpoch] = []
    left, seen = deque(objects), set[int]()
    while left and len(seen) < _MOST_LOOKED_INTO:
        each = left.popleft()
        if each is None or id(each) in seen or isinstance(each, type):
            continue
        seen.add(id(each))
        if isinstance(each, SetsEpoch):
            found.append(each)
            if not inside:
                continue
        held = getattr(each, "__dict__", {})  # not ``getattr``, which could run user code
        for name in _HOLDERS:
            within = held.get(name)
            left.extend(within if isinstance(within, list | tuple) else [within])
    return found


def epoch_of(each: object) -> int | None:
    """The epoch that an object shows; ``None`` where it shows none. Local."""
    epoch = getattr(each, "epoch", None)
    return epoch if type(epoch) is int and epoch >= 0 else None


def tell_epoch(epoch: int, *objects: Any, asked: bool = True) -> None:
    """Calls ``set_epoch`` with the next epoch on the objects that have it. Local.

    Args:
      epoch: the number.
      *objects: samplers, loaders or datasets.
      asked: whether the user gave this number; else only the objects that show their epoch are told.
    """
    for each in wants_epochs(*objects):
        if asked or epoch_of(each) is not None:
            each.set_epoch(epoch)


@final
class EpochSetter:
    """Sets the epoch of the user's objects, and notices the epochs that the user set on them.

    Args:
      objects: the sampler, batch sampler and dataset.
      persistent: whether loader workers are persistent, so that the epoch must reach them too.
    """

    def __init__(self, *objects: Any, persistent: bool = False) -> None:
        self._objects = wants_epochs(*objects)
        self._watched = wants_epochs(*objects, inside=True)
        # By the id of an object: the number that does not count.
        self._shown: dict[int, int | None] = {id(each): 0 for each in self._watched}
        self._asked: int | None = None
        self.epoch = 0
        """The epoch that was told last."""
        self.shared_epoch = SharedEpoch() if persistent and self._objects else None
        """The epoch as persistent loader workers see it; ``None`` without them."""

    def tell(self, epoch: int, *, asked: bool = False) -> None:
        """Sets the epoch that begins now, or that the user asked for. Local."""
        self.epoch = epoch
        tell_epoch(epoch, *self._objects, asked=asked)
        if asked:
            self._asked = epoch
        if self.shared_epoch is not None:
            self.shared_epoch.announce(epoch, asked=epoch == self._asked)
        self.forget_calls()

    def tell_also(self, fresh: Any) -> None:
        """Sets the epoch of ``fresh``, made by a function for this epoch, if it is a new object. Local."""
        for each in wants_epochs(fresh):
            if not any(each is known for known in self._objects):
                each.set_epoch(self.epoch)

    def forget_calls(self) -> None:
        """Lets the epochs that the objects have now not count as set by the user. Local."""
        self._shown = {id(each): epoch_of(each) for each in self._watched}

    def set_by_user(self) -> int | None:
        """The epoch to which the user has set one of the objects; ``None`` if it was only set from here. Local."""
        for each in self._watched:
            found = epoch_of(each)
            if found is not None and found != self._shown.get(id(each), found):
                return found
        return None


def set_announced_epoch(shared: SharedEpoch, dataset: Any) -> None:
    """In a persistent loader worker: sets the dataset's epoch when one begins, if a new epoch was announced."""
    epoch = shared.announced()
    if epoch is not None:
        tell_epoch(epoch, dataset, asked=shared.is_asked)
