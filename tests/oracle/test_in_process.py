"""Random programs among threads over fake collectives: what every rank gets is what the laws say."""

from __future__ import annotations

import logging
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, seed

import torchdistinput as tdi
from tests.oracle.checking import Checker
from tests.oracle.data import write_files
from tests.oracle.drawing import programs, settings_of
from tests.oracle.found import FOUND, READ
from tests.oracle.playing import Played, Targets, play
from tests.oracle.program import Action, Program, Turn
from tests.support.collectives import FakeCollectives
from tests.support.scenes import Footprint, left_since
from torchdistinput.build_pipeline import Setting
from torchdistinput.plan.topology import Topology

SECONDS = 20.0


def fake_strategy(world: FakeCollectives, rank: int, replicas: int, sharing: int = 1) -> tdi.Strategy:
    """The strategy of one of several threads, of which so many read the same."""
    strategy = tdi.Strategy(devices=["cpu"] * replicas)
    if world.num_ranks > 1:
        workers = world.num_ranks // sharing
        topology = Topology(num_workers=workers, replicas_per_worker=replicas, worker=rank // sharing)
        devices = [torch.device("cpu")] * replicas
        strategy._settle(Setting(topology=topology, devices=devices, ranks=world.ranks(rank), timeout_seconds=SECONDS))
    return strategy


def play_among_threads(program: Program, turn: Turn, folder: Path, targets: Targets, state: str) -> list[Played]:
    ranks = turn.world * turn.sharing
    world = FakeCollectives(ranks, firsts=range(0, ranks, turn.sharing), timeout_seconds=SECONDS)

    def one(rank: int) -> Played:
        played = play(fake_strategy(world, rank, turn.replicas, turn.sharing), program, turn, folder, targets, state)
        if played.log.error:
            world.end(rank)
        return played

    found = world.run(one, timeout_seconds=2 * SECONDS)
    for rank in range(ranks):
        world.end(rank)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    played = [each for each in found if isinstance(each, Played)]
    for rank, each in enumerate(played):  # those that read the same see the same
        assert replace(each, message="") == replace(played[rank - rank % turn.sharing], message="")
    return played[:: turn.sharing]


def run(program: Program) -> None:
    play_whole(program, counts_sought=False)


def play_whole(program: Program, *, counts_sought: bool) -> None:
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        folder = Path(name)
        if program.has_files:
            write_files(program, folder)
        todo = [Checker(program, folder, counts_sought=counts_sought)]
        for checker in todo:
            while (turn := checker.turn) is not None:
                if turn.changes:
                    write_files(program, folder, turn.changes)
                checker.check(play_among_threads(checker.program, turn, folder, checker.targets, checker.state))
            todo += checker.branches


def test_random_programs_get_what_the_laws_say(
    all_cells: bool, drawn_by: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    check = given(programs(most_ranks=7 if all_cells else 3))(run)
    for program in FOUND:
        check = example(program)(check)
    before = Footprint.now()
    seed(drawn_by)(settings_of(all_cells=all_cells)(check))()
    assert not (left := left_since(before, frozenset())), f"left behind: {left}"


@pytest.mark.parametrize("data", [("ready", (4, 2, 3)), ("items", (9,))], ids=str)
def test_the_samples_before_a_step_that_was_sought_are_counted(data: tuple[Any, tuple[int, ...]]) -> None:
    play_whole(Program(*data, turns=(Turn(2, actions=(Action("seek", 1), READ)),)), counts_sought=True)
