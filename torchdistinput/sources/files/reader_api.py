"""Readers that can be entered again: they know where their blocks start.

Counting bytes for every record would make reading slow, and many formats can be read only in larger pieces anyway. So a
reader tells where it stands once for each *block* of records, and whoever goes on in the middle of a file starts at the
last block before the record that he wants, and passes over a few.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial, update_wrapper
from itertools import chain
from operator import itemgetter
from typing import (
    Any,
    BinaryIO,
    Concatenate,
    Final,
    Generic,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    final,
    overload,
)

import numpy as np
import numpy.typing as npt

__all__ = [
    "BLOCK_BYTES",
    "Block",
    "BlockReader",
    "Layout",
    "MadeRecords",
    "Part",
    "Records",
    "StartsOf",
    "blocks_of",
    "grouped",
    "in_blocks",
    "kind_of",
    "layout_of",
]

BLOCK_BYTES: Final = 1 << 16
"""How much of a file a block should be about, where the format leaves the choice."""

_MADE_AT_ONCE: Final = 64

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_records_of: Callable[[Any], Any] = itemgetter(1)


class Records(Protocol[T_co]):
    """The records of a block: a list, or what makes them as they are asked for and knows how many there are."""

    def __len__(self) -> int:
        """How many they are."""
        ...

    def __iter__(self) -> Iterator[T_co]:
        """The records, in order."""
        ...


@final
class MadeRecords(Generic[T]):
    """Records that are made as they are asked for.

    Args:
      count: how many they are.
      make: makes those from the first number up to the second.
    """

    def __init__(self, count: int, make: Callable[[int, int], list[T]]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        for lo in range(0, self._count, _MADE_AT_ONCE):
            yield from self._make(lo, min(lo + _MADE_AT_ONCE, self._count))

    def __getitem__(self, wanted: slice) -> list[T]:
        """Those records, of a slice without a step."""
        lo, hi, _ = wanted.indices(self._count)
        return self._make(lo, max(lo, hi))


Block: TypeAlias = tuple[int, Records[T]]
"""Where a block can be entered, in bytes of the content, and its records."""


@final
class Part:
    """Some bytes of a file, at the offsets that they have there: what a reader needs that is entered in front of them.

    Args:
      data: the bytes.
      offset: where they start in the file; the content is taken to end after them.
    """

    def __init__(self, data: bytes, offset: int) -> None:
        self._data = data
        self._offset = offset
        self._at = offset

    def seek(self, offset: int) -> int:
        """Goes to an offset of the file; nothing can be read in front of the bytes."""
        self._at = offset
        return offset

    def read(self, count: int) -> bytes:
        """Up to so many bytes."""
        start = self._at - self._offset
        found = self._data[start : start + count] if start >= 0 else b""
        self._at += len(found)
        return found


class Layout(NamedTuple):
    """Where the records of a file are, so that some of them can be read without the others."""

    records: int
    """How many they are."""
    offset_of: Callable[[int], int]
    """Where a record starts, in bytes; of ``source``: where the last one ends. The reader can be entered there."""
    read: Callable[[BinaryIO, int, int], list[Any]] | None = None
    """Reads the records from the first number up to the second; ``None``: what lies between their offsets is read."""
    read_rows: Callable[[BinaryIO, int, int], npt.NDArray[Any]] | None = None
    """Reads them as the rows of one array, where that is what they are."""


RecordKind: TypeAlias = Literal["strings", "rows"]
"""What all records of a reader are: strings, or rows of arrays."""
LayoutOf: TypeAlias = Callable[..., Layout | None]
"""The layout of a file, of its content (at its front) and its size in bytes; ``None`` where it has to be read."""
StartsOf: TypeAlias = Callable[..., Iterator[npt.NDArray[np.int64]]]
"""Where the records of a file start, in pieces, of its content (at its front), which is read for that."""


@final
class BlockReader(Generic[P, T]):
    """A reader made of a function that yields blocks; see ``in_blocks``. It has the name and the text of the function.

    Args:
      blocks: the function.
      layout: tells where the records are by the size of a file.
      starts: tells where they are by reading the file.
      records: what all of them are: strings, or rows of arrays; ``None``: anything.
    """

    __name__: str
    __qualname__: str

    def __init__(
        self,
        blocks: Callable[Concatenate[BinaryIO, int, P], Iterator[Block[T]]],
        layout: LayoutOf | None = None,
        starts: StartsOf | None = None,
        *,
        records: RecordKind | None = None,
    ) -> None:
        update_wrapper(self, blocks)
        signature = inspect.signature(blocks)
        first, _, *others = signature.parameters.values()
        self.__signature__ = signature.replace(parameters=[first, *others])
        self.blocks = blocks
        self.layout = layout
        self.starts = starts
        self.records = records

    def __call__(self, file: BinaryIO, /, *args: P.args, **options: P.kwargs) -> Iterator[T]:
        """All records of a file, from its front."""
        return chain.from_iterable(map(_records_of, self.blocks(file, 0, *args, **options)))

    def __repr__(self) -> str:
        return f"<reader {self.__module__}.{self.__qualname__}>"

    def __reduce__(self) -> str:
        return self.__qualname__  # by its name, as a function


@overload
def in_blocks(blocks: Callable[Concatenate[BinaryIO, int, P], Iterator[Block[T]]]) -> BlockReader[P, T]: ...


@overload
def in_blocks(
    *, layout: LayoutOf | None = None, starts: StartsOf | None = None, records: RecordKind | None = None
) -> Callable[[Callable[Concatenate[BinaryIO, int, P], Iterator[Block[T]]]], BlockReader[P, T]]: ...


def in_blocks(
    blocks: Callable[..., Iterator[Block[Any]]] | None = None,
    *,
    layout: LayoutOf | None = None,
    starts: StartsOf | None = None,
    records: RecordKind | None = None,
) -> Any:
    """Makes a reader that can be entered again, so that a resumed run need not read a file from its front.

    A plain function is a reader too, and resumes as exactly; it reads again what it had read of the files in progress.

    Example:
      >>> @readers.in_blocks
      ... def lines(file, offset):
      ...     readers.skip_to(file, offset)
      ...     while block := file.readlines(1 << 16):
      ...         yield offset, block
      ...         offset += sum(map(len, block))

    Args:
      blocks: a function of a binary file object, which is at its front, and a position: 0 for the front, or one that it
        yielded for the same content. It goes there, and yields for each block of records the position at which the
        block can be entered, and its records (a list). A position is any int of 0 or more that grows from block to
        block: an offset in bytes, as of the readers here, or the number of a row group; only this function reads it.
        What else it takes are keyword arguments, for ``functools.partial``. A ``SourceError`` with ``resume_at``, after
        the blocks in front of the bad record, says that it can be entered at the error's ``offset``, to raise the same
        again, and at ``resume_at``; both are positions then.
      layout: tells where the records are, by the size of a file alone: a function of the file, its size and the same
        keyword arguments, which returns a ``Layout`` or ``None``. A rank then reads only its part of the file (DATA).
      starts: yields where the records start, by reading the file: a function of the file and the same keyword
        arguments, for the index of ``FileDataset(index_folder=...)``.
      records: what all records are for certain: ``"strings"``, or ``"rows"`` of arrays, which are stacked at once.

    Returns:
      A function of a binary file object, and the same keyword arguments, that yields the records. It pickles if it is
      at the top of its module.
    """
    if blocks is None:
        return partial(BlockReader, layout=layout, starts=starts, records=records)
    return BlockReader(blocks, layout, starts, records=records)


def blocks_of(read: Callable[..., Iterable[Any]]) -> Callable[[BinaryIO, int], Iterator[Block[Any]]] | None:
    """The blocks of a reader, or of a ``functools.partial`` of one; nothing where it is a plain function."""
    if isinstance(read, BlockReader):
        blocks: Callable[[BinaryIO, int], Iterator[Block[Any]]] = read.blocks
        return blocks
    if isinstance(read, partial) and not read.args:
        inner = blocks_of(read.func)
        return None if inner is None else partial(inner, **read.keywords)
    return None


def layout_of(read: Callable[..., Iterable[Any]]) -> Callable[[BinaryIO, int], Layout | None] | None:
    """Tells where the records are of which a reader knows it by the size of a file; nothing for other readers."""
    if isinstance(read, partial) and not read.args:
        inner = layout_of(read.func)
        return None if inner is None else partial(inner, **read.keywords)
    return read.layout if isinstance(read, BlockReader) else None


def kind_of(read: Callable[..., Iterable[Any]]) -> RecordKind | None:
    """What all records of a reader are for certain, if that is known."""
    return read.records if isinstance(read, BlockReader) else None


def grouped(records: Iterator[tuple[int, T]], start: int) -> Iterator[Block[T]]:
    """Gathers records that come one by one to blocks. Those in front of a failure are yielded before it is raised.

    Args:
      records: each with the offset at which it ends, in bytes.
      start: the offset at which the first one starts.
    """
    end, failure, more = start, None, True
    while more:
        block: list[T] = []
        more = False
        try:
            for end, record in records:
                block.append(record)
                if end - start >= BLOCK_BYTES:
                    more = True
                    break
        except Exception as error:  # the block comes first
            failure = error
        if block:
            yield start, block
        start = end
    if failure is not None:
        raise failure
