"""Over real ranks: what is left out is missing once, all account for it alike, and stop alike where it is too much."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.sources.test_skipping import Broken, file_data, law, skipping
from tests.support.cells import cells
from tests.support.epochs import lists, raised
from torchdistinput import readers
from torchdistinput.testing import run_ranks

BROKEN = {0, 4, 5, 6, 7, 13, 19}
UNDECODABLE = {2, 9}
NUMBERS = list(range(20))

Step = tuple[int, int | None, Any]


def steps_of(loader: tdi.DistributedDataset) -> list[Step]:
    return [(loader.step.index, loader.step.global_size, lists(element)) for element in loader]


def map_style(folder: Path, workers: int) -> Any:
    return DataLoader(Broken(20, BROKEN), batch_size=4, num_workers=workers)


def files_in(folder: Path, workers: int) -> Any:
    return DataLoader(file_data(folder, "tfrecords", BROKEN, UNDECODABLE), batch_size=4, num_workers=workers)


SOURCES: dict[str, tuple[Callable[[Path, int], Any], str, set[int]]] = {
    "map-style": (map_style, "DATA", BROKEN),
    "map-style, a part for each worker": (map_style, "OFF", BROKEN),
    "files under DATA": (files_in, "DATA", BROKEN | UNDECODABLE),
    "files under FILE": (files_in, "FILE", BROKEN | UNDECODABLE),
}


def runs(folder: str, everything: bool) -> list[list[Step]]:
    strategy = tdi.Strategy(devices=["cpu"])
    found = []
    for name, setting in cells([*SOURCES], {"workers": [0, 2], "prefetch": [0, 2]}, everything=everything):
        make, policy, _ = SOURCES[name]
        options = skipping(prefetch=setting["prefetch"], auto_shard_policy=tdi.AutoShardPolicy[policy])
        with strategy.distribute_dataset(make(Path(folder), setting["workers"]), options) as loader:
            found.append(steps_of(loader))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_the_rest_comes_once_and_every_rank_knows_how_much_it_is(world: int, tmp_path: Path, all_cells: bool) -> None:
    prepare(tmp_path)
    ranks = run_ranks(world, runs, str(tmp_path), all_cells)
    names = [name for name, _ in cells([*SOURCES], {"workers": [0, 2], "prefetch": [0, 2]}, everything=all_cells)]
    for name, *of_ranks in zip(names, *ranks, strict=True):
        _, policy, broken = SOURCES[name]
        for together in zip(*of_ranks, strict=True):
            assert len({(index, size) for index, size, _ in together}) == 1, name
            assert sum(len(part) for _, _, part in together) == together[0][1], name
        assert [index for index, _, _ in of_ranks[0]] == list(range(len(of_ranks[0])))
        if policy == "DATA":
            steps = [[part for _, _, part in together] for together in zip(*of_ranks, strict=True)]
            assert steps == law(NUMBERS, 4, broken, world), name
        copies = world if policy == "OFF" else 1
        delivered = sorted(number for steps in of_ranks for _, _, part in steps for number in part)
        assert delivered == sorted([*set(NUMBERS) - broken] * copies), name


def prepare(folder: Path) -> None:
    """Writes the files before ranks write the same ones again."""
    files_in(folder, 0)


# Too much of it


def until_too_many(max_errors: int, prefetch: int, workers: int) -> tuple[int, Any]:
    loader = tdi.Strategy(devices=["cpu"]).distribute_dataset(
        DataLoader(Broken(32, {1, 2, 9, 10, 17, 22, 30}), batch_size=4, num_workers=workers),
        skipping(max_errors=max_errors, prefetch=prefetch),
    )
    steps: list[Any] = []
    error = raised(lambda: steps.extend(loader))
    return len(steps), error


def all_until_too_many() -> list[tuple[int, Any]]:
    settings = [(m, p, w) for m, p, w in zip([0, 1, 2, 3, 4, 5, 6, 7], [0, 2] * 4, [0, 0, 1, 1] * 2, strict=True)]
    return [until_too_many(*setting) for setting in settings]


def test_every_rank_stops_at_the_same_step_with_the_same_error() -> None:
    first, second = run_ranks(2, all_until_too_many)
    assert first == second
    for max_errors, (steps, error) in enumerate(first):
        assert steps == (0, 0, 2, 2, 4, 5, 7, 8)[max_errors]
        if max_errors == 7:
            assert error is None
            continue
        assert error.kind == "SourceError"
        assert f"up to step {steps} of epoch 0, and max_errors={max_errors}" in error.message
        assert "\nrank 0: sample 1: BrokenError: number 1 is broken" in error.message
        assert "\nrank 1: sample 2: BrokenError: number 2 is broken" in error.message


def with_other_bounds() -> Any:
    options = skipping(max_errors=5 + dist.get_rank())
    data = DataLoader(Broken(8, set()), batch_size=4)
    return raised(lambda: tdi.Strategy(devices=["cpu"]).distribute_dataset(data, options))


def test_ranks_that_allow_for_more_or_less_disagree() -> None:
    for error in run_ranks(2, with_other_bounds):
        assert error.kind == "RankDisagreement"
        assert "max_errors: rank 0: 5; rank 1: 6" in error.message


# One that is read by all counts once


def whole_records(folder: str) -> tuple[list[Step], Any]:
    strategy = tdi.Strategy(devices=["cpu"])
    files = tdi.FileDataset(str(Path(folder) / "f"), readers.json_lines, map_fn=torch.tensor)
    data = DataLoader(files, batch_size=None)
    steps = steps_of(
        strategy.distribute_dataset(data, skipping(max_errors=1, auto_shard_policy=tdi.AutoShardPolicy.DATA))
    )
    refused = strategy.distribute_dataset(data, skipping(max_errors=0, auto_shard_policy=tdi.AutoShardPolicy.DATA))
    return steps, raised(lambda: list(refused))


def test_a_ready_batch_that_all_ranks_cut_is_left_out_once(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"[1, 2]\n{\n[5, 6]\n")
    for rank, (steps, error) in enumerate(run_ranks(2, whole_records, str(tmp_path))):
        assert steps == [(0, 2, [1 + rank]), (1, 2, [5 + rank])]
        assert "1 samples could not be read" in error.message


# Taken up again, at the same and at another number of ranks


RESUMED = ["map-style", "files under DATA", "files under FILE"]


def opened(folder: str, source: str) -> tdi.DistributedDataset:
    make, policy, _ = SOURCES[source]
    options = skipping(auto_shard_policy=tdi.AutoShardPolicy[policy])
    return tdi.Strategy(devices=["cpu"]).distribute_dataset(make(Path(folder), 0), options)


def saved(folder: str) -> dict[str, tuple[list[Step], list[str]]]:
    found: dict[str, tuple[list[Step], list[str]]] = {}
    for source in RESUMED:
        steps, states = found[source] = [], []
        with opened(folder, source) as loader:
            for element in loader:
                steps.append((loader.step.index, loader.step.global_size, lists(element)))
                states.append(json.dumps(loader.state_dict()))
    return found


def resumed(folder: str, states: dict[str, list[str]]) -> dict[str, list[list[Step]]]:
    found: dict[str, list[list[Step]]] = {source: [] for source in RESUMED}
    for source in RESUMED:
        for state in states[source]:
            with opened(folder, source) as loader:
                loader.load_state_dict(json.loads(state))
                found[source].append(steps_of(loader))
    return found


def test_a_run_goes_on_at_any_number_of_ranks_with_the_rest(tmp_path: Path) -> None:
    prepare(tmp_path)
    ranks = run_ranks(2, saved, str(tmp_path))
    states = {source: ranks[0][source][1][:-1] for source in RESUMED}
    assert states == {source: ranks[1][source][1][:-1] for source in RESUMED}
    again = run_ranks(2, resumed, str(tmp_path), states)
    other = run_ranks(3, resumed, str(tmp_path), states)
    for source in RESUMED:
        for done in range(1, len(states[source]) + 1):
            for whole, rests in zip(ranks, again, strict=True):
                assert rests[source][done - 1] == whole[source][0][done:], (source, done)
            before = [number for whole in ranks for _, _, part in whole[source][0][:done] for number in part]
            after = [number for rests in other for _, _, part in rests[source][done - 1] for number in part]
            assert sorted(before + after) == sorted(set(NUMBERS) - SOURCES[source][2]), (source, done)
