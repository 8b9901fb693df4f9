"""Opens iterable data again in each epoch: calls the user's function, or iterates over the user's object."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any, cast, final

from torchdistinput.errors import InputError


@final
class Reopened:
    """Gives fresh data for each epoch: calls a function again, or refuses an iterator that is exhausted."""

    def __init__(self, data: Any, first: Any = None) -> None:
        self._data = data
        self._first = first
        self._used = False

    def __call__(self) -> Iterable[Any]:
        """The data, to be iterated once.

        Raises:
          InputError: the data is an iterator that is exhausted.
        """
        data, self._first = self._first, None
        if data is None:
            data = self._data() if is_function(self._data) else self._data
        if not isinstance(data, Iterator):
            return cast(Iterable[Any], data)
        spent = inspect.isgenerator(data) and inspect.getgeneratorstate(data) == inspect.GEN_CLOSED
        if spent or (self._used and data is self._data):
            raise InputError(
                f"the data is a {type(data).__name__} that was already read; it cannot start again for another epoch. "
                "Give the function that makes it (distribute_dataset(make_batches), not make_batches())."
            )
        self._used = True
        return data


def is_function(data: Any) -> bool:
    """Whether ``data`` is a function that returns the data."""
    return callable(data) and not isinstance(data, Iterable)
