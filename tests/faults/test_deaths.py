"""The fault matrix over real ranks, continued: ranks and loader workers that die or stall, and ends of all kinds.

What a rank that lives tells of the others, how soon, and that nothing is left behind; see ``test_faults_on_ranks.py``.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import torchdistinput as tdi
from tests.data import Numbers
from tests.support import faults, scenes
from tests.support.cells import cells
from tests.support.faults import Stall
from tests.support.interpreters import Interpreters, own_output
from tests.support.platforms import linux_processes
from tests.support.scenes import SETTINGS, Expected, Group, Played, Scene, Stage, check
from tests.support.waiting import wait_for
from torchdistinput.coordination import timeouts
from torchdistinput.sources.torch_loader import open_runs
from torchdistinput.testing import run_ranks
from torchdistinput.testing.ranks import free_port

pytestmark = linux_processes

# ------------------------------------------------------------------------ ranks and workers that die or stall


def dies(signal_number: int, victim: int = 1) -> Scene:
    """A rank ends without a word, with its loader workers still at work."""

    def scene(stage: Stage) -> None:
        def end() -> None:
            os.kill(os.getpid(), signal_number)
            time.sleep(faults.PATIENCE_SECONDS)

        stage.read(stage.numbers({}), 4, end if stage.rank == victim else bool)

    return scene


def all_terminated(stage: Stage) -> None:
    """As a launcher ends its ranks: each gets it for itself, at the same step, and its loader workers do not."""
    stage.read(stage.numbers({}), 4, lambda: os.kill(os.getpid(), signal.SIGTERM))


def dies_with_busy_workers(stage: Stage) -> None:
    """The loader workers of rank 1 read on for long after it was killed; they must not keep its connections open."""
    stall = {stage.first_of(step, 1): Stall(stage.folder / "never") for step in range(6, 10)}

    def end() -> None:
        time.sleep(1.0)  # until both workers are in it
        os.kill(os.getpid(), signal.SIGKILL)

    stage.read(stage.numbers(stall), 4, end if stage.rank == 1 else bool)


def terminated_by_a_handler(stage: Stage) -> None:
    """SIGTERM as a scheduler sends it, to a rank that makes an orderly end of it while it waits in ``next``."""

    def leave(*_: object) -> None:
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, leave)
    release = stage.folder / "release"
    soon = threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGTERM))
    with stage.distribute(stage.numbers({})) as dataset:
        try:
            stage.loop(dataset, 3, soon.start if stage.rank == 1 else Stall(release))
        finally:
            release.touch()


def worker_ends(how: Callable[[], object]) -> Scene:
    def scene(stage: Stage) -> None:
        stage.read(stage.numbers({stage.first_of(5, 1): how}))

    return scene


def reading_stalls(stage: Stage) -> None:
    """Rank 1 cannot read on before the others have given up."""
    release = stage.folder / "release"
    try:
        stage.read(stage.numbers({stage.first_of(3, 1): Stall(release)}), timeout_seconds=4)
    finally:
        if stage.rank == 0:
            release.touch()


STANDING_SECONDS = 10.0


def standing(scene: Scene) -> Scene:
    """The rank itself waits for 4 seconds only: a busy machine takes long for the vote that tells the others."""

    def shorter(stage: Stage) -> None:
        with mock.patch.object(open_runs, "_PART_OF_TIMEOUT", 0.4):
            scene(stage)

    return shorter


def worker_stalls(stage: Stage, seconds: float = STANDING_SECONDS) -> None:
    """It waits for longer than anybody would."""
    stage.read(stage.numbers({stage.first_of(3, 1): Stall(stage.folder / "never")}), timeout_seconds=seconds)


def worker_stops(stage: Stage) -> None:
    stage.read(stage.numbers({stage.first_of(3, 1): faults.stop_worker}), timeout_seconds=STANDING_SECONDS)


def worker_of_a_function_stops(stage: Stage) -> None:
    """What it sent before is in its own memory, which only it can hand out."""

    def loader(context: tdi.InputContext) -> Any:
        rank = context.input_pipeline_id
        data = Numbers(600, {6: faults.stop_worker} if rank == 1 else {})
        return stage.loader(data, batch_size=2)

    options = tdi.InputOptions(prefetch=stage.prefetch, timeout_seconds=STANDING_SECONDS)
    stage.dataset = stage.strategy.distribute_datasets_from_function(loader, options)
    stage.loop(stage.dataset)


def signal_between_epochs(signal_number: int) -> Scene:
    """To a worker that lives on, and is asked at the start of the next epoch whether it does."""

    def scene(stage: Stage) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))  # the workers inherit it
        faulty = stage.numbers({}, persistent_workers=True)
        dataset = stage.distribute(faulty, timeout_seconds=STANDING_SECONDS)
        iterator = iter(dataset)
        for _ in range(3):
            next(iterator)
            stage.count()
        iterator.close()
        if stage.rank == 1:
            os.kill(min(stage.children), signal_number)
        stage.loop(dataset)

    return scene


def worker_stalls_after_the_others_gave_up(stage: Stage) -> None:
    """What the rank itself tells is the same."""
    with mock.patch.object(open_runs, "_PART_OF_TIMEOUT", 1.5):
        worker_stalls(stage, 5.0)


def worker_stalls_with_a_timeout(stage: Stage) -> None:
    """torch's own ``timeout=`` is shorter than ours; and longer than a busy machine takes to start a worker."""
    release = stage.folder / "release"
    data = stage.numbers({stage.first_of(3, 1): Stall(release)}, timeout=6)
    try:
        stage.read(data)
    finally:
        release.touch()


def training_is_slow(stage: Stage) -> None:
    """Rank 1 computes for longer than the others wait; then it wants to go on."""
    release = stage.folder / "release"
    try:
        with mock.patch.object(timeouts, "_WARN_SECONDS", 1.0):
            stage.read(stage.numbers({}), 3, Stall(release) if stage.rank == 1 else bool, timeout_seconds=4)
    finally:
        if stage.rank == 0:
            release.touch()


GONE = Expected(4, words=("died",), kind="RankLost", own=None, ahead=True)
LATE = Expected(3, words=(), kind="CoordinationTimeout", own="RankLost", ahead=True, seconds=4.0)
WORKERS = {"workers": [2]}
STANDING = Expected(
    3, words=("loader worker 1 (pid ", "did not answer within 4"), causes=("TimeoutError",), seconds=5.0
)
QUIT = Expected(5, words=("loader worker", "exited with code 3"), causes=("RuntimeError",), seconds=10.0)
STOPPED = replace(STANDING, words=(*STANDING.words, "stopped by a signal"))

DYING: dict[str, tuple[Scene, Expected, dict[str, list[int]]]] = {
    "SIGKILL": (dies(signal.SIGKILL), GONE, {}),
    "SIGKILL, its workers busy": (dies_with_busy_workers, GONE, WORKERS),
    "SIGTERM": (dies(signal.SIGTERM), GONE, {}),
    "SIGTERM on all": (all_terminated, replace(GONE, ranks=(0, 1)), {}),
    "SIGKILL of the rank with the store": (
        dies(signal.SIGKILL, victim=0),
        Expected(4, (0,), words=("died",), kind="RankLost", own=None, ahead=True),
        {},
    ),
    "SIGTERM with a handler": (
        terminated_by_a_handler,
        Expected(3, words=(), kind="RankLost", own="SystemExit", ahead=True),
        {},
    ),
    "a worker is killed": (
        worker_ends(faults.kill_worker),
        Expected(5, words=("loader worker", "killed by signal 9"), causes=("RuntimeError",), seconds=10.0),
        WORKERS,
    ),
    "a worker exits": (worker_ends(partial(faults.quit_worker, 3)), QUIT, WORKERS),
    "a worker exits with code 0": (
        worker_ends(partial(faults.quit_worker, 0)),
        replace(QUIT, words=("loader worker", "exited with code 0, samples 22, 23")),
        WORKERS,
    ),
    "the reading stalls": (reading_stalls, LATE, {"workers": [0]}),
    "a worker stalls": (standing(worker_stalls), replace(STANDING, words=(*STANDING.words, "samples 14, 15")), WORKERS),
    "a worker stalls, the others gave up": (
        worker_stalls_after_the_others_gave_up,
        # The steps that rank 1 held when it began to wait may lack its vote: all of them, where rank 0 came late.
        replace(LATE, steps=0, own="SourceError", seconds=5.0),
        WORKERS,
    ),
    "a worker is stopped": (
        standing(worker_stops),
        replace(STOPPED, words=(*STOPPED.words, "samples 14, 15")),
        WORKERS,
    ),
    "a worker of a dataset function's loader is stopped": (
        standing(worker_of_a_function_stops),
        replace(STOPPED, steps=1, ahead=True),
        WORKERS,
    ),
    "a worker is stopped between epochs": (
        standing(signal_between_epochs(signal.SIGSTOP)),
        replace(STOPPED, words=STOPPED.words[1:]),
        WORKERS,
    ),
    "a worker exits between epochs": (
        signal_between_epochs(signal.SIGUSR1),
        Expected(3, words=("loader worker", "exited with code 0)"), causes=("RuntimeError",), seconds=5.0),
        WORKERS,
    ),
    "a worker stalls, with a timeout": (
        worker_stalls_with_a_timeout,
        Expected(3, words=("timed out after 6",), causes=("RuntimeError",), seconds=10.0),
        WORKERS,
    ),
    "the training is slow": (training_is_slow, LATE, {}),
}
SCENES = {name: scene for name, (scene, _, _) in DYING.items()}
AT_ONCE = 8  # groups; they wait for the most part


@pytest.fixture(scope="module")
def survived(all_cells: bool, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """A few groups at a time, as each of them waits for the most part."""
    todo = [
        (name, setting)
        for number, (name, (_, _, limits)) in enumerate(DYING.items())
        for _, setting in cells([name], {**SETTINGS, **limits}, everything=all_cells, seed=number)
    ]
    found: Played = {}
    for first in range(0, len(todo), AT_ONCE):
        groups = [Group(__name__, cell, tmp_path_factory.mktemp("group")) for cell in todo[first : first + AT_ONCE]]
        try:
            for (name, setting), group in zip(todo[first:], groups, strict=False):
                found.setdefault(name, []).append((setting, group.stories()))
        finally:
            for group in groups:
                group.end()
    return found


@pytest.mark.parametrize("name", DYING)
def test_a_death_or_a_stall_is_told_by_name_and_leaves_nothing(survived: Played, name: str) -> None:
    for setting, stories in survived[name]:
        check(stories, DYING[name][1], setting)


# --------------------------------------------------------------------------------------------- the group goes first


def group_destroyed_first(settings: list[dict[str, Any]]) -> list[list[int]]:
    """Iterators outlive the default group; one is closed by ``close``, one by ``with``, others by the end of all."""
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=60)
    found, iterators = [], []
    for setting in settings:
        stage = Stage(strategy, folder=Path(), **setting)
        iterators.append(iter(stage.distribute(stage.loader(Numbers(20)))))
        found.append(next(iterators[-1]).tolist())
    dist.destroy_process_group()
    for number, iterator in enumerate(iterators):
        found[number] += next(iterator).tolist()
    with iterators[0] as kept:
        next(kept)
    iterators[1].close()
    found[2] += [value for element in iterators[2] for value in element.tolist()]
    return found


def test_iterators_outlive_the_process_group_that_is_destroyed_first() -> None:
    settings = [{"prefetch": prefetch, "workers": workers} for prefetch in (0, 2) for workers in (0, 2)]
    first, second = run_ranks(2, group_destroyed_first, settings)
    assert first == [[0, 1, 4, 5], [0, 1, 4, 5], [0, 1, 4, 5, 8, 9, 12, 13, 16, 17], [0, 1, 4, 5]]
    assert second == [[2, 3, 6, 7], [2, 3, 6, 7], [2, 3, 6, 7, 10, 11, 14, 15, 18, 19], [2, 3, 6, 7]]


# --------------------------------------------------------------------------------- the end of the interpreter

SCRIPT = """
import os, sys
import torch.distributed as dist
from torch.utils.data import DataLoader
import torchdistinput as tdi

rank, port, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:" + port, rank=rank, world_size=2)
strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=60)
alive = []
for prefetch in (0, 2):
    for workers in (0, 2) if how == "exit on both" else (prefetch,):
        loader = DataLoader(range(400), batch_size=4, num_workers=workers, persistent_workers=workers > 0)
        alive.append(iter(strategy.distribute_dataset(loader, tdi.InputOptions(prefetch=prefetch))))
        next(alive[-1])
print("alive", flush=True)
if how == "exit on both":
    sys.exit(7)
if how == "raise on one" and rank == 1:
    raise KeyError("the training fails")
if how == "raise on one":
    while True:
        for iterator in alive:
            next(iterator)
"""


@pytest.mark.parametrize("how", ["exit on both", "raise on one"])
def test_the_interpreter_ends_with_iterators_alive(how: str, interpreters: Interpreters, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    port = str(free_port())
    ranks = interpreters.run(*([str(script), str(rank), port, how] for rank in range(2)))
    wait_for(lambda: not any(scenes.members_of(rank.pid) for rank in ranks))
    codes = [rank.code for rank in ranks]
    errors = [rank.errors for rank in ranks]
    assert [own_output(rank) for rank in ranks] == ["alive\n"] * 2, errors
    if how == "raise on one":
        assert codes == [1, 1], errors
        assert "RankLost" in errors[0]
        assert "rank 1" in errors[0]
        _, last, after = errors[1].partition("KeyError: 'the training fails'")
        assert last
        assert "Traceback" not in after  # torch 2.15 may count there what its own bindings leak
        assert "torchdistinput" not in after
    else:
        assert codes == [7 if how == "exit on both" else 0] * 2, errors
        assert "Traceback" not in "".join(errors)
