"""Going on after a record that cannot be read, where it is certain where the next one starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple, final

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
    enter: Callable[[int], Iterator[Block[Any]]], file: BinaryIO, offset: int, name: str
) -> Iterator[Block[Any]]:
    """The blocks from an offset on, with a ``CorruptRecord`` in place of each record that cannot be read.

    A reader that is entered expects the file at its front. A compressed file is read again for that, which costs as
    much as what comes before the record: the number of records that may be left out bounds it.
    """
    while True:
        try:
            yield from enter(offset)
        except SourceError as error:
            start, after = error.offset, error.resume_at
            if start is None or after is None or not offset <= start < after or not _rewound(file):
                raise
            spoiled = CorruptRecord(
                f"{one_line(name)}, offset {start}: {in_one_line(error).removeprefix('SourceError: ')}"
            )
        else:
            return
        yield start, [spoiled]
        offset = after


def _rewound(file: BinaryIO) -> bool:
    """Goes to the front of a file; whether that was possible."""
    try:
        return file.seek(0) == 0
    except (OSError, ValueError, NotImplementedError):  # a stream: then the bad record is raised
        return False
