"""The block shuffle on Parquet and zarr: reading beside a full shuffle, and how well it mixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Sampler, SequentialSampler

import torchdistinput as tdi
from benches.model import Column, Contender, Measured, Table, Target, rate, total
from benches.peers import peer
from benches.timing import epochs

__all__ = ["tables"]

RATE, APART, SAME = "samples/s", "distance of neighbours, of a full shuffle's", "neighbours of one block"
BLOCK, FLOATS, BATCH = 1000, 64, 256
SEQUENTIAL = "in order"
FULL = "ShuffleSampler(n)"


class Blocks(Dataset[Any]):
    """Samples of blocks, of which the last ones that were read are kept."""

    def __init__(self, num_blocks: int, read: Callable[[int], Any], keep: int) -> None:
        self.length = num_blocks * BLOCK
        self.read = lru_cache(keep)(read)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.read(index // BLOCK)[index % BLOCK]


def row_groups(path: str) -> Callable[[int], Any]:
    """Reads a row group of a Parquet file as an array."""
    file = peer("pyarrow.parquet").ParquetFile(path)
    return lambda group: np.stack(file.read_row_group(group).column(0).combine_chunks().to_numpy(zero_copy_only=False))


def chunks(path: str) -> Callable[[int], Any]:
    """Reads a chunk of a zarr array."""
    array = peer("zarr").open_array(path, mode="r")
    return lambda number: array[number * BLOCK : (number + 1) * BLOCK]


READERS = {"parquet": row_groups, "zarr": chunks}


def measured(kind: str, path: str, num_blocks: int, batches: int, window: int) -> Measured:
    """One epoch, or its first batches; a window of 0 is the order of the data, of -1 a full shuffle."""
    data = Blocks(num_blocks, READERS[kind](path), max(window, 16))
    sampler: Sampler[int] = SequentialSampler(data)
    if window:
        sampler = tdi.ShuffleSampler(len(data), 1, **({"block": BLOCK, "window": window} if window > 0 else {}))
    order = np.fromiter(sampler, np.int64, len(data))
    loader = tdi.DataLoader(data, BATCH, sampler=_First(order[: batches * BATCH].tolist()))
    found = epochs(loader, len, repeats=1, steps_ahead=0)
    apart = np.abs(np.diff(order)).mean() / (len(data) / 3)
    return {**found, "apart": apart, "same": float((order[1:] // BLOCK == order[:-1] // BLOCK).mean())}


class _First(Sampler[int]):
    """The first samples of an order."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Any:
        return iter(self.order)


def write_parquet(path: Path, rows: Any) -> None:
    """A column of vectors; a row group is a block."""
    pa = peer("pyarrow")
    column = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), FLOATS)
    peer("pyarrow.parquet").write_table(pa.table({"x": column}), path, row_group_size=BLOCK)


def write_zarr(path: Path, rows: Any) -> None:
    """An array; a chunk is a block."""
    array = peer("zarr").create_array(str(path), shape=rows.shape, chunks=(BLOCK, FLOATS), dtype=rows.dtype)
    array[:] = rows


WRITERS = {"parquet": write_parquet, "zarr": write_zarr}


def tables(*, small: bool, folder: Path) -> Sequence[Table]:
    """Each kind of storage."""
    num_blocks = 40 if small else 400
    rows = np.random.default_rng(0).random((num_blocks * BLOCK, FLOATS), dtype="f4")
    found = []
    for kind, write in WRITERS.items():
        path = folder / f"blocks.{kind}"
        write(path, rows)
        args = (kind, str(path), num_blocks)
        whole = num_blocks * BLOCK // BATCH
        contenders = (
            Contender(SEQUENTIAL, "limit", measured, (*args, whole, 0), (kind.replace("parquet", "pyarrow"),)),
            *(
                Contender(f"block={BLOCK}, window={window}", "ours", measured, (*args, whole, window))
                for window in (4, 16, 64)
            ),
            Contender(FULL, "ours", measured, (*args, 2 if small else 4, -1)),
        )
        columns = (
            Column(RATE, "more", rate("samples", "seconds")),
            Column(APART, "more", total("apart")),
            Column(SAME, "less", total("same")),
        )
        target = Target(RATE, f"block={BLOCK}, window=16", 0.8, (SEQUENTIAL,))
        title = f"{kind}: blocks of {BLOCK} vectors of {FLOATS}"
        found.append(Table(title, columns, contenders, 1, 1 if small else 3, (target,)))
    return found
