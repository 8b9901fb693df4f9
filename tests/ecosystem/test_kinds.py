"""The table of examples/my_data, row by row: ``check_source`` at several numbers of ranks.

Each kind of data is made of 101 samples, by the line that its row names.

Each function imports its package itself, and gives a loader whose batches ``numbers_in`` reads, or a dataset of
fragments whose records ``number_of`` reads: sample ``i`` has the number ``i``. ``write_all`` writes the files once.
"""

from __future__ import annotations

import importlib.util
import json
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from importlib import import_module
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import fsspec
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import torchdistinput as tdi
from tests.data import Mapped
from torchdistinput import readers
from torchdistinput.testing import check_source, run_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from sqlite_source import SqliteSource

SAMPLES, G = 101, 10  # a last batch of one sample
NUMBERS = np.arange(SAMPLES)
ROWS = np.stack([NUMBERS, NUMBERS**2], axis=1)
PARTS = [range(40), range(40, 70), range(70, SAMPLES)]
"""The samples of each file."""


class Kind(NamedTuple):
    """A row of the table."""

    make: Callable[..., Any]
    """The loader, given the folder of files and the number of loader workers; or, without ``workers``, the dataset,
    given the folder and the order."""
    packages: tuple[str, ...] = ()
    workers: tuple[int, ...] = (0, 2)
    truth: Sequence[int] = range(SAMPLES)
    long: bool = False
    """With ``--all-cells`` only: another row says nearly the same."""


# --------------------------------------------------------------------------------------------- files, written once


def write_all(folder: Path, have: set[str]) -> None:
    """Writes the files of all kinds whose packages are there."""
    np.save(folder / "rows.npy", ROWS)
    NUMBERS.tofile(folder / "numbers.bin")
    for place, part in enumerate(PARTS):
        (folder / f"{place}.txt").write_text("".join(f"{number}\n" for number in part))
        (folder / f"{place}.fixed").write_bytes(NUMBERS[part[0] : part[-1] + 1].astype("<i8").tobytes())
    with closing(sqlite3.connect(folder / "rows.db")) as made, made:
        made.execute("CREATE TABLE samples (key INTEGER PRIMARY KEY)")
        made.executemany("INSERT INTO samples VALUES (?)", [(key,) for key in range(SAMPLES)])
    if "pyarrow" in have:
        _write_parquet(folder)
    if "tfrecord" in have:
        _write_tfrecords(folder)
    if "webdataset" in have:
        _write_tars(folder)
    if "litdata" in have:
        write_litdata(folder / "litdata")
    if "streaming" in have:
        write_mosaicml(folder / "mosaicml")
    if "h5py" in have:
        h5py: Any = import_module("h5py")

        with h5py.File(folder / "rows.h5", "w") as file:
            file["x"] = ROWS
    if "lance" in have:
        _write_lance(folder)
    if "zarr" in have:
        zarr: Any = import_module("zarr")

        zarr.save(str(folder / "rows.zarr"), ROWS)


def _write_parquet(folder: Path) -> None:
    pa: Any = import_module("pyarrow")
    pq: Any = import_module("pyarrow.parquet")

    for place, part in enumerate(PARTS):
        table = pa.table({"x": [*part], "text": [f"sample {number}" for number in part]})
        pq.write_table(table, folder / f"{place}.parquet", row_group_size=16)


def _write_lance(folder: Path) -> None:
    lance: Any = import_module("lance")
    pa: Any = import_module("pyarrow")

    lance.write_dataset(pa.table({"x": NUMBERS}), str(folder / "rows.lance"), max_rows_per_file=40)


def _write_tfrecords(folder: Path) -> None:
    tfrecord: Any = import_module("tfrecord")

    for place, part in enumerate(PARTS):
        writer = tfrecord.TFRecordWriter(str(folder / f"{place}.tfrecord"))
        for number in part:
            writer.write({"x": (number, "int")})
        writer.close()


def _write_tars(folder: Path) -> None:
    wds: Any = import_module("webdataset")

    for place, part in enumerate(PARTS):
        with wds.TarWriter(str(folder / f"{place}.tar")) as writer:
            for number in part:
                writer.write({"__key__": f"{number:06}", "x.npy": ROWS[number], "txt": f"sample {number}"})


# ------------------------------------------------------------------------------------------------------ map-style


def h5py_columns(folder: Path, workers: int) -> Any:
    h5py: Any = import_module("h5py")

    columns: Any = {"x": h5py.File(folder / "rows.h5")["x"]}
    return tdi.DataLoader(columns, batch_size=G, num_workers=workers)


def zarr_array(folder: Path, workers: int) -> Any:
    zarr: Any = import_module("zarr")

    array: Any = zarr.open_array(str(folder / "rows.zarr"), mode="r")
    return tdi.DataLoader(array, batch_size=G, num_workers=workers)


def memory_map(folder: Path, workers: int) -> Any:
    columns: Any = {
        "x": np.load(folder / "rows.npy", mmap_mode="r"),
        "y": np.memmap(folder / "numbers.bin", dtype=NUMBERS.dtype, mode="r"),
    }
    return tdi.DataLoader(columns, batch_size=G, num_workers=workers)


def lance(folder: Path, workers: int) -> Any:
    lance: Any = import_module("lance.torch.data")

    data: Any = lance.SafeLanceDataset(str(folder / "rows.lance"))
    context = "forkserver" if workers else None  # Lance ends with a fork
    return tdi.DataLoader(data, batch_size=G, num_workers=workers, multiprocessing_context=context)


def grain_map(folder: Path, workers: int) -> Any:
    grain: Any = import_module("grain")

    data: Any = grain.MapDataset.range(SAMPLES).map(as_dict)
    return tdi.DataLoader(data, batch_size=G, num_workers=workers)


def as_dict(number: int) -> dict[str, int]:
    return {"x": int(number)}


def tensor_dict(folder: Path, workers: int) -> Any:
    tensordict: Any = import_module("tensordict")

    data: Any = tensordict.TensorDict({"x": torch.from_numpy(ROWS)}, batch_size=[SAMPLES])
    return tdi.DataLoader(data, batch_size=G, num_workers=workers, collate_fn=as_it_is)


def as_it_is(samples: Any) -> Any:
    return samples


def samples() -> Mapped:
    """Samples of several sizes, each full of its number."""
    return Mapped(SAMPLES, lambda index: torch.full((1 + index % 3, 2), index))


def detection(folder: Path, workers: int) -> Any:
    more: Any = {
        "num_workers": workers,
        "collate_fn": images_and_boxes,
        "options": tdi.InputOptions(empty_fn=no_images),
    }
    return tdi.DataLoader(samples(), batch_size=G, **more)


def no_images() -> Any:
    return (), ()


def images_and_boxes(samples: list[torch.Tensor]) -> Any:
    return tuple(zip(*[(image, {"boxes": image[: int(image[0, 0]) % 2]}) for image in samples], strict=True))


def nested(folder: Path, workers: int) -> Any:
    more: Any = {"num_workers": workers, "collate_fn": nest, "options": tdi.InputOptions(empty_fn=nothing_nested)}
    return tdi.DataLoader(samples(), batch_size=G, **more)


def nothing_nested() -> Any:
    return torch.nested.nested_tensor_from_jagged(torch.zeros(0, 2, dtype=torch.int64), torch.tensor([0]))


def nest(samples: list[torch.Tensor]) -> Any:
    return torch.nested.nested_tensor(samples, layout=torch.jagged)


def packed(folder: Path, workers: int) -> Any:
    more: Any = {"num_workers": workers, "collate_fn": pack, "options": tdi.InputOptions(empty_fn=nothing_packed)}
    return tdi.DataLoader(samples(), batch_size=G, **more)


def nothing_packed() -> Any:
    return {"tokens": torch.zeros(0, 2, dtype=torch.int64), "cu_seqlens": torch.tensor([0])}


def pack(samples: list[torch.Tensor]) -> Any:
    lengths = torch.tensor([0, *map(len, samples)])
    return {"tokens": torch.cat(samples), "cu_seqlens": lengths.cumsum(0)}


def lhotse_sampler(**of_one: Any) -> Any:
    lhotse, sampling = import_module("lhotse.testing.dummies"), import_module("lhotse.dataset.sampling")
    cuts: Any = import_module("lhotse").CutSet.from_cuts(lhotse.dummy_cut(number) for number in range(SAMPLES))
    return sampling.SimpleCutSampler(cuts, max_cuts=G, **of_one)


def lhotse_cuts(folder: Path, workers: int) -> Any:
    return tdi.DataLoader(Speech(), sampler=lhotse_sampler(rank=0, world_size=1), batch_size=None, num_workers=workers)


def lhotse_parts(folder: Path, workers: int) -> Any:
    """The same, where a rank reads its part only."""
    settings: Any = {"num_workers": workers, "collate_fn": speech_of, "options": tdi.InputOptions(empty_fn=no_speech)}
    return tdi.DataLoader(Same(), batch_sampler=lhotse_sampler(rank=0, world_size=1), **settings)


class Same(Dataset[Any]):
    """The cut that it is asked for."""

    def __getitem__(self, cut: Any) -> Any:
        return cut


def no_speech() -> Any:
    return {"x": torch.zeros(0, dtype=torch.int64)}


def speech_of(cuts: list[Any]) -> Any:
    return Speech()[import_module("lhotse").CutSet.from_cuts(cuts)]


class Speech(Dataset[Any]):
    """As lhotse's own datasets: it makes a batch of a set of cuts."""

    def __getitem__(self, cuts: Any) -> Any:
        return {"x": torch.tensor([int(cut.id.rpartition("-")[2]) for cut in cuts])}


def graphs(folder: Path, workers: int) -> Any:
    pyg: Any = import_module("torch_geometric.data")

    data = [pyg.Data(x=torch.full((1 + number % 3, 2), number), y=torch.tensor([number])) for number in range(SAMPLES)]
    settings: Any = {
        "num_workers": workers,
        "collate_fn": pyg.Batch.from_data_list,
        "options": tdi.InputOptions(empty_fn=no_graph),
    }
    return tdi.DataLoader(data, G, **settings)  # type: ignore[arg-type]


def no_graph() -> Any:
    batch: Any = import_module("torch_geometric.data").Batch
    return batch(x=torch.zeros(0, 2, dtype=torch.int64), y=torch.zeros(0, dtype=torch.int64))


# ---------------------------------------------------------------------------------------------- files and streams


def columns(policy: str, folder: Path, workers: int) -> Any:
    """Batches that are slices of the columns of Parquet files."""
    chosen = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy[policy])
    data = DataLoader(tdi.FileDataset(f"{folder}/*.parquet", readers.parquet()), batch_size=G, num_workers=workers)
    return tdi.Strategy(["cpu"]).distribute_dataset(data, chosen)


def parquet(folder: Path, **order: Any) -> Any:
    return tdi.FileDataset(f"{folder}/*.parquet", readers.parquet(["x"]), **order)


def text(folder: Path, **order: Any) -> Any:
    return tdi.FileDataset(f"{folder}/*.txt", readers.text_lines, map_fn=int, **order)


def text_in_parts(folder: Path, **order: Any) -> Any:
    return text(folder, fragment_bytes=20, **order)


def fixed(folder: Path, **order: Any) -> Any:
    read = readers.fixed_length_records(8)
    return tdi.FileDataset(f"{folder}/*.fixed", read, map_fn=from_little_end, **order)


def from_little_end(record: bytes) -> int:
    return int.from_bytes(record, "little")


def npy_in_parts(folder: Path, **order: Any) -> Any:
    return tdi.FileDataset(f"{folder}/rows.npy", readers.npy_rows, fragment_bytes=300, **order)


def some(line: str) -> list[str]:
    """A line with a number n has n mod 4 samples."""
    return [line] * (int(line) % 4)


SOME = [number for number in range(SAMPLES) for _ in range(number % 4)]


def plain_lines(file: BinaryIO) -> list[str]:
    """A reader without blocks."""
    return file.read().decode().split()


@readers.in_blocks
def lines_of_three(file: BinaryIO, offset: int) -> Iterator[tuple[int, list[str]]]:
    """Blocks of three lines."""
    file.seek(offset)
    while lines := [line.decode().strip() for line in islice(file, 3)]:
        yield offset, lines
        offset = file.tell()


def flat(read: Any, folder: Path, **order: Any) -> Any:
    return tdi.FileDataset(f"{folder}/*.txt", read, flat_map_fn=some, **{"map_fn": int, **order})


def remote(folder: Path, **order: Any) -> Any:
    for place, part in enumerate(PARTS):
        with fsspec.open(f"memory://bucket/{place}.txt", "wt") as file:
            file.write("".join(f"{number}\n" for number in part))
    return tdi.FileDataset("memory://bucket/*.txt", readers.text_lines, map_fn=int, storage_options={}, **order)


def tfrecords(folder: Path, **order: Any) -> Any:
    return tdi.FileDataset(f"{folder}/*.tfrecord", readers.tfrecords, map_fn=parsed, **order)


def parsed(record: bytes) -> int:
    example: Any = import_module("tfrecord.example_pb2").Example

    return int(example.FromString(record).features.feature["x"].int64_list.value[0])


def tars(folder: Path, **order: Any) -> Any:
    return tdi.FileDataset(f"{folder}/*.tar", readers.webdataset(), map_fn=row_in, **order)


def row_in(sample: dict[str, Any]) -> Any:
    return np.load(BytesIO(sample["x.npy"]))


def database(folder: Path, **order: Any) -> Any:
    return tdi.FragmentDataset(SqliteSource(str(folder / "rows.db"), "samples", 25), **order)


def streamed(steps: Callable[[Any], Any], folder: Path, **order: Any) -> Any:
    """A streaming dataset of Hugging Face; ``steps`` must leave the numbers as they are."""
    datasets, streams = import_module("datasets"), import_module("torchdistinput.integrations.datasets")
    data = datasets.load_dataset("parquet", data_files=f"{folder}/*.parquet", split="train", streaming=True)
    return tdi.FragmentDataset(streams.fragments(steps(data)), **order)


def itself(data: Any) -> Any:
    return data.with_format("torch")


def mapped(data: Any) -> Any:
    return data.map(same, batched=True, batch_size=7)


def same(batch: Any) -> Any:
    return {"x": [*batch["x"]]}


def filtered(data: Any) -> Any:
    return data.select_columns(["x"]).filter(are_even, batched=True, batch_size=7)


def are_even(batch: Any) -> list[bool]:
    return [number % 2 == 0 for number in batch["x"]]


def repeated(data: Any) -> Any:
    return data.select_columns(["x"]).map(some_of_batch, batched=True, batch_size=7)


def some_of_batch(batch: Any) -> Any:
    return {"x": [number for number in batch["x"] for _ in range(number % 4)]}


def stream_of_tables(policy: str, folder: Path, workers: int) -> Any:
    """Batches that are slices of Arrow's columns."""
    chosen = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy[policy])
    data = DataLoader(streamed(arrow, folder), batch_size=G, num_workers=workers)
    return tdi.Strategy(["cpu"]).distribute_dataset(data, chosen)


def arrow(data: Any) -> Any:
    return data.with_format("arrow")


def stream_itself(folder: Path, workers: int) -> Any:
    datasets = import_module("datasets")
    data = datasets.load_dataset("parquet", data_files=f"{folder}/*.parquet", split="train", streaming=True)
    return tdi.DataLoader(data.select_columns(["x"]), batch_size=G, num_workers=workers)


def grain_stream(folder: Path, workers: int) -> Any:
    grain: Any = import_module("grain")

    data = grain.MapDataset.range(SAMPLES).map(as_dict).to_iter_dataset()
    return tdi.Strategy(["cpu"]).distribute_dataset(data, global_batch_size=G)


def torchdata_nodes(folder: Path, workers: int) -> Any:
    nodes: Any = import_module("torchdata.nodes")

    mapped = nodes.ParallelMapper(nodes.IterableWrapper(range(SAMPLES)), as_dict, num_workers=2, method="thread")
    return tdi.Strategy(["cpu"]).distribute_dataset(nodes.Loader(mapped), global_batch_size=G)


class ByIndex(Dataset[Any]):
    """The samples of a stream that divides itself when it is iterated, and not when it is asked by index."""

    def __init__(self, stream: Any, length: int) -> None:
        self.stream, self.length = stream, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.stream[index]


def write_litdata(folder: Path) -> None:
    module: Any = import_module("litdata.streaming.writer")

    folder.mkdir()
    writer = module.BinaryWriter(str(folder), chunk_size=10)
    for number in range(SAMPLES):
        writer.add_item(number, {"x": number})
    writer.done()
    writer.merge(1)


def litdata_stream(folder: Path) -> Any:
    return import_module("litdata").StreamingDataset(str(folder), shuffle=False)


def litdata(folder: Path, workers: int) -> Any:
    stream, index = litdata_stream(folder / "litdata"), json.loads((folder / "litdata" / "index.json").read_text())
    length = sum(chunk["chunk_size"] for chunk in index["chunks"])  # len() tells that of a rank's part
    return tdi.DataLoader(ByIndex(stream, length), batch_size=G, num_workers=workers)


def write_mosaicml(folder: Path) -> None:
    streaming: Any = import_module("streaming")

    with streaming.MDSWriter(out=str(folder), columns={"x": "int"}, size_limit=400) as writer:
        for number in range(SAMPLES):
            writer.write({"x": number})


def mosaicml_stream(folder: Path) -> Any:
    return import_module("streaming").StreamingDataset(local=str(folder), shuffle=False, batch_size=G)


def mosaicml(folder: Path, workers: int) -> Any:
    stream = mosaicml_stream(folder / "mosaicml")
    return tdi.DataLoader(ByIndex(stream, stream.num_samples), batch_size=G, num_workers=workers)


HF = ("datasets", "pyarrow")
KINDS = {
    "Parquet": Kind(parquet, ("pyarrow",), workers=()),
    "Parquet, columns under DATA": Kind(partial(columns, "DATA"), ("pyarrow",)),
    "Parquet, columns under FILE": Kind(partial(columns, "FILE"), ("pyarrow",), workers=(0,)),
    "h5py": Kind(h5py_columns, ("h5py",)),
    "zarr": Kind(zarr_array, ("zarr",)),
    "memmap": Kind(memory_map),
    "Lance": Kind(lance, ("lance",), workers=(0,)),
    "Grain, MapDataset": Kind(grain_map, ("grain",)),
    "TensorDict": Kind(tensor_dict, ("tensordict",)),
    "detection": Kind(detection),
    "nested tensors": Kind(nested),
    "packed": Kind(packed),
    "lhotse": Kind(lhotse_cuts, ("lhotse",)),
    "lhotse, its part": Kind(lhotse_parts, ("lhotse",)),
    "graphs": Kind(graphs, ("torch_geometric",)),
    "text": Kind(text, workers=()),
    "text in parts": Kind(text_in_parts, workers=(), long=True),
    "fixed length": Kind(fixed, workers=()),
    "npy in parts": Kind(npy_in_parts, workers=()),
    "flat": Kind(partial(flat, readers.text_lines), workers=(), truth=SOME),
    "flat, in blocks of three": Kind(partial(flat, lines_of_three), workers=(), truth=SOME, long=True),
    "flat, without blocks": Kind(partial(flat, plain_lines), workers=(), truth=SOME),
    "remote": Kind(remote, workers=()),
    "TFRecord": Kind(tfrecords, ("tfrecord",), workers=()),
    "WebDataset": Kind(tars, ("webdataset",), workers=()),
    "SQLite": Kind(database, workers=()),
    "Hugging Face": Kind(partial(streamed, itself), HF, workers=()),
    "Hugging Face, mapped": Kind(partial(streamed, mapped), HF, workers=(), long=True),
    "Hugging Face, filtered": Kind(partial(streamed, filtered), HF, workers=(), truth=range(0, SAMPLES, 2), long=True),
    "Hugging Face, repeated": Kind(partial(streamed, repeated), HF, workers=(), truth=SOME),
    "Hugging Face, tables under FILE": Kind(partial(stream_of_tables, "FILE"), HF, workers=(0,)),
    "Hugging Face, the stream itself": Kind(stream_itself, HF, workers=(0,)),
    "LitData": Kind(litdata, ("litdata",)),
    "MosaicML": Kind(mosaicml, ("streaming",)),
    "Grain, IterDataset": Kind(grain_stream, ("grain",), workers=(0,)),
    "torchdata.nodes": Kind(torchdata_nodes, ("torchdata",), workers=(0,)),
}


def sources(folder: Path, packages: Callable[[str], bool], *, all_cells: bool) -> dict[str, Any]:
    """All kinds whose packages are there, as ``check_source`` takes them; with the most loader workers, or each way."""
    found: dict[str, Any] = {}
    for name, kind in KINDS.items():
        if (all_cells or not kind.long) and all(map(packages, kind.packages)):
            ways = kind.workers if all_cells else kind.workers[-1:]
            found |= {f"{name}, {workers} workers": partial(kind.make, folder, workers) for workers in ways}
            if not kind.workers:
                found[name] = partial(kind.make, folder)
    return found


def numbers_of(opened: Any) -> list[int]:
    """The numbers of all samples of a loader or a dataset."""
    if isinstance(opened, tdi.FragmentDataset):
        return [*map(number_of, opened)]
    with opened as loader:
        return [number for batch in loader for number in numbers_in(batch)]


def number_of(record: Any) -> int:
    if isinstance(record, dict):
        record = record["x"]
    return int(record if isinstance(record, int) else record[0] if len(np.shape(record)) else record)


def numbers_in(batch: Any) -> list[int]:
    """The numbers of the samples of a batch."""
    match batch:
        case {"cu_seqlens": offsets, "tokens": tokens}:
            return [int(tokens[offset, 0]) for offset in offsets[:-1]]
        case Mapping():
            return numbers_in(batch["x"])
        case tuple():  # images, and their boxes
            return [int(image[0, 0]) for image in batch[0]]
        case torch.Tensor():
            return [int(part.flatten()[0]) for part in batch.unbind()]
        case _:
            return numbers_in(batch.y if hasattr(batch, "y") else batch["x"])


def is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def skip_without(packages: tuple[str, ...]) -> None:
    for package in packages:
        if not is_there(package):
            pytest.skip(f"could not import {package!r}")


def read_alone(folder: Path, all_cells: bool) -> dict[str, list[int]]:
    """Writes all files, and reads each kind once, in a process of its own: once Lance is imported, each fork warns."""
    write_all(folder, {package for kind in KINDS.values() for package in kind.packages if is_there(package)})
    return {name: numbers_of(make()) for name, make in sources(folder, is_there, all_cells=all_cells).items()}


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory, all_cells: bool) -> dict[str, list[int]]:
    """What one process has read of each kind; all of them have passed the check."""
    folder = tmp_path_factory.mktemp("kinds")
    (found,) = run_ranks(1, read_alone, folder, all_cells, timeout_seconds=240)
    given = sources(folder, is_there, all_cells=all_cells)
    check_source(given, worlds=(2, 3, 1) if all_cells else (2, 1), samples=numbers_in)
    return found


LONG = {name: [pytest.mark.long] if kind.long else [] for name, kind in KINDS.items()}


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in LONG.items()])
def test_a_kind_is_read_right_on_ranks_and_in_one_process(name: str, checked: dict[str, list[int]]) -> None:
    """With ``--all-cells`` at three ranks too, and also without loader workers."""
    skip_without(KINDS[name].packages)
    of_kind = [read for row, read in checked.items() if row == name or row[: -len(", 0 workers")] == name]
    assert of_kind
    assert all(read == [*KINDS[name].truth] for read in of_kind)


def read_by_workers(folder: Path) -> list[int]:
    write_all(folder, {"lance"})
    return numbers_of(KINDS["Lance"].make(folder, 2))


def test_lance_is_read_by_loader_workers_that_are_not_forked(tmp_path: Path) -> None:
    skip_without(("lance",))
    assert run_ranks(1, read_by_workers, tmp_path, timeout_seconds=120) == [[*range(SAMPLES)]]
