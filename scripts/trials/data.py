"""The data of a program, as each worker reads it: sample ``n`` is the number ``n``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import torchdistinput as tdi
from torchdistinput import readers
from trials.programs import Input

__all__ = [
    "Numbers",
    "Stream",
    "file_contents",
    "global_loader",
    "numbers_in",
    "open_input",
    "samples_of_worker",
    "write_files",
]

_APART = 1000  # samples of two files, or of two dataset functions
_SHARES = (0.4, 0.05, 0.0, 0.35, 0.2)  # of the samples, in each file


class Numbers(Dataset[int]):
    """0 .. n-1, by their place."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """0 .. n-1 in order, or every so many of them."""

    def __init__(self, length: int, first: int = 0, every: int = 1) -> None:
        self.length, self.first, self.every = length, first, every

    def __iter__(self) -> Iterator[int]:
        yield from range(self.first, self.length, self.every)

    def shard(self, num_shards: int, index: int) -> Stream:
        """The part that one of several workers reads."""
        return Stream(self.length, index, num_shards)


class Batches:
    """Numbers in order, as ready batches."""

    def __init__(self, numbers: Sequence[int], batch: int) -> None:
        self.numbers, self.batch = torch.tensor(numbers), batch

    def __iter__(self) -> Iterator[torch.Tensor]:
        for start in range(0, len(self.numbers), self.batch):
            yield self.numbers[start : start + self.batch]


def samples_of_worker(source: Input, worker: int) -> list[int]:
    """What a dataset function makes for a worker: each has another length."""
    length = max(0, source.length - 7 * worker)
    return [_APART * worker + number for number in range(length)]


def file_contents(source: Input) -> list[list[int]]:
    """The records of each file: some are empty, and their sizes differ."""
    sizes = [round(source.length * share) for share in _SHARES]
    return [[_APART * file + record for record in range(size)] for file, size in enumerate(sizes)]


def write_files(folder: Path, sources: tuple[Input, ...]) -> None:
    """Writes the files of the inputs that have some."""
    for number, source in enumerate(sources):
        if source.data == "files":
            inside = folder / f"input-{number}"
            inside.mkdir()
            for file, records in enumerate(file_contents(source)):
                (inside / f"{file}.txt").write_text("".join(f"{record}\n" for record in records))


def numbers_in(element: Any) -> list[int]:
    """The samples of an element."""
    tensor = element[0] if isinstance(element, (list, tuple)) else element
    return [int(each) for each in tensor.tolist()]


def _map_style(source: Input) -> Any:
    return TensorDataset(torch.arange(source.length)) if source.data == "table" else Numbers(source.length)


def _arguments(source: Input, seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "batch_size": source.batch,
        "drop_last": source.drop_last,
        "num_workers": source.num_workers,
        "persistent_workers": source.persistent,
    }
    if source.order != "in order" and source.length:
        found["shuffle"] = True
    if source.order == "shuffled":
        found["generator"] = torch.Generator().manual_seed(seed)
    return found


def global_loader(source: Input, seed: int, data: Any = None) -> Any:
    """Makes torch's own loader of one process, without loader workers where they change nothing.

    Args:
      source: the input.
      seed: of its generator.
      data: in place of its own.
    """
    if source.data == "batches":
        return Batches(range(source.length), source.batch)
    if data is None:
        data = Stream(source.length) if source.data == "stream" else _map_style(source)
    arguments = _arguments(source, seed)
    if source.order == "in order" and source.data != "stream" and not source.persistent:  # else seeds are drawn once
        arguments.update(num_workers=0, persistent_workers=False)
    return DataLoader(data, **arguments)


def open_input(strategy: tdi.Strategy, source: Input, seed: int, folder: Path) -> Any:
    """The input, distributed. Collective.

    Args:
      strategy: among whose replicas.
      source: the input.
      seed: of its generator.
      folder: of its files.
    """
    policy = tdi.AutoShardPolicy[source.policy]
    options = tdi.InputOptions(auto_shard_policy=policy, prefetch=source.prefetch)
    if source.data == "function":

        def dataset_fn(context: tdi.InputContext) -> Any:
            return Batches(samples_of_worker(source, context.input_pipeline_id), source.batch)

        return strategy.distribute_datasets_from_function(dataset_fn, options)
    if source.data == "batches":
        return strategy.distribute_dataset(Batches(range(source.length), source.batch), options)
    data: Any = Stream(source.length) if source.data == "stream" else None
    if source.data == "files":
        data = tdi.FileDataset(f"{folder}/*.txt", readers.text_lines, map_fn=int)
    arguments = _arguments(source, seed)
    if data is None:
        data = _map_style(source)
    if source.drop_in:
        return tdi.DataLoader(data, prefetch=source.prefetch, strategy=strategy, **arguments)
    return strategy.distribute_dataset(DataLoader(data, **arguments), options)
