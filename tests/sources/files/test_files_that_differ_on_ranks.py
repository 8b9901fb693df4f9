"""Under DATA, ranks that see different contents of the same files are told the first file that differs, and how."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support.epochs import Raised, raised
from torchdistinput import readers
from torchdistinput.testing import run_ranks

FILES, LINES = 3, 100
MIXED = {"shuffle_files": True, "shuffle_buffer": 16, "cycle_length": 2}


class Case(NamedTuple):
    """What one rank has otherwise, and what all ranks are told; nothing where the difference does no harm."""

    words: tuple[str, ...]
    change: Callable[[str], None] = lambda _: None
    settings: dict[str, Any] = {}  # noqa: RUF012 - never changed
    policy: str = "DATA"
    workers: int = 0
    later: Callable[[str], None] = lambda _: None
    """Changes what the rank has, once the epoch has begun."""
    read: Any = readers.text_lines
    pattern: str = "*.txt"
    of: Callable[[tdi.FileDataset], Any] = lambda files: files
    """Makes the data of the files."""
    steps: int | None = None
    """After how many steps it is noticed, where that is not before the first."""


def text(folder: str, number: int, lines: range) -> None:
    Path(f"{folder}/{number}.txt").write_text("".join(f"{number}:{line:03}\n" for line in lines))


def shorter(folder: str) -> None:
    text(folder, 1, range(LINES - 5))


def other_start(folder: str) -> None:
    text(folder, 1, range(1, LINES + 1))


def zipped(folder: str) -> None:
    Path(f"{folder}/0.gz").write_bytes(gzip.compress(b"1\n" * (90 if folder.endswith("1") else 95)))


def array(folder: str) -> None:
    np.save(f"{folder}/0.npy", np.arange(90 if folder.endswith("1") else 95))


def twice_here(line: str) -> list[str]:
    return [line] * (1 + (line == "1:050" and dist.get_rank() == 1))


def mixed(files: tdi.FileDataset) -> tdi.Mixture:
    both = {"files": files, "numbers": [*map(str, range(50))]}
    return tdi.Mixture(both, {"files": 3, "numbers": 1}, stop="repeat", num_samples=800)


CASES = {
    "fewer lines": Case(("content of the files", "1.txt: 570 bytes", "1.txt: 600 bytes"), shorter),
    "fewer lines, mixed": Case(("content of the files", "570 bytes", "600 bytes"), shorter, MIXED),
    "fewer lines, in parts": Case(("file list, first in entry 4", "1.txt[0:142]", "1.txt[0:150]"), shorter)._replace(
        settings={"fragment_bytes": 150}
    ),
    "equal size": Case(
        ("content of the files, first in entry 1", "1.txt: 600 bytes, first and last block"), other_start
    ),
    "a file is missing": Case(("2.txt: is not there",), lambda at: os.unlink(f"{at}/2.txt"))._replace(
        pattern="{0..2}.txt"
    ),
    "a name more": Case(("file list, first in entry 3", "3.txt", "(none)"), lambda at: text(at, 3, range(5))),
    "another name": Case(("file list, first in entry 1", "1.txt", "11.txt"))._replace(
        change=lambda at: os.rename(f"{at}/1.txt", f"{at}/11.txt")
    ),
    "compressed": Case(("0.gz: ",), pattern="*.gz"),
    "arrays": Case(("0.npy: 888 bytes", "0.npy: 848 bytes"), pattern="*.npy", read=readers.npy_rows),
    "appended meanwhile": Case(("1.txt has 100 records", "more records"))._replace(
        later=lambda at: text(at, 1, range(LINES + 30)), steps=25
    ),
    "cut meanwhile, at a batch": Case(("2.txt has 100 records", "no more records"))._replace(
        later=lambda at: text(at, 2, range(LINES - 4)), steps=37
    ),
    "cut meanwhile, mixed": Case(("2.txt has 50 records", "more records"))._replace(
        later=lambda at: text(at, 2, range(50)), settings={"cycle_length": 2, "block_length": 4}
    ),
    "more samples of a record": Case(("1.txt has 100 records", "1.txt has 101 records"))._replace(
        settings={"flat_map_fn": twice_here}, steps=25
    ),
    "more samples, in loader workers": Case(("1.txt has 100 records", "1.txt has 101 records"))._replace(
        settings={"flat_map_fn": twice_here, **MIXED}, workers=2
    ),
    "a mixture": Case(("content of the files, first in entry 1", "570 bytes", "600 bytes"), shorter, of=mixed),
    "a mixture, cut meanwhile": Case(("read different data at step 32",), of=mixed)._replace(
        later=lambda at: text(at, 2, range(50)), steps=32
    ),
    "under FILE": Case((), shorter, policy="FILE"),
}


def every_case(folder: str) -> dict[str, tuple[Raised | None, int]]:
    """One rank with files of its own: what each case raises, and after how many steps."""
    found = {}
    strategy = tdi.Strategy(["cpu"], timeout_seconds=60)
    rank = dist.get_rank()
    for name, case in CASES.items():
        own = f"{folder}/{name}/{rank}"
        os.makedirs(own)
        for number in range(FILES):
            text(own, number, range(LINES))
        zipped(own)
        array(own)
        os.chdir(own)
        if rank == 1:
            case.change(own)
        steps = 0

        def run(case: Case = case, own: str = own) -> None:
            nonlocal steps
            files = tdi.FileDataset(case.pattern, case.read, **case.settings)
            loader = DataLoader(case.of(files), batch_size=8, num_workers=case.workers)
            options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy[case.policy], prefetch=2)
            with strategy.distribute_dataset(loader, options) as distributed:
                for step, _ in enumerate(distributed):
                    if not step and rank == 1:
                        case.later(own)
                    steps = step + 1

        found[name] = (raised(run), steps)
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[Raised | None, int]]]:
    return run_ranks(2, every_case, str(tmp_path_factory.mktemp("differ")), timeout_seconds=120)


@pytest.mark.parametrize("name", CASES)
def test_ranks_are_told_the_first_file_that_differs(
    told: list[dict[str, tuple[Raised | None, int]]], name: str
) -> None:
    case = CASES[name]
    (one, steps), (other, steps_there) = (each[name] for each in told)
    assert one == other
    assert steps == steps_there
    if not case.words:
        assert one is None
        return
    assert one is not None
    assert one.kind == "RankDisagreement"
    assert len(one.message) < 500
    assert all(word in one.message for word in case.words), one.message
    assert "rank 0" in one.message
    assert "rank 1" in one.message
    assert case.steps is None or steps == case.steps
