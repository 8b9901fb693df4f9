"""Every case of ``conformance/many_workers.json`` through the public API, on real gloo ranks.

One launch per world size runs all its cases in a loop: a launch costs more than a case. ``--all-cells`` runs each with
every setting, otherwise the settings rotate.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support.cells import cells
from tests.support.epochs import epoch
from torchdistinput import readers
from torchdistinput.testing import run_ranks

FILE = Path(__file__).parent / "many_workers.json"
CASES: list[dict[str, Any]] = json.loads(FILE.read_text())
WORLDS = sorted({case["workers"] for case in CASES})
SETTINGS: dict[str, list[Any]] = {"prefetch": [0, 1, 2], "named_by": ["pattern", "list"]}


@functools.cache
def strategy_of(replicas: int) -> tdi.Strategy:
    return tdi.Strategy(devices=["cpu"] * replicas)


def write_files(case: dict[str, Any], folder: Path) -> None:
    """One number a line; the names sort in the order of the case's list."""
    folder.mkdir()
    for number, records in enumerate(case["files"]):
        (folder / f"part-{number:03d}.txt").write_text("".join(f"{record}\n" for record in records))


def source_of(case: dict[str, Any], folder: Path, named_by: str) -> Any:
    if "n" in case:
        return range(case["n"])
    pattern = str(folder / "part-*.txt")
    files: Any = pattern if named_by == "pattern" else [str(path) for path in sorted(folder.iterdir())]
    return tdi.FileDataset(files, readers.text_lines, map_fn=int)


def run_case(case: dict[str, Any], folder: Path, setting: dict[str, Any]) -> dict[str, Any]:
    strategy = strategy_of(case["replicas_per_worker"])
    source = source_of(case, folder, setting["named_by"])
    data = DataLoader(source, batch_size=case["global_batch_size"], drop_last=case["drop_last"])
    options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy[case["policy"]], prefetch=setting["prefetch"])
    try:
        dataset = strategy.distribute_dataset(data, options)
    except tdi.InputError as error:
        return {"error": type(error).__name__}
    return {"steps": epoch(strategy, dataset)}


def cases_of(world: int) -> list[dict[str, Any]]:
    return [case for case in CASES if case["workers"] == world]


def run_cases(folder: str, world: int, everything: bool) -> list[tuple[str, dict[str, Any]]]:
    """One rank: the outcome of each case of this world size."""
    matrix = cells(cases_of(world), SETTINGS, everything=everything, seed=world)
    return [(case["id"], run_case(case, Path(folder) / case["id"], setting)) for case, setting in matrix]


def wanted(case: dict[str, Any], rank: int) -> dict[str, Any]:
    if "error" in case["want"]:
        return {"error": case["want"]["error"]}
    return {"steps": case["want"]["workers"][rank]}


@pytest.mark.parametrize("world", WORLDS)
def test_every_case_of_many_workers_gives_each_worker_the_steps_that_the_file_says(
    world: int, tmp_path: Path, all_cells: bool
) -> None:
    cases = {case["id"]: case for case in cases_of(world)}
    for case in cases.values():
        if "files" in case:
            write_files(case, tmp_path / case["id"])
    ranks = run_ranks(world, run_cases, str(tmp_path), world, all_cells, timeout_seconds=300)
    wrong = [
        (cases[name], rank, found)
        for rank, outcomes in enumerate(ranks)
        for name, found in outcomes
        if found != wanted(cases[name], rank)
    ]
    assert not wrong, f"{len(wrong)} are wrong, the first: {wrong[:2]}"
    for outcomes in ranks:
        assert {name for name, _ in outcomes} == set(cases)
        assert len(outcomes) == len(cases) * (6 if all_cells else 1)


def test_the_worlds_together_hold_every_case_of_the_file() -> None:
    assert WORLDS == [1, 2, 3, 4, 5]
    assert sum(sum(case["workers"] == world for case in CASES) for world in WORLDS) == len(CASES) == 358
    assert len({case["id"] for case in CASES}) == len(CASES)
