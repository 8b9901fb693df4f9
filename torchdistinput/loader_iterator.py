"""The iterator of ``torchdistinput.DataLoader``, and the refusal of data that is divided among the ranks already."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, NoReturn, final

from torchdistinput.dataset import DistributedDataset, iterator_of
from torchdistinput.errors import InputError, SourceError
from torchdistinput.iterator import DistributedIterator, delivered, of_this_process
from torchdistinput.plan.options import Step


@final
class Divided(NamedTuple):
    """The divided dataset behind a ``DataLoader``, and how it was divided.

    Args:
      dataset: yields this process's parts.
      group: the default process group when the data was divided.
      parts: the number of parts of each batch.
      alone: whether this is the only process that reads.
      sealed: whether batches are passed through unchanged (``OpaqueBatch``).
    """

    dataset: DistributedDataset
    group: Any
    parts: int
    alone: bool
    sealed: bool


@final
class LoaderIterator:
    """One epoch of a ``DataLoader``. Made by ``iter(loader)``; ends when the loop is left, or at ``close``.

    It begins at its first ``next`` or ``has_next``.

    Args:
      divide: divides the data among the ranks, if it is not yet. Collective.
      length: returns the number of steps of an epoch.
    """

    def __init__(self, divide: Callable[[], Divided], length: Callable[[], int]) -> None:
        self._divide = divide
        self._length = length
        self._iterator: DistributedIterator | None = None
        self._is_closed = False

    def _begin(self) -> DistributedIterator:
        divided = self._divide()
        self._alone, self._sealed = divided.alone, divided.sealed
        self._iterator = iterator_of(divided.dataset)
        if self._is_closed:
            self._iterator.close()
        return self._iterator

    def __len__(self) -> int:
        """The steps of an epoch, as ``len`` of torch's iterator; ``TypeError`` where the number is not known."""
        return self._length()

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        iterator = self._iterator or self._begin()
        try:
            element = next(iterator)
        except SourceError as error:
            failure = _as_torch_raises(error) if self._alone else error
        else:
            return element.content if self._sealed else element
        try:
            raise failure
        finally:
            del failure  # its traceback refers to this frame: avoids a reference cycle

    def has_next(self) -> bool:
        """See ``DistributedIterator.has_next``."""
        iterator = self._iterator or self._begin()
        try:
            return iterator.has_next()
        except SourceError as error:
            failure = _as_torch_raises(error) if self._alone else error
        try:
            raise failure
        finally:
            del failure

    @property
    def is_part(self) -> bool:
        """Whether its batches are parts of global batches. Collective where the data is not divided yet."""
        return self._divide().parts > 1

    @property
    def step(self) -> Step:
        """See ``DistributedIterator.step``."""
        return delivered(None) if self._iterator is None else self._iterator.step

    def close(self) -> None:
        """See ``DistributedIterator.close``."""
        self._is_closed = True
        if self._iterator is not None:
            self._iterator.close()

    def __getstate__(self) -> NoReturn:
        raise of_this_process(self)

    def __enter__(self) -> LoaderIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def refuse_divided(data: object) -> None:
    """Refuses data that is divided among the ranks already. Local.

    Raises:
      InputError: the data is divided. Each rank would keep a part of its part, and the rest would be lost.
    """
    if isinstance(data, DistributedDataset | DistributedIterator) or (
        isinstance(data, LoaderIterator) and data.is_part
    ):
        raise InputError(
            f"found a {type(data).__name__} as data, which is divided among the ranks already; most of each rank's "
            "part would be lost if it was divided again. Iterate over it, or give the data that it was made of."
        )


def _as_torch_raises(error: SourceError) -> BaseException:
    """The exception of the user's code; the error itself where this library's own readers raised it.

    The frames of this library that passed the exception on hold it in their variables, and it holds them as the callers
    of the user's code. They are cleared: else its iterator would live on until a garbage collection.
    """
    cause = error.__cause__
    if cause is None or isinstance(cause, InputError):
        return error
    here, passed = inspect.currentframe(), list[FrameType]()
    frame = None if cause.__traceback__ is None else cause.__traceback__.tb_frame.f_back
    while frame is not None and here is not None and frame is not here.f_back:
        passed.append(frame)
        frame = frame.f_back
    if frame is not None:  # else the user's code ran in another thread
        for each in passed:
            each.clear()
    del here, frame, passed  # this frame refers to itself
    return cause
