"""The fault matrix over real ranks: who raises what, after how many steps, how soon, and that nothing is left behind.

Cells that stand elsewhere, and are not repeated here:

=========================================== ===========================================================================
broken files, records, structures, batches  ``test_bad_input.py``
exceptions of all kinds                     ``test_failures.py``
a rank that never comes, or comes alone     ``test_absent_ranks.py``
all ranks leave early                       the oracle, ``scripts/chaos.py --churn``
ranks and loader workers that die or stall  ``test_deaths.py``
a dataset function that raises              ``test_end_of_data.py``
a rank that dies in training, with a restart ``test_checkpoint.py``
a loader worker that dies, the drop-in      ``test_data_loader.py``
what ranks were given differs               ``test_desync.py``
the end of the interpreter under torchrun   ``tests/faults/test_departures.py``
=========================================== ===========================================================================
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import torchdistinput as tdi
from tests.data import Numbers
from tests.faults.test_deaths import DYING
from tests.support import faults, scenes
from tests.support.cells import cells
from tests.support.faults import Stall
from tests.support.platforms import linux_processes
from tests.support.scenes import SETTINGS, Expected, Played, Scene, Stage, check
from tests.support.waiting import wait_for
from torchdistinput import build_pipeline, readers
from torchdistinput.testing import run_ranks

pytestmark = linux_processes

WORLD = 3


# --------------------------------------------------------------------------------------------- data that fails


def at_samples(*places: tuple[int, int], how: Callable[[], object] = faults.plain) -> Scene:
    """A map-style dataset that fails for some ranks' samples: pairs of step and rank."""

    def scene(stage: Stage) -> None:
        stage.read(stage.numbers({stage.first_of(*place): how for place in places}))

    return scene


def lasting_workers(stage: Stage) -> None:
    lasting = {"persistent_workers": stage.workers > 0}
    stage.read(stage.numbers({stage.first_of(3, 1): faults.plain}, **lasting))


def last_batch(stage: Stage) -> None:
    """The last batch has 2 samples, one for each of the first ranks."""
    length = 3 * stage.batch + 2
    stage.read(stage.loader(Numbers(length, {length - 1: faults.plain})))


def collate(stage: Stage) -> None:
    stage.read(stage.numbers({}, collate_fn=faults.BrokenCollate(stage.first_of(3, 1))))


def sampler(stage: Stage) -> None:
    until = 3 * stage.batch if stage.rank == stage.odd else 600
    stage.read(stage.numbers({}, sampler=faults.BrokenSampler(until)))


def stream(stage: Stage) -> None:
    """Each loader worker has the whole of it, and they take turns: what fails is in the fourth batch of each."""
    stage.read(stage.loader(faults.Stream({3 * stage.batch: faults.plain} if stage.rank == stage.odd else {})))


def lines(stage: Stage, *sizes: int) -> str:
    """Files of lines: numbers from 0 in the first one, from 1000 in the second, and so on."""
    if stage.rank == 0:
        for number, size in enumerate(sizes):
            text = "".join(f"{1000 * number + k}\n" for k in range(size))
            (stage.folder / f"{number}.draft").write_text(text)
            (stage.folder / f"{number}.draft").rename(stage.folder / f"{number}.txt")
    names = [stage.folder / f"{number}.txt" for number in range(len(sizes))]
    wait_for(lambda: all(name.exists() for name in names))
    return str(stage.folder / "*.txt")


def map_fn(stage: Stage) -> None:
    """Under DATA one rank decodes the record."""
    data = tdi.FileDataset(lines(stage, 100), readers.text_lines, map_fn=faults.BrokenDecode(stage.first_of(3, 1)))
    stage.read(stage.loader(data), auto_shard_policy=tdi.AutoShardPolicy.DATA)


def reader(stage: Stage) -> None:
    """Under DATA all ranks read it; one of them has a bad disk."""
    broken = faults.BrokenReader(3 * stage.batch if stage.rank == stage.odd else -1)
    data = tdi.FileDataset(lines(stage, 100), broken, map_fn=int)
    stage.read(stage.loader(data), auto_shard_policy=tdi.AutoShardPolicy.DATA)


def after_others_ended(stage: Stage) -> None:
    """Under FILE each worker cuts a batch of 6 into 3 steps; rank 1 fails in its sixth batch, the others have one."""
    data = tdi.FileDataset(lines(stage, 6, 60, 6), readers.text_lines, map_fn=faults.BrokenDecode(1030))
    stage.read(stage.loader(data))


def device_copy(stage: Stage) -> None:
    """The part of the copy that is not asynchronous: no memory is left for it."""
    copier = faults.BrokenCopier(3)
    broken = mock.patch.object(build_pipeline, "make_copier", return_value=copier)
    with broken if stage.rank == stage.odd else contextlib.nullcontext():
        stage.read(stage.numbers({}))


IN_A_FILE = ("BrokenError",)

FAILING: dict[str, tuple[Scene, Expected]] = {
    "one rank": (at_samples((3, 1)), Expected(3, words=("BrokenError", "step 3", "sample"))),
    "two ranks at once": (at_samples((2, 0), (2, 2)), Expected(2, (0, 2))),
    "two ranks one after the other": (at_samples((4, 0), (2, 1)), Expected(2, words=("step 2",))),
    "the first batch": (at_samples((0, 2)), Expected(0, (2,))),
    "the last batch": (last_batch, Expected(3)),
    "lasting workers": (lasting_workers, Expected(3)),
    "collate_fn": (collate, Expected(3)),
    "the sampler": (sampler, Expected(3)),
    "an iterable": (stream, Expected((3, 6))),
    "map_fn": (map_fn, Expected(3, words=("BrokenError", "0.txt"), causes=IN_A_FILE)),
    "a reader": (reader, Expected(3, words=("BrokenError", "0.txt"), causes=IN_A_FILE)),
    "after others have ended": (
        after_others_ended,
        Expected(15, words=("BrokenError", "1.txt"), causes=IN_A_FILE),
    ),
    "the copy": (device_copy, Expected(3, words=("MemoryError", "no memory left", "cop"), causes=("MemoryError",))),
    "an exception of 10 MB": (at_samples((3, 1), how=faults.huge), Expected(3)),
}


# --------------------------------------------------------------------------------------------- ranks that leave


def training_fails(stage: Stage) -> None:
    with stage.distribute(stage.numbers({})) as dataset:
        stage.loop(dataset, 3, faults.plain if stage.rank == stage.odd else bool)


def training_fails_and_is_caught(stage: Stage) -> None:
    """Nothing is closed by hand: the iterator goes with the traceback."""
    try:
        stage.loop(stage.distribute(stage.numbers({})), 3, faults.plain if stage.rank == stage.odd else bool)
    except faults.BrokenError:
        stage.story.note = "caught"


def one_breaks(stage: Stage) -> None:
    for _ in stage.distribute(stage.numbers({})):
        stage.count()
        if stage.rank == 1 and stage.story.steps == 3:
            break


def one_closes(stage: Stage) -> None:
    """Over data without an end."""
    iterator = iter(stage.distribute(lambda: (torch.arange(6) for _ in itertools.count())))
    stage.loop(itertools.islice(iterator, 3 if stage.rank == 1 else None))
    iterator.close()


def training_fails_and_its_traceback_is_kept(stage: Stage) -> None:
    """As in an interactive session: the iterator lives, and only ``close`` tells the others."""
    dataset = stage.distribute(stage.numbers({}))
    try:
        stage.loop(dataset, 3, faults.plain if stage.rank == stage.odd else bool)
    except faults.BrokenError as kept:
        dataset.close()
        stage.story.note = str(kept)


def interrupted_while_waiting(stage: Stage) -> None:
    """Rank 2 is slow, ranks 0 and 1 wait for it in ``next``, where rank 1 gets a Ctrl-C."""
    release = stage.folder / "release"
    do = (bool, threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start, Stall(release))[stage.rank]
    with stage.distribute(stage.numbers({})) as dataset:
        try:
            stage.loop(dataset, 3, do)
        finally:
            if stage.rank == 1:
                release.touch()


def all_interrupted(stage: Stage) -> None:
    """As a Ctrl-C in a terminal: all ranks and their loader workers get it, two in ``next``, one in its training."""
    (stage.folder / f"{stage.rank} {os.getpgrp()}").touch()  # a rank and its loader workers are a process group

    def interrupt_all() -> None:
        """Stopped ones get it at once: none hears of another one's end before."""
        time.sleep(0.4)
        *others, own = [int(note.split()[1]) for note in sorted(os.listdir(stage.folder))]
        for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGCONT):
            for group in others:
                os.killpg(group, number)
        os.killpg(own, signal.SIGINT)
        time.sleep(faults.PATIENCE_SECONDS)

    with stage.distribute(stage.numbers({})) as dataset:
        stage.loop(dataset, 3, interrupt_all if stage.rank == 2 else bool)


LEAVING: dict[str, tuple[Scene, Expected]] = {
    "the training fails": (training_fails, Expected(3, words=(), kind="RankLost", own="BrokenError", ahead=True)),
    "the training fails, caught": (
        training_fails_and_is_caught,
        Expected(3, words=(), kind="RankLost", own="", ahead=True),
    ),
    "the training fails, its traceback is kept": (
        training_fails_and_its_traceback_is_kept,
        Expected(3, words=(), kind="RankLost", own="", ahead=True),
    ),
    "one rank breaks": (one_breaks, Expected(3, words=(), kind="RankLost", own="", ahead=True)),
    "one rank closes": (one_closes, Expected(3, words=(), kind="RankLost", own="", ahead=True)),
    "Ctrl-C on one": (
        interrupted_while_waiting,
        Expected(3, words=(), kind="RankLost", own="KeyboardInterrupt", ahead=True),
    ),
    "Ctrl-C on all": (all_interrupted, Expected(3, (0, 1, 2), own="KeyboardInterrupt", ahead=True)),
}


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


LOST = ("a worker is killed", "a worker exits", "a worker stalls, with a timeout")


CELLS: dict[tuple[int, str], tuple[Scene, Expected, dict[str, Any]]] = {
    **{(WORLD, name): (scene, expected, {}) for name, (scene, expected) in (FAILING | LEAVING).items()},
    **{
        (1, name): (scene, here(expected), {})
        for name, (scene, expected) in FAILING.items()
        if expected.ranks == (1,) and name != "after others have ended"
    },
    **{(1, name): (cell[0], here(cell[1]), cell[2]) for name, cell in DYING.items() if name in LOST},
    (1, "Ctrl-C"): (interrupted_in_next, Expected(2, (0,), own="KeyboardInterrupt", ahead=True), {}),
}
"""By the number of ranks and the name; in a process alone there is nobody to agree with."""
SCENES = {name: scene for (_, name), (scene, _, _) in CELLS.items()}


@pytest.fixture(scope="module")
def played(all_cells: bool, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Played]:
    """One launch for all cells that every rank lives through, and one of a process alone."""
    found: dict[int, Played] = {}
    for world in (WORLD, 1):
        todo = [
            (name, setting)
            for number, ((size, name), (_, _, limits)) in enumerate(CELLS.items())
            for _, setting in cells([name], {**SETTINGS, **limits}, everything=all_cells, seed=number)
            if size == world
        ]
        folder = str(tmp_path_factory.mktemp("faults"))
        ranks = run_ranks(world, scenes.play_all, __name__, todo, folder, timeout_seconds=60 + 10 * len(todo))
        of_world = found.setdefault(world, {})
        for (name, setting), *stories in zip(todo, *ranks, strict=True):
            of_world.setdefault(name, []).append((setting, stories))
    return found


@pytest.mark.parametrize(("world", "name"), CELLS)
def test_a_fault_is_told_on_every_rank_after_the_same_steps_and_leaves_nothing(
    played: dict[int, Played], world: int, name: str
) -> None:
    for setting, stories in played[world][name]:
        check(stories, CELLS[world, name][1], setting)
