"""What is told of steps without reading is what the laws say: random programs in one process, at worlds of any size."""

from __future__ import annotations

import tempfile
import warnings
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
from hypothesis import example, given, seed

import torchdistinput as tdi
from tests.oracle.data import OneProcess, dataset_of, numbers_of
from tests.oracle.drawing import programs, settings_of
from tests.oracle.laws import steps_of
from tests.oracle.playing import distributed
from tests.oracle.program import Program, Turn


def is_told(program: Program) -> bool:
    turn = program.turns[0]
    return program.is_told(turn) and replace(program, turns=(turn,)).is_exact and not turn.loader_workers


def look_up(program: Program) -> None:
    if program.order == "shuffled" and program.seed % 2:
        program = replace(program, own_generator=False)
    torch.manual_seed(program.seed)
    default = torch.get_rng_state()
    turn, wanted = program.turns[0], program.turns[0].world
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        strategy = tdi.Strategy(devices=["cpu"] * turn.replicas)
        loader = distributed(strategy, program, turn, dataset_of(program, Path(name)))
        orders = OneProcess(program, Path(name))
        for epoch in range(2):
            right = steps_of(program, turn, orders(epoch))
            told = []
            if right:
                told = [loader.samples_of(epoch, step, world_size=wanted) for step in range(len(right))]
                assert {each.num_steps for each in told} == {len(right)}
            found = [[numbers_of(part.samples) for part in each.parts] for each in told]
            assert found == [[piece for row in step for piece in row] for step in right]
            plan = loader.explain(world_size=wanted)
            if not epoch and plan.num_steps is not None:  # it is the plan of the first epoch
                samples = None if plan.batch_size is None else sum(each.global_size for each in told)
                assert (plan.num_steps, plan.samples) == (len(right), samples)
            owners = defaultdict(set)
            for each in told:
                for part in each.parts:
                    for sample in part.samples:
                        owners[sample].add((each.step, part.rank, part.replica))
            for sample, steps in owners.items():
                assert {*loader.steps_of(sample, epoch, world_size=wanted)} == steps
            for each in told:
                last = loader.samples_of(epoch, each.step, rank=wanted - 1, world_size=wanted)
                assert last.parts == tuple(part for part in each.parts if part.rank == wanted - 1)
        assert torch.equal(torch.get_rng_state(), default)  # nothing is drawn


def test_what_is_told_of_random_programs_is_what_the_laws_say(all_cells: bool, drawn_by: int) -> None:
    check = given(programs().filter(is_told))(look_up)
    # Rows that are passed over, of files that end one after the other.
    for sizes in ((3, 1), (0, 5), (2, 2)):
        check = example(
            Program("files", sizes, "FILE", 1, files=replace(Program().files, format="fragments"), turns=(Turn(2, 2),))
        )(check)
    # A last batch that is dropped by the sampler of lists.
    check = example(Program("lists", (3,), drop_last=True))(check)
    seed(drawn_by)(settings_of(all_cells=all_cells)(check))()
