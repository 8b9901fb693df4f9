"""``flat_map_fn``: several samples, or none, for a record.

The samples count as records of their fragment. The function is applied where records are read. So numbers, windows,
cursors and batches are those of its samples, and a resumed run calls it again for the records of the block in which it
goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, BinaryIO, TypeAlias

from torchdistinput.coordination.failures import in_one_line
from torchdistinput.errors import SourceError
from torchdistinput.sources.formats.reader_api import Block, BlockReader, facts_of
from torchdistinput.sources.readers.corrupt_records import CorruptRecord
from torchdistinput.sources.readers.open_file import Read
from torchdistinput.sources.storage.retry import one_line

FlatMap: TypeAlias = Callable[[Any], Iterable[Any]]


def flat_mapped(read: Read, flat_map_fn: FlatMap, name: str, *, skip: bool) -> Read:
    """A reader of the samples that a function makes of the records of another reader.

    Args:
      read: the reader of the records.
      flat_map_fn: gives the samples of a record.
      name: the file, or fragment, for messages.
      skip: whether a record for which the function fails is left out; else it is a ``SourceError``.
    """
    blocks = facts_of(read).blocks
    samples_of = partial(_samples_of, flat_map_fn, name, skip=skip)
    if blocks is None:
        return lambda file: chain.from_iterable(map(samples_of, read(file)))

    def flat(file: BinaryIO, offset: int) -> Iterator[Block[Any]]:
        for position, records in blocks(file, offset):
            made: list[Any] = []
            try:
                for record in records:
                    made += samples_of(record)
            except SourceError:
                yield position, made  # the samples in front come first
                raise
            yield position, made

    return BlockReader(flat)


def _samples_of(flat_map_fn: FlatMap, name: str, record: Any, *, skip: bool) -> list[Any]:
    try:
        return list(flat_map_fn(record))
    except Exception as error:
        problem = f"flat_map_fn failed: {in_one_line(error)}; the record is {record!r:.100}"
        if skip:
            return [CorruptRecord(f"{one_line(name)}: {problem}")]
        raise SourceError(problem) from error
