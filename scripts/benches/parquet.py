"""Parquet: 4 files of 500,000 records with 8 numbers and a text, as columns, over one rank and two.

Under DATA a rank needs some rows of each global batch, and so of each row group. pyarrow decodes row groups whole, and
ranks exchange no samples, so at two ranks each row group is decoded twice. The bare loop over ``files[rank::2]``
decodes it once, but its batches are not those of one process. The limit for DATA is the loop that cuts its part out of
the global batches of all files; the table has both.

The limits do not wait for another rank. Ours agree on each step, as ranks that train together must, some 4,000 times a
second here: so at two processes there is also the loop by hand that adds up one number of all ranks at each step.

LitData has an environment of its own (``scripts/test_apart``), where the same command measures it too:
``.venv-apart/bin/python scripts/bench.py parquet tar``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import torchdistinput as tdi
from benches.model import Column, Contender, Measured, Table, Target, rate
from benches.peers import missing, peer
from benches.timing import epochs

__all__ = ["tables"]

RATE = "records/s"
COLUMNS_LIMIT = "pyarrow iter_batches on files[rank::world], to tensors"
CUT_LIMIT = "pyarrow iter_batches on all files, this rank's part of each global batch"
ROWS_LIMIT = "pyarrow iter_batches on files[rank::world], to a dict a record"
AGREES = ", with an all_reduce of one number each step"
LIMITS = "Under DATA each rank decodes all row groups, as pyarrow decodes no part of one; so does the second loop."
FILES, GLOBAL_BATCH = 4, 4096
NUMBERS = [f"n{number}" for number in range(8)]


def names(folder: str) -> list[str]:
    """The files, in order."""
    return sorted(str(path) for path in Path(folder).iterdir())


def world() -> tuple[int, int]:
    """This rank, and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def mine(folder: str) -> list[str]:
    """The files of this rank."""
    rank, size = world()
    return names(folder)[rank::size]


class Bare:
    """The loop without a loader.

    Args:
      limit: which of the limits it is.
    """

    def __init__(self, folder: str, limit: str) -> None:
        self.limit = limit.removesuffix(AGREES)
        self.files = names(folder) if self.limit == CUT_LIMIT else mine(folder)
        self.agrees = limit.endswith(AGREES)

    def __iter__(self) -> Iterator[Any]:
        """The batches."""
        number = torch.zeros(1)
        for batch in self._batches():
            yield batch
            if self.agrees:
                dist.all_reduce(number)

    def _batches(self) -> Iterator[Any]:
        parquet = peer("pyarrow.parquet")
        rank, size = world()
        share = GLOBAL_BATCH // size
        for name in self.files:
            with parquet.ParquetFile(name) as file:
                for batch in file.iter_batches(GLOBAL_BATCH if self.limit == CUT_LIMIT else share, columns=NUMBERS):
                    yield as_tensors(batch.slice(rank * share, share) if self.limit == CUT_LIMIT else batch)


def as_tensors(batch: Any) -> dict[str, torch.Tensor]:
    """Columns in memory of their own, as a training step may change them."""
    return {name: torch.tensor(column.to_numpy()) for name, column in zip(batch.schema.names, batch, strict=True)}


def num_records(batch: Any) -> int:
    """The records of a batch of any contender."""
    return len(batch[NUMBERS[0]]) if isinstance(batch, dict) else len(batch)


def timed(loader: Iterable[Any], repeats: int) -> Measured:
    """Whole epochs."""
    return epochs(loader, num_records, repeats=repeats, steps_ahead=0)


def bare_columns(folder: str, repeats: int, limit: str) -> Measured:
    """A limit."""
    return timed(Bare(folder, limit), repeats)


def columns(folder: str, repeats: int, policy: str) -> Measured:
    """A ``FileDataset`` under a policy."""
    files = tdi.FileDataset(names(folder), tdi.readers.parquet(NUMBERS))
    chosen = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy[policy])
    with tdi.Strategy(["cpu"]).distribute_dataset(files, chosen, global_batch_size=GLOBAL_BATCH) as dataset:
        return timed(dataset, repeats)


def rows(folder: str, repeats: int) -> Measured:
    """A ``FileDataset`` whose ``map_fn`` gets each record, under FILE; its batches are lists."""
    files = tdi.FileDataset(names(folder), tdi.readers.parquet(NUMBERS), map_fn=_mapped)
    with tdi.Strategy(["cpu"]).distribute_dataset(files, global_batch_size=GLOBAL_BATCH, collate_fn=_itself) as dataset:
        return timed(dataset, repeats)


class BareRows(Bare):
    """The loop that makes the same records, of the same values, and calls the same function of each."""

    def _batches(self) -> Iterator[Any]:
        parquet, share = peer("pyarrow.parquet"), GLOBAL_BATCH // world()[1]
        for name in self.files:
            with parquet.ParquetFile(name) as file:
                for batch in file.iter_batches(share, columns=NUMBERS):
                    arrays = [column.to_numpy() for column in batch]
                    values = [each.tolist() if each.dtype == np.float64 else each.copy() for each in arrays]
                    yield [_mapped(dict(zip(NUMBERS, row, strict=True))) for row in zip(*values, strict=True)]


def bare_rows(folder: str, repeats: int) -> Measured:
    """The limit of rows."""
    return timed(BareRows(folder, ROWS_LIMIT), repeats)


def _mapped(record: dict[str, Any]) -> dict[str, Any]:
    return record


def _itself(batch: Any) -> Any:
    return batch


def hugging_face(folder: str, repeats: int) -> Measured:
    """Datasets, streaming, split by node, in batches of Arrow."""
    rank, size = world()
    load = peer("datasets").load_dataset
    stream = load("parquet", data_files=names(folder), split="train", streaming=True, columns=NUMBERS)
    part = peer("datasets.distributed").split_dataset_by_node(stream, rank, size).with_format("torch")
    return timed(DataLoader(part.batch(GLOBAL_BATCH // size), batch_size=None), repeats)


def fragments(folder: str, repeats: int) -> Measured:
    """A streaming dataset as fragments of ours, in columns, under FILE."""
    load = peer("datasets").load_dataset
    stream = load("parquet", data_files=names(folder), split="train", streaming=True, columns=NUMBERS)
    source = peer("torchdistinput.integrations.datasets").fragments(stream.with_format("arrow"))
    chosen = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.FILE)
    with tdi.Strategy(["cpu"]).distribute_dataset(source, chosen, global_batch_size=GLOBAL_BATCH) as dataset:
        return timed(dataset, repeats)


def grain(folder: str, repeats: int) -> Measured:
    """Grain's reader of Parquet files, file by file, batched."""
    of = peer("grain")
    part: Any = of.experimental.ParquetIterDataset
    files = of.MapDataset.source(mine(folder)).map(part)
    data = of.experimental.InterleaveIterDataset(files, cycle_length=1)
    return timed(data.map(_numbers).batch(GLOBAL_BATCH // world()[1]), repeats)


def litdata(folder: str, repeats: int) -> Measured:
    """LitData's reader of Parquet files, over an index of them."""
    of, loaders = peer("litdata"), peer("litdata.streaming.item_loader")
    read = loaders.ParquetLoader(columns=NUMBERS)
    data = of.StreamingDataset(f"{folder}-litdata", item_loader=read, drop_last=False)
    return timed(of.StreamingDataLoader(data, batch_size=GLOBAL_BATCH // world()[1]), repeats)


def index_for_litdata(folder: str) -> None:
    """Makes this index, beside copies of the files."""
    shutil.copytree(folder, f"{folder}-litdata")
    peer("litdata").index_parquet_dataset(f"{folder}-litdata")


def _numbers(record: dict[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in NUMBERS}


def write(folder: Path, records: int) -> str:
    """The files; numbers of several types, and a text."""
    pa, parquet = peer("pyarrow"), peer("pyarrow.parquet")
    folder.mkdir()
    for number in range(FILES):
        random = np.random.default_rng(number)
        of = {name: random.random(records).astype("f4" if place % 2 else "f8") for place, name in enumerate(NUMBERS)}
        text = [f"record {each} of file {number}" for each in range(records)]
        parquet.write_table(pa.table({**of, "text": text}), folder / f"{number}.parquet", row_group_size=100_000)
    return str(folder)


def tables(*, small: bool, folder: Path) -> Sequence[Table]:
    """Columns, over one rank and two."""
    records, repeats = 2_000 if small else 500_000, 1 if small else 3
    where, less = write(folder / "parquet", records), write(folder / "less", records // 10)  # for what is slow
    if not missing(("litdata", "polars")):
        index_for_litdata(less)
    found = []
    for size in (1, 2):
        fast, slow = (where, repeats), (less, 1)
        column_limits: tuple[str, ...] = (COLUMNS_LIMIT, CUT_LIMIT)
        if size == 1:  # they all do the same
            column_limits = column_limits[:1]
        agreeing = [] if size == 1 else [CUT_LIMIT + AGREES]
        found.append(
            Table(
                f"Parquet as columns, {size} process(es)",
                (Column(RATE, "more", rate("samples", "seconds")),),
                (
                    *(Contender(limit, "limit", bare_columns, (*fast, limit)) for limit in column_limits),
                    *(Contender(loop, "before", bare_columns, (*fast, loop)) for loop in agreeing),
                    Contender("FILE", "ours", columns, (*fast, "FILE")),
                    Contender("DATA", "ours", columns, (*fast, "DATA")),
                    Contender("datasets, streaming, as fragments", "ours", fragments, fast, ("datasets",)),
                    Contender("datasets, streaming", "peer", hugging_face, slow, ("datasets",), once=True),
                    Contender("grain ParquetIterDataset", "peer", grain, slow, ("grain",), once=True),
                    Contender("litdata ParquetLoader", "peer", litdata, slow, ("litdata", "polars"), once=True),
                ),
                size,
                1 if small else 3,
                (
                    Target(RATE, "FILE", 0.9, (COLUMNS_LIMIT,)),
                    Target(RATE, "DATA", 0.9, column_limits[-1:]),
                    *(Target(RATE, "DATA", 1.0, (loop,)) for loop in agreeing),
                ),
                LIMITS if size > 1 else "",
            )
        )
        found.append(_rows(less, size, small=small))
    return found


def _rows(folder: str, size: int, *, small: bool) -> Table:
    repeats = 1 if small else 3
    contenders = (
        Contender(ROWS_LIMIT, "limit", bare_rows, (folder, repeats)),
        Contender("FILE, rows", "ours", rows, (folder, repeats)),
    )
    targets = (Target(RATE, "FILE, rows", 0.7, (ROWS_LIMIT,)),)
    columns = (Column(RATE, "more", rate("samples", "seconds")),)
    return Table(f"Parquet as rows, {size} process(es)", columns, contenders, size, repeats, targets)
