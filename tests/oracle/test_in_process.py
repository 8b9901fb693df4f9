"""Random programs among threads over fake collectives: what every rank gets is what the laws say."""

from __future__ import annotations

import logging
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, seed

import torchdistinput as tdi
from tests.oracle.checking import Checker
from tests.oracle.data import write_files
from tests.oracle.drawing import programs, settings_of
from tests.oracle.playing import Played, Targets, play
from tests.oracle.program import Action, Files, Odd, Program, Turn
from tests.support.collectives import FakeCollectives
from torchdistinput.build_pipeline import Setting
from torchdistinput.plan.topology import Topology

SECONDS = 20.0


SKIP, READ, ALL = Action("skip", 1), Action("read", 1), Action("read")
KINDS = (("items", (5,), "shuffled"), ("stream", (5,), "in order"))
FOUND = [
    # The order after an epoch whose last drawn sample was left out.
    Program(
        "items",
        (4,),
        batch=1,
        order="shuffled",
        bad=frozenset({2}),
        skips=True,
        turns=(Turn(actions=(Action("read"), Action("read"))),),
    ),
    # Padded steps of several replicas had another structure.
    Program(sizes=(3,), collate="pair", extras="pad", turns=(Turn(replicas=2),)),
    # Empty parts: the count not in dim 0; numbers of another step; all replicas of a rank; vectors as long as a part.
    Program(sizes=(1,), collate="time first", turns=(Turn(replicas=2),)),
    Program(sizes=(3,), collate="counted", turns=(Turn(replicas=2),)),
    Program(sizes=(1,), collate="columns", turns=(Turn(2, 2),)),
    Program(sizes=(5,), batch=4, collate="columns", turns=(Turn(2),)),
    # A file that changed at equal size was read on.
    Program("files", (4,), turns=(Turn(actions=(Action("read", 1),)), Turn(changes="same size"))),
    # Arrays that were collated became tensors.
    Program(collate="arrays"),
    # A rank whose own data had ended before the step that was gone to, there and on the resume after.
    Program("stream", (7,), policy="HINT", batch=4, drop_last=True, turns=(Turn(2, actions=(SKIP, Action("read"))),)),
    Program("function", (1, 5), turns=(Turn(3, actions=(SKIP, Action("read", 1))), Turn(3))),
    # Data that had ended in the middle of a row before a resume came once more on the resume after.
    Program("function", (1, 1, 1), turns=(Turn(3, 2, actions=(Action("read", 1),)),) * 2 + (Turn(3, 2),)),
    # A resume in the middle of a rank's own batch of records.
    Program("files", (9, 9), policy="FILE", batch=4, turns=(Turn(2, actions=(Action("read", 1),)), Turn(2))),
    # A rank left its loop alone, no further before the end than was read ahead.
    Program("items", (8,), turns=(Turn(2, prefetch=2, actions=(ALL, ALL), odd=Odd(1, "leaves", 3)),)),
    # Unlike batches in a row: one structure, or one error.
    *[
        Program("ready", (3, 3, 3), collate=collate, odd_batch=(1, how), turns=(Turn(world, replicas),))
        for how in ("dtype", "missing", "uneven", "keys")
        for collate, world, replicas in (("table", 2, 1), ("alike", 1, 2))
    ],
    Program("function", (3, 3, 2, 1), collate="noted", turns=(Turn(1, 2),)),
    Program("ready", (0, 3, 2), "HINT", collate="table", turns=(Turn(2),)),
    # Numbers of a batch that would be those of another one.
    Program("ready", (4, 4, 1), "HINT", collate="noted", turns=(Turn(2),)),
    Program("ready", (1, 4), collate="noted", turns=(Turn(2),)),
    Program("ready", (4, 1, 2), "OFF", collate="texts", turns=(Turn(2, 2),)),
    # As many samples left out as may be, and one more.
    *[
        Program(batch=2, sizes=(12,), bad=frozenset({1, 4, 5}), skips=True, max_errors=most, turns=(turn,))
        for most, turn in ((3, Turn()), (2, Turn(prefetch=2)), (3, Turn(2, prefetch=5)), (2, Turn(2, prefetch=5)))
    ],
    # Parts by cost; batches by length; a state of the data's own.
    Program("items", (9,), batch=6, balance=True, extras="index", turns=(Turn(2, actions=(READ,)), Turn(1, 3))),
    Program("items", (9,), batch=6, order="tokens", turns=(Turn(2, actions=(READ,)), Turn(1, 3))),
    Program("kept", (9,), turns=(Turn(2, actions=(READ, READ), save_each=True), Turn(3, prefetch=2))),
    Program("kept", (4,), turns=(Turn(1), Turn(2))),
    # Turns of files, with the places of their records; lists that are padded; short batches of a rank's own.
    *[
        Program(
            "files", sizes, policy, 3, extras="index", files=Files("txt", 2, block), turns=(Turn(world), Turn(world))
        )
        for policy, world in (("DATA", 1), ("FILE", 2))
        for sizes, block in (((5, 4), 3), ((4, 4), 2), ((6, 3, 3), 3))
    ],
    Program("items", (3,), batch=4, collate="named", extras="pad", turns=(Turn(2),)),
    Program("items", (3,), batch=4, collate="objects", extras="index and pad", turns=(Turn(2),)),
    Program("stream", (5,), "OFF", batch=4, turns=(Turn(2, 2),)),
    Program("stream", (5,), "OFF", batch=3, turns=(Turn(2, 3),)),
    # Files that were begun, dealt anew to more ranks.
    Program("files", (5, 3, 4, 2), "FILE", turns=(Turn(2, actions=(READ,)), Turn(3))),
    # A state that was changed by hand.
    Program(order="shuffled", turns=(Turn(2, actions=(READ,)), Turn(beyond=True))),
    # Data that came to differ between epochs; and of which parts were without a sample only after it had grown.
    Program("items", (8,), turns=(Turn(2, actions=(ALL, ALL), odd=Odd(1, "grows")),)),
    Program("items", (8,), turns=(Turn(2, actions=(ALL, Action("grow", 1), ALL)),)),
    # A look in the middle of an epoch moved the state; before an epoch it used up random draws; it began an empty one.
    *(
        Program(data, sizes, order=order, turns=(Turn(world, actions=(READ, Action("look", how))), Turn(world)))
        for world, (data, sizes, order), how in (
            *((1, KINDS[0], 0), (2, KINDS[0], 1), (3, KINDS[0], 2)),
            *((1, KINDS[1], 1), (2, KINDS[1], 2), (3, KINDS[1], 0)),
        )
    ),
    *(
        Program("items", (5,), order="shuffled", turns=(Turn(2, actions=(READ, Action("look", how), ALL, ALL)),))
        for how in range(3)
    ),
    *(Program("items", (0,), turns=(Turn(world, actions=(Action("look", 1), ALL)),)) for world in (1, 2)),
    # The drop-in that was told an epoch in a loop, which was then left, forgot the steps of the loop.
    *(
        Program(data, (8,), drop_in=True, turns=(Turn(actions=(READ, Action("tell"), Action("break"))),))
        for data in ("items", "stream")
    ),
    # Data that had grown was saved with the length at construction.
    *(
        Program("items", (8,), order=order, turns=(Turn(world, actions=(ALL, Action("grow", 7))), Turn(2)))
        for world, order in ((1, "in order"), (2, "shuffled"), (3, "shuffled"))
    ),
    # The samples before a step that was sought were not counted, where a batch sampler has batches of its own.
    Program("items", (4, 2, 3), order="batches", turns=(Turn(actions=(Action("seek", 1), READ)),)),
]
"""The smallest programs that showed faults."""


def fake_strategy(world: FakeCollectives, rank: int, replicas: int) -> tdi.Strategy:
    """The strategy of one of several threads."""
    strategy = tdi.Strategy(devices=["cpu"] * replicas)
    if world.num_ranks > 1:
        topology = Topology(num_workers=world.num_ranks, replicas_per_worker=replicas, worker=rank)
        devices = [torch.device("cpu")] * replicas
        strategy._settle(Setting(topology=topology, devices=devices, ranks=world.ranks(rank), timeout_seconds=SECONDS))
    return strategy


def play_among_threads(program: Program, turn: Turn, folder: Path, targets: Targets, state: str) -> list[Played]:
    world = FakeCollectives(turn.world, timeout_seconds=SECONDS)

    def one(rank: int) -> Played:
        played = play(fake_strategy(world, rank, turn.replicas), program, turn, folder, targets, state)
        if played.log.error:
            world.end(rank)
        return played

    found = world.run(one, timeout_seconds=2 * SECONDS)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return [each for each in found if isinstance(each, Played)]


def run(program: Program) -> None:
    play_whole(program, counts_sought=False)


def play_whole(program: Program, *, counts_sought: bool) -> None:
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        folder = Path(name)
        if program.data == "files":
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
    seed(drawn_by)(settings_of(all_cells=all_cells)(check))()


NOT_MENDED = {
    "each rank counts the samples before a sought step by its own sampler, so states differ": [
        Program("items", (8,), "HINT", batch=9, turns=(Turn(3, actions=(SKIP,)),)),
    ],
    "the samples of ready batches before a step that was sought are not known": [
        Program("ready", (4, 2, 3), turns=(Turn(2, actions=(Action("seek", 1), READ)),)),
    ],
}
"""The smallest programs that show faults which are known."""


@pytest.mark.xfail(strict=True, raises=AssertionError)
@pytest.mark.parametrize(
    ("why", "program"), [(why, program) for why, programs in NOT_MENDED.items() for program in programs]
)
def test_what_is_known(why: str, program: Program) -> None:
    play_whole(program, counts_sought=True)
