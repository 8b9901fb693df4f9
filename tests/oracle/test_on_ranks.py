"""Random programs on real ranks, with loader workers: the same number of programs in each run.

All programs are played in step: the ranks of a world size are started once for each turn. A program that fails here is
one to try in one process too, where it shrinks.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings

import torchdistinput as tdi
from tests.oracle.checking import Checker
from tests.oracle.data import write_files
from tests.oracle.drawing import programs
from tests.oracle.found import MIXED
from tests.oracle.playing import Played, Targets, play, seed_for
from tests.oracle.program import Action, Files, Odd, Program, Turn
from tests.support.scenes import Footprint, left_since
from torchdistinput.sources.rng import shared_state_of
from torchdistinput.testing import run_ranks

Task = tuple[Program, Turn, str, Targets, str]
SECONDS = 60.0


def drawn(count: int, drawn_by: int) -> list[Program]:
    """So many programs; each by a seed of its own, as hypothesis varies what it drew before."""
    last: list[Program] = []

    @settings(
        max_examples=5, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(programs(processes=True))
    def draw(program: Program) -> None:
        last[:] = [program]

    found = []
    for number in range(count):
        seed(1000 * drawn_by + number)(draw)()
        found += last
    return found


@functools.cache
def strategy_of(replicas: int) -> tdi.Strategy:
    return tdi.Strategy(devices=["cpu"] * replicas, timeout_seconds=SECONDS)


def play_anew(task: Task) -> Played:
    """One rank: plays a turn as if its process had read nothing before."""
    program, turn, folder, targets, state = task
    strategy = strategy_of(turn.replicas)
    shared_state_of(tuple(range(dist.get_world_size()))).state = None
    seed_for(program, state, strategy.rank)
    return play(strategy, program, turn, Path(folder), targets, state)


def play_all(tasks: list[Task]) -> list[Played]:
    """One rank."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found = []
    for _, turn, *_ in tasks:
        strategy_of(turn.replicas)
    before = Footprint.now()
    for task in tasks:
        found.append(play_anew(task))
        found[-1].draws_next = float(torch.rand(()))
    assert not (left := left_since(before, frozenset())), f"left behind: {left}"
    return found


ALL, READ, DRAW = Action("read"), Action("read", 1), Action("draw", 2)
TOLD = (Action("tell", 1, 1), ALL, Action("tell", 1, 2), READ, Action("tell", 1, 1), READ)
WORLDS = (
    Turn(2, actions=(Action("read", 2),)),
    Turn(3, prefetch=2, actions=(Action("read"), Action("read", 1))),
    Turn(2),
)
FIXED = [
    Program("items", (11,), batch=4, order="shuffled", own_generator=False, turns=WORLDS),
    Program("table", (11,), batch=4, order="shuffled", own_generator=False, drop_in=True, turns=WORLDS),
    Program("items", (11,), extras="index", turns=(Turn(2, 1, 0, 1, (Action("infer"), Action("read"))),)),
    Program(
        "items", (11,), collate="augmented", order="shuffled", turns=(Turn(2, 1, 0, 2, (Action("read", 2),)), Turn())
    ),
    Program("stream", (5,), "HINT", 4, turns=(Turn(2, loader_workers=2),)),
    Program("items", (9,), order="batches", turns=(Turn(2, loader_workers=1, odd=Odd(1, "breaks", 2)),)),
    *(
        Program("items", (20,), batch=4, order="listed", turns=(Turn(2, 1, 3, 2, odd=Odd(1, does, 2)),))
        for does in ("draws", "ends")
    ),
    Program("files", (5,) * 4, batch=4, files=MIXED, turns=(Turn(2, loader_workers=2, actions=TOLD), Turn(3))),
    Program("items", (20,), batch=8, turns=(Turn(2, 1, 2, 2, (READ, Action("picture"), ALL, ALL), persistent=True),)),
    *(
        Program("items", (11,), batch=4, order="shuffled", own_generator=False, drop_in=drop_in, turns=(turn, Turn(3)))
        for turn in (Turn(2, prefetch=2, actions=(DRAW, DRAW)), Turn(2, loader_workers=2, actions=(ALL, DRAW)))
        for drop_in in (False, True)
    ),
    *(
        Program(data, (9,), batch=4, order=order, shows=shows, drop_in=drop_in, turns=(turn,))
        for data, order, shows in (
            *(("items", "in order", "epoch"), ("stream", "in order", "epoch"), ("stream", "in order", "counts")),
            *(("items", "told", "epoch"), ("items", "told", "nothing")),
        )
        for drop_in, turn in (
            (False, Turn(2, loader_workers=2, actions=(ALL, ALL, Action("tell", int(shows != "nothing"), 1), ALL))),
            (True, Turn(2, loader_workers=2, persistent=True, actions=(ALL, ALL, Action("tell", epochs=2), ALL))),
        )
    ),
]
"""Programs that draw from torch's default generator, in worlds that change; and of loader workers."""
DIFFER = [Program("files", (5, 4), batch=3), Program("files", (5, 4), batch=3, collate="pair", files=Files("txt.gz"))]


def play_differing(folder: str, how: str) -> list[Played]:
    """One rank: programs over files that are others on rank 1, under the same names."""
    rank, found = dist.get_rank(), []
    for number, program in enumerate(DIFFER):
        own = Path(folder, str(number), str(rank))
        own.mkdir(parents=True)
        os.chdir(own)
        write_files(program, Path(), how if rank else "")
        found.append(play(strategy_of(1), program, program.turns[0], Path(), (), ""))
    return found


@pytest.mark.parametrize("how", ["longer", "same size"])
def test_files_that_differ_between_ranks_are_refused_on_all_before_a_step(how: str, tmp_path: Path) -> None:
    for together in zip(*run_ranks(2, play_differing, str(tmp_path), how), strict=True):
        assert {each.log.error for each in together} == {"RankDisagreement"}
        assert not any(each.log.steps for each in together)


def test_random_programs_get_what_the_laws_say_among_processes(all_cells: bool, drawn_by: int, tmp_path: Path) -> None:
    checkers: list[tuple[Checker, Path]] = []
    for number, program in enumerate([*FIXED, *drawn(1000 if all_cells else 40, drawn_by)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        if program.has_files:
            write_files(program, folder)
        checkers.append((Checker(program, folder), folder))
    while any(checker.turn for checker, _ in checkers):
        worlds: dict[tuple[int, int], list[tuple[Checker, Task]]] = defaultdict(list)
        for checker, folder in checkers:
            turn = checker.turn
            if turn is not None:
                if turn.changes:
                    write_files(checker.program, folder, turn.changes)
                task = (checker.program, turn, str(folder), checker.targets, checker.state)
                is_alone = turn.odd is not None and turn.odd.does == "leaves"  # the ranks come to its end one by one
                worlds[turn.world, 1 + len(worlds) if is_alone else 0].append((checker, task))
        for (world, _), todo in worlds.items():
            ranks = run_ranks(world, play_all, [task for _, task in todo], timeout_seconds=SECONDS + 2 * len(todo))
            for place, (checker, task) in enumerate(todo):
                assert len({rank[place].draws_next for rank in ranks}) == world, task[0]
                try:
                    checker.check([rank[place] for rank in ranks])
                except AssertionError as error:
                    pytest.fail(f"{task[0]}\n{error}")
                folder = Path(task[2])
                checkers += [(branch, folder) for branch in checker.branches]
                checker.branches = []
