"""Inputs that the tests distribute, one of every kind that ``distribute_dataset`` takes.

Each is made anew by a function, so that torch's one-process loader and the library get equal but separate objects
(generators hold state). ``reference`` yields the global batches that torch gives in one process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import torchdistinput as tdi
from tests.data import Count, Order, Repeated
from torchdistinput import readers


def generator(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@final
class Records(Dataset[dict[str, Any]]):
    """Samples with a float vector, an int and a string."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor([index, index * index], dtype=torch.float64), "y": index, "name": f"r{index}"}


@final
@dataclasses.dataclass(frozen=True)
class Table(Dataset[int]):
    """Numbers by their place; a map-style dataset that shards itself, as Hugging Face datasets do."""

    numbers: range

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> int:
        return self.numbers[index]

    def shard(self, num_shards: int, index: int) -> Table:
        return Table(self.numbers[index::num_shards])


@final
class BatchesByList(Dataset[torch.Tensor]):
    """A dataset that is asked for whole batches: torch's ``sampler=BatchSampler, batch_size=None``."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, indices: list[int]) -> torch.Tensor:
        return torch.tensor(indices) * 10


def uneven_batches() -> Order:
    """A user's own batch sampler; its batches differ in size, and one is smaller than most worlds."""
    return Order(4, lambda _: [[4, 2, 0], [1], [3, 5, 6, 7, 8], [9, 10]])


@final
class BatchesDrawnAtOnce(Sampler[list[int]]):
    """Draws all batches of an epoch as soon as it is asked for its iterator, not at the first ``next``."""

    def __init__(self, length: int, generator: torch.Generator | None = None) -> None:
        self.length = length
        self.generator = generator

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.length, generator=self.generator).tolist()
        return iter([order[first : first + 3] for first in range(0, self.length, 3)])


@final
class PlainIterable:
    """An iterable that torch does not know, iterated anew each epoch."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return ready_batches()


def ready_batches() -> Iterator[dict[str, torch.Tensor]]:
    """Of sizes 3, 1, 4, 2."""
    start = 0
    for size in (3, 1, 4, 2):
        row = torch.arange(start, start + size)
        yield {"id": row, "wide": row[:, None] * torch.ones(1, 2)}
        start += size


def samples() -> Iterator[dict[str, Any]]:
    for index in range(9):
        yield {"id": index, "x": torch.tensor([index / 2])}


class Padded(NamedTuple):
    """What ``pad`` makes: a custom collate function may return any structure."""

    tokens: torch.Tensor
    lengths: torch.Tensor


def pad(rows: Sequence[int]) -> Padded:
    """A collate function whose inner dims depend on the samples given, padded to a width that does not."""
    tokens = torch.zeros(len(rows), 12, dtype=torch.int64)
    for place, row in enumerate(rows):
        tokens[place, :row] = row
    return Padded(tokens, torch.tensor(list(rows)))


def write_numbers(folder: Path) -> None:
    """Four text files with 5, 0, 3 and 4 numbers, 0 .. 11 in order."""
    start = 0
    for name, size in (("a", 5), ("b", 0), ("c", 3), ("d", 4)):
        (folder / f"{name}.txt").write_text("".join(f"{number}\n" for number in range(start, start + size)))
        start += size


def numbers_of(folder: Path) -> tdi.FileDataset:
    return tdi.FileDataset(str(folder / "?.txt"), readers.text_lines, map_fn=int)


@final
@dataclasses.dataclass(frozen=True)
class LoaderOf:
    """Makes a DataLoader of these arguments; those that are functions are called first, for a fresh object each."""

    dataset: Any
    arguments: dict[str, Any]

    def __call__(self, folder: Path, cls: Any = DataLoader, **more: Any) -> Any:
        given = {**self.arguments, **more}
        fresh = {name: value() if name in FRESH else value for name, value in given.items()}
        return cls(self.dataset(folder) if self.dataset is numbers_of else self.dataset, **fresh)


def loader(dataset: Any, **arguments: Any) -> LoaderOf:
    return LoaderOf(dataset, arguments)


FRESH = ("generator", "sampler", "batch_sampler")


def replacement_sampler() -> Sampler[int]:
    return RandomSampler(range(11), replacement=True, num_samples=9, generator=generator(3))


def weighted_sampler() -> Sampler[int]:
    return WeightedRandomSampler([float(k + 1) for k in range(11)], 14, generator=generator(5))


LOADERS: dict[str, LoaderOf] = {
    "sequential": loader(range(11), batch_size=4),
    "shuffled by a generator": loader(range(23), batch_size=4, shuffle=True, generator=generator),
    "shuffled by torch.manual_seed only": loader(range(23), batch_size=5, shuffle=True),
    "drop last": loader(range(23), batch_size=4, shuffle=True, drop_last=True, generator=generator),
    "random with replacement": loader(range(11), batch_size=4, sampler=replacement_sampler),
    "weighted": loader(range(11), batch_size=4, sampler=weighted_sampler),
    "subset": loader(
        range(11), batch_size=2, sampler=lambda: SubsetRandomSampler([1, 3, 5, 7, 9], generator=generator())
    ),
    "own batch sampler of varying sizes": loader(range(11), batch_sampler=uneven_batches),
    "sampler of batches": loader(
        BatchesByList(), batch_size=None, sampler=lambda: BatchSampler(SequentialSampler(range(11)), 4, drop_last=False)
    ),
    "iterable": loader(Repeated(10), batch_size=4),
    "iterable that shards itself": loader(Count(10), batch_size=4),
    "own collate function": loader(range(1, 12), batch_size=5, shuffle=True, collate_fn=pad),
    "dicts with strings": loader(Records(), batch_size=5, shuffle=True),
    "tensors": loader(TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6)), batch_size=4, shuffle=True),
    "files": loader(numbers_of, batch_size=5),
}
"""What users give to a DataLoader, whatever the number of loader workers."""
