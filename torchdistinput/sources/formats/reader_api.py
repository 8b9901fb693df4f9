"""The interface of readers that can resume in the middle of a file: they yield blocks of records with their offsets.

Counting bytes for every record would make reading slow, and many formats can be read only in larger pieces anyway. So a
reader reports its position once for each *block* of records. A resume in the middle of a file starts at the last block
before the wanted record, and skips a few records.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
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

from torchdistinput.sources.formats.columns import RecordList

BLOCK_BYTES: Final = 1 << 16
"""The approximate size of a block, if the format leaves the choice."""

_MADE_AT_ONCE: Final = 256

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_records_of: Callable[[Any], Any] = itemgetter(1)


class Records(Protocol[T_co]):
    """The records of a block: a list, or an object that knows their number and makes them on demand."""

    def __len__(self) -> int:
        """How many they are."""
        ...

    def __iter__(self) -> Iterator[T_co]:
        """The records, in order."""
        ...


@final
class LazyRecords:
    """Records that are made on demand.

    Args:
      count: how many records there are.
      make: makes the records from the first number up to the second.
    """

    def __init__(self, count: int, make: Callable[[int, int], RecordList]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for lo in range(0, self._count, _MADE_AT_ONCE):
            yield from self[lo : lo + _MADE_AT_ONCE]

    def __getitem__(self, wanted: slice) -> RecordList:
        """The records of a slice without a step."""
        lo, hi, _ = wanted.indices(self._count)
        return self._make(lo, max(lo, hi))


Read: TypeAlias = Callable[[BinaryIO], Iterable[Any]]
"""A reader: takes a binary file object and yields the records in it."""
Block: TypeAlias = tuple[int, Records[T]]
"""The offset of a block, in bytes of the content, and its records."""


@final
class BoundedFile:
    """A file object that ends at an offset of a file, for a reader that starts at an offset before it.

    Args:
      file: the file.
      start: where reading starts, in bytes.
      end: where the content ends.
    """

    def __init__(self, file: BinaryIO, start: int, end: int) -> None:
        self._file = file
        self._at = start
        self._end = end

    def seek(self, offset: int) -> int:
        """Goes to an offset of the file."""
        self._at = offset
        return offset

    def read(self, count: int) -> bytes:
        """Up to ``count`` bytes."""
        count = min(count, self._end - self._at)
        if count <= 0:
            return b""
        self._file.seek(self._at)
        found = self._file.read(count)
        self._at += len(found)
        return found


class Layout(NamedTuple):
    """The offsets of the records of a file, so that some of them can be read without the others."""

    records: int
    """How many they are."""
    offset_of: Callable[[int], int]
    """The offset of a record, in bytes; of number ``records``: the end of the last one. The reader can start there."""
    read: Callable[[BinaryIO, int, int], RecordList] | None = None
    """Reads the records from the first number up to the second; ``None``: the bytes between their offsets are read."""
    boundary_from: Callable[[int], int] | None = None
    """Where the file is cut in parts: the first number, from the given one on, at which a unit of reading begins, such
    as a row group; of ``records``: ``records``. ``None``: at each record."""


LayoutOf: TypeAlias = Callable[..., Layout | None]
"""Finds the layout of a file from its content (at its start) and its size in bytes; ``None`` if it must be read."""
NextStart: TypeAlias = Callable[[BinaryIO, int], int]
"""Finds the offset of the first record that starts at an offset or behind it; the end of the file if there is none."""
TypesOf: TypeAlias = Callable[..., Mapping[str, str] | None]
"""Finds the columns of a file from its content (at its start): the type of each, by its name; ``None``: no records."""


class ReaderFacts(NamedTuple):
    """What a reader can do; see ``in_blocks``. The functions of ``facts_of`` have the reader's keyword arguments."""

    blocks: Callable[..., Iterator[Block[Any]]] | None = None
    """``None``: a plain function, which yields the records one by one."""
    layout: LayoutOf | None = None
    next_start: NextStart | None = None
    records: Literal["strings"] | None = None
    ranges: bool = False
    types: TypesOf | None = None


@final
class BlockReader(Generic[P, T]):
    """A reader made of a function that yields blocks; see ``in_blocks``. It has the function's name and docstring."""

    __name__: str
    __qualname__: str

    def __init__(
        self, blocks: Callable[Concatenate[BinaryIO, int, P], Iterator[Block[T]]], facts: ReaderFacts | None = None
    ) -> None:
        update_wrapper(self, blocks)
        signature = inspect.signature(blocks)
        first, _, *others = signature.parameters.values()
        self.__signature__ = signature.replace(parameters=[first, *others])
        self.blocks = blocks
        self.facts = (facts or ReaderFacts())._replace(blocks=blocks)

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
    *,
    layout: LayoutOf | None = None,
    next_start: NextStart | None = None,
    records: Literal["strings"] | None = None,
    ranges: bool = False,
    types: TypesOf | None = None,
) -> Callable[[Callable[Concatenate[BinaryIO, int, P], Iterator[Block[T]]]], BlockReader[P, T]]: ...


def in_blocks(
    blocks: Callable[..., Iterator[Block[Any]]] | None = None,
    *,
    layout: LayoutOf | None = None,
    next_start: NextStart | None = None,
    records: Literal["strings"] | None = None,
    ranges: bool = False,
    types: TypesOf | None = None,
) -> Any:
    r"""Makes a reader that can start inside a file, so that a resumed run need not read the file from its start.

    A plain function is a reader too, and resumes as exactly, but reads its open files again from their start.

    Example:
      >>> @tdi.readers.in_blocks
      ... def lines(file, offset):
      ...     tdi.readers.skip_to(file, offset)
      ...     while block := file.readlines(1 << 16):
      ...         yield offset, block
      ...         offset += sum(map(len, block))
      >>> list(lines(io.BytesIO(b"one\ntwo\n")))
      [b'one\n', b'two\n']

    Args:
      blocks: a function of a binary file object, which is at its start, and a position: 0 for the start, or a position
        that it yielded for the same content. It goes to the position, and yields for each block of records the block's
        position and its records (a list). A position is any int of 0 or more that grows from block to block: an offset
        in bytes, as of the readers here, or the number of a row group; only this function interprets it. Further
        parameters are keyword arguments, for ``functools.partial``. For a bad record it may raise, after the blocks in
        front of the record, a ``SourceError`` with ``offset`` and ``resume_at``. Both are positions: the function can
        start at ``offset``, and then raises the same error again, and at ``resume_at``.
      layout: finds the records by the size of a file alone: a function of the file, its size and the same keyword
        arguments, which returns a ``Layout`` or ``None``. A rank then reads only its part of the file (DATA).
      next_start: a function of the file and an offset, which returns the offset of the first record that starts there
        or behind it, or the size of the file. Then files are read in parts by ``FileDataset(fragment_bytes=...)``.
      records: ``"strings"``, if all records are certainly strings.
      ranges: whether it reads parts of a file here and there, in requests of its own size. Then nothing is read ahead
        of a remote file.
      types: finds the columns of a file: a function of the file and the same keyword arguments, which returns a dict
        with the type of each column as text, or ``None`` if the file has no records. It is called for the first files,
        until one has records. ``blocks`` and ``layout`` get these columns as a further keyword argument ``schema``, and
        call its ``check(types)``, which refuses the columns of another file.

    Returns:
      A function of a binary file object, and the same keyword arguments, that yields the records. It pickles if it is
      at the top of its module.
    """
    about = ReaderFacts(None, layout, next_start, records, ranges, types)
    return partial(BlockReader, facts=about) if blocks is None else BlockReader(blocks, about)


def facts_of(read: Callable[..., Iterable[Any]]) -> ReaderFacts:
    """What a reader, or a ``functools.partial`` of one, can do: nothing, for a plain function."""
    inner = read.func if isinstance(read, partial) and not read.args else read
    if not isinstance(inner, BlockReader):
        return ReaderFacts()
    options = read.keywords if isinstance(read, partial) else {}
    if not options:
        return inner.facts
    with_options: Any = {
        name: partial(getattr(inner.facts, name), **options)
        for name in ("blocks", "layout", "types")
        if getattr(inner.facts, name) is not None
    }
    return inner.facts._replace(**with_options, records=None)


def grouped(records: Iterator[tuple[int, T]], start: int) -> Iterator[Block[T]]:
    """Groups single records into blocks. Records in front of a failure are yielded before it is raised.

    Args:
      records: the records, each with the offset of its end, in bytes.
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
