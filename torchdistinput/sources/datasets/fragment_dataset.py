"""``FragmentDataset``: data in fragments as a torch dataset: the order of an epoch, reading, and decoding.

Reading is separate from decoding: a ``reader`` yields undecoded records, and ``map_fn`` is called only for the
records that are kept. The order of the records is a function of (fragments, seed, epoch) and the given order of
fragments. It does not depend on the process that reads, or on the number of processes. So every rank and every loader
worker can find its own part.

``FileDataset`` is a ``FragmentDataset`` of ``Files``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from typing import Any, Final, final

from torch.utils.data import IterableDataset

from torchdistinput.coordination.failures import in_one_line
from torchdistinput.coordination.fingerprints import digest_of_list
from torchdistinput.errors import InputError, SourceError, StateMismatch
from torchdistinput.plan.file_resharding import FileCursor, ReaderCursor
from torchdistinput.plan.mixing import Cursor
from torchdistinput.plan.permutation import shuffled
from torchdistinput.sources.checks import as_object, check_callable, checked_int
from torchdistinput.sources.formats.columns import SchemaOfFiles
from torchdistinput.sources.formats.reader_api import Read
from torchdistinput.sources.fragments import Fragment, FragmentSource
from torchdistinput.sources.kernel.batcher import as_is
from torchdistinput.sources.kernel.epoch_order import cannot_know
from torchdistinput.sources.kernel.read_failures import CorruptRecord, Decoded, FindPlaces, RecordPlace
from torchdistinput.sources.readers.files import Files
from torchdistinput.sources.readers.fragment_reader import (
    FlatMap,
    FragmentReader,
    NumberedReader,
    ReadFrom,
    flat_mapped,
    with_corrupt_records,
)
from torchdistinput.sources.readers.interleave import Interleave, Reader
from torchdistinput.sources.readers.record_order import RecordSequence, found_record, numbers_of
from torchdistinput.sources.sample_seed import Samples, calls_on, epoch_key
from torchdistinput.sources.set_epoch import EpochCounter, loader_worker
from torchdistinput.sources.storage.glob import FileNames, ListedName, expand
from torchdistinput.sources.storage.retry import one_line

_MARK_BYTES: Final = 6


class FragmentDataset(IterableDataset[Any]):
    """The records of a source of fragments, as a torch ``IterableDataset`` that the library can divide.

    Given to ``strategy.distribute_dataset``, alone or in a ``DataLoader``, its fragments are dealt to the workers, or
    its records divided, by the policy. In plain torch it is an ordinary dataset. ``FileDataset`` is one of ``Files``.

    It is made of a ``FragmentSource``. With ``shuffle_fragments`` each epoch has its own order of the fragments;
    the other arguments are those of ``FileDataset``.

    Raises:
      TypeError, ValueError: for arguments that cannot be right.
      InputError: the source has no fragments, or two of one name.
    """

    kind = "fragment"
    """The word for one of them, in messages."""
    names: tuple[str, ...]
    """The names of the fragments, in the order of the source."""

    def __init__(
        self,
        source: FragmentSource,
        *,
        map_fn: Callable[[Any], Any] | None = None,
        flat_map_fn: FlatMap | None = None,
        shuffle_fragments: bool = False,
        shuffle_buffer: int = 0,
        seed: int = 0,
        cycle_length: int = 1,
        block_length: int = 1,
    ) -> None:
        super().__init__()
        if not isinstance(as_object(source), FragmentSource):
            raise TypeError(f"source must have the methods fragments and read of a FragmentSource, got {source!r:.100}")
        self._source = source
        self._files = source if isinstance(source, Files) else None
        self._list_fragments()
        if not self.names:
            raise InputError(f"{type(source).__name__}.fragments() gave no fragment; at least one is needed")
        if self._files is None and len(set(self.names)) < len(self.names):
            ((twice, _),) = Counter(self.names).most_common(1)
            raise InputError(f"{type(source).__name__}.fragments() gave two fragments of the name {twice!r:.100}")
        shuffle = ("shuffle_fragments" if self._files is None else "shuffle_files", shuffle_fragments)
        if map_fn is not None:
            check_callable("map_fn", map_fn)
        if flat_map_fn is not None:
            check_callable("flat_map_fn", flat_map_fn)
        if not isinstance(as_object(shuffle[1]), bool):
            raise TypeError(f"{shuffle[0]} must be True or False, got {shuffle[1]!r}")
        self.map_fn = map_fn
        self.flat_map_fn = flat_map_fn
        self.seed = checked_int("seed", seed)
        self._shuffles = shuffle
        self._shuffle_buffer = checked_int("shuffle_buffer", shuffle_buffer, at_least=0)
        self._cycle_length = checked_int("cycle_length", cycle_length, at_least=1)
        self._block_length = checked_int("block_length", block_length, at_least=1)
        self._epochs = EpochCounter()
        self._counted: list[int] | None = None

    def _list_fragments(self) -> None:
        """Keeps the fragments of the source as plain lists: a million files are pickled in a fraction of the time."""
        found = self._source.fragments()
        self.names = tuple(each.name for each in found)
        self._counts = [each.num_records for each in found]
        self._sizes = [each.num_bytes for each in found]
        self._fingerprints = [each.fingerprint for each in found]

    def _fragment(self, index: int) -> Fragment:
        return Fragment(self.names[index], self._counts[index], self._sizes[index], self._fingerprints[index])

    def marks(self) -> list[str]:
        """A text for each fragment or file that differs where its content does, without reading it. Local."""
        if self._files is not None:
            return self._files.marks()
        found = map(self._fragment, range(len(self.names)))
        return [f"{each.name}: {each.num_records}, {each.num_bytes}, {each.fingerprint}" for each in found]

    def num_records(self, *, opens: bool = False) -> list[int] | None:
        """How many records each fragment has, if that is known for all, or found as each is opened. Local.

        Raises:
          SourceError: naming a fragment that is missing or cannot be opened.
        """
        if self.flat_map_fn is not None:
            return None
        if self._files is None or not opens:
            return _known_of_all(self._counts)
        if self._counted is None and self._files.facts.layout is not None:
            self._counted = _known_of_all(self._files.count([*map(self._fragment, range(len(self.names)))]))
        return self._counted

    def num_bytes(self, *, asks: bool = False) -> list[int] | None:
        """How large each fragment is, if that is known for all, or once the filesystem is asked. Opens nothing. Local.

        Raises:
          SourceError: naming a file that is missing or whose size cannot be asked.
        """
        if asks and self._files is not None:
            self._files.ask_sizes()
            self._list_fragments()
        return _known_of_all(self._sizes)

    def schema_facts(self) -> dict[str, Any]:
        """The columns of the first file, where all files must have the same. It may open that file. Local."""
        try:
            schema = None if self._files is None else self._files.schema()
        except SourceError as error:  # the reader raises it, at the first step
            return {"columns of the files": f"{error.file} cannot be read"}
        return {} if schema is None else schema.facts

    @property
    def decodes(self) -> bool:
        """Whether undecoded records differ from samples. Local."""
        return self.map_fn is not None

    @property
    def yields_strings(self) -> bool:
        """Whether all its records are certainly strings. Local."""
        plain = self.map_fn is None and self.flat_map_fn is None
        return plain and self._files is not None and self._files.facts.records == "strings"

    @property
    def reads_ranges(self) -> bool:
        """Whether some records of a fragment can be read without the others. Local."""
        can = self._files is not None and self._files.facts.layout is not None
        return can and not self._shuffle_buffer and self.flat_map_fn is None

    @property
    def order_in_words(self) -> str:
        """The data and its order, for people. Local."""
        order = f"{self.kind}s shuffled" if self._shuffles[1] else f"{self.kind}s in order"
        if self._cycle_length > 1:
            order += f", {self._cycle_length} interleaved"
        if self._shuffle_buffer:
            order += f", records shuffled in windows of {self._shuffle_buffer}"
        return f"{type(self).__name__}, {len(self.names):,} {self.kind}(s), {order}"

    def file_order(self, epoch: int) -> list[int]:
        """The indices of the fragments in the order of an epoch; before they are dealt to workers."""
        if not self._shuffles[1]:
            return list(range(len(self.names)))
        return shuffled(len(self.names), self.seed, epoch)

    def reader(
        self,
        order: Sequence[int],
        epoch: int,
        place: Cursor | None = None,
        *,
        skip: bool = False,
        in_ranges: bool = False,
    ) -> Interleave:
        """A reader of the undecoded records of some fragments. It opens each fragment when its turn comes.

        Args:
          order: indices of the fresh fragments, in the order in which they are opened; see ``plan.file_resharding``.
          epoch: the epoch whose shuffle orders the records.
          place: the cursor of an earlier reader of the same fresh fragments, or the part of an earlier world's reading
            that was dealt to this worker.
          skip: whether to yield a ``CorruptRecord`` for a record that cannot be read, if reading can certainly go on.
          in_ranges: whether records are taken by ``reserve`` only, which reads only some of them if it can.

        Raises:
          IndexError: if there is no such fragment.
          StateMismatch: if the cursor is in a fragment that the dataset does not have.
        """
        for index in order:
            if not 0 <= index < len(self.names):
                raise IndexError(f"there is no {self.kind} {index}: the dataset has {len(self.names)} {self.kind}s")
        place = ReaderCursor() if place is None else _of_files(place)
        self._check_place(place, len(order))
        schema = SchemaOfFiles()
        open_fragment = partial(self._open, epoch, skip, in_ranges, schema)
        return Interleave(order, open_fragment, self._cycle_length, self._block_length, place, schema)

    def _numbers(self, counts: Sequence[int], order: Sequence[int], epoch: int) -> Interleave:
        """A ``reader`` that reads the numbers of the records in their place."""
        schema = SchemaOfFiles()

        def open_fragment(start: FileCursor) -> FragmentReader:
            file, name = start.file, self.names[start.file]
            read, key = partial(numbers_of, name, counts[file]), (self.seed, epoch, file)
            return FragmentReader(name, read, start, self._shuffle_buffer, key, lambda: (-1, ""), schema)

        return Interleave(order, open_fragment, self._cycle_length, self._block_length, ReaderCursor(), schema)

    def record_orders(self, shards: Sequence[Sequence[int]], epoch: int) -> list[RecordSequence]:
        """The records that a ``reader`` of each shard yields, without reading any; it may open each fragment. Local.

        Raises:
          InputError: the number of records of some fragment is not known.
        """
        counts = self.num_records(opens=True)
        if counts is None:
            way_out = "Give each Fragment its num_records."
            if self.flat_map_fn is not None:
                way_out = "flat_map_fn makes any number of samples of a record; use map_fn, or map-style data."
            elif self.kind == "file":
                way_out = (
                    "Use files that are not compressed, of a format that says it: parquet, npy_rows, "
                    "fixed_length_records."
                )
            raise cannot_know(f"the number of records of each {self.kind} is not known", way_out)
        found = partial(found_record, self.names, counts)
        return [
            RecordSequence(
                sum(counts[file] for file in shard), partial(self._numbers, counts, shard, epoch), as_is, found
            )
            for shard in shards
        ]

    def epoch_order(self, epoch: int) -> RecordSequence:
        """See ``RecordSet.epoch_order``."""
        (found,) = self.record_orders([self.file_order(epoch)], epoch)
        return found

    def check_places(self, places: Sequence[Cursor]) -> None:
        """Checks that the fragments at which reading goes on exist and are unchanged. Local.

        Raises:
          StateMismatch: naming the fragment that has changed, or is gone.
          SourceError: naming the fragment, if it cannot be checked.
        """
        cursors = {cursor.file: cursor for place in map(_of_files, places) for cursor in place.cursors}
        for cursor in cursors.values():
            self._check_cursor(cursor)
        if cursors:
            self._check_unchanged([*cursors.values()])

    def read_epoch(self, epoch: int, place: Cursor | None = None, *, skip: bool = False) -> Interleave:
        """A reader of all undecoded records of an epoch, from the front or a cursor on; see ``reader``."""
        return self.reader(self.file_order(epoch), epoch, place, skip=skip)

    def decode(
        self, records: list[Any], places: FindPlaces, key: int, *, seeds: bool = False, skip: bool = False
    ) -> Decoded:
        """Applies ``map_fn`` to records.

        Args:
          records: undecoded records; with ``skip`` a ``CorruptRecord`` in the place of one that cannot be read.
          places: returns the origins of the records; called only if they are needed.
          key: the key of the epoch, for ``sample_seed``.
          seeds: whether the global generators are seeded for each record.
          skip: whether records that cannot be read, and those for which ``map_fn`` fails, are left out.

        Returns:
          The decoded records; and the messages for those that were left out, by their positions.

        Raises:
          SourceError: naming the place, if ``map_fn`` fails; the original is its ``__cause__``. Not with ``skip``.
        """
        map_fn = self.map_fn
        if map_fn is None and not skip:
            return records, {}
        decoded: list[Any] = []
        left_out: dict[int, str] = {}
        with Samples(key, seeds=seeds and map_fn is not None) as reading:
            reading.places = places
            for position, record in enumerate(records):
                reading.begin(position)
                if skip and isinstance(record, CorruptRecord):
                    left_out[position] = record.reason
                    continue
                try:
                    decoded.append(record if map_fn is None else map_fn(record))
                except Exception as error:
                    place = places()[position]
                    if not skip:
                        raise _undecodable(place, error) from error
                    problem = str(error) if isinstance(error, SourceError) else f"map_fn failed: {in_one_line(error)}"
                    left_out[position] = f"{one_line(place.file)}, record {place.record}: {problem}"
        return decoded, left_out

    def fingerprint(self) -> dict[str, Any]:
        """Plain facts that determine the records and their order; ranks compare them."""
        return {
            f"{self.kind} list": digest_of_list(self.names),
            f"number of {self.kind}s": len(self.names),
            f"first {self.kind}": self.names[0],
            self._shuffles[0]: self._shuffles[1],
            "shuffle_buffer": self._shuffle_buffer,
            "seed": self.seed,
            "cycle_length": self._cycle_length,
            "block_length": self._block_length,
        }

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next ``iter()``; later ones follow. Also for persistent loader workers.

        Counts as ``set_epoch`` of a loader that ``distribute_dataset`` made of the dataset.
        """
        self._epochs.announce(epoch)

    @property
    def epoch(self) -> int:
        """The epoch that ``set_epoch`` chose last, or that a distributed dataset of this began; 0 before. Local."""
        return self._epochs.last

    def __iter__(self) -> Iterator[Any]:
        """The decoded records of the next epoch; in a loader worker, this worker's part of them."""
        epoch = self._epochs.take()
        worker, num_workers = loader_worker()
        reader = self.read_epoch(epoch)
        return chain.from_iterable(self._own_samples(reader, epoch_key(self.seed, epoch), worker, num_workers))

    def _own_samples(self, reader: Interleave, key: int, worker: int, num_workers: int) -> Iterator[Iterable[Any]]:
        """The samples of a loader worker, in blocks: no Python code runs for a record that is not decoded."""
        with closing(reader):
            while records := reader.take_ready():
                own = slice(worker, None, num_workers)
                worker = (worker - len(records)) % num_workers
                if self.map_fn is None:
                    yield records[own]
                else:
                    places = partial(own_places, reader, len(records), own)
                    yield self._decoded_one_by_one(self.map_fn, records[own], places, key)

    @staticmethod
    def _decoded_one_by_one(
        map_fn: Callable[[Any], Any], records: Iterable[Any], places: FindPlaces, key: int
    ) -> Iterator[Any]:
        reading = Samples(key)
        reading.places = places
        call = calls_on(reading)
        for position, record in enumerate(records):
            reading.begin(position)
            try:
                decoded = call(map_fn, record)
            except Exception as error:
                raise _undecodable(places()[position], error) from error
            yield decoded

    def _open(
        self,
        epoch: int,
        skip: bool,  # noqa: FBT001 - for partial
        in_ranges: bool,  # noqa: FBT001 - as above
        schema: SchemaOfFiles,
        start: FileCursor,
    ) -> FragmentReader | NumberedReader:
        fragment = self._fragment(start.file)
        name, mark = fragment.name, partial(self._mark, fragment)
        if in_ranges and not skip and self.reads_ranges and self._files is not None:
            numbered = self._files.by_number(fragment)
            if numbered is not None:
                return NumberedReader(name, numbered, start, mark, schema)
        read: ReadFrom = partial(self._source.read, fragment)
        if self.flat_map_fn is not None:
            read = flat_mapped(read, self.flat_map_fn, name, skip=skip)
        if skip:
            read = with_corrupt_records(read, name)
        return FragmentReader(name, read, start, self._shuffle_buffer, (self.seed, epoch, start.file), mark, schema)

    def _mark(self, fragment: Fragment) -> tuple[int, str]:
        return (_mark_of(fragment), "") if self._files is None else self._files.mark(fragment)

    def _check_unchanged(self, places: Sequence[FileCursor]) -> None:
        fragments = [self._fragment(place.file) for place in places]
        if self._files is not None:
            self._files.check_unchanged(places, fragments)
            return
        for place, fragment in zip(places, fragments, strict=True):
            if place.size not in {-1, _mark_of(fragment)}:
                raise StateMismatch(
                    f"{one_line(fragment.name)}: the fragment has changed since the state was saved in the middle of "
                    "it; put it back as it was, or start the epoch anew"
                )

    def _check_place(self, place: ReaderCursor, dealt: int) -> None:
        for cursor in place.cursors:
            self._check_cursor(cursor)
        if place.opened > dealt:
            raise StateMismatch(
                f"the saved state has opened {place.opened} fresh {self.kind}s for a reader that is dealt {dealt}: it "
                f"belongs to another list of {self.kind}s, or is damaged; load a state of this dataset"
            )

    def _check_cursor(self, cursor: FileCursor) -> None:
        if not 0 <= cursor.file < len(self.names):
            raise StateMismatch(
                f"the saved state is in {self.kind} {cursor.file}, but the dataset has {len(self.names)} {self.kind}s; "
                "load a state of this dataset"
            )


def _of_files(place: Cursor) -> ReaderCursor:
    """The cursor of a reader of files.

    Raises:
      StateMismatch: it is the cursor of a mixture.
    """
    if not isinstance(place, ReaderCursor):
        raise StateMismatch("the saved state is that of a mixture, and the data is none; load a state of this dataset")
    return place


def own_places(reader: Reader, count: int, own: slice) -> list[RecordPlace]:
    """The origins of a loader worker's part of the ``count`` records that were taken last."""
    return reader.places(0, count)[own]


def _mark_of(fragment: Fragment) -> int:
    """An int that changes with the content of the fragment; -1 if changes cannot be detected."""
    facts = [fragment.num_records, fragment.num_bytes, fragment.fingerprint]
    if facts == [None, None, None]:
        return -1
    return int.from_bytes(hashlib.sha256(json.dumps(facts).encode()).digest()[:_MARK_BYTES], "big")


def _known_of_all(values: Sequence[int | None]) -> list[int] | None:
    """The values, if none is missing."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else None


def _undecodable(place: RecordPlace, error: Exception) -> SourceError:
    problem = f"map_fn failed on record {place.record}: {in_one_line(error)}"
    return SourceError(f"{one_line(place.file)}: {problem}", file=place.file)


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
        source = Files(
            files,
            read,
            storage_options=storage_options,
            compression=compression,
            fragment_bytes=fragment_bytes,
            cache=cache,
        )
        super().__init__(
            source,
            map_fn=map_fn,
            flat_map_fn=flat_map_fn,
            shuffle_fragments=shuffle_files,
            shuffle_buffer=shuffle_buffer,
            seed=seed,
            cycle_length=cycle_length,
            block_length=block_length,
        )

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files. Local."""
        assert self._files is not None
        return self._files.files
