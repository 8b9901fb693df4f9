"""Calls ``set_epoch`` of the user's samplers and datasets, and notices calls that the user makes directly.

At each ``iter()``, ``set_epoch`` of the sampler, the batch sampler and the dataset is called, in one process as on many
ranks. An object without ``set_epoch`` may hold one that has it: a ``BatchSampler`` its sampler, a ``Subset`` its
dataset. Persistent loader workers have copies of the dataset; they read the epoch from shared memory.

A ``set_epoch`` that the user calls on such an object counts as ``set_epoch`` of the loader. It is noticed by torch's
attribute ``epoch``, if the object has it: its number differs from the number noted last. The number is noted after each
call from here, and at the end of the epoch, as some objects count epochs by themselves while they are read. The first
number is 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol, final, runtime_checkable

from torchdistinput.sources.files.plain_epochs import SharedEpoch
from torchdistinput.sources.map_style.shuffle_sampler import ShuffleSampler

_HOLDERS: Final = ("sampler", "batch_sampler", "dataset", "datasets", "given")
_MOST_LOOKED_INTO: Final = 256


@runtime_checkable
class SetsEpoch(Protocol):
    """A sampler or dataset with torch's ``set_epoch``."""

    def set_epoch(self, epoch: int) -> Any:
        """Takes the number of the coming epoch."""


def wants_epochs(*objects: Any) -> list[SetsEpoch]:
    """The objects with ``set_epoch``. An object without it is searched: its sampler, batch sampler and datasets. Local.

    A ``ShuffleSampler`` is left out: its epoch is set where its order is drawn.
    """
    found: list[SetsEpoch] = []
    left, seen = deque(objects), set[int]()
    while left and len(seen) < _MOST_LOOKED_INTO:
        each = left.popleft()
        if each is None or id(each) in seen or isinstance(each, type | ShuffleSampler):
            continue
        seen.add(id(each))
        if isinstance(each, SetsEpoch):
            found.append(each)
            continue
        held = getattr(each, "__dict__", {})  # not ``getattr``, which could run user code
        for name in _HOLDERS:
            inside = held.get(name)
            left.extend(inside if isinstance(inside, list | tuple) else [inside])
    return found


def tell_epoch(epoch: int, *objects: Any) -> None:
    """Calls ``set_epoch`` with the next epoch on the objects that have it. Local."""
    for each in wants_epochs(*objects):
        each.set_epoch(epoch)


@final
class EpochSetter:
    """Sets the epoch of the user's objects, and remembers the epochs that were set.

    Args:
      objects: the sampler, batch sampler and dataset.
      lasting: whether loader workers are persistent, so that the epoch must reach them too.
    """

    def __init__(self, *objects: Any, lasting: bool = False) -> None:
        self._objects = wants_epochs(*objects)
        self._seen: Sequence[int | None] = [0] * len(self._objects)
        self._epoch = 0
        self.shared_epoch = SharedEpoch() if lasting and self._objects else None
        """The epoch as persistent loader workers see it; ``None`` without them."""

    def tell(self, epoch: int) -> None:
        """Sets the epoch that begins now. Local."""
        self._epoch = epoch
        for each in self._objects:
            each.set_epoch(epoch)
        if self.shared_epoch is not None:
            self.shared_epoch.announce(epoch)
        self.look()

    def tell_also(self, fresh: Any) -> None:
        """Sets the epoch of ``fresh``, made by a function for this epoch, if it is a new object. Local."""
        for each in wants_epochs(fresh):
            if not any(each is known for known in self._objects):
                each.set_epoch(self._epoch)

    def look(self) -> None:
        """Notes the epochs that the objects have now, so that they do not count as set by the user. Local."""
        self._seen = [_epoch_of(each) for each in self._objects]

    def set_by_user(self) -> int | None:
        """The epoch to which the user has set one of the objects; ``None`` if it was only set from here. Local."""
        for each, seen in zip(self._objects, self._seen, strict=True):
            found = _epoch_of(each)
            if found is not None and found != seen:
                return found
        return None

    def go_on_from(self, before: EpochSetter) -> None:
        """Takes over the noted epochs of the same objects. Local."""
        known = {id(each): seen for each, seen in zip(before._objects, before._seen, strict=True)}
        self._seen = [known.get(id(each), 0) for each in self._objects]


def _epoch_of(each: object) -> int | None:
    epoch = getattr(each, "epoch", None)
    return epoch if type(epoch) is int and epoch >= 0 else None


def set_announced_epoch(shared: SharedEpoch, dataset: Any) -> None:
    """In a persistent loader worker: sets the dataset's epoch when one begins, if a new epoch was announced."""
    epoch = shared.announced()
    if epoch is not None:
        tell_epoch(epoch, dataset)
