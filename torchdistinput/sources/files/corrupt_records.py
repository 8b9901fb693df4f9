"""Going on after a record that cannot be read, where it is certain where the next one starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast, final

from torchdistinput.coordination.failures import in_one_line
from torchdistinput.errors import SourceError
from torchdistinput.sources.files.reader_api import Block
from torchdistinput.sources.files.retry import one_line

__all__ = ["CorruptRecord", "with_spoiled"]


@final
class CorruptRecord(NamedTuple):
    """Stands for a record that could not be read."""

    reason: str
    """What is to be told: the file, the offset, and what is wrong there."""


def with_spoiled(
    enter: Callable[[Any], Iterator[Block[Any]]], rewind: Callable[[], bool], offset: Any, name: str
) -> Iterator[Block[Any]]:
    """The blocks from an offset on, with a ``CorruptRecord`` in place of each record that cannot be read.

    A reader that is entered expects the file at its front. A compressed file is read again for that, which costs as
    much as what comes before the record: the number of records that may be left out bounds it.

    Args:
      enter: reads the blocks from an offset, or a position, on.
      rewind: goes to the front; whether that was possible.
      offset: where to begin.
      name: of the file, or fragment.
    """
    while True:
        try:
            yield from enter(offset)
        except SourceError as error:
            start, after = cast(Any, error.offset), cast(Any, error.resume_at)  # positions, of a source of fragments
            if start is None or after is None or not _goes_on(offset, start, after) or not rewind():
                raise
            where = f"offset {start}" if isinstance(start, int) else f"position {start[0]!r:.100}"
            spoiled = CorruptRecord(f"{one_line(name)}, {where}: {in_one_line(error).removeprefix('SourceError: ')}")
        else:
            return
        yield start, [spoiled]
        offset = after


def _goes_on(offset: Any, start: Any, after: Any) -> bool:
    """Whether reading that was entered at ``offset`` gets further by going on at ``after``."""
    if isinstance(start, int) and isinstance(after, int):  # bytes; positions of other fragments may have no order
        return bool(offset <= start < after)
    return after not in (start, offset)
