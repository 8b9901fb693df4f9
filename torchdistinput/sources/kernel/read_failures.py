"""Where a record comes from, what stands for one that cannot be read, and failures of reading as values.

A failure travels from the loader worker to the thread that delivers batches. An exception of a class that cannot be
pickled would hang the queue of the loader worker, and the indices or the file would be missing in its message.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, TypeAlias, final

from torch.utils.data import get_worker_info

from torchdistinput.coordination.failures import kind_of, text_of, traceback_of
from torchdistinput.errors import SourceError
from torchdistinput.step_types import NO_ORIGIN, Origin, ReadFailure


class RecordPlace(NamedTuple):
    """The origin of a record."""

    file: str
    """The name of the file."""
    record: int
    """The index of the record inside its file, from 0, before any shuffling."""
    file_number: int
    """The position of the file in the dataset's list."""


FindPlaces: TypeAlias = Callable[[], Sequence[RecordPlace]]
"""Returns the origins of some records. Called only where they are needed, as it takes time."""
Decoded: TypeAlias = tuple[list[Any], dict[int, str]]
"""Decoded records; and the messages for those that were left out, by their positions."""


@final
class CorruptRecord(NamedTuple):
    """A placeholder for a record that could not be read."""

    reason: str
    """The message: the file, the offset, and the problem."""


class WorkerTraceback(Exception):
    """The traceback of a loader worker, as text: the cause of the exception that this loader worker returned."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@final
class Failure:
    """An exception of the reading code, as a value that travels to the thread that delivers batches.

    Args:
      error: the exception.
      where: what was being read, for the message.
      origin: the same as known values; the values that only this process knows are added.
    """

    def __init__(self, error: Exception, where: str, origin: Origin = NO_ORIGIN) -> None:
        info = get_worker_info()
        self.where = where
        self.error = error
        self.cause: Exception | None = None
        self.origin = origin
        if info is not None:
            self.where = f"{where}, loader worker {info.id}".lstrip(", ")
            self.origin = origin._replace(
                worker=info.id, kind=kind_of(error), text=text_of(error), traceback=traceback_of(error)
            )
            self.error = _picklable(error)
            # Pickle drops the cause of an exception. The cause of a SourceError is the exception of the user's code.
            if isinstance(error, SourceError) and isinstance(error.__cause__, Exception):
                self.cause = _picklable(error.__cause__)

    def reraise(self) -> NoReturn:
        """Raises a ``ReadFailure`` whose cause is the exception. Once.

        A reader may keep this object, but not the exception: its traceback will refer to the user's iterator, which
        could then never be garbage-collected.
        """
        if self.origin.traceback is not None:
            if self.cause is not None:
                self.error.__cause__ = self.cause
            (self.cause or self.error).__cause__ = WorkerTraceback(self.origin.traceback)
        error = self.error
        del self.error
        raise ReadFailure(self.where, self.origin) from error


def _picklable(error: Exception) -> Exception:
    kind = type(error)
    with suppress(Exception):
        copied = pickle.loads(pickle.dumps(error))
        if isinstance(copied, Exception):
            return copied
    with suppress(Exception):  # an attribute of the exception may be a lock, for example, or a function
        bare = kind.__new__(kind, *error.args)
        if isinstance(pickle.loads(pickle.dumps(bare)), Exception):
            return bare
    return RuntimeError(text_of(error))  # it cannot be pickled; its text still says what happened
