"""Random programs on real ranks, with loader workers: the same number of programs, the same ones, in each run.

All programs are played in step: the ranks of a world size are started once for each turn. A program that fails here is
one to try in one process too, where it shrinks.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

import torchdistinput as tdi
from tests.oracle.checking import Checker
from tests.oracle.data import write_files
from tests.oracle.drawing import programs
from tests.oracle.known_faults import known_fault
from tests.oracle.playing import Played, Targets, play
from tests.oracle.program import Program, Turn
from torchdistinput.testing import run_ranks

Task = tuple[Program, Turn, str, Targets, str]
SECONDS = 60.0


def drawn(count: int) -> list[Program]:
    """So many programs, the same each time; the first ones of hypothesis are small."""
    found: list[Program] = []

    @given(programs(processes=True).filter(lambda program: not known_fault(program)))
    def collect(program: Program) -> None:
        found.append(program)

    quick = settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    seed(1)(quick(collect))()
    return list(dict.fromkeys(found))


@functools.cache
def strategy_of(replicas: int) -> tdi.Strategy:
    return tdi.Strategy(devices=["cpu"] * replicas, timeout_seconds=SECONDS)


def play_all(tasks: list[Task]) -> list[Played]:
    """One rank."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    return [
        play(strategy_of(turn.replicas), program, turn, Path(folder), targets, state)
        for program, turn, folder, targets, state in tasks
    ]


def test_random_programs_get_what_the_laws_say_among_processes(all_cells: bool, tmp_path: Path) -> None:
    checkers: list[tuple[Checker, Path]] = []
    for number, program in enumerate(drawn(1000 if all_cells else 60)):
        folder = tmp_path / str(number)
        folder.mkdir()
        if program.data == "files":
            write_files(program, folder)
        checkers.append((Checker(program, folder), folder))
    while any(checker.turn for checker, _ in checkers):
        worlds: dict[int, list[tuple[Checker, Task]]] = defaultdict(list)
        for checker, folder in checkers:
            turn = checker.turn
            if turn is not None:
                if turn.changes:
                    write_files(checker.program, folder, turn.changes)
                task = (checker.program, turn, str(folder), checker.targets, checker.state)
                worlds[turn.world].append((checker, task))
        for world, todo in worlds.items():
            ranks = run_ranks(world, play_all, [task for _, task in todo], timeout_seconds=SECONDS + 2 * len(todo))
            for place, (checker, task) in enumerate(todo):
                try:
                    checker.check([rank[place] for rank in ranks])
                except AssertionError as error:
                    pytest.fail(f"{task[0]}\n{error}")
