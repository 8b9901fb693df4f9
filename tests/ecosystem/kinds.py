"""The kinds of data in the table of examples/my_data: each is made of 101 samples, by the line that its row names.

Each function writes its files once (``write_all``), imports its package itself, and gives a loader whose batches
``numbers_in`` reads: sample ``i`` has the number ``i``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np
import torch
from torch.utils.data import Dataset

import torchdistinput as tdi

SAMPLES, G = 101, 10  # a last batch of one sample
NUMBERS = np.arange(SAMPLES)
ROWS = np.stack([NUMBERS, NUMBERS**2], axis=1)
PARTS = [range(40), range(40, 70), range(70, SAMPLES)]
"""The samples of each file."""


class Kind(NamedTuple):
    """A row of the table."""

    make: Callable[[Path, int], Any]
    """The loader, given the folder of files and the number of loader workers."""
    packages: tuple[str, ...] = ()
    workers: tuple[int, ...] = (0, 2)


# --------------------------------------------------------------------------------------------- files, written once


def write_all(folder: Path, have: set[str]) -> None:
    """Writes the files of all kinds whose packages are there."""
    np.save(folder / "rows.npy", ROWS)
    NUMBERS.tofile(folder / "numbers.bin")
    for place, part in enumerate(PARTS):
        (folder / f"{place}.txt").write_text("".join(f"{number}\n" for number in part))
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

    table = pa.table({"x": NUMBERS, "text": [f"sample {number}" for number in NUMBERS]})
    pq.write_table(table, folder / "rows.parquet", row_group_size=16)


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


def parquet(folder: Path, workers: int) -> Any:
    files = tdi.FileDataset(str(folder / "rows.parquet"), tdi.readers.parquet(["x"]))
    return tdi.DataLoader(files, batch_size=G, num_workers=workers)


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


class Samples(Dataset[Any]):
    """Samples of several sizes, each full of its number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 + index % 3, 2), index)


def detection(folder: Path, workers: int) -> Any:
    more: Any = {"num_workers": workers, "collate_fn": images_and_boxes, "empty_fn": no_images}
    return tdi.DataLoader(Samples(), batch_size=G, **more)


def no_images() -> Any:
    return (), ()


def images_and_boxes(samples: list[torch.Tensor]) -> Any:
    return tuple(zip(*[(image, {"boxes": image[: int(image[0, 0]) % 2]}) for image in samples], strict=True))


def nested(folder: Path, workers: int) -> Any:
    more: Any = {"num_workers": workers, "collate_fn": nest, "empty_fn": nothing_nested}
    return tdi.DataLoader(Samples(), batch_size=G, **more)


def nothing_nested() -> Any:
    return torch.nested.nested_tensor_from_jagged(torch.zeros(0, 2, dtype=torch.int64), torch.tensor([0]))


def nest(samples: list[torch.Tensor]) -> Any:
    return torch.nested.nested_tensor(samples, layout=torch.jagged)


def packed(folder: Path, workers: int) -> Any:
    more: Any = {"num_workers": workers, "collate_fn": pack, "empty_fn": nothing_packed}
    return tdi.DataLoader(Samples(), batch_size=G, **more)


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
    settings: Any = {"num_workers": workers, "collate_fn": speech_of, "empty_fn": no_speech}
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
    settings: Any = {"num_workers": workers, "collate_fn": pyg.Batch.from_data_list, "empty_fn": no_graph}
    return tdi.DataLoader(data, G, **settings)  # type: ignore[arg-type]


def no_graph() -> Any:
    batch: Any = import_module("torch_geometric.data").Batch
    return batch(x=torch.zeros(0, 2, dtype=torch.int64), y=torch.zeros(0, dtype=torch.int64))


# ---------------------------------------------------------------------------------------------- files and streams


def text(folder: Path, workers: int) -> Any:
    data = tdi.FileDataset(f"{folder}/*.txt", tdi.readers.text_lines, map_fn=int)
    return tdi.DataLoader(data, batch_size=G, num_workers=workers)


def remote(folder: Path, workers: int) -> Any:
    for place, part in enumerate(PARTS):
        with fsspec.open(f"memory://bucket/{place}.txt", "wt") as file:
            file.write("".join(f"{number}\n" for number in part))
    data = tdi.FileDataset("memory://bucket/*.txt", tdi.readers.text_lines, map_fn=int, storage_options={})
    return tdi.DataLoader(data, batch_size=G, num_workers=workers)


def tfrecords(folder: Path, workers: int) -> Any:
    data = tdi.FileDataset(f"{folder}/*.tfrecord", tdi.readers.tfrecords, map_fn=parsed)
    return tdi.DataLoader(data, batch_size=G, num_workers=workers)


def parsed(record: bytes) -> int:
    example: Any = import_module("tfrecord.example_pb2").Example

    return int(example.FromString(record).features.feature["x"].int64_list.value[0])


def tars(folder: Path, workers: int) -> Any:
    data = tdi.FileDataset(f"{folder}/*.tar", tdi.readers.webdataset(), map_fn=row_in)
    return tdi.DataLoader(data, batch_size=G, num_workers=workers)


def row_in(sample: dict[str, Any]) -> Any:
    return np.load(BytesIO(sample["x.npy"]))


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


KINDS = {
    "Parquet": Kind(parquet, ("pyarrow",)),
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
    "text": Kind(text),
    "remote": Kind(remote),
    "TFRecord": Kind(tfrecords, ("tfrecord",)),
    "WebDataset": Kind(tars, ("webdataset",)),
    "LitData": Kind(litdata, ("litdata",)),
    "MosaicML": Kind(mosaicml, ("streaming",)),
    "Grain, IterDataset": Kind(grain_stream, ("grain",), workers=(0,)),
    "torchdata.nodes": Kind(torchdata_nodes, ("torchdata",), workers=(0,)),
}


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
