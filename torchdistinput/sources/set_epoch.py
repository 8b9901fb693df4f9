"""The user's objects with ``set_epoch``: who they are, what they were told, and whether the user told them otherwise.

At each ``iter()`` the sampler, the batch sampler and the dataset are told the number of the epoch, in one process as on
many ranks. One that does not want to know may hold one that does: a ``BatchSampler`` its sampler, a ``Subset`` its
dataset. Loader workers that live on have copies of the dataset, which hear of it by a board.

A ``set_epoch`` that the user calls on such an object itself counts as one on the loader. It shows where the object has
torch's attribute ``epoch``, and that is another number than when it was looked at last: when it was told, and at the
end of the epoch, as some count by themselves while they are read. Before, it is 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol, final, runtime_checkable

from torchdistinput.sources.files.plain_epochs import SharedEpoch
from torchdistinput.sources.map_style.shuffle_sampler import ShuffleSampler

__all__ = ["HearsEpochs", "ToldEpochs", "tell_epoch", "wants_epochs"]

_HOLDERS: Final = ("sampler", "batch_sampler", "dataset", "datasets", "given")
_MOST_LOOKED_INTO: Final = 256


@runtime_checkable
class _SetsEpoch(Protocol):
    """A sampler or dataset with torch's ``set_epoch``."""

    def set_epoch(self, epoch: int) -> Any:
        """Takes the number of the coming epoch."""


def wants_epochs(*objects: Any) -> list[_SetsEpoch]:
    """Those with ``set_epoch``; of one without, those among its sampler, batch sampler, dataset or datasets. Local.

    A ``ShuffleSampler`` is none of them: its epochs are set where its order is drawn.
    """
    found: list[_SetsEpoch] = []
    left, seen = deque(objects), set[int]()
    while left and len(seen) < _MOST_LOOKED_INTO:
        each = left.popleft()
        if each is None or id(each) in seen or isinstance(each, type | ShuffleSampler):
            continue
        seen.add(id(each))
        if isinstance(each, _SetsEpoch):
            found.append(each)
            continue
        held = getattr(each, "__dict__", {})  # so that no code of the user's runs
        for name in _HOLDERS:
            inside = held.get(name)
            left.extend(inside if isinstance(inside, list | tuple) else [inside])
    return found


def tell_epoch(epoch: int, *objects: Any) -> None:
    """Tells those that want to know the epoch that comes. Local."""
    for each in wants_epochs(*objects):
        each.set_epoch(epoch)


@final
class ToldEpochs:
    """What the user's objects were told.

    Args:
      objects: the sampler, batch sampler and dataset.
      lasting: whether loader workers live on from epoch to epoch, which are to hear of it.
    """

    def __init__(self, *objects: Any, lasting: bool = False) -> None:
        self._objects = wants_epochs(*objects)
        self._seen: Sequence[int | None] = [0] * len(self._objects)
        self._epoch = 0
        self.hears = HearsEpochs(SharedEpoch()) if lasting and self._objects else None
        """What the loader workers have."""

    def tell(self, epoch: int) -> None:
        """An epoch begins. Local."""
        self._epoch = epoch
        for each in self._objects:
            each.set_epoch(epoch)
        if self.hears is not None:
            self.hears.board.announce(epoch)
        self.look()

    def tell_also(self, fresh: Any) -> None:
        """Tells what a function made for this epoch, if that is another object. Local."""
        for each in wants_epochs(fresh):
            if not any(each is told for told in self._objects):
                each.set_epoch(self._epoch)

    def look(self) -> None:
        """Whatever the objects say now was not said by the user since. Local."""
        self._seen = [_epoch_of(each) for each in self._objects]

    def set_by_user(self) -> int | None:
        """The epoch that the user told one of them, if it was none that was told here. Local."""
        for each, seen in zip(self._objects, self._seen, strict=True):
            found = _epoch_of(each)
            if found is not None and found != seen:
                return found
        return None

    def go_on_from(self, before: ToldEpochs) -> None:
        """Takes over what was told to the same objects. Local."""
        known = {id(each): seen for each, seen in zip(before._objects, before._seen, strict=True)}
        self._seen = [known.get(id(each), 0) for each in self._objects]


def _epoch_of(each: object) -> int | None:
    epoch = getattr(each, "epoch", None)
    return epoch if type(epoch) is int and epoch >= 0 else None


@final
class HearsEpochs:
    """Tells the datasets of loader workers that live on.

    Args:
      board: where the epoch is announced.
    """

    def __init__(self, board: SharedEpoch) -> None:
        self.board = board

    def listen(self, dataset: Any) -> None:
        """An epoch begins in this loader worker, which may have been told of another one before."""
        epoch = self.board.news()
        if epoch is not None:
            tell_epoch(epoch, dataset)
