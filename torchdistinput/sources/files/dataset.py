"""Datasets over files: which files, in which order, and the walk over their records.

Reading is apart from decoding: a *walk* yields what the reader yields, and ``map_fn`` is called only for the records
that somebody keeps. The order of a walk follows from (files, seed, epoch) and the order of files that it is given; it
does not depend on who walks or on how many processes do, so every rank and every loader worker can find its own part.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import chain, islice
from typing import Any, Final, final

import torch
from torch.utils.data import IterableDataset, get_worker_info

from torchdistinput.coordination.failures import in_one_line
from torchdistinput.errors import SourceError, StateMismatch
from torchdistinput.plan.file_resharding import FileCursor, ReaderCursor
from torchdistinput.plan.permutation import shuffled
from torchdistinput.sources.files.checks import as_object, check_callable, checked_int
from torchdistinput.sources.files.glob import FileNames, expand, listed
from torchdistinput.sources.files.interleave import Interleave
from torchdistinput.sources.files.io import OpenedFile, check_compression, file_size, open_file
from torchdistinput.sources.files.open_file import CorruptRecord, OpenFile, Read, RecordPlace
from torchdistinput.sources.files.plain_epochs import EpochCounter
from torchdistinput.sources.files.reader_api import Layout, blocks_of, kind_of, layout_of
from torchdistinput.sources.files.reading import RecordReader
from torchdistinput.sources.files.record_index import IndexFolder
from torchdistinput.sources.files.retry import one_line
from torchdistinput.sources.sample_seed import Samples, calls_on, epoch_key

__all__ = ["FileDataset", "list_files"]

_MAX_ASKED_AT_ONCE: Final = 8


def list_files(
    pattern: FileNames,
    *,
    shuffle: bool = False,
    seed: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Lists the files that match, in an order that is the same on every rank. Local: no communication.

    Args:
      pattern: a pattern, whose files come sorted by name, or a list of names and patterns, which keeps its order.
        Local, or with the protocol of any fsspec filesystem. ``**`` matches folders at any depth.
      shuffle: whether to permute the whole list by the seed.
      seed: an int that all ranks share; needed for shuffling, and for nothing else.
      storage_options: arguments of the filesystem.

    Returns:
      Names as the user wrote them, with the wildcards filled in: a relative pattern gives relative names.

    Raises:
      ValueError: if the list is empty, or if ``shuffle_sampler`` has no seed.
      SourceError: if a pattern matches no file.
    """
    if shuffle and seed is None:
        raise ValueError(
            "list_files(shuffle=True) needs a seed: without one every rank would shuffle differently, so that some "
            "files would be read twice and others never; give the same seed on all ranks"
        )
    names = expand(pattern, storage_options)
    if not shuffle:
        return names
    return [names[index] for index in shuffled(len(names), checked_int("seed", seed))]


@final
class FileDataset(IterableDataset[Any]):
    """The records of files, as a torch ``IterableDataset`` that the library can divide by files.

    Given to ``strategy.distribute_dataset``, alone or in a ``DataLoader``, its files are dealt to the workers, or its
    records divided, by the policy. In plain torch it is an ordinary dataset: with loader workers, record ``j`` comes
    from worker ``j mod num_workers``, and every record comes once.

    **Epochs in plain torch.** Each ``iter()`` is the next epoch, starting from 0 or from what ``set_epoch`` said.
    Loader workers are copies of the dataset: with ``persistent_workers=True`` they count on by themselves, and
    ``set_epoch`` reaches them; without, each epoch starts new copies, and ``set_epoch`` must be called before each
    epoch for a new order, as with torch's ``DistributedSampler``.

    **What is read.** Where a rank, or a loader worker, needs only a part of each batch (policy DATA; several loader
    workers), it reads nothing else of an uncompressed file whose records can be found without reading it: those of
    ``fixed_length_records`` and ``npy_rows`` by the size of the file; those of ``text_lines``, ``json_lines`` and
    ``tfrecords`` by an index. Of all others, and with a ``shuffle_buffer``, it reads everything, and decodes its part.

    Args:
      files: a pattern, or a list of names and patterns, as for ``list_files``. A name that stands in a list twice is
        read twice. Names are opened only when they are read.
      read: takes a binary file object and yields the records in it; see ``readers``. A resumed run seeks where it was
        left, if the reader can be entered again (``readers.in_blocks``), and else reads its open files from the front.
      map_fn: decodes a record, for example into tensors; called only for records that are kept. ``None`` keeps them.
      shuffle_files: whether each epoch has its own order of the files.
      shuffle_buffer: records of a file that are shuffled together, and so held in memory, for each open file; 0: none.
      seed: an int, the same on every rank.
      cycle_length: files that are open at the same time, their records interleaved.
      block_length: records that are taken from one of them in turn.
      storage_options: arguments of the fsspec filesystem.
      compression: ``"infer"`` by the ends of the names, a name that fsspec knows, or ``None`` for the bytes as stored.
      index_folder: a local folder, seen by all ranks, for indices of the files; see ``build_index``. ``None``: without.

    Raises:
      TypeError, ValueError: for arguments that cannot be right.
      SourceError: if a pattern matches no file; while reading, naming the file, if one is missing, unreadable or
        damaged.
    """

    def __init__(  # noqa: PLR0913 - fixed by the design: one dataset is one call
        self,
        files: FileNames,
        read: Read,
        *,
        map_fn: Callable[[Any], Any] | None = None,
        shuffle_files: bool = False,
        shuffle_buffer: int = 0,
        seed: int = 0,
        cycle_length: int = 1,
        block_length: int = 1,
        storage_options: Mapping[str, Any] | None = None,
        compression: str | None = "infer",
        index_folder: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        check_callable("read", read)
        if map_fn is not None:
            check_callable("map_fn", map_fn)
        if not isinstance(as_object(shuffle_files), bool):
            raise TypeError(f"shuffle_files must be True or False, got {shuffle_files!r}")
        if storage_options is not None and not isinstance(as_object(storage_options), Mapping):
            raise TypeError(f"storage_options must be a mapping of argument names to values, got {storage_options!r}")
        check_compression(compression)
        self.map_fn = map_fn
        self._read = read
        self.seed = checked_int("seed", seed)
        self._shuffle_files = shuffle_files
        self._shuffle_buffer = checked_int("shuffle_buffer", shuffle_buffer, at_least=0)
        self._cycle_length = checked_int("cycle_length", cycle_length, at_least=1)
        self._block_length = checked_int("block_length", block_length, at_least=1)
        self._storage_options = None if storage_options is None else dict(storage_options)
        self._compression = compression
        self._indices = None if index_folder is None else IndexFolder(index_folder, read)
        found = listed(files, storage_options)
        self.files: tuple[str, ...] = tuple(each.name for each in found)
        self._sizes = tuple(each.size for each in found)
        self._records: list[int] | None = None
        self._epochs = EpochCounter()

    @property
    def has_index(self) -> bool:
        """Whether it has a folder for indices. Local."""
        return self._indices is not None

    @property
    def listed_sizes(self) -> list[int] | None:
        """The stored sizes of ``dataset`` in bytes, where all of them were told by listing folders. Local."""
        sizes = [size for size in self._sizes if size is not None]
        return sizes if len(sizes) == len(self._sizes) else None

    def records_of_files(self) -> list[int] | None:
        """How many records each of ``dataset`` has, where all have an index in ``index_folder``. Local.

        Returns:
          ``None`` where some has no index yet (compressed files never have one), or has changed since.

        Raises:
          SourceError: naming a file that is missing or cannot be asked for its size.
        """
        if self._indices is not None and self._records is None:
            with ThreadPoolExecutor(min(_MAX_ASKED_AT_ONCE, len(self.files))) as pool:
                found = [*pool.map(self._records_of, range(len(self.files)))]
            known = [records for records in found if records is not None]
            self._records = known if len(known) == len(found) else None
        return self._records

    def _records_of(self, index: int) -> int | None:
        indices, name, size = self._indices, self.files[index], self._sizes[index]
        if indices is None or not indices.has(name):
            return None
        return indices.records(name, file_size(name, self._storage_options) if size is None else size)

    @property
    def yields_strings(self) -> bool:
        """Whether its records are strings for certain. Local."""
        return self.map_fn is None and kind_of(self._read) == "strings"

    @property
    def yields_rows(self) -> bool:
        """Whether its records are rows of arrays, or tensors of their memory. Local."""
        return kind_of(self._read) == "rows" and self.map_fn in (None, torch.from_numpy)

    def file_order(self, epoch: int) -> list[int]:
        """The indices of ``dataset`` in the order of an epoch; before they are dealt to workers."""
        if not self._shuffle_files:
            return list(range(len(self.files)))
        return shuffled(len(self.files), self.seed, epoch)

    def build_index(self, worker: int = 0, num_workers: int = 1) -> int:
        """Makes the indices that are missing in ``index_folder``, of every ``num_workers``-th file. Local.

        ``distribute_dataset`` does so where it will need them, each rank its part, while the others wait for at most
        ``timeout_seconds``. For much data, do it before, in as many processes as you like. Each file is read once. An
        index is a few bytes a record; remove the folder when you no longer need it.

        Args:
          worker: begins with this file.
          num_workers: and goes on by so many.

        Returns:
          How many were made.

        Raises:
          ValueError: the dataset has no ``index_folder``.
          SourceError: naming the file that cannot be read.
        """
        if self._indices is None:
            raise ValueError("this FileDataset has no index_folder; give one that all ranks see")
        names = list(dict.fromkeys(self.files))[worker::num_workers]
        return sum(self._build_index(self._indices, name) for name in names)

    def _build_index(self, indices: IndexFolder, name: str) -> bool:
        if indices.has(name):
            return False
        with closing(open_file(name, self._compression, self._storage_options)) as opened:
            if opened.plain:
                indices.build(opened)
            return opened.plain

    def walk(
        self,
        order: Sequence[int],
        epoch: int,
        place: ReaderCursor | None = None,
        *,
        skip: bool = False,
        in_ranges: bool = False,
    ) -> RecordReader:
        """Walks over the undecoded records of some files. Files are opened as the walk comes to them.

        Args:
          order: indices of ``dataset``, in the order in which they are to be opened: the fresh ones, see
            ``plan.file_resharding``.
          epoch: which epoch's shuffle the records are in.
          place: where an earlier walk over the same fresh files was left, or what was dealt of an earlier world.
          skip: whether a ``CorruptRecord`` stands for a record that cannot be read, where it is certain how to go on.
          in_ranges: whether records are taken by ``reserve`` only, which reads but some of them where it can.

        Raises:
          IndexError: if there is no such file.
          StateMismatch: if the place is in a file that the dataset does not have.
        """
        for index in order:
            if not 0 <= index < len(self.files):
                raise IndexError(f"there is no file {index}: the dataset has {len(self.files)} files")
        if place is not None:
            self._check_place(place, len(order))
        open_lane = partial(self._lane, epoch, skip, in_ranges)
        table = Interleave(order, open_lane, self._cycle_length, self._block_length, place or ReaderCursor())
        return RecordReader(table)

    def check_unchanged(self, places: Iterable[FileCursor]) -> None:
        """Asks whether files that are to be entered again are there, in the size that they had. Local.

        Args:
          places: where they were left.

        Raises:
          StateMismatch: naming the file and both sizes, or the file that is gone.
          SourceError: naming the file, if it cannot be asked.
        """
        lanes = {lane.file: lane for lane in places}
        for lane in lanes.values():
            self._check_lane(lane)
        if not lanes:
            return
        with ThreadPoolExecutor(min(_MAX_ASKED_AT_ONCE, len(lanes))) as pool:
            for lane, size in zip(lanes.values(), pool.map(self._stored_size, lanes), strict=True):
                if size is not None and lane.size not in {-1, size}:
                    raise StateMismatch(
                        f"{one_line(self.files[lane.file])}: the file has {size} bytes, but had {lane.size} when the "
                        "state was saved, in the middle of it; put the file back as it was, or start the epoch anew"
                    )

    def decode(
        self, records: list[Any], places: Callable[[], Sequence[RecordPlace]], key: int, *, seeds: bool = False
    ) -> list[Any]:
        """Applies ``map_fn`` to records.

        Args:
          records: undecoded records.
          places: tells where they come from; called only if that is asked for.
          key: the word of the epoch, for ``sample_seed``.
          seeds: whether the global generators are seeded for each record.

        Raises:
          SourceError: naming the place, if ``map_fn`` fails; the original is its ``__cause__``.
        """
        map_fn = self.map_fn
        if map_fn is None:
            return records
        decoded: list[Any] = []
        with Samples(key, seeds=seeds) as reading:
            reading.places = places
            try:
                for position, record in enumerate(records):
                    reading.begin(position)
                    decoded.append(map_fn(record))
            except Exception as error:
                raise _undecodable(places()[reading.index], error) from error
        return decoded

    def decode_readable(
        self, records: list[Any], places: Callable[[], Sequence[RecordPlace]], key: int, *, seeds: bool = False
    ) -> tuple[list[Any], dict[int, str]]:
        """Applies ``map_fn`` to the records that can be read, and leaves out those for which it fails.

        Args:
          records: undecoded records, or ``CorruptRecord`` in their place.
          places: tells where they come from; called only if that is asked for, and where one is left out.
          key: the word of the epoch, for ``sample_seed``.
          seeds: whether the global generators are seeded for each record.

        Returns:
          The decoded ones; and, by their positions, what is to be told of the others.
        """
        decoded: list[Any] = []
        left_out: dict[int, str] = {}
        with Samples(key, seeds=seeds and self.map_fn is not None) as reading:
            reading.places = places
            for position, record in enumerate(records):
                reading.begin(position)
                if isinstance(record, CorruptRecord):
                    left_out[position] = record.reason
                    continue
                try:
                    decoded.append(record if self.map_fn is None else self.map_fn(record))
                except Exception as error:
                    place = places()[position]
                    left_out[position] = (
                        f"{one_line(place.file)}, record {place.record}: map_fn failed: {in_one_line(error)}"
                    )
        return decoded, left_out

    def fingerprint(self) -> dict[str, Any]:
        """Plain facts that decide which records come in which order; ranks compare them."""
        names = json.dumps(self.files)  # a name may hold whatever else could separate them
        return {
            "number of files": len(self.files),
            "file list": hashlib.sha256(names.encode()).hexdigest()[:16],
            "first file": self.files[0],
            "shuffle_files": self._shuffle_files,
            "shuffle_buffer": self._shuffle_buffer,
            "seed": self.seed,
            "cycle_length": self._cycle_length,
            "block_length": self._block_length,
        }

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next ``iter()``; later ones follow. Also for loader workers that live on."""
        self._epochs.announce(checked_int("epoch", epoch))

    def __iter__(self) -> Iterator[Any]:
        """The decoded records of the next epoch; in a loader worker, this worker's share of them."""
        epoch = self._epochs.take()
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        walk = self.walk(self.file_order(epoch), epoch)
        if self.map_fn is None:  # no Python code runs for a record of a block
            return chain.from_iterable(self._undecoded(walk, worker, num_workers))
        read = partial(calls_on(walk, epoch_key(self.seed, epoch)), self.map_fn)
        return self._decoded(walk, read, worker, num_workers)

    def _undecoded(self, walk: RecordReader, worker: int, num_workers: int) -> Iterator[Iterable[Any]]:
        with closing(walk):
            if blocks_of(self._read) is None:
                yield islice(walk, worker, None, num_workers)
                return
            while records := walk.take_ready():
                yield records[worker::num_workers]
                worker = (worker - len(records)) % num_workers

    def _decoded(self, walk: RecordReader, read: Callable[[Any], Any], worker: int, num_workers: int) -> Iterator[Any]:
        with closing(walk):
            for record in islice(walk, worker, None, num_workers):
                try:
                    decoded = read(record)
                except Exception as error:
                    raise _undecodable(walk.place, error) from error
                yield decoded

    def _lane(self, epoch: int, skip: bool, in_ranges: bool, start: FileCursor) -> OpenFile:  # noqa: FBT001 - for partial
        name = self.files[start.file]
        opened = open_file(name, self._compression, self._storage_options)
        try:
            layout = self._layout(opened) if in_ranges else None
        except BaseException:
            opened.close()
            raise
        key = (self.seed, epoch, start.file)
        return OpenFile(name, opened, self._read, self._shuffle_buffer, key, start, skip=skip, layout=layout)

    def _layout(self, opened: OpenedFile) -> Layout | None:
        """Where the records of a file are, as far as that is known without reading it."""
        if self._shuffle_buffer or not opened.plain or opened.size < 0:
            return None
        if self._indices is not None:
            return self._indices.layout(opened)
        known = layout_of(self._read)
        layout = None if known is None else known(opened.stream, opened.size)
        opened.stream.seek(0)
        return layout

    def _stored_size(self, index: int) -> int | None:
        name = self.files[index]
        try:
            return file_size(name, self._storage_options)
        except SourceError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            raise StateMismatch(
                f"{one_line(name)}: the file is gone, but the saved state is in the middle of it; put it back, or "
                "start the epoch anew"
            ) from error

    def _check_place(self, place: ReaderCursor, dealt: int) -> None:
        for lane in place.lanes:
            self._check_lane(lane)
        if place.opened > dealt:
            raise StateMismatch(
                f"the saved state has opened {place.opened} fresh files of a walk that is dealt {dealt}: it belongs to "
                "another list of files, or is damaged; load a state of this dataset"
            )

    def _check_lane(self, lane: FileCursor) -> None:
        if not 0 <= lane.file < len(self.files):
            raise StateMismatch(
                f"the saved state is in file {lane.file}, but the dataset has {len(self.files)} files; load a state "
                "of this dataset"
            )


def _undecodable(place: RecordPlace, error: Exception) -> SourceError:
    return SourceError(
        f"{one_line(place.file)}: map_fn failed on record {place.record}: {in_one_line(error)}", file=place.file
    )
