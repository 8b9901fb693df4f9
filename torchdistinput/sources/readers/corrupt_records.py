"""Goes on after a record that cannot be read, if the start of the next record is certain (``on_error="skip"``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast, final

from torchdistinput.coordination.failures import in_one_line
from torchdistinput.errors import SourceError
from torchdistinput.sources.formats.reader_api import Block
from torchdistinput.sources.storage.retry import one_line


@final
class CorruptRecord(NamedTuple):
    """A placeholder for a record that could not be read."""

    reason: str
    """The message: the file, the offset, and the problem."""


def with_corrupt_records(
    enter: Callable[[Any], Iterator[Block[Any]]], rewind: Callable[[], bool], offset: Any, name: str
) -> Iterator[Block[Any]]:
    """The blocks from an offset on, with a ``CorruptRecord`` in place of each record that cannot be read.

    A reader that starts at an offset expects the file to be at its start. So a compressed file is read again up to the
    record, for each such record; the limit of skipped records bounds this cost.

    Args:
      enter: reads the blocks from an offset, or a position, on.
      rewind: goes to the start of the file; returns whether that was possible.
      offset: where to begin.
      name: the name of the file, or fragment.
    """
    while True:
        try:
            yield from enter(offset)
        except SourceError as error:
            start, after = cast(Any, error.offset), cast(Any, error.resume_at)  # positions, of a source of fragments
            if start is None or after is None or not _goes_on(offset, start, after) or not rewind():
                raise
            where = f"offset {start}" if isinstance(start, int) else f"position {start[0]!r:.100}"
            corrupt = CorruptRecord(f"{one_line(name)}, {where}: {in_one_line(error).removeprefix('SourceError: ')}")
        else:
            return
        yield start, [corrupt]
        offset = after


def _goes_on(offset: Any, start: Any, after: Any) -> bool:
    """Whether reading that started at ``offset`` gets further if it goes on at ``after``."""
    if isinstance(start, int) and isinstance(after, int):  # bytes; positions of other fragments may have no order
        return bool(offset <= start < after)
    return after not in (start, offset)
