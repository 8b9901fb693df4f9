"""Large files in parts: each part is a fragment of its own, which another worker may read.

The parts follow from the sizes of the files alone, so no file is opened to find them. A part of a text has the lines
that start in it. A part of a file with a layout (records of one length, arrays, row groups) has its share of the
records, or of whole row groups. So each record is in one part, whichever way the part is read. If the layout of a file
cannot be found, the first part has all its records, and the others have none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple, cast, final

from torchdistinput.errors import SourceError
from torchdistinput.plan.sharding import parts_of
from torchdistinput.sources.formats.reader_api import Block, BlockReader, BoundedFile, Layout, facts_of
from torchdistinput.sources.readers.open_file import Read
from torchdistinput.sources.storage.io import OpenedFile


@final
class FilePart(NamedTuple):
    """A part of a file, or a whole file."""

    file: str
    """The name of the file."""
    start: int
    end: int | None
    """The range in bytes; the end is ``None`` for a whole file whose size is not known."""
    whole: int | None
    """The size of the file in bytes."""

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole file."""
        return (self.start, self.end) == (0, self.whole)

    @property
    def name(self) -> str:
        """The name of the file, with the range in bytes if it is a part."""
        return self.file if self.is_whole else f"{self.file}[{self.start}:{self.end}]"

    @property
    def size(self) -> int | None:
        """How many bytes it has, if that is known."""
        return None if self.end is None else self.end - self.start


def parts_of_file(file: str, size: int | None, largest: int | None) -> list[FilePart]:
    """A file, whole, or in parts.

    Args:
      file: its name.
      size: its size in bytes; ``None`` if it is not known.
      largest: how many bytes a part may have; ``None``: the file is not cut.
    """
    if size is None or largest is None:
        return [FilePart(file, 0, size, size)]
    return [FilePart(file, start, end, size) for start, end in parts_of(size, largest)]


def reader_of_part(
    part: FilePart, opened: OpenedFile, read: Read, find_layout: Callable[[], Layout | None], *, in_ranges: bool
) -> tuple[Read, Layout | None]:
    """The reader of the records of a part, and their layout if some of them are to be read without the others.

    Args:
      part: the part, which is not a whole file.
      opened: its file.
      read: the reader of the file, which yields blocks.
      find_layout: finds the layout of the file.
      in_ranges: whether the layout is wanted.

    Raises:
      SourceError: the file has changed since it was cut.
    """
    facts = facts_of(read)
    blocks, next_start = facts.blocks, facts.next_start
    assert blocks is not None
    assert part.end is not None
    assert part.whole is not None
    if opened.size != part.whole:
        raise SourceError(
            f"{part.name}: the file has {opened.size} bytes, but had {part.whole} when it was cut in parts: it was "
            "written since; make the FileDataset again",
            file=part.name,
        )
    if next_start is not None and opened.plain:
        start, end = (next_start(opened.exact, offset) for offset in (part.start, part.end))
        opened.exact.seek(0)  # where its buffer expects it

        def between(file: BinaryIO, offset: int) -> Iterator[Block[Any]]:
            unbuffered = opened.exact if file is opened.stream else file  # a buffer would read beyond the part
            return blocks(cast(BinaryIO, BoundedFile(unbuffered, start, end)), max(offset, start))

        layout = find_layout() if in_ranges else None
        records = (0, 0) if layout is None else (_record_at(layout, start), _record_at(layout, end))
        return BlockReader(between), None if layout is None else _within(layout, *records)
    layout = find_layout()
    if layout is None:
        return (BlockReader(_nothing) if part.start else read), None
    lo, hi = (layout.records * offset // part.whole for offset in (part.start, part.end))
    if layout.boundary_from is not None:
        lo, hi = layout.boundary_from(lo), layout.boundary_from(hi)
    return BlockReader(_limited(blocks, layout, lo, hi)), _within(layout, lo, hi) if in_ranges else None


def _nothing(_file: BinaryIO, _offset: int) -> Iterator[Block[Any]]:
    return iter(())


def _limited(
    blocks: Callable[[BinaryIO, int], Iterator[Block[Any]]], layout: Layout, lo: int, hi: int
) -> Callable[[BinaryIO, int], Iterator[Block[Any]]]:
    """The blocks of the records ``[lo, hi)``."""

    def between(file: BinaryIO, offset: int) -> Iterator[Block[Any]]:
        at = max(lo, _record_at(layout, offset))
        if at >= hi:
            return
        for position, records in blocks(file, layout.offset_of(at)):
            at = _record_at(layout, position)
            yield position, records if at + len(records) <= hi else cast(Any, records)[: hi - at]
            if at + len(records) >= hi:
                return

    return between


def _within(layout: Layout, lo: int, hi: int) -> Layout:
    """The layout of the records ``[lo, hi)``."""
    read = layout.read
    return Layout(
        hi - lo,
        lambda record: layout.offset_of(lo + record),
        None if read is None else lambda file, first, end: read(file, lo + first, lo + end),
    )


def _record_at(layout: Layout, offset: int) -> int:
    """The number of the first record that starts at an offset or behind it."""
    return bisect_left(range(layout.records), offset, key=layout.offset_of)
