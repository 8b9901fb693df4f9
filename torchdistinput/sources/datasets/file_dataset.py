"""``FileDataset`` and ``list_files``: datasets of records in files, with their readers and sizes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any, BinaryIO, Final, TypeVar, final

from torchdistinput.coordination.failures import in_one_line
from torchdistinput.errors import SourceError, StateMismatch
from torchdistinput.plan.file_resharding import FileCursor
from torchdistinput.plan.permutation import shuffled
from torchdistinput.sources.checks import as_object, check_callable, checked_int
from torchdistinput.sources.datasets.fragment_dataset import FragmentDataset, known_of_all
from torchdistinput.sources.formats.columns import SchemaOfFiles
from torchdistinput.sources.formats.reader_api import Layout, ReaderFacts, facts_of
from torchdistinput.sources.readers.flat_map import FlatMap
from torchdistinput.sources.readers.open_file import Opened, Read
from torchdistinput.sources.readers.parts import FilePart, parts_of_file, reader_of_part
from torchdistinput.sources.storage.file_cache import FileCache
from torchdistinput.sources.storage.glob import FileNames, ListedName, expand, listed
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


def list_files(
    pattern: FileNames,
    *,
    shuffle: bool = False,
    seed: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Lists the files that match a pattern, in the same order on every rank. Local: no communication.

    >>> fsspec.filesystem("memory").pipe({"/data/08": b"", "/data/09": b"", "/data/10": b""})
    >>> tdi.list_files("memory://data/*")
    ['memory://data/08', 'memory://data/09', 'memory://data/10']
    >>> tdi.list_files(["memory://data/{09..10}", "memory://data/08"])
    ['memory://data/09', 'memory://data/10', 'memory://data/08']

    Args:
      pattern: a pattern, whose files come sorted by name, or a list of names and patterns, which keeps its order.
        Local, or with the protocol of any fsspec filesystem. ``**`` matches folders at any depth; links to folders are
        followed. Braces are expanded first, without a look-up, in the order as written: ``"data-{000..012}.tar"``,
        ``"{train,extra}/*.txt"``. Braces without ``..`` or a comma stay as they are; ``[{]``, ``[*]`` stand for the
        character itself. A name that was listed here, or that a local file has, is that file.
      shuffle: whether to permute the whole list by the seed.
      seed: an int that all ranks share; needed for shuffling, and for nothing else.
      storage_options: arguments of the filesystem.

    Returns:
      Names as the user wrote them, with the wildcards filled in: a relative pattern gives relative names.

    Raises:
      ValueError: if the list is empty, or if ``shuffle`` has no seed.
      SourceError: if a pattern matches no file.
    """
    if shuffle and seed is None:
        raise ValueError(
            "list_files(shuffle=True) needs a seed: without one every rank would shuffle differently, so that some "
            "files would be read twice and others never; give the same seed on all ranks"
        )
    names: list[str] = [*map(ListedName, expand(pattern, storage_options))]
    if not shuffle:
        return names
    return [names[index] for index in shuffled(len(names), checked_int("seed", seed))]


@final
class FileDataset(FragmentDataset):
    r"""The records of files, as a torch ``IterableDataset`` that the library can divide by files.

    Given to ``strategy.distribute_dataset``, alone or in a ``DataLoader``, its files are dealt to the workers, or its
    records divided, by the policy. In plain torch it is an ordinary dataset: with loader workers, record ``j`` comes
    from worker ``j mod num_workers``, and every record comes once.

    >>> fsspec.filesystem("memory").pipe({"/data/a.txt": b"1\n2\n", "/data/b.txt": b"3\n4\n"})
    >>> list(tdi.FileDataset("memory://data/*.txt", tdi.readers.text_lines, map_fn=int, cycle_length=2))
    [1, 3, 2, 4]

    **Epochs in plain torch.** Each ``iter()`` is the next epoch, starting from 0 or from what ``set_epoch`` said.
    Loader workers have copies of the dataset. With ``persistent_workers=True`` the copies count epochs by themselves,
    and ``set_epoch`` reaches them. Without it, each epoch starts new copies, and ``set_epoch`` must be called before
    each epoch for a new order, as with torch's ``DistributedSampler``.

    **What is read.** Where a rank, or a loader worker, needs only a part of each batch (policy DATA; several loader
    workers), it reads nothing else of an uncompressed file whose records can be found without reading it: those of
    ``fixed_length_records``, ``npy_rows`` and ``parquet``. It reads all other files, and all files with a
    ``shuffle_buffer``, in full, and decodes its part.

    Args:
      files: a pattern, or a list of names and patterns, as for ``list_files``. A name that stands in a list twice is
        read twice. Names are opened only when they are read.
      read: takes a binary file object and yields the records in it; see ``readers``. A resumed run seeks to the block
        of the last record if the reader allows it (``readers.in_blocks``); else it reads its open files from the start.
      map_fn: decodes a record, for example into tensors; called only for records that are kept. ``None`` keeps them.
      flat_map_fn: gives the samples of a record, as a list or another iterable; called before ``map_fn``, and for all
        records that are read, on each rank under policy DATA. It may not call ``sample_seed``. ``None``: each record is
        one sample.
      shuffle_files: whether each epoch has its own order of the files.
      shuffle_buffer: records of a file that are shuffled together, and so held in memory, for each open file; 0: none.
      seed: an int, the same on every rank.
      cycle_length: files that are open at the same time, their records interleaved.
      block_length: records that are taken from one of them in turn.
      storage_options: arguments of the fsspec filesystem.
      compression: ``"infer"`` by the ends of the names, a name that fsspec knows, or ``None`` for the bytes as stored.
      fragment_bytes: a file with more bytes is read in equal parts of at most so many bytes, as if each part were a
        file: it is dealt out, interleaved, shuffled and numbered on its own. The parts follow from the sizes of the
        files, without opening one. A Parquet file is cut between row groups. For files that are not compressed, and the
        readers ``text_lines``, ``json_lines``, ``fixed_length_records``, ``npy_rows`` and ``parquet``. ``None``: files
        are read whole.
      cache: a local folder for copies of remote files, made at their first opening: one download for all processes of
        a host. A file that has changed is copied anew. Nothing is removed; empty the folder where room is short.
        ``None``: remote files are read from where they are.

    Raises:
      TypeError, ValueError: for arguments that cannot be right.
      SourceError: if a pattern matches no file; while reading, naming the file, if one is missing, unreadable or
        damaged.
    """

    kind = "file"

    def __init__(  # noqa: PLR0913 - fixed by the design: one dataset is one call
        self,
        files: FileNames,
        read: Read,
        *,
        map_fn: Callable[[Any], Any] | None = None,
        flat_map_fn: FlatMap | None = None,
        shuffle_files: bool = False,
        shuffle_buffer: int = 0,
        seed: int = 0,
        cycle_length: int = 1,
        block_length: int = 1,
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
        kept = None if cache is None else FileCache(cache)
        self._read = read
        self._storage_options = None if storage_options is None else dict(storage_options)
        self._compression = compression
        self._cache = kept
        found = listed(files, storage_options)
        self._files = tuple(each.name for each in found)
        # Plain lists: for a million files they are pickled in a fraction of the time.
        self._sizes = [each.facts.size for each in found]
        self._marks = [each.facts.mark for each in found]
        self._asked: dict[int, str] = {}  # what was told of remote files without a mark
        self._warned_unmarked = False
        if fragment_bytes is not None:
            self._check_can_be_cut()
            self._ask_sizes()
        largest = [fragment_bytes if is_plain(name, compression) else None for name in self._files]
        cut = map(parts_of_file, self._files, self._sizes, largest)
        self._parts = tuple(part for parts in cut for part in parts)
        self.names = tuple(part.name for part in self._parts)
        self._counted: list[int] | None = None
        self._schema: SchemaOfFiles | None = None
        shuffle = ("shuffle_files", shuffle_files)
        self._begin(map_fn, flat_map_fn, shuffle, shuffle_buffer, seed, cycle_length, block_length)

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files. Local."""
        return tuple(map(ListedName, self._files))

    @property
    def reads_ranges(self) -> bool:
        """See ``FragmentDataset.reads_ranges``. Local."""
        return self._facts.layout is not None and not self._shuffle_buffer and self.flat_map_fn is None

    @property
    def yields_strings(self) -> bool:
        """See ``FragmentDataset.yields_strings``. Local."""
        return self.map_fn is None and self.flat_map_fn is None and self._facts.records == "strings"

    def schema_facts(self) -> dict[str, Any]:
        """See ``FragmentDataset.schema_facts``. Local."""
        try:
            schema = self._file_schema()
        except SourceError as error:  # the reader raises it, at the first step
            return {"columns of the files": f"{error.file} cannot be read"}
        return {} if schema is None else schema.facts

    @property
    def _facts(self) -> ReaderFacts:
        return facts_of(self._read)

    def _file_schema(self) -> SchemaOfFiles | None:
        """The columns of the first file with records, which all files must have; ``None`` where files have no columns.

        It opens that file, once.

        Raises:
          SourceError: naming a file that cannot be read.
        """
        find = self._facts.types
        if self._schema is None and find is not None:
            found = ((name, self._types_in(name, find)) for name in self._files)
            self._schema = SchemaOfFiles(*next((each for each in found if each[1] is not None), ()))
        return self._schema

    def _types_in(self, name: str, find: Callable[[BinaryIO], Mapping[str, str] | None]) -> Mapping[str, str] | None:
        # Not by the cache, which would copy the file to each host.
        with self._opened(name, in_ranges=self._facts.ranges) as opened:
            try:
                return find(opened.stream)
            except Exception as error:
                problem = str(error) if isinstance(error, SourceError) else in_one_line(error)
                raise SourceError(f"{one_line(name)}: {problem}", file=name) from error

    def num_bytes(self) -> list[int] | None:
        """See ``FragmentDataset.num_bytes``. Local."""
        return known_of_all([part.size for part in self._parts])

    def ask_num_bytes(self) -> list[int] | None:
        """See ``FragmentDataset.ask_num_bytes``: one request for each file that was named without a pattern.

        Raises:
          SourceError: naming a file that is missing or whose size cannot be asked.
        """
        self._ask_sizes()
        sizes = dict(zip(self._files, self._sizes, strict=True))
        self._parts = tuple(
            FilePart(part.file, 0, sizes[part.file], sizes[part.file]) if part.whole is None else part
            for part in self._parts
        )
        return self.num_bytes()

    def _ask_sizes(self) -> None:
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

    def _check_can_be_cut(self) -> None:
        if self._facts.blocks is None or (self._facts.next_start is None and self._facts.layout is None):
            raise ValueError(
                f"fragment_bytes was given with the reader {self._read!r:.100}, whose files cannot be read in parts: "
                "those of text_lines, json_lines, fixed_length_records, npy_rows and parquet can"
            )

    def _known_records(self) -> list[int] | None:
        """See ``FragmentDataset.num_records``: no file is opened for it."""
        return None

    def _counted_records(self) -> list[int] | None:
        """See ``FragmentDataset.count_records``: by opening each file once, where its format tells.

        Raises:
          SourceError: naming a file that is missing or cannot be read.
        """
        if self._counted is None and self._facts.layout is not None:
            self._counted = known_of_all(_in_threads(self._records_in, range(len(self.names))))
        return self._counted

    def _records_in(self, index: int) -> int | None:
        """How many records a file has, if that can be found without reading them. It opens the file."""
        opened, _, layout = self._open_fragment(index, in_ranges=True)
        opened.close()
        return None if layout is None else layout.records

    def _opened(self, name: str, *, in_ranges: bool = False) -> closing[OpenedFile]:
        """A file, open for reading where it is, and not in the cache."""
        return closing(open_file(name, self._compression, self._storage_options, in_ranges=in_ranges))

    def _open_fragment(self, index: int, *, in_ranges: bool) -> tuple[Opened, Read, Layout | None]:
        part = self._parts[index]
        schema = self._file_schema()
        read: Any = self._read
        if schema is not None:
            read = partial(read, schema=schema)
        opened = open_file(
            part.file, self._compression, self._storage_options, in_ranges=self._facts.ranges, cache=self._cache
        )
        find_layout = partial(self._layout, opened, read)
        try:
            if part.is_whole:
                return opened, read, find_layout() if in_ranges else None
            return opened, *reader_of_part(part, opened, read, find_layout, in_ranges=in_ranges)
        except BaseException:
            opened.close()
            raise

    def _layout(self, opened: OpenedFile, read: Read) -> Layout | None:
        """The offsets of the records of a file, if they are known without reading it."""
        if not opened.plain or opened.size < 0:
            return None
        known = facts_of(read).layout
        layout = None if known is None else known(opened.stream, opened.size)
        opened.stream.seek(0)
        return layout

    def _check_unchanged(self, places: Sequence[FileCursor]) -> None:
        """See ``FragmentDataset.check_places``: the sizes and marks of the files are compared.

        Raises:
          StateMismatch: naming the file, and both sizes if they differ; or the file that is gone.
          SourceError: naming the file, if it cannot be asked.
        """
        found = _in_threads(self._facts_now, [place.file for place in places])
        for place, facts in zip(places, found, strict=True):
            problem = ""
            if facts.size is not None and place.size not in {-1, facts.size}:
                problem = f"the file has {facts.size} bytes, but had {place.size}"
            elif facts.mark and place.mark not in {"", facts.key}:
                problem = "the file has other content than it had"
            if problem:
                raise StateMismatch(
                    f"{one_line(self.names[place.file])}: {problem} when the state was saved, in the middle of it; put "
                    "the file back as it was, or start the epoch anew"
                )
        unchecked = [place.file for place, facts in zip(places, found, strict=True) if not (facts.mark and place.mark)]
        if unchecked:
            _LOG.warning(
                "%s and %d other(s) of the files in progress are compared by size only: the state, or the filesystem, "
                "has no mark of their content",
                *(one_line(self.names[unchecked[0]]), len(unchecked) - 1),
            )

    def _facts_now(self, index: int) -> FileFacts:
        name = self._parts[index].file
        try:
            return file_facts(name, self._storage_options)
        except SourceError as error:
            if not is_missing(error):
                raise
            raise StateMismatch(
                f"{one_line(name)}: the file is gone, but the saved state is in the middle of it; put it back, or "
                "start the epoch anew"
            ) from error


def _in_threads(ask: Callable[[int], T], indices: Sequence[int]) -> list[T]:
    """The result of a request for each index; some requests are made at the same time."""
    with ThreadPoolExecutor(max(1, min(_MAX_ASKED_AT_ONCE, len(indices)))) as pool:
        return [*pool.map(ask, indices)]


def _text_of(size: int | None, mark: str) -> str:
    return f"{size} bytes, {mark or _UNMARKED}"
