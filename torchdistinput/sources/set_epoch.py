"""Calls ``set_epoch`` of the user's samplers and datasets, and notices calls that the user makes directly.

When an epoch begins, ``set_epoch`` of the sampler, the batch sampler and the dataset is called, in one process as on
many ranks. An object without ``set_epoch`` may hold one that has it: a ``BatchSampler`` its sampler, a ``Subset`` its
dataset. Persistent loader workers have copies of the dataset; they read the epoch from shared memory.

A ``set_epoch`` that the user calls on such an object, or on one inside of it, counts as ``set_epoch`` of the loader. An
object need not show its epoch: it may hand it on, or seed a generator with it. So the method itself notes its calls, on
the object: it is wrapped once for each class, when a loader first sees an object of the class (``watch_calls``). A
wrapper on the object would be carried to its copies, and act on the original. Calls that were made before are seen by
torch's attribute ``epoch``: a number other than 0. Objects that cannot take notes (with ``__slots__``, or written in C)
are watched by this attribute at all times: its number differs from the one after the last call from here, or at the
end of the last epoch, as some objects count epochs by themselves while they are read.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from numbers import Integral
from types import FunctionType
from typing import Any, Final, Protocol, final, runtime_checkable

from torchdistinput.sources.plain_epochs import SharedEpoch

_HOLDERS: Final = ("sampler", "batch_sampler", "dataset", "datasets", "given")
_MOST_LOOKED_INTO: Final = 256
_NOTE: Final = "torchdistinput: epoch"
"""The key of the note in the ``__dict__`` of an object, while its last ``set_epoch`` is one of the user's."""
_MARK: Final = "notes_epochs"
"""The attribute of a ``set_epoch`` that notes its calls."""


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


def tell_epoch(epoch: int, *objects: Any) -> None:
    """Calls ``set_epoch`` with the next epoch on the objects that have it. Local."""
    for each in wants_epochs(*objects):
        each.set_epoch(epoch)
        forget_calls(each)  # this one is not the user's


def watch_calls(*objects: Any) -> list[SetsEpoch]:
    """Makes ``set_epoch`` of these objects, and of those inside of them, note the calls that the user makes. Local.

    Returns:
      the objects that have it.
    """
    found = wants_epochs(*objects, inside=True)
    for each in found:
        for kind in type(each).__mro__:
            method = kind.__dict__.get("set_epoch")
            if isinstance(method, FunctionType) and not hasattr(method, _MARK):
                setattr(kind, "set_epoch", _noting(method))  # noqa: B010 - to mypy a method cannot be set
            if method is not None:
                break
    return found


def epoch_noted(*objects: Any) -> int | None:
    """The epoch of the user's last call since ``forget_calls``, on the first object with one; else ``None``. Local."""
    found = (getattr(each, "__dict__", {}).get(_NOTE) for each in objects)
    return next((epoch for epoch in found if epoch is not None), None)


def forget_calls(*objects: Any) -> None:
    """Forgets the user's calls of ``set_epoch`` of these objects. Local."""
    for each in objects:
        getattr(each, "__dict__", {}).pop(_NOTE, None)


def _noting(method: FunctionType) -> Callable[..., Any]:
    """The ``set_epoch`` of a class, which then notes its calls."""

    @functools.wraps(method)
    def set_epoch(self: Any, *arguments: Any, **named: Any) -> Any:
        result = method(self, *arguments, **named)
        epoch = next(iter((*arguments, *named.values())), None)
        if isinstance(epoch, Integral) and int(epoch) >= 0 and hasattr(self, "__dict__"):
            self.__dict__[_NOTE] = int(epoch)
        return result

    setattr(set_epoch, _MARK, True)
    return set_epoch


@final
class EpochSetter:
    """Sets the epoch of the user's objects, and notices the epochs that the user set on them.

    Args:
      objects: the sampler, batch sampler and dataset.
      persistent: whether loader workers are persistent, so that the epoch must reach them too.
    """

    def __init__(self, *objects: Any, persistent: bool = False) -> None:
        self._objects = wants_epochs(*objects)
        self._watched = watch_calls(*objects)
        # By the id of an object that is watched by its attribute: the number that does not count.
        self._shown: dict[int, int | None] = {id(each): 0 for each in self._watched}
        self.epoch = 0
        """The epoch that was told last."""
        self.shared_epoch = SharedEpoch() if persistent and self._objects else None
        """The epoch as persistent loader workers see it; ``None`` without them."""

    def tell(self, epoch: int) -> None:
        """Sets the epoch that begins now. Local."""
        self.epoch = epoch
        tell_epoch(epoch, *self._objects)
        if self.shared_epoch is not None:
            self.shared_epoch.announce(epoch)
        self.forget_calls()

    def tell_also(self, fresh: Any) -> None:
        """Sets the epoch of ``fresh``, made by a function for this epoch, if it is a new object. Local."""
        for each in wants_epochs(fresh):
            if not any(each is known for known in self._objects):
                tell_epoch(self.epoch, each)

    def forget_calls(self) -> None:
        """Lets the epochs that the objects have now not count as set by the user. Local."""
        forget_calls(*self._watched)
        self._shown = {id(each): _epoch_of(each) for each in self._watched if not _takes_notes(each)}

    def set_by_user(self) -> int | None:
        """The epoch to which the user has set one of the objects; ``None`` if it was only set from here. Local."""
        noted = epoch_noted(*self._watched)
        if noted is not None:
            return noted
        for each in self._watched:
            found = _epoch_of(each)
            if found is not None and found != self._shown.get(id(each), found):
                return found
        return None


def _epoch_of(each: object) -> int | None:
    epoch = getattr(each, "epoch", None)
    return epoch if type(epoch) is int and epoch >= 0 else None


def _takes_notes(each: object) -> bool:
    return hasattr(each, "__dict__") and hasattr(type(each).set_epoch, _MARK)  # type: ignore[attr-defined]


def set_announced_epoch(shared: SharedEpoch, dataset: Any) -> None:
    """In a persistent loader worker: sets the dataset's epoch when one begins, if a new epoch was announced."""
    epoch = shared.announced()
    if epoch is not None:
        tell_epoch(epoch, dataset)
