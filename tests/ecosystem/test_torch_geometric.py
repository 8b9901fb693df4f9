"""Batches of graphs, as PyG makes them, with the real package."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support.packages import package
from torchdistinput.testing import run_ranks

data = package("torch_geometric.data")

GRAPHS = 7


def graphs() -> list[Any]:
    return [data.Data(x=torch.full((1 + number % 3, 2), number), y=torch.tensor([number])) for number in range(GRAPHS)]


def no_graph() -> Any:
    return data.Batch(x=torch.zeros(0, 2), y=torch.zeros(0, dtype=torch.int64))


def parts(num_workers: int) -> list[Any]:
    options: Any = {"batch_size": 3, "collate_fn": data.Batch.from_data_list, "num_workers": num_workers}
    strategy = tdi.Strategy(devices=["cpu"])
    torch_loader: Any = DataLoader(graphs(), **options)  # type: ignore[arg-type]
    with strategy.distribute_dataset(torch_loader, tdi.InputOptions(empty_fn=no_graph)) as loader:
        return [(batch.y.tolist(), loader.step.local_sizes, loader.step.global_size) for batch in loader]


def parts_in_turn() -> list[list[Any]]:
    return [parts(num_workers) for num_workers in (0, 2)]


def test_each_replica_gets_a_batch_of_its_graphs(all_cells: bool) -> None:
    """In the process itself, and in loader workers."""
    for world in (1, 2, 3) if all_cells else (1, 3):
        check_graphs(world)


def check_graphs(world: int) -> None:
    for results in zip(*run_ranks(world, parts_in_turn), strict=True):
        for step, expected in enumerate([[0, 1, 2], [3, 4, 5], [6]]):
            found = [result[step] for result in results]
            assert [number for numbers, _, _ in found for number in numbers] == expected
            for numbers, sizes, size in found:
                assert (len(numbers), size) == (sizes[0], len(expected))
