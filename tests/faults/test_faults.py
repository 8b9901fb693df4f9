"""The fault matrix in one process: the same scenes as over ranks, in a process with nobody to agree with."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from typing import Any

import pytest

from tests.faults import test_deaths, test_faults_on_ranks
from tests.support import scenes
from tests.support.cells import cells
from tests.support.platforms import linux_processes
from tests.support.scenes import SETTINGS, Expected, Played, Scene, Stage
from torchdistinput.testing import run_ranks

pytestmark = linux_processes


def interrupted_in_next(stage: Stage) -> None:
    """Ctrl-C while a batch is slow to come."""
    soon = threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT))
    slow = {stage.first_of(4, 0): lambda: time.sleep(1.5)}
    reached_early = stage.prefetch if stage.workers == 0 else 0  # what is read here is read ahead in an earlier `next`
    with stage.distribute(stage.numbers(slow)) as dataset:
        stage.loop(dataset, 4 - reached_early, soon.start)


def here(expected: Expected) -> Expected:
    """The same without ranks."""
    return dataclasses.replace(expected, ranks=(0,), named=False)


WHERE_ONE = {
    name: cell
    for name, cell in test_faults_on_ranks.FAILING.items()
    if cell[1].ranks == (1,) and name != "after others have ended"
}
LOST = ("a worker is killed", "a worker exits", "a worker stalls, with a timeout")
ALONE: dict[str, tuple[Scene, Expected, dict[str, Any]]] = {
    **{name: (scene, here(expected), {}) for name, (scene, expected) in WHERE_ONE.items()},
    **{name: (cell[0], here(cell[1]), cell[2]) for name, cell in test_deaths.DYING.items() if name in LOST},
    "Ctrl-C": (interrupted_in_next, Expected(2, (0,), own="KeyboardInterrupt", ahead=True), {}),
}
SCENES = {name: scene for name, (scene, _, _) in ALONE.items()}


@pytest.fixture(scope="module")
def played(all_cells: bool, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """One launch for all."""
    todo = [
        cell
        for number, (name, (_, _, limits)) in enumerate(ALONE.items())
        for cell in cells([name], {**SETTINGS, **limits}, everything=all_cells, seed=number)
    ]
    folder = str(tmp_path_factory.mktemp("alone"))
    (stories,) = run_ranks(1, scenes.play_all, __name__, todo, folder, timeout_seconds=60 + 10 * len(todo))
    found: Played = {}
    for (name, setting), story in zip(todo, stories, strict=True):
        found.setdefault(name, []).append((setting, [story]))
    return found


@pytest.mark.parametrize("name", ALONE)
def test_a_fault_is_told_after_the_steps_before_it_and_leaves_nothing(played: Played, name: str) -> None:
    for setting, stories in played[name]:
        scenes.check(stories, ALONE[name][1], setting)
