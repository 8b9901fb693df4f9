"""Every case of ``conformance/one_process.json`` through the public API, in one process with CPU replicas."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

import torch
from torch.utils.data import DataLoader, IterableDataset

import torchdistinput as tdi
from tests.support.cells import cells
from tests.support.epochs import epoch

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "one_process.json").read_text())


@functools.cache
def strategy_of(replicas: int) -> tdi.Strategy:
    return tdi.Strategy(devices=["cpu"] * replicas)


@final
class Batches(IterableDataset[torch.Tensor]):
    """An iterable dataset of ready global batches."""

    def __init__(self, batches: list[torch.Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.batches)


def as_generator_function(batches: list[torch.Tensor]) -> Any:
    return lambda: (batch for batch in batches)


def as_generator(batches: list[torch.Tensor]) -> Any:
    return (batch for batch in batches)


def as_list(batches: list[torch.Tensor]) -> Any:
    return batches


def as_loader(batches: list[torch.Tensor]) -> Any:
    return DataLoader(Batches(batches), batch_size=None)


ITERABLES: list[Callable[[list[torch.Tensor]], Any]] = [
    Batches,
    as_generator_function,
    as_generator,
    as_list,
    as_loader,
]


SETTINGS: dict[str, list[Any]] = {"prefetch": [0, 1, 2], "iterable": ITERABLES}


def delivered(case: dict[str, Any], setting: dict[str, Any]) -> list[list[Any]]:
    strategy = strategy_of(case["replicas"])
    options = tdi.InputOptions(prefetch=setting["prefetch"])
    if "n" in case:
        data: Any = DataLoader(range(case["n"]), batch_size=case["global_batch_size"], drop_last=case["drop_last"])  # type: ignore[arg-type]
    else:
        batches = [torch.tensor(batch, dtype=torch.int64) for batch in case["global_batches"]]
        data = setting["iterable"](batches)
    return epoch(strategy, strategy.distribute_dataset(data, options))


def test_every_case_of_one_process_gives_the_pieces_that_the_file_says(all_cells: bool) -> None:
    ran = [(case, setting, delivered(case, setting)) for case, setting in cells(CASES, SETTINGS, everything=all_cells)]
    wrong = [(case, setting, found) for case, setting, found in ran if found != case["want"]]
    assert not wrong, f"{len(wrong)} of {len(ran)}, the first: {wrong[:3]}"
    assert len({case["id"] for case, _, _ in ran}) == len(CASES) == 418
