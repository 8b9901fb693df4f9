"""``flat_map_fn``: several samples, or none, for a record.

The samples count as records of their fragment. The function is applied where records are read. So numbers, windows,
cursors and batches are those of its samples, and a resumed run calls it again for the records of the block in which it
goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from torchdistinput.coordination.failures import in_one_line
from torchdistinput.errors import SourceError
from torchdistinput.sources.formats.columns import as_records
from torchdistinput.sources.kernel.record_places import CorruptRecord
from torchdistinput.sources.readers.fragment_reader import ReadFrom
from torchdistinput.sources.storage.retry import one_line

FlatMap: TypeAlias = Callable[[Any], Iterable[Any]]


def flat_mapped(read: ReadFrom, flat_map_fn: FlatMap, name: str, *, skip: bool) -> ReadFrom:
    """Reads the samples that a function makes of the records of a fragment.

    Args:
      read: reads the records.
      flat_map_fn: gives the samples of a record.
      name: the file, or fragment, for messages.
      skip: whether a record for which the function fails is left out; else it is a ``SourceError``.
    """

    def blocks(start: Any) -> Iterator[tuple[Any, Any]]:
        for position, records in read(start):
            made: list[Any] = []
            try:
                for record in as_records(records):
                    made += _samples_of(flat_map_fn, name, record, skip=skip)
            except SourceError:
                yield position, made  # the samples in front come first
                raise
            yield position, made

    return blocks


def _samples_of(flat_map_fn: FlatMap, name: str, record: Any, *, skip: bool) -> list[Any]:
    try:
        return list(flat_map_fn(record))
    except Exception as error:
        problem = f"flat_map_fn failed: {in_one_line(error)}; the record is {record!r:.100}"
        if skip:
            return [CorruptRecord(f"{one_line(name)}: {problem}")]
        raise SourceError(problem) from error
