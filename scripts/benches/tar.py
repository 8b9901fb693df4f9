"""Tar archives of WebDataset: samples of 1 KB and of 100 KB with a class, as batches of tensors, over 1 and 2 ranks.

LitData has an environment of its own: see ``benches/parquet.py`` for the command.
"""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, default_collate

import torchdistinput as tdi
from benches.files import READ, timed
from benches.model import Column, Contender, Measured, Table, Target, rate, total
from benches.peers import missing, peer

__all__ = ["tables"]

RATE = "samples/s"
LIMIT = "bare loop at known offsets"
BY_HAND = "DataLoader over tarfile"
WEBDATASET = "webdataset"
DATASETS = "datasets, streaming"
LITDATA = "litdata, over its own chunks"
FILES = 8
GLOBAL_BATCH = 64


def mine(folder: str) -> list[str]:
    """The archives of this rank."""
    return sorted(str(path) for path in Path(folder).iterdir())[dist.get_rank() :: dist.get_world_size()]


def share() -> int:
    """The batch size of a rank."""
    return GLOBAL_BATCH // dist.get_world_size()


def size_of(batch: Any) -> int:
    """The samples of a batch."""
    return len(batch[1])


def to_sample(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """What all contenders make of a sample."""
    return torch.frombuffer(bytearray(sample["bin"]), dtype=torch.uint8), int(sample["cls"])


class Bare:
    """The loop without a loader: each content at its offset, which was found before."""

    def __init__(self, names: Sequence[str]) -> None:
        self.places: list[tuple[str, list[tuple[int, int]]]] = []
        for name in names:
            with tarfile.open(name) as archive:
                self.places.append((name, [(member.offset_data, member.size) for member in archive]))

    def __iter__(self) -> Iterator[Any]:
        samples: list[tuple[torch.Tensor, int]] = []
        for name, places in self.places:
            with Path(name).open("rb") as file:
                contents = [None, None]
                for number, (offset, size) in enumerate(places):
                    file.seek(offset)
                    content: Any = file.read(size)
                    contents[number % 2] = content
                    if number % 2:
                        samples.append(to_sample({"bin": contents[0], "cls": contents[1]}))
                    if len(samples) == share():
                        yield default_collate(samples)
                        samples = []
        if samples:
            yield default_collate(samples)


class ByHand(IterableDataset[Any]):
    """Samples, as users read them with Python's ``tarfile``."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def __iter__(self) -> Iterator[Any]:
        for name in self.names:
            with tarfile.open(name, "r|") as archive:
                sample: dict[str, Any] = {}
                for member in archive:
                    content = archive.extractfile(member)
                    assert content is not None
                    sample[member.name.rpartition(".")[2]] = content.read()
                    if len(sample) == 2:
                        yield to_sample(sample)
                        sample = {}


def bare(folder: str, repeats: int) -> Measured:
    """The limit."""
    return measured(Bare(mine(folder)), folder, repeats)


def by_hand(folder: str, repeats: int) -> Measured:
    """torch, the archives dealt by hand."""
    return measured(DataLoader(ByHand(mine(folder)), share()), folder, repeats)


def webdataset(folder: str, repeats: int) -> Measured:
    """The package, which splits the archives by rank."""
    wds = peer("webdataset")
    data = wds.WebDataset(mine(folder), shardshuffle=False, nodesplitter=None).map(to_sample)
    return measured(DataLoader(data, share()), folder, repeats)


def litdata(folder: str, repeats: int) -> Measured:
    """LitData, over the same samples in chunks of its own."""
    of = peer("litdata")
    data = of.StreamingDataset(f"{folder}-litdata", drop_last=False)
    return measured(of.StreamingDataLoader(data, batch_size=share()), f"{folder}-litdata", repeats)


def write_litdata(folder: str) -> None:
    """Writes these chunks."""
    Path(f"{folder}-litdata").mkdir()
    writer = peer("litdata.streaming.writer").BinaryWriter(f"{folder}-litdata", chunk_bytes=1 << 24)
    for number, sample in enumerate(ByHand(sorted(str(path) for path in Path(folder).iterdir()))):
        writer.add_item(number, sample)
    writer.done()
    writer.merge(1)


def hugging_face(folder: str, repeats: int) -> Measured:
    """Datasets, streaming."""
    data = peer("datasets").load_dataset("webdataset", data_files=mine(folder), split="train", streaming=True)
    return measured(DataLoader(data, share(), collate_fn=decoded), folder, repeats)


def decoded(samples: list[dict[str, Any]]) -> Any:
    """The batch of decoded samples."""
    return default_collate([to_sample(sample) for sample in samples])


def ours(folder: str, repeats: int, policy: str) -> Measured:
    """A ``FileDataset`` under a policy."""
    names = sorted(str(path) for path in Path(folder).iterdir())
    data = tdi.FileDataset(names, tdi.readers.webdataset(keys=["bin", "cls"]), map_fn=to_sample)
    options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy[policy])
    with tdi.Strategy(["cpu"]).distribute_dataset(DataLoader(data, GLOBAL_BATCH), options) as dataset:
        return measured(dataset, folder, repeats)


def measured(loader: Iterable[Any], folder: str, repeats: int) -> Measured:
    """Whole epochs; then one more, whose bytes are counted."""
    return timed(loader, folder, repeats, size_of)


def write(folder: Path, samples: int, size: int) -> str:
    """Writes the archives as the package does, with a time of day before each member; returns their folder."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(FILES):
        with tarfile.open(folder / f"{number}.tar", "w") as archive:
            for sample in range(samples):
                for end, content in (("bin", random.bytes(size)), ("cls", b"%d" % (sample % 10))):
                    member = tarfile.TarInfo(f"{number}/{sample:06}.{end}")
                    member.size, member.mtime = len(content), time.time()
                    archive.addfile(member, io.BytesIO(content))
    return str(folder)


def tables(*, small: bool, folder: Path) -> Sequence[Table]:
    """Two sizes of samples, over one rank and two."""
    each = {"1 KB": (10, 1000) if small else (2000, 1000), "100 KB": (2, 100_000) if small else (150, 100_000)}
    written = {title: write(folder / title.replace(" ", ""), *sizes) for title, sizes in each.items()}
    if not missing(("litdata",)):
        for where in written.values():
            write_litdata(where)
    return [_table(title, where, world, small=small) for title, where in written.items() for world in (1, 2)]


def _table(title: str, folder: str, world: int, *, small: bool) -> Table:
    fast, slow = (folder, 1 if small else 5), (folder, 1)
    contenders = (
        Contender(LIMIT, "limit", bare, fast),
        Contender("FILE", "ours", ours, (*fast, "FILE")),
        Contender("DATA", "ours", ours, (*fast, "DATA")),
        Contender(BY_HAND, "before", by_hand, fast),
        Contender(WEBDATASET, "peer", webdataset, slow, ("webdataset",)),
        Contender(DATASETS, "peer", hugging_face, slow, ("datasets",), once=True),
        Contender(LITDATA, "peer", litdata, slow, ("litdata",), once=True),
    )
    targets = (
        Target(RATE, "FILE", 1.0, (BY_HAND, WEBDATASET, DATASETS)),
        Target(READ, "FILE", 1.01),
    )
    columns = (Column(RATE, "more", rate("samples", "seconds")), Column(READ, "less", total("read")))
    note = (
        "The bare loop reads no header. Grain, LitData and MosaicML's streaming read no tar archives: LitData has the "
        "samples in chunks of its own format, which are mapped to memory, so no target is set against it."
    )
    return Table(f"Tar archives, {title} samples", columns, contenders, world, 1 if small else 3, targets, note)
