"""Where a record comes from, and what stands in the place of one that cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, final


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
