"""Random programs over a network that goes and comes back: each rank gets what the laws say, or all raise alike."""

from __future__ import annotations

import itertools
import random
import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import torchdistinput as tdi
from tests.network.conftest import RANDOM_WORLDS
from tests.network.lab import Lab, hosts, run_on
from tests.oracle.checking import Checker
from tests.oracle.data import dataset_of, write_files
from tests.oracle.playing import Played, distributed
from tests.oracle.program import Action, Program, Turn
from tests.oracle.test_on_ranks import Task, drawn, play_all

LONGEST_SECONDS = 1.0
"""Of a time without the network: far below the timeout of the ranks, 60 seconds."""


def of_world(world: int, first: int, count: int) -> list[Program]:
    """Programs of one turn, in which so many ranks read to the end of an epoch: of a part of those that are drawn."""
    found = []
    for program in drawn(first + count, drawn_by=0)[first:]:
        turn = program.turns[0]
        goes_on_alone = turn.odd is not None and turn.odd.does == "leaves"  # to the next program, before the others
        if turn.world == world and not goes_on_alone:
            found.append(replace(program, turns=(replace(turn, actions=(*turn.actions, Action("read"))),)))
    return found


AT_ONCE = 3
"""The programs that follow one another without waiting for the network to go once more."""


def play_as_it_goes(tasks: list[Task], times: Path) -> list[Played]:
    """One rank: plays the next programs each time that the network went, so that it goes while each few of them run."""
    found = []
    for first in range(0, len(tasks), AT_ONCE):
        while not (times / str(first // AT_ONCE)).exists():
            time.sleep(0.005)
        found += play_all(tasks[first : first + AT_ONCE])
    return found


def unsettle(lab: Lab, dice: random.Random, running: Future[Any], times: Path) -> int:
    """Takes one host after the other from the network for a while. Returns how often."""
    for number in itertools.count():
        host = dice.randrange(len(lab.hosts))
        goes_after, stays_away = dice.uniform(0.05, 0.5), dice.uniform(0.05, LONGEST_SECONDS)
        if dice.random() < 0.5:
            (times / str(number)).touch()
        time.sleep(goes_after)
        if running.done():
            return number
        lab.unplug(host)
        (times / str(number)).touch()
        time.sleep(stays_away)
        lab.plug_in(host)
    raise AssertionError


@pytest.mark.parametrize("seed", RANDOM_WORLDS)
def test_programs_over_a_network_that_goes_and_comes_back(seed: int, all_cells: bool, tmp_path: Path) -> None:
    world, count = RANDOM_WORLDS[seed], 60 if all_cells else 12
    checkers, tasks = [], list[Task]()
    for number, program in enumerate(of_world(world, count * seed, count)):
        folder = tmp_path / str(number)
        folder.mkdir()
        if program.has_files:
            write_files(program, folder)
        checker = Checker(program, folder)
        checkers.append(checker)
        tasks.append((program, program.turns[0], str(folder), checker.targets, ""))
    with hosts(world) as lab, ThreadPoolExecutor(1) as pool:
        times = tmp_path / "times"
        times.mkdir()
        running = pool.submit(run_on, lab, play_as_it_goes, tasks, times, timeout_seconds=240.0)
        went = unsettle(lab, random.Random(seed), running, times)
        ranks = running.result()
    assert went >= (len(tasks) - 1) // AT_ONCE
    for place, (checker, task) in enumerate(zip(checkers, tasks, strict=True)):
        try:
            checker.check([rank[place] for rank in ranks])
        except AssertionError as error:
            pytest.fail(f"{task[0]}\n{error}")


ENDLESS = {
    "items": Program("items", (9,), batch=4),
    "stream": Program("stream", (9,), policy="OFF", batch=4),
    "ready": Program("ready", (4, 3)),
    "function": Program("function", (4, 3), policy="OFF"),
}
TIMEOUT_SECONDS = 4.0


def play_on(program: Program, folder: Path) -> str:
    """One rank: epochs without an end; the error that ends them."""
    tdi.Strategy(devices=["cpu"])  # all meet with patience: they come at different times
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=TIMEOUT_SECONDS)
    data = None if program.data == "function" else dataset_of(program, folder)
    dataset = distributed(strategy, program, Turn(3), data)
    try:
        with dataset:
            for step in itertools.count():
                for _ in dataset:
                    time.sleep(0.02)
                if step == 2:
                    (folder / str(strategy.rank)).touch()
    except tdi.InputError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_host_that_stays_away_is_named_on_all_ranks(kind: str, tmp_path: Path) -> None:
    dice = random.Random(kind)
    away = dice.randrange(1, 3)
    with hosts(3) as lab, ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_on, lab, play_on, ENDLESS[kind], tmp_path)
        while len([*tmp_path.iterdir()]) < 3 and not running.done():
            time.sleep(0.05)
        time.sleep(dice.uniform(0.0, 0.5))
        lab.unplug(away)
        told = running.result()
    others = "|".join(str(rank) for rank in range(3) if rank != away)
    for rank, message in enumerate(told):
        named = rf"rank ({others})\b" if rank == away else rf"rank {away}\b"
        assert re.match(r"(CoordinationTimeout|RankLost): ", message), (rank, away, message)
        assert re.search(named, message), (rank, away, message)
