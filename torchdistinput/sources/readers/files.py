"""``Files``: files as a source of fragments. A file is a fragment, and a format is what yields its blocks.

**Large files in parts.** With ``fragment_bytes`` each part of a large file is a fragment of its own, which another
worker may read. The parts follow from the sizes of the files alone, so no file is opened to find them. A part of a text
has the lines that start in it. A part of a file with a layout (records of one length, arrays, row groups) has its share
of the records, or of whole row groups. So each record is in one part, whichever way the part is read. If the layout of
a file cannot be found, the first part has all its records, and the others have none.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any, BinaryIO, Final, NamedTuple, TypeVar, cast, final

from torchdistinput.coordination.failures import in_one_line
from torchdistinput.errors import SourceError, StateMismatch
from torchdistinput.plan.file_resharding import FileCursor
from torchdistinput.plan.topology import parts_of
from torchdistinput.sources.checks import as_object, check_callable, checked_int
from torchdistinput.sources.formats.columns import AsAsked, SchemaOfFiles
from torchdistinput.sources.formats.reader_api import Block, BoundedFile, Layout, Read, ReaderFacts, facts_of
from torchdistinput.sources.fragments import Fragment
from torchdistinput.sources.readers.fragment_reader import RecordsByNumber, too_short
from torchdistinput.sources.storage.file_cache import FileCache
from torchdistinput.sources.storage.glob import FileNames, ListedName, listed
from torchdistinput.sources.storage.io import (
    FileFacts,
    OpenedFile,
    check_compression,
    file_facts,
    is_plain,
    open_file,
    stat_facts,
)
from torchdistinput.sources.storage.retry import is_missing, one_line

T = TypeVar("T")

_LOG = logging.getLogger("torchdistinput")

_MAX_ASKED_AT_ONCE: Final = 8
_MAX_MARKED: Final = 1000
_UNMARKED: Final = "no mark"


class _Part(NamedTuple):
    """A part of a file, in bytes."""

    file: str
    start: int
    end: int
    whole: int
    """The size of the file."""


@final
class Files:
    """Files, or parts of them, as a ``FragmentSource``; ``FileDataset`` describes the arguments.

    Raises:
      TypeError, ValueError: for arguments that cannot be right.
      SourceError: a pattern matches no file.
    """

    def __init__(
        self,
        files: FileNames,
        read: Read,
        *,
        storage_options: Mapping[str, Any] | None = None,
        compression: str | None = "infer",
        fragment_bytes: int | None = None,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        check_callable("read", read)
        if storage_options is not None and not isinstance(as_object(storage_options), Mapping):
            raise TypeError(f"storage_options must be a mapping of argument names to values, got {storage_options!r}")
        check_compression(compression)
        if fragment_bytes is not None:
            checked_int("fragment_bytes", fragment_bytes, at_least=1)
        self._cache = None if cache is None else FileCache(cache)
        self._read = read
        self._storage_options = None if storage_options is None else dict(storage_options)
        self._compression = compression
        found = listed(files, storage_options)
        self._files = tuple(each.name for each in found)
        # Plain lists: for a million files they are pickled in a fraction of the time.
        self._sizes = [each.facts.size for each in found]
        self._marks = [each.facts.mark for each in found]
        self._asked: dict[int, str] = {}  # what was told of remote files without a mark
        self._warned_unmarked = False
        self._schema: SchemaOfFiles | None = None
        self._parts: dict[str, _Part] = {}  # by the names of their fragments; none of whole files
        self._largest = fragment_bytes
        if fragment_bytes is not None:
            self._check_can_be_cut()
            self.ask_sizes()

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files."""
        return tuple(map(ListedName, self._files))

    @property
    def facts(self) -> ReaderFacts:
        """What the reader can do."""
        return facts_of(self._read)

    def _check_can_be_cut(self) -> None:
        if self.facts.blocks is None or (self.facts.next_start is None and self.facts.layout is None):
            raise ValueError(
                f"fragment_bytes was given with the reader {self._read!r:.100}, whose files cannot be read in parts: "
                "those of text_lines, json_lines, fixed_length_records, npy_rows and parquet can"
            )

    # ------------------------------------------------------------------------------------------------ the contract

    def fragments(self) -> Sequence[Fragment]:
        """See ``FragmentSource.fragments``: no file is opened for it. A name may come twice."""
        found: list[Fragment] = []
        for file, size, mark in zip(self._files, self._sizes, self._marks, strict=True):
            whole = size is None or self._largest is None or not is_plain(file, self._compression)
            parts = [(0, size)] if whole else parts_of(cast(int, size), cast(int, self._largest))
            if len(parts) == 1:
                found.append(Fragment(file, num_bytes=size, fingerprint=mark or None))
                continue
            for start, end in cast("list[tuple[int, int]]", parts):
                name = f"{file}[{start}:{end}]"
                self._parts[name] = _Part(file, start, end, cast(int, size))
                found.append(Fragment(name, num_bytes=end - start, fingerprint=mark or None))
        return found

    def read(self, fragment: Fragment, position: Any) -> Iterator[tuple[Any, Any]]:
        """See ``FragmentSource.read``. Positions are those of the reader; of a plain function, numbers of records."""
        with closing(self._open(fragment, cache=self._cache)) as opened:
            try:
                yield from self._blocks(fragment, opened, position or 0)
            except SourceError as error:
                if self.facts.blocks is None or not (position or 0) <= (error.offset or 0) < (error.resume_at or 0):
                    error.resume_at = None  # there reading would not go on
                raise
            except StateMismatch:
                raise
            except Exception as error:
                offset, where = opened.where()
                raise SourceError(f"reading failed{where}, {in_one_line(error)}", offset=offset) from error

    def _open(self, fragment: Fragment, *, cache: FileCache | None = None) -> OpenedFile:
        name, in_ranges = self._file_of(fragment), self.facts.ranges
        return open_file(name, self._compression, self._storage_options, in_ranges=in_ranges, cache=cache)

    def _file_of(self, fragment: Fragment) -> str:
        part = self._parts.get(fragment.name)
        return fragment.name if part is None else part.file

    def _blocks(self, fragment: Fragment, opened: OpenedFile, position: int) -> Iterator[Block[Any]]:
        facts = self._facts_with_schema()
        if facts.blocks is None:
            return self._one_by_one(fragment.name, opened, position)
        part = self._parts.get(fragment.name)
        if part is None:
            return facts.blocks(opened.stream, position)
        self._check_size(fragment, part, opened)
        if facts.next_start is not None:
            start, end = self._lines(part, opened)
            bounded = BoundedFile(opened.exact, start, end)  # a buffer would read beyond the part
            return facts.blocks(cast(BinaryIO, bounded), max(position, start))
        layout = self._layout(opened)
        if layout is None:
            return iter(()) if part.start else facts.blocks(opened.stream, position)
        return _limited(facts.blocks, opened.stream, layout, self._numbers(part, opened, layout), position)

    def _one_by_one(self, name: str, opened: OpenedFile, number: int) -> Iterator[Block[Any]]:
        """The records of a plain function, from a number on, in blocks of as many as are asked for."""
        records = iter(self._read(opened.stream))
        skipped = sum(1 for _ in islice(records, number))
        if skipped < number:
            raise too_short(name, number, number - skipped)
        for record in records:
            block = AsAsked((record,))
            block.more, block.failure = records, None
            yield number, block
            if block.failure is not None:
                raise block.failure
            number += len(block)
            del record, block  # before the next record is read

    # ------------------------------------------------------------------------------------------- parts, and numbers

    @staticmethod
    def _check_size(fragment: Fragment, part: _Part, opened: OpenedFile) -> None:
        if opened.size != part.whole:
            raise SourceError(
                f"{one_line(fragment.name)}: the file has {opened.size} bytes, but had {part.whole} when it was cut in "
                "parts: it was written since; make the FileDataset again"
            )

    def _lines(self, part: _Part, opened: OpenedFile) -> tuple[int, int]:
        """Where the first record of a part of a text begins, and the first one behind it."""
        next_start = self.facts.next_start
        assert next_start is not None
        start, end = (next_start(opened.exact, offset) for offset in (part.start, part.end))
        opened.exact.seek(0)  # where its buffer expects it
        return start, end

    def _numbers(self, part: _Part, opened: OpenedFile, layout: Layout) -> tuple[int, int]:
        """The numbers of the records of a part: of the first one, and of the first one behind it."""
        if self.facts.next_start is not None:
            start, end = self._lines(part, opened)
            return _record_at(layout, start), _record_at(layout, end)
        lo, hi = (layout.records * offset // part.whole for offset in (part.start, part.end))
        if layout.boundary_from is None:
            return lo, hi
        return layout.boundary_from(lo), layout.boundary_from(hi)

    def _layout(self, opened: OpenedFile) -> Layout | None:
        """The offsets of the records of a file, if they are known without reading it."""
        find = self._facts_with_schema().layout
        if find is None or not opened.plain or opened.size < 0:
            return None
        layout = find(opened.stream, opened.size)
        opened.stream.seek(0)
        return layout

    def by_number(self, fragment: Fragment) -> RecordsByNumber | None:
        """The records of a file, to be read without the others; ``None`` if its format does not tell where they are.

        Raises:
          SourceError: the file is missing, cannot be read, or has changed since it was cut in parts.
        """
        if self.facts.layout is None:
            return None
        opened = self._open(fragment, cache=self._cache)
        layout = None
        try:
            part, layout = self._parts.get(fragment.name), self._layout(opened)
            if part is not None:
                self._check_size(fragment, part, opened)
            if layout is None:
                return None
            numbers = (0, layout.records) if part is None else self._numbers(part, opened, layout)
            return RecordsByNumber(opened, self._facts_with_schema(), layout, numbers)
        except BaseException:
            layout = None
            raise
        finally:
            if layout is None:
                opened.close()

    def count(self, fragments: Sequence[Fragment]) -> list[int | None]:
        """How many records each has, where its format tells; opens each file."""

        def count(index: int) -> int | None:
            found = self.by_number(fragments[index])
            if found is None:
                return None
            with closing(found):
                return found.count

        return _in_threads(count, range(len(fragments)))

    # --------------------------------------------------------------------------------------------------- their columns

    def _facts_with_schema(self) -> ReaderFacts:
        schema = self.schema()
        read: Any = self._read
        return facts_of(read if schema is None else partial(read, schema=schema))

    def schema(self) -> SchemaOfFiles | None:
        """The columns of the first file with records, which all files must have; ``None`` where files have no columns.

        It opens that file, once.

        Raises:
          SourceError: naming a file that cannot be read.
        """
        find = self.facts.types
        if self._schema is None and find is not None:
            found = ((name, self._types_in(name, find)) for name in self._files)
            self._schema = SchemaOfFiles(*next((each for each in found if each[1] is not None), ()))
        return self._schema

    def _types_in(self, name: str, find: Callable[[BinaryIO], Mapping[str, str] | None]) -> Mapping[str, str] | None:
        with closing(self._open(Fragment(name))) as opened:  # not by the cache, which would copy the file to each host
            try:
                return find(opened.stream)
            except Exception as error:
                problem = str(error) if isinstance(error, SourceError) else in_one_line(error)
                raise SourceError(f"{one_line(name)}: {problem}", file=name) from error

    # ----------------------------------------------------------------------------------------------- sizes and marks

    def ask_sizes(self) -> None:
        """Asks for the sizes of files that were named without a pattern: one request for each.

        Raises:
          SourceError: naming a file that is missing or whose size cannot be asked.
        """
        unknown = [index for index, size in enumerate(self._sizes) if size is None]
        asked = _in_threads(lambda index: stat_facts(self._files[index], self._storage_options), unknown)
        for index, facts in zip(unknown, asked, strict=True):
            self._sizes[index], self._marks[index] = facts

    def marks(self) -> list[str]:
        """See ``FragmentDataset.marks``. Files without a known mark are asked: at most some, remote ones once."""
        unmarked = [index for index, mark in enumerate(self._marks) if not mark]
        asked = unmarked[:: -(-len(unmarked) // _MAX_MARKED) or 1]
        texts = [*map(_text_of, self._sizes, self._marks)]
        for index, text in zip(asked, _in_threads(self._mark_now, asked), strict=True):
            texts[index] = text
        unchecked = [index for index in asked if texts[index].endswith(_UNMARKED)]
        if unchecked and not self._warned_unmarked:
            self._warned_unmarked = True
            _LOG.warning(
                "%s: its filesystem tells no mark of its content: ranks that read other content of equal size, and a "
                "file that changes between a state and its resume, are not noticed",
                one_line(self._files[unchecked[0]]),
            )
        return [f"{one_line(name)}: {text}" for name, text in zip(self._files, texts, strict=True)]

    def _mark_now(self, index: int) -> str:
        if index in self._asked:
            return self._asked[index]
        name = self._files[index]
        try:
            text = _text_of(*file_facts(name, self._storage_options))
        except SourceError as error:
            text = "is not there" if is_missing(error) else "cannot be asked"
        if "://" in name:
            self._asked[index] = text
        return text

    def mark(self, fragment: Fragment) -> tuple[int, str]:
        """The stored size of the file of a fragment, -1 where it is not known; and its mark as a state has it."""
        part = self._parts.get(fragment.name)
        size = fragment.num_bytes if part is None else part.whole
        facts = FileFacts(size, fragment.fingerprint or "")
        if not facts.mark or size is None:
            facts = file_facts(self._file_of(fragment), self._storage_options)
        return -1 if facts.size is None else facts.size, facts.key

    def check_unchanged(self, places: Sequence[FileCursor], fragments: Sequence[Fragment]) -> None:
        """Checks that files in progress are what they were: their sizes and marks are compared.

        Raises:
          StateMismatch: naming the file, and both sizes if they differ; or the file that is gone.
          SourceError: naming the file, if it cannot be asked.
        """
        found = _in_threads(lambda number: self._facts_now(fragments[number]), range(len(fragments)))
        for place, fragment, facts in zip(places, fragments, found, strict=True):
            problem = ""
            if facts.size is not None and place.size not in {-1, facts.size}:
                problem = f"the file has {facts.size} bytes, but had {place.size}"
            elif facts.mark and place.mark not in {"", facts.key}:
                problem = "the file has other content than it had"
            if problem:
                raise StateMismatch(
                    f"{one_line(fragment.name)}: {problem} when the state was saved, in the middle of it; put "
                    "the file back as it was, or start the epoch anew"
                )
        rest = zip(places, fragments, found, strict=True)
        unchecked = [fragment.name for place, fragment, facts in rest if not (facts.mark and place.mark)]
        if unchecked:
            _LOG.warning(
                "%s and %d other(s) of the files in progress are compared by size only: the state, or the filesystem, "
                "has no mark of their content",
                *(one_line(unchecked[0]), len(unchecked) - 1),
            )

    def _facts_now(self, fragment: Fragment) -> FileFacts:
        name = self._file_of(fragment)
        try:
            return file_facts(name, self._storage_options)
        except SourceError as error:
            if not is_missing(error):
                raise
            raise StateMismatch(
                f"{one_line(name)}: the file is gone, but the saved state is in the middle of it; put it back, or "
                "start the epoch anew"
            ) from error


def _limited(
    blocks: Callable[[BinaryIO, int], Iterator[Block[Any]]],
    file: BinaryIO,
    layout: Layout,
    numbers: tuple[int, int],
    position: int,
) -> Iterator[Block[Any]]:
    """The blocks of some records of a file, from a position on."""
    lo, hi = numbers
    at = max(lo, _record_at(layout, position))
    if at >= hi:
        return
    for start, records in blocks(file, layout.offset_of(at)):
        at = _record_at(layout, start)
        yield start, records if at + len(records) <= hi else cast(Any, records)[: hi - at]
        if at + len(records) >= hi:
            return


def _record_at(layout: Layout, offset: int) -> int:
    """The number of the first record that starts at an offset or behind it."""
    return bisect_left(range(layout.records), offset, key=layout.offset_of)


def _in_threads(ask: Callable[[int], T], indices: Sequence[int]) -> list[T]:
    """The result of a request for each index; some requests are made at the same time."""
    with ThreadPoolExecutor(max(1, min(_MAX_ASKED_AT_ONCE, len(indices)))) as pool:
        return [*pool.map(ask, indices)]


def _text_of(size: int | None, mark: str) -> str:
    return f"{size} bytes, {mark or _UNMARKED}"
