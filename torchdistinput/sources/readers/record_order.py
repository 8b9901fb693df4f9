"""The order in which records are read, without reading: their readers read numbers in the place of the records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

from torchdistinput.sources.kernel.epoch_order import FileRecord, SourceSample, Walk
from torchdistinput.sources.kernel.sample_index import file_and_record
from torchdistinput.sources.readers.interleave import Reader

_BLOCK: Final = 2**12


@final
class RecordSequence:
    """The records of some files, or of a mixture, in the order of an epoch; see ``SampleSequence``.

    Args:
      length: how many there are.
      open_reader: opens the reader, at the front.
      told: what the samples are of the things that it reads.
      found: see ``SampleSequence``.
    """

    def __init__(
        self,
        length: int,
        open_reader: Callable[[], Reader],
        told: Callable[[Any], Any],
        found: Callable[[Any], Any],
    ) -> None:
        self._length, self._open_reader, self._told = length, open_reader, told
        self.between = Walk(self._read).between
        """See ``SampleSequence.between``."""
        self.found = found
        """See ``SampleSequence.found``."""

    def __len__(self) -> int:
        return self._length

    def _read(self) -> Iterator[Any]:
        reader = self._open_reader()
        while records := reader.take(_BLOCK):
            yield from map(self._told, records)


def numbers_of(name: str, count: int, position: int | None) -> Iterator[tuple[int, list[FileRecord]]]:
    """The numbers of the records of a file, in blocks; see ``fragment_reader.ReadFrom``."""
    for start in range(position or 0, count, _BLOCK):
        yield start, [FileRecord(name, record) for record in range(start, min(start + _BLOCK, count))]


def found_record(names: Sequence[str], counts: Sequence[int], sample: Any) -> FileRecord:
    """A record that a user names: (file, record), or the number that ``with_index=True`` gives it.

    Raises:
      ValueError: the files have no such record.
    """
    file, record = file_and_record(sample) if type(sample) is int else _pair(sample, "(file, record)")
    file = names.index(file) if isinstance(file, str) and file in names else file
    known = type(file) is int and 0 <= file < len(names)
    if not known or type(record) is not int or not 0 <= record < counts[file]:
        raise ValueError(
            f"found the sample {sample!r:.100}; (file, record) is needed, with the name of one of the "
            f"{len(names)} files and the number of one of its records from 0 on."
        )
    return FileRecord(names[file], record)


def found_in_source(names: Sequence[str], found: Sequence[Callable[[Any], Any]], sample: Any) -> SourceSample:
    """A sample of a mixture that a user names: (source, sample).

    Raises:
      ValueError: there is no such source, or it has no such sample.
    """
    name, inner = _pair(sample, "(source, sample)")
    if name not in names:
        raise ValueError(f"found the source {name!r:.100}; the sources are {', '.join(map(repr, names))}.")
    return SourceSample(name, found[names.index(name)](inner))


def _pair(sample: Any, needed: str) -> tuple[Any, Any]:
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise ValueError(f"found the sample {sample!r:.100}; a pair {needed} is needed.")
    return sample[0], sample[1]
