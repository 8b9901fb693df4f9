"""A stall on a random rank, in a random stage, is named by the verdict: on real ranks, in one epoch each.

The log of the first rank and of the one in question, and the report from the traces, say the same. A busy machine
stands still itself: where another cause is named, the same stall is tried again with four times the length.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, final

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler, default_collate

import torchdistinput as tdi
from tests.support.launched import lines_logged
from torchdistinput.testing import run_ranks
from torchdistinput.tracing.report import Report
from torchdistinput.tracing.verdict import RankTimes, verdict

STALLS = (0.05, 0.2, 0.8)
"""How long a step stands still, in seconds: at first, and when it is tried again."""
BLOCK = 8  # steps that stand still, one after the other; a file of a rank has that many
STEPS = 6 * BLOCK
WORDS = {"sampler": "the sampler", "getitem": "__getitem__", "collate": "collate_fn", "training": "its training code"}


class Stall(NamedTuple):
    """Where a trial stands still, and how the input is read."""

    rank: int
    stage: str
    block: int
    files: bool
    workers: int
    seconds: float = STALLS[0]

    def __call__(self, stage: str, rank: int, step: int) -> None:
        if (stage, rank) == (self.stage, self.rank) and step // BLOCK == self.block:
            time.sleep(self.seconds)

    @property
    def place(self) -> tuple[int, int]:
        return self.block, self.rank

    @classmethod
    def drawn(cls, draw: random.Random, world: int) -> Stall:
        """A random one; files have no sampler."""
        files = draw.random() < 0.4
        stages = ["getitem", "collate", "training"] + ["sampler"] * (not files)
        return cls(draw.randrange(world), draw.choice(stages), draw.randrange(1, 5), files, draw.choice([0, 2]))


@final
class Samples:
    """Map-style data, two samples a step and rank."""

    def __init__(self, stall: Stall, world: int) -> None:
        self._stall = stall
        self._world = world

    def __len__(self) -> int:
        return 2 * self._world * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        step, place = divmod(index, 2 * self._world)
        if place % 2 == 0:
            self._stall("getitem", place // 2, step)
        return torch.tensor([step])


@final
class Sampler(SequentialSampler):
    def __init__(self, data: Samples, stall: Stall, rank: int, world: int) -> None:
        super().__init__(data)
        self._place = stall, rank, world

    def __iter__(self) -> Iterator[int]:
        stall, rank, world = self._place
        for index in super().__iter__():
            if index % (2 * world) == 0:
                stall("sampler", rank, index // (2 * world))
            yield index


@final
class Collate:
    def __init__(self, stall: Stall, rank: int) -> None:
        self._stall, self._rank = stall, rank

    def __call__(self, samples: list[torch.Tensor]) -> Any:
        self._stall("collate", self._rank, int(samples[0][0]))
        return default_collate(samples)


@final
class Read:
    """Records of files, two a step and rank."""

    def __init__(self, stall: Stall, rank: int) -> None:
        self._stall, self._rank = stall, rank

    def __call__(self, file: BinaryIO) -> Iterator[torch.Tensor]:
        for number, line in enumerate(file):
            if number % 2 == 0:
                self._stall("getitem", self._rank, int(line))
            yield torch.tensor([int(line)])


def verdicts(world: int, stalls: list[Stall], folder: str) -> list[str]:
    """One rank: the last line that it logged in each trial, if any."""
    lines = lines_logged()
    strategy = tdi.Strategy(devices=["cpu"])
    rank, found = strategy.input_pipeline_id, []
    for trial, stall in enumerate(stalls):
        data: Any = tdi.FileDataset(f"{folder}/*.txt", Read(stall, rank)) if stall.files else Samples(stall, world)
        loader: DataLoader[Any] = DataLoader(
            data,
            2 * world,
            sampler=None if stall.files else Sampler(data, stall, rank, world),
            num_workers=stall.workers,
            persistent_workers=stall.workers > 0,
            collate_fn=Collate(stall, rank),
        )
        lines.clear()
        options = tdi.InputOptions(log_every=1000, prefetch=2, trace=f"{folder}/trace-{trial}")
        with strategy.distribute_dataset(loader, options) as dataset:
            for _ in range(2):  # in the first one, all wait for the start of loader workers
                for step, _ in enumerate(dataset):
                    time.sleep(0.002)
                    stall("training", rank, step)
        found.append(next((line for line in lines[::-1] if ", step " in line), ""))
    return found


def name_of(block: int, rank: int) -> str:
    return f"{block:02}-{rank}.txt"


def names_rank(stall: Stall, lines: list[str]) -> bool:
    """Whether the first rank names the rank, and only that one speaks, too."""
    silent = all(not line or stall.rank == rank for rank, line in enumerate(lines[1:], 1))
    return silent and f"rank {stall.rank} made the others wait" in lines[0]


def explains(stall: Stall, line: str) -> bool:
    """Whether a line names the rank and the stage, and the file where that is what stood still."""
    named = f"rank {stall.rank} made the others wait" in line and f"of it in {WORDS[stall.stage]}" in line
    return named and (not (stall.files and stall.stage == "getitem") or name_of(*stall.place) in line)


def make_files(folder: Path, world: int) -> None:
    """Policy FILE gives file ``i`` to rank ``i % world``."""
    for block in range(STEPS // BLOCK):
        for rank in range(world):
            text = "".join(f"{BLOCK * block + step}\n" * 2 for step in range(BLOCK))
            (folder / name_of(block, rank)).write_text(text)


def trials(folder: Path, world: int, stalls: list[Stall]) -> tuple[list[Any], list[Any]]:
    """The trials whose stall was not named by the logs, and by the report."""
    folder.mkdir()
    make_files(folder, world)
    found = run_ranks(world, verdicts, world, stalls, str(folder), timeout_seconds=120 + 20 * len(stalls))
    by_logs, by_report = [], []
    for trial, (stall, *lines) in enumerate(zip(stalls, *found, strict=True)):
        if not (names_rank(stall, lines) and explains(stall, lines[stall.rank])):
            by_logs.append((stall, lines))
        told = str(Report.of(folder / f"trace-{trial}").verdict)
        if not explains(stall, told):
            by_report.append((stall, told))
    return by_logs, by_report


def drawn(world: int, seed: int, number: int) -> list[Stall]:
    draw = random.Random(seed)
    return [Stall.drawn(draw, world) for _ in range(number)]


@pytest.mark.parametrize("world", [2, 3])
def test_a_stall_is_named(world: int, tmp_path: Path) -> None:
    stalls, missed = drawn(world, 11 * world, 6), []
    for seconds in STALLS:
        by_logs, by_report = trials(tmp_path / f"{seconds}", world, [each._replace(seconds=seconds) for each in stalls])
        missed = by_logs + by_report
        stalls = [*dict.fromkeys(stall for stall, _ in missed)]
        if not stalls:
            break
    assert not missed


@pytest.mark.long
def test_99_of_100_stalls_are_named(tmp_path: Path) -> None:
    """On a machine that does nothing else."""
    by_logs, by_report = [], []
    for world in (2, 3, 4):
        logs, report = trials(tmp_path / str(world), world, drawn(world, 100 + world, 34))
        by_logs += logs
        by_report += report
    assert len(by_logs) <= 1, by_logs
    assert len(by_report) <= 3, by_report  # it is of both epochs: in the first one, all wait for loader workers


def rank(number: int, waiting: float, made_wait: float = 0.0, **more: Any) -> RankTimes:
    return RankTimes(rank=number, seconds=300.0, waiting=waiting, made_wait=made_wait, **more)


def late(stages: Mapping[str, float], **more: Any) -> list[RankTimes]:
    return [rank(0, 42.0), rank(1, 40.0), rank(2, 43.0, 41.0, late_in=stages, **more)]


LATE = "rank 2 made the others wait 41 s of 300 s (14 %): "
FILES = {"web-0193.tar": 30.0, "web-0007.tar": 8.0}
ALL = "the training loop of rank 1 waited 90 s of 300 s (30 %) for its input: "
GRADIENTS = "; if the ranks exchange gradients, the others wait for this rank there"

CASES = [
    (
        late({"fetch": 38.0, "draw": 3.0}, files=FILES, num_workers=2, busy=0.95),
        f"{LATE}93 % of it in fetch, most of that in web-0193.tar; more loader workers would help, a larger prefetch "
        "would not",
        (True, 2, "fetch", "web-0193.tar"),
    ),
    (
        late({"getitem": 41.0}, files={"a": 20.0, "b": 21.0, "c": 5.0}, num_workers=4, busy=0.2),
        f"{LATE}100 % of it in __getitem__; a larger prefetch would help, more loader workers would not",
        (True, 2, "getitem", None),
    ),
    (late({"collate": 41.0}, num_workers=4, busy=0.6), f"{LATE}100 % of it in collate_fn", (True, 2, "collate", None)),
    (
        late({"getitem": 41.0}, num_workers=0, busy=1.0),
        f"{LATE}100 % of it in __getitem__; loader workers would help: now the training thread reads",
        (True, 2, "getitem", None),
    ),
    (
        late({"sampler": 40.0, "getitem": 1.0}, files=FILES, num_workers=0),
        f"{LATE}98 % of it in the sampler; a sampler runs on the training thread, where neither loader workers nor a "
        "larger prefetch would help",
        (True, 2, "sampler", None),
    ),
    (
        late({"training": 40.0, "fetch": 1.0}, files=FILES, num_workers=2, busy=0.95),
        f"{LATE}98 % of it in its training code, not in its input",
        (False, 2, "training", None),
    ),
    (late({}), LATE[:-2], (True, 2, None, None)),
    (
        [rank(0, 60.0, 9.0), rank(1, 90.0, 8.0, waited_in={"copy": 60.0, "vote": 30.0})],
        f"{ALL}67 % of it in the copy to the device{GRADIENTS}",
        (True, 1, "copy", None),
    ),
    (
        [
            rank(0, 85.0, 2.0, waited_in={"getitem": 80.0}, num_workers=0),
            rank(1, 90.0, 3.0, waited_in={"getitem": 81.0, "vote": 9.0}, waited_files={"a": 81.0}, num_workers=0),
            rank(2, 3.0),  # the median counts
        ],
        "all ranks wait alike for their input, 85 s of 300 s (28 %): 95 % of it in __getitem__, most of that in a; "
        "loader workers would help: now the training thread reads",
        (True, None, "getitem", "a"),
    ),
    (
        [rank(0, 2.0, waited_in={"getitem": 2.0}), rank(1, 2.0, waited_in={"getitem": 2.0}, waited_files={"a": 1.0})],
        "not input-bound: all ranks wait alike for their input, 2.0 s of 300 s (1 %): 100 % of it in __getitem__",
        (False, None, "getitem", None),
    ),
    (
        late({"collate": 41.0}, files=FILES, num_workers=4, busy=0.6),  # a batch's, no file's
        f"{LATE}100 % of it in collate_fn",
        (True, 2, "collate", None),
    ),
    (  # others wait in an all-reduce, unseen
        [rank(0, 4.0), rank(1, 90.0, 4.0, late_in={"fetch": 4.0}, waited_in={"getitem": 89.0, "vote": 1.0})],
        f"{ALL}99 % of it in __getitem__{GRADIENTS}",
        (True, 1, "getitem", None),
    ),
    (  # for several ranks in turn
        [rank(0, 9.0, 40.0), rank(1, 90.0, 40.0, waited_in={"vote": 90.0})],
        f"{ALL}100 % of it in waits for other ranks, or for messages between them",
        (True, 1, "vote", None),
    ),
    (  # what it did is known of a small part yet
        [rank(0, 90.0), rank(1, 1.0, 80.0, late_in={"training": 5.0})],
        "rank 1 made the others wait 80 s of 300 s (27 %)",
        (True, 1, None, None),
    ),
    (
        [rank(0, 3.0, 1.0), rank(1, 2.0, 2.5, late_in={"getitem": 2.5}, files={"index 17": 2.0}, num_workers=0)],
        "not input-bound: rank 1 made the others wait 2.5 s of 300 s (1 %): 100 % of it in __getitem__, most of that "
        "in index 17",
        (False, 1, "getitem", "index 17"),
    ),
    (
        [rank(0, 0.0312)],
        "not input-bound: the training loop waited 31 ms of 300 s (0 %) for its input",
        (False, 0, None, None),
    ),
    (
        [rank(0, 30.0, waited_in={"fetch": 29.0, "draw": 1.0}, num_workers=0)],
        "the training loop waited 30 s of 300 s (10 %) for its input: 97 % of it in fetch; loader workers would help: "
        "now the training thread reads",
        (True, 0, "fetch", None),
    ),
    ([], "no step was measured yet", (False, None, None, None)),
    ([RankTimes(rank=0, seconds=0.0, waiting=0.0)], "no step was measured yet", (False, None, None, None)),
]


@pytest.mark.parametrize(("ranks", "text", "facts"), CASES)
def test_the_sentence_says_what_the_numbers_say(ranks: list[RankTimes], text: str, facts: tuple[Any, ...]) -> None:
    for order in (ranks, ranks[::-1]):
        found = verdict(order)
        assert str(found) == text
        assert (found.input_bound, found.rank, found.stage, found.file) == facts
