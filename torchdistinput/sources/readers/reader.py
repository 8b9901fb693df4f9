"""``Reader``: one pass over undecoded records, which can be entered again between any two of them.

The readers of several files (``Interleave``) and of a mixture (``MixedReader``) read records of other readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, final

from torchdistinput.plan.mixing import Cursor
from torchdistinput.sources.formats.columns import RecordList, joined
from torchdistinput.sources.kernel.record_places import RecordPlace
from torchdistinput.sources.readers.fragment_reader import FragmentReader, NumberedReader
from torchdistinput.step_types import Digest

Turn: TypeAlias = tuple[FragmentReader | NumberedReader, int, int]
"""A fragment, and the range of its records that a turn yielded, counted as they are yielded."""


class Reader(Protocol):
    """A reader of undecoded records: of files, of the indices of a dataset, or of a mixture."""

    @property
    def opened(self) -> int:
        """A count; where it has grown, the cursor is reported after the batch: fresh files that were opened."""

    @property
    def of_columns(self) -> bool:
        """Whether the records that were read are ``Columns``; in lists they may be beside a ``CorruptRecord``."""

    def take(self, count: int) -> RecordList:
        """The next ``count`` records, fewer at the end; ``places`` returns their origins."""

    def reserve(self, count: int) -> Reserved:
        """Skips the next ``count`` records, fewer at the end; they are read when the result is sliced.

        If they must be read from start to end, they are read at once. The result is valid until the next call.
        """

    def places(self, lo: int, hi: int) -> list[RecordPlace]:
        """The origins of the records ``[lo, hi)`` of the last ``take``. Call it before the next record is taken."""

    def digest(self) -> Digest:
        """A number of what was read so far that is the same on all ranks that read the same. Once a batch."""

    def position(self) -> Cursor:
        """The cursor: another reader that starts there yields the records that this one has not yielded."""

    def close(self) -> None:
        """Ends the reading. More calls do nothing."""


@final
class Reserved:
    """Reserved records of a reader: a slice of them reads its records.

    Args:
      parts: in order: lists of records that were read already, or turns whose records are still to be read.
    """

    def __init__(self, parts: Sequence[RecordList | Turn]) -> None:
        self._parts = parts
        self._sizes = [part[2] - part[1] if isinstance(part, tuple) else len(part) for part in parts]
        self._size = sum(self._sizes)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, wanted: slice) -> RecordList:
        """The records of a slice without a step. The records of one file are read in one call.

        Raises:
          SourceError: naming the file.
        """
        lo, hi, _ = wanted.indices(self._size)
        pieces: list[RecordList | Turn] = []
        ranges: dict[Any, tuple[int, int]] = {}  # of each file, from its first wanted record to its last
        for part, size in zip(self._parts, self._sizes, strict=True):
            a, b = max(lo, 0), min(hi, size)
            lo, hi = lo - size, hi - size  # as the next part counts
            if a >= b:
                continue
            if isinstance(part, tuple):
                file, first, _ = part
                pieces.append((file, first + a, first + b))
                ranges[file] = ranges.get(file, (first + a,))[0], first + b
            else:
                pieces.append(part[a:b])
        read = {file: file.read_range(a, b) for file, (a, b) in ranges.items()}
        whole: list[RecordList] = []
        for piece in pieces:
            if isinstance(piece, tuple):
                file, a, b = piece
                start = ranges[file][0]
                whole.append(read[file][a - start : b - start])
            else:
                whole.append(piece)
        return joined(whole)
