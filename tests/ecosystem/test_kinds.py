"""The table of examples/my_data, row by row: each step is the whole batch, at any number of ranks, and resumed."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.ecosystem.kinds import KINDS, SAMPLES, G, numbers_in, write_all
from torchdistinput.testing import run_ranks

CASES = [(name, workers) for name, kind in KINDS.items() for workers in kind.workers]
STOP = 4
"""The step after which the state is taken, and loaded in the next world."""

Played = dict[str, tuple[list[list[int]], list[list[int]] | None, str]]
"""Of each case: its epoch, what was left of the epoch of the state that was given, and a state."""


def play_in_worlds(folder: str, worlds: tuple[int, ...]) -> dict[int, Played]:
    """One process, which is a rank of each world that is large enough: importing all the packages takes the longest."""
    rank, found = int(os.environ["RANK"]), {}
    states: dict[str, str] = {}
    for world in worlds:
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(world)
        path = Path(folder) / f"states of {world}"
        if rank < world:
            store = f"file://{folder}/store of {world}"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
            found[world] = play(folder, states)
            dist.destroy_process_group()
            if rank == 0:
                path.with_suffix(".new").write_text(json.dumps({case: each[2] for case, each in found[world].items()}))
                path.with_suffix(".new").rename(path)
        while not path.exists():
            time.sleep(0.01)  # run_ranks bounds the wait
        states = json.loads(path.read_text())
    return found


def play(folder: str, states: dict[str, str]) -> Played:
    """One rank: an epoch of each case, and the rest of the epoch whose state another world has left."""
    found: Played = {}
    for name, workers in CASES:
        if not are_there(KINDS[name].packages):
            continue
        case = f"{name} {workers}"
        with KINDS[name].make(Path(folder), workers) as loader:
            iterator = iter(loader)
            epoch = [numbers_in(next(iterator)) for _ in range(STOP)]
            state = json.dumps(loader.state_dict())
            epoch += [numbers_in(batch) for batch in iterator]
            assert [numbers_in(batch) for batch in loader] == epoch  # the next one
        rest = None
        if case in states:
            with KINDS[name].make(Path(folder), workers) as loader:
                loader.load_state_dict(json.loads(states[case]))
                rest = [numbers_in(batch) for batch in loader]
        found[case] = (epoch, rest, state)
        dist.barrier()
    return found


def are_there(packages: tuple[str, ...]) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)


def skip_without(packages: tuple[str, ...]) -> None:
    for package in packages:
        if not are_there((package,)):
            pytest.skip(f"could not import {package!r}")


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory, all_cells: bool) -> dict[int, list[Played]]:
    """What each rank of each world has read; each world gets the states of the one before."""
    folder = tmp_path_factory.mktemp("kinds")
    have = {package for kind in KINDS.values() for package in kind.packages if are_there((package,))}
    run_ranks(1, write_all, folder, have, timeout_seconds=240)  # elsewhere: once Lance is imported, each fork warns
    chosen = (2, 3, 1) if all_cells else (2, 1)
    ranks = run_ranks(max(chosen), play_in_worlds, str(folder), chosen, init_group=False, timeout_seconds=240)
    return {world: [played[world] for played in ranks[:world]] for world in chosen}


def put_together(ranks: list[Played], case: str, read: Callable[[Any], list[list[int]]]) -> list[list[int]]:
    steps = [read(rank[case]) for rank in ranks]
    assert len({len(each) for each in steps}) == 1, "the ranks made different numbers of steps"
    return [[number for part in row for number in part] for row in zip(*steps, strict=True)]


@pytest.mark.parametrize(("name", "workers"), CASES)
def test_each_step_is_the_whole_batch_also_after_a_resume(
    name: str, workers: int, worlds: dict[int, list[Played]]
) -> None:
    """With ``--all-cells`` at three ranks too."""
    skip_without(KINDS[name].packages)
    case = f"{name} {workers}"
    truth = [[*range(start, min(start + G, SAMPLES))] for start in range(0, SAMPLES, G)]
    for world, ranks in worlds.items():
        assert put_together(ranks, case, lambda played: played[0]) == truth, world
        if world != 2:  # the first one, which had no state
            assert put_together(ranks, case, lambda played: played[1]) == truth[STOP:], world
        if world == 3:  # by law S
            assert [len(rank[case][0][0]) for rank in ranks] == [4, 4, 2]
        assert [len(rank[case][0][-1]) for rank in ranks] == [1, *[0] * (world - 1)]


def read_by_workers(folder: Path) -> list[int]:
    write_all(folder, {"lance"})
    with KINDS["Lance"].make(folder, 2) as loader:
        return [number for batch in loader for number in numbers_in(batch)]


def test_lance_is_read_by_loader_workers_that_are_not_forked(tmp_path: Path) -> None:
    skip_without(("lance",))
    assert run_ranks(1, read_by_workers, tmp_path, timeout_seconds=120) == [[*range(SAMPLES)]]
