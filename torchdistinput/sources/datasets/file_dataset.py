"""``FileDataset`` and ``list_files``: datasets of records in files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, final

from torchdistinput.plan.permutation import shuffled
from torchdistinput.sources.checks import checked_int
from torchdistinput.sources.datasets.fragment_dataset import FragmentDataset
from torchdistinput.sources.formats.reader_api import Read
from torchdistinput.sources.readers.files import Files
from torchdistinput.sources.readers.flat_map import FlatMap
from torchdistinput.sources.storage.glob import FileNames, ListedName, expand


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
