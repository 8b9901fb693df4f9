"""Files over two ranks: 400,000 lines of text, in even files and half of it in the first; rows of 16 float32."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

import torchdistinput as tdi
from benches.model import Column, Contender, Measured, Table, Target, rate, total
from benches.peers import peer
from benches.timing import epochs

__all__ = ["tables"]

RATE = "records/s"
FIRST = "records/s in the first epoch"
READ = "bytes read over bytes there"
SHARE = "largest share over the mean"
BY_SIZE = "FILE by size, in parts of 1 MiB"
LIMIT = "bare loop on files[rank::2]"
BY_HAND = "DataLoader on files[rank::2]"
CACHED = "FILE, remote, from the cache"
FILES = 8
WORLD = 2
GLOBAL_BATCH = 512
WIDTH = 16
LINE = "a line of text, about as long as they are in the wild: {:09d}\n"


def names(folder: str) -> list[str]:
    """The files, in order."""
    return sorted(str(path) for path in Path(folder).iterdir())


def bytes_read() -> int:
    """By this process and its live loader workers, by the kernel's count."""
    pids = [child.pid for child in multiprocessing.active_children()]
    return sum(int(Path(f"/proc/{pid}/io").read_text().split()[1]) for pid in ["self", *pids])


def timed(loader: Iterable[Any], folder: str, repeats: int, count: Callable[[Any], int] = len) -> Measured:
    """Whole epochs; then one more, whose bytes are counted."""
    found = epochs(loader, count, repeats=repeats, steps_ahead=0)
    before = bytes_read()
    for _ in loader:
        pass
    there = sum(Path(name).stat().st_size for name in names(folder))
    return {**found, "read": (bytes_read() - before) / there}


class Lines(IterableDataset[str]):
    """Lines, as users read them."""

    def __init__(self, files: Sequence[str]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[str]:
        for name in self.files:
            with Path(name).open(encoding="utf-8") as file:
                for line in file:
                    yield line[:-1]


class Batches:
    """The loop without a loader."""

    def __init__(self, files: Sequence[str]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[list[str]]:
        batch: list[str] = []
        for name in self.files:
            with Path(name).open(encoding="utf-8") as file:
                for line in file:
                    batch.append(line[:-1])
                    if len(batch) == GLOBAL_BATCH // WORLD:
                        yield batch
                        batch = []
        if batch:
            yield batch


def mine(folder: str) -> list[str]:
    """The files of this rank."""
    return names(folder)[dist.get_rank() :: WORLD]


def bare(folder: str, repeats: int) -> Measured:
    """The limit."""
    return timed(Batches(mine(folder)), folder, repeats)


def by_hand(folder: str, repeats: int) -> Measured:
    """torch, the files dealt by hand."""
    return timed(DataLoader(Lines(mine(folder)), GLOBAL_BATCH // WORLD), folder, repeats)


def accelerated(folder: str, repeats: int) -> Measured:
    """Accelerate: every rank reads all."""
    accelerate = peer("accelerate")
    config = accelerate.DataLoaderConfiguration(dispatch_batches=False, even_batches=False)
    loader = accelerate.Accelerator(cpu=True, dataloader_config=config).prepare(
        DataLoader(Lines(names(folder)), GLOBAL_BATCH // WORLD)
    )
    return timed(loader, folder, repeats)


def hugging_face(folder: str, repeats: int) -> Measured:
    """Datasets, streaming, split by node."""
    datasets = peer("datasets")
    lines = datasets.load_dataset("text", data_files=names(folder), split="train", streaming=True)
    part = peer("datasets.distributed").split_dataset_by_node(lines, dist.get_rank(), WORLD)
    return timed(DataLoader(part, GLOBAL_BATCH // WORLD, collate_fn=_texts), folder, repeats)


def _texts(samples: list[dict[str, str]]) -> list[str]:
    return [sample["text"] for sample in samples]


def text(folder: str, repeats: int, policy: str, workers: int) -> Measured:
    """Ours, over lines."""
    return ours(tdi.FileDataset(names(folder), tdi.readers.text_lines), folder, repeats, policy, workers)


def by_size(folder: str, repeats: int, fragment_bytes: int) -> Measured:
    """Ours, the files in parts, which are dealt by their sizes."""
    data = tdi.FileDataset(names(folder), tdi.readers.text_lines, fragment_bytes=fragment_bytes)
    options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.FILE, file_assignment="by_size")
    with tdi.Strategy(["cpu"]).distribute_dataset(DataLoader(data, GLOBAL_BATCH), options) as dataset:
        return timed(dataset, folder, repeats)


def cached(folder: str, repeats: int, copies: str) -> Measured:
    """Ours, over lines of a filesystem that is not local, from the second epoch on, when they are in the cache."""
    far = fsspec.filesystem("memory")
    for name in names(folder):
        far.pipe(f"/far/{Path(name).name}", Path(name).read_bytes())
    data = tdi.FileDataset("memory://far/*", tdi.readers.text_lines, cache=copies)
    return ours(data, folder, repeats, "FILE", 0)


def npy(folder: str, repeats: int, policy: str) -> Measured:
    """Ours, over the rows of arrays."""
    data = tdi.FileDataset(names(folder), tdi.readers.npy_rows)
    return ours(data, folder, repeats, policy, 0)


def fixed(folder: str, repeats: int, policy: str) -> Measured:
    """Ours, over records of a fixed length."""
    read = tdi.readers.fixed_length_records(4 * WIDTH)
    return ours(tdi.FileDataset(names(folder), read), folder, repeats, policy, 0)


def ours(data: tdi.FileDataset, folder: str, repeats: int, policy: str, workers: int) -> Measured:
    """A ``FileDataset`` under a policy."""
    options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy[policy])
    loader = DataLoader(data, GLOBAL_BATCH, num_workers=workers, persistent_workers=workers > 0)
    with tdi.Strategy(["cpu"]).distribute_dataset(loader, options) as dataset:
        return timed(dataset, folder, repeats)


def bare_rows(folder: str, repeats: int) -> Measured:
    """The rank's rows of every batch, through a memory map."""
    return timed(Rows(names(folder)), folder, repeats)


class Rows:
    """This rank's part of each batch of arrays."""

    def __init__(self, files: Sequence[str]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[Any]:
        share = GLOBAL_BATCH // WORLD
        for name in self.files:
            rows = np.load(name, mmap_mode="r")
            for start in range(dist.get_rank() * share, len(rows), GLOBAL_BATCH):
                yield torch.from_numpy(np.array(rows[start : start + share]))


def write(folder: Path, sizes: Sequence[int], one: Callable[[Path, int], None]) -> str:
    """Writes the files of a table; returns their folder."""
    folder.mkdir()
    for number, size in enumerate(sizes):
        one(folder / f"{number}", size)
    return str(folder)


def write_lines(path: Path, size: int) -> None:
    """Text."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(map(LINE.format, range(size)))


def write_array(path: Path, size: int) -> None:
    """One array."""
    with path.open("wb") as file:
        np.save(file, np.arange(size * WIDTH, dtype=np.float32).reshape(size, WIDTH))


def write_records(path: Path, size: int) -> None:
    """The same without a header."""
    path.write_bytes(np.arange(size * WIDTH, dtype=np.float32).tobytes())


def tables(*, small: bool, folder: Path) -> Sequence[Table]:
    """Even and skewed text; formats that can be entered anywhere."""
    each = 1_000 if small else 50_000
    even, skewed = [each] * FILES, [each * FILES // 2, *[each * FILES // 30] * 15]
    return [
        _text("Text lines, even files", write(folder / "even", even, write_lines), small=small),
        _text(
            "Text lines, half of all in the first of 16 files",
            write(folder / "skewed", skewed, write_lines),
            small=small,
        ),
        _rows(write(folder / "npy", even, write_array), write(folder / "fixed", even, write_records), small=small),
    ]


def largest_share(ranks: Sequence[Measured]) -> float:
    """The samples of the rank with the most, over the mean."""
    samples = [rank["samples"] for rank in ranks]
    return max(samples) * len(samples) / sum(samples)


COLUMNS = (
    Column(RATE, "more", rate("samples", "seconds")),
    Column(FIRST, "more", rate("samples", "first")),
    Column(READ, "less", total("read")),
    Column(SHARE, "less", largest_share),
)


def _text(title: str, folder: str, *, small: bool) -> Table:
    fast, slow = (folder, 1 if small else 5), (folder, 1)
    contenders = (
        Contender(LIMIT, "limit", bare, fast),
        Contender("FILE", "ours", text, (*fast, "FILE", 0)),
        Contender(BY_SIZE, "ours", by_size, (*fast, 10_000 if small else 1 << 20)),
        Contender(CACHED, "ours", cached, (*fast, f"{folder}-copies")),
        Contender("FILE, 1 loader worker a rank", "ours", text, (*fast, "FILE", 1)),
        Contender("DATA", "ours", text, (*fast, "DATA", 0)),
        Contender(BY_HAND, "before", by_hand, fast),
        Contender("datasets, split_dataset_by_node", "peer", hugging_face, slow, ("datasets",), once=True),
        Contender("accelerate, every rank reads all", "peer", accelerated, slow, ("accelerate",), once=True),
    )
    targets = (
        Target(RATE, "FILE", 0.9, (LIMIT,)),
        Target(RATE, "FILE", 1.0, (BY_HAND,)),
        Target(FIRST, "FILE", 1.0, (BY_HAND,)),
        Target(RATE, CACHED, 0.9, ("FILE",)),
        Target(READ, "FILE", 1.01),
        Target(SHARE, BY_SIZE, 1.05),
        Target(READ, BY_SIZE, 1.05),
    )
    return Table(title, COLUMNS, contenders, WORLD, 1 if small else 3, targets)


def _rows(arrays: str, records: str, *, small: bool) -> Table:
    repeats = 1 if small else 3
    contenders = (
        Contender("bare loop over memory-mapped .npy", "limit", bare_rows, (arrays, repeats)),
        Contender(".npy, DATA", "ours", npy, (arrays, repeats, "DATA")),
        Contender(".npy, FILE", "ours", npy, (arrays, repeats, "FILE")),
        Contender("fixed length, DATA", "ours", fixed, (records, repeats, "DATA")),
        Contender("fixed length, FILE", "ours", fixed, (records, repeats, "FILE")),
    )
    targets = tuple(Target(READ, name, 1.05) for name in (".npy, DATA", "fixed length, DATA"))
    note = "The bare loop reads through a memory map, which the kernel does not count."
    return Table("Rows of 64 bytes", COLUMNS, contenders, WORLD, 1 if small else 3, targets, note)
