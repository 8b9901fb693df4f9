"""What it costs to stop and to go on: the first batch after a resume at 90 % of an epoch, and the states."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from benches.model import Column, Contender, Measured, Table, Target, largest
from benches.timing import seconds_of

__all__ = ["tables"]

FIRST, READ = "ms to the first batch", "kB read for it"
MEDIAN, FIRST_STATE, SIZE = "us, median", "us, the first of an epoch", "bytes as JSON"
ORDER, DRAWN, PERMUTATION = "ShuffleSampler", "RandomSampler", "torch.randperm alone"
FILE, FRONT = "a text file, from the state", "a text file, from its front"
BATCH, STEPS = 256, 300
LINE = "a line of text, about as long as they are in the wild: {:09d}\n"

Make = Callable[[str, int], Any]


def distribute(loader: Any) -> tdi.DistributedDataset:
    """The loader's batches for one process, nothing read ahead."""
    return tdi.Strategy(devices=["cpu"]).distribute_dataset(loader, tdi.InputOptions(prefetch=0))


def shuffled(_: str, length: int) -> tdi.DistributedDataset:
    """An order that is computed, not stored."""
    data: Any = range(length)
    return distribute(DataLoader(data, BATCH, sampler=tdi.ShuffleSampler(length, seed=1)))


def drawn(_: str, length: int) -> tdi.DistributedDataset:
    """An order that torch draws as a whole."""
    data: Any = range(length)
    return distribute(DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(1)))


def lines(files: str, _: int) -> tdi.DistributedDataset:
    """The lines of the files that fit a pattern; up to 16 are open at once."""
    return distribute(DataLoader(tdi.FileDataset(files, tdi.readers.text_lines, cycle_length=16), BATCH))


def bytes_read() -> int:
    """What this process has read so far, by the kernel's count; 0 where it does not tell."""
    told = Path("/proc/self/io")
    return int(told.read_text().split()[1]) if told.exists() else 0


def resumed(make: Make, file: str, length: int, *, loads: bool = True) -> Measured:
    """To the first batch at 90 % of the epoch, by a state or by reading up to it."""
    step = length * 9 // 10 // BATCH
    before = make(file, length)
    before.seek(0, step - 1)
    with iter(before) as iterator:
        next(iterator)
        state = json.dumps(before.state_dict())

    def first() -> None:
        dataset = make(file, length)
        if loads:
            dataset.load_state_dict(json.loads(state))
        with iter(dataset) as again:
            next(islice(again, 0 if loads else step, None))

    read = bytes_read()
    times = [seconds_of(first) for _ in range(5)]
    return {"ms": 1e3 * statistics.median(times), "kB": (bytes_read() - read) / 5e3}


def from_the_front(make: Make, file: str, length: int) -> Measured:
    """What a resume would be without a place in the file."""
    return resumed(make, file, length, loads=False)


def permuted(length: int) -> Measured:
    """The draw that torch's sampler needs."""
    draw = [seconds_of(lambda: torch.randperm(length, generator=torch.Generator().manual_seed(1))) for _ in range(5)]
    return {"ms": 1e3 * statistics.median(draw), "kB": 0.0}


def states(make: Make, file: str, length: int) -> Measured:
    """A state after each step."""
    dataset = make(file, length)
    with iter(dataset) as iterator:
        times = [seconds_of(dataset.state_dict) for _ in islice(iterator, STEPS)]
        size = len(json.dumps(dataset.state_dict()))
    return {"us": 1e6 * statistics.median(times), "first": 1e6 * times[0], "bytes": size}


def tables(*, small: bool, folder: Path) -> Sequence[Table]:
    """One process; what is compared is measured in turns."""
    shrink, rounds = (1000, 1) if small else (1, 3)
    file, count = folder / "lines.txt", 200_000_000 // len(LINE.format(0)) // shrink
    with file.open("w") as writer:
        writer.writelines(map(LINE.format, range(count)))
    for number in range(16):
        (folder / f"part-{number}.txt").write_text("".join(map(LINE.format, range(10_000))))
    place, parts = str(file), str(folder / "part-*.txt")
    resumes = (
        Contender(ORDER, "ours", resumed, (shuffled, place, 10**9 // shrink)),
        Contender(PERMUTATION, "limit", permuted, (10**7 // shrink,)),
        Contender(DRAWN, "ours", resumed, (drawn, place, 10**7 // shrink)),
        Contender(FILE, "ours", resumed, (lines, place, count)),
        Contender(FRONT, "before", from_the_front, (lines, place, count)),
    )
    saved = (
        Contender("map-style", "ours", states, (drawn, place, 10**6)),
        Contender("a file", "ours", states, (lines, place, count)),
        Contender("16 open files", "ours", states, (lines, parts, count)),
    )
    return [
        Table(
            "A resume at 90 % of the epoch",
            (Column(FIRST, "less", largest("ms")), Column(READ, "less", largest("kB"))),
            resumes,
            1,
            rounds,
            (Target(FIRST, FILE, 20.0, (FRONT,)),),
        ),
        Table(
            "state_dict() after each step",
            (
                Column(MEDIAN, "less", largest("us")),
                Column(FIRST_STATE, "less", largest("first")),
                Column(SIZE, "less", largest("bytes")),
            ),
            saved,
            1,
            rounds,
            tuple(Target(SIZE, each.name, 8192.0) for each in saved),
        ),
    ]
