"""Over real ranks: what is left out is missing once, all account for it alike, and stop alike where it is too much."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.sources.test_skipping import Broken, file_data, skipping
from tests.support.epochs import lists, raised
from torchdistinput import readers
from torchdistinput.testing import run_ranks

BROKEN = {0, 4, 5, 6, 7, 13, 19}
UNDECODABLE = {2, 9}

Step = tuple[int, int | None, Any]


def steps_of(loader: tdi.DistributedDataset) -> list[Step]:
    return [(loader.step.index, loader.step.global_size, lists(element)) for element in loader]


def files_in(folder: Path) -> Any:
    return DataLoader(file_data(folder, "tfrecords", BROKEN, UNDECODABLE), batch_size=4)


POLICIES = ("DATA", "FILE")
"""The policies."""


def prepare(folder: Path) -> None:
    """Writes the files before ranks write the same ones again."""
    files_in(folder)


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


def opened(folder: str, policy: str) -> tdi.DistributedDataset:
    options = skipping(auto_shard_policy=tdi.AutoShardPolicy[policy])
    return tdi.Strategy(devices=["cpu"]).distribute_dataset(files_in(Path(folder)), options)


def saved(folder: str) -> dict[str, tuple[list[Step], list[str]]]:
    found: dict[str, tuple[list[Step], list[str]]] = {}
    for policy in POLICIES:
        steps, states = found[policy] = [], []
        with opened(folder, policy) as loader:
            for element in loader:
                steps.append((loader.step.index, loader.step.global_size, lists(element)))
                states.append(json.dumps(loader.state_dict()))
    return found


def resumed(folder: str, states: dict[str, list[str]]) -> dict[str, list[list[Step]]]:
    found: dict[str, list[list[Step]]] = {policy: [] for policy in POLICIES}
    for policy in POLICIES:
        for state in states[policy]:
            with opened(folder, policy) as loader:
                loader.load_state_dict(json.loads(state))
                found[policy].append(steps_of(loader))
    return found


def test_a_run_goes_on_at_any_number_of_ranks_with_the_rest(tmp_path: Path) -> None:
    prepare(tmp_path)
    ranks = run_ranks(2, saved, str(tmp_path))
    states = {policy: ranks[0][policy][1][:-1] for policy in POLICIES}
    assert states == {policy: ranks[1][policy][1][:-1] for policy in POLICIES}
    again = run_ranks(2, resumed, str(tmp_path), states)
    other = run_ranks(3, resumed, str(tmp_path), states)
    for policy in POLICIES:
        for done in range(1, len(states[policy]) + 1):
            for whole, rests in zip(ranks, again, strict=True):
                assert rests[policy][done - 1] == whole[policy][0][done:], (policy, done)
            before = [number for whole in ranks for _, _, part in whole[policy][0][:done] for number in part]
            after = [number for rests in other for _, _, part in rests[policy][done - 1] for number in part]
            assert sorted(before + after) == sorted({*range(20)} - BROKEN - UNDECODABLE), (policy, done)
