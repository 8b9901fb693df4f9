"""What it costs to stop and to go on: the time to the first batch after a resume, what is read for it, the states.

    shuffle   ShuffleSampler over 10^9 samples, at 90 % of the epoch; the samples read before the first batch
    random    torch's RandomSampler over 10^7 samples, at 90 %, beside the permutation that it has to draw
    files     a text file of 200 MB, at 90 %: bytes and time to the first batch, beside reading from the front
    state     state_dict() after each step (the median, and the first call of the epoch), and how long it is as JSON

Times are medians; what is compared is measured in turns. ``--json`` prints the same as JSON; ``--small`` takes a
hundredth of everything, to see that the script works.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import torchdistinput as tdi
from torchdistinput import readers

BATCH = 256
REPEATS = 5
STEPS = 300
LINE = "a line of text, about as long as they are in the wild: {:09d}\n"

Result = dict[str, float | str]


class Numbers(Dataset[int]):
    """0 .. n-1; counts what is read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.read += 1
        return index


def seconds_of(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def distribute(loader: DataLoader[Any]) -> tdi.DistributedDataset:
    """The loader's batches for one process, nothing read ahead."""
    return tdi.Strategy(devices=["cpu"]).distribute_dataset(loader, tdi.InputOptions(prefetch=0))


def state_at(dataset: tdi.DistributedDataset, step: int) -> str:
    """The state after that step, as JSON."""
    dataset.seek(0, step - 1)
    with iter(dataset) as iterator:
        next(iterator)
        return json.dumps(dataset.state_dict())


def first_batch(dataset: tdi.DistributedDataset, state: str) -> None:
    """Loads the state, and takes a batch."""
    dataset.load_state_dict(json.loads(state))
    with iter(dataset) as iterator:
        next(iterator)


def shuffle(length: int) -> Result:
    """A resume in an order that is computed, not stored."""

    def make() -> tuple[Numbers, tdi.DistributedDataset]:
        data = Numbers(length)
        return data, distribute(DataLoader(data, BATCH, sampler=tdi.ShuffleSampler(length, seed=1)))

    state = state_at(make()[1], length * 9 // 10 // BATCH)
    times, before = [], []
    for _ in range(REPEATS):
        data, dataset = make()
        times.append(seconds_of(lambda: first_batch(dataset, state)))  # noqa: B023 - called at once
        before.append(data.read - BATCH)
    return {"samples": length, "ms": 1e3 * statistics.median(times), "samples read before": max(before)}


def random(length: int) -> Result:
    """A resume in an order that torch draws as a whole."""

    def make() -> tdi.DistributedDataset:
        generator = torch.Generator().manual_seed(1)
        return distribute(DataLoader(Numbers(length), BATCH, shuffle=True, generator=generator))

    state = state_at(make(), length * 9 // 10 // BATCH)
    times, bare = [], []
    for _ in range(REPEATS):
        dataset = make()
        times.append(seconds_of(lambda: first_batch(dataset, state)))  # noqa: B023 - called at once
        bare.append(seconds_of(lambda: torch.randperm(length, generator=torch.Generator().manual_seed(1))))
    ratio = statistics.median(time / alone for time, alone in zip(times, bare, strict=True))
    return {
        "samples": length,
        "ms": 1e3 * statistics.median(times),
        "ms of randperm": 1e3 * statistics.median(bare),
        "ratio": ratio,
    }


def bytes_read() -> int:
    """What this process has read so far, by the kernel's count; 0 where it does not tell."""
    told = Path("/proc/self/io")
    return int(told.read_text().split()[1]) if told.exists() else 0


def text_file(folder: Path, megabytes: float) -> int:
    """Writes the file; returns its number of lines."""
    lines = int(megabytes * 1e6) // len(LINE.format(0))
    with (folder / "text.txt").open("w") as file:
        file.writelines(map(LINE.format, range(lines)))
    return lines


def files(folder: Path, lines: int) -> Result:
    """A resume inside a file."""
    size = (folder / "text.txt").stat().st_size
    steps = lines * 9 // 10 // BATCH

    def make() -> tdi.DistributedDataset:
        return distribute(DataLoader(tdi.FileDataset(str(folder / "text.txt"), readers.text_lines), BATCH))

    def from_the_front() -> None:
        with iter(make()) as iterator:
            next(islice(iterator, steps, None))

    state = state_at(make(), steps)
    times, front, read, read_in_front = [], [], [], []
    for _ in range(REPEATS):
        dataset = make()
        start = bytes_read()
        times.append(seconds_of(lambda: first_batch(dataset, state)))  # noqa: B023 - called at once
        middle = bytes_read()
        front.append(seconds_of(from_the_front))
        read.append(middle - start)
        read_in_front.append(bytes_read() - middle)
    return {
        "MB": size / 1e6,
        "ms": 1e3 * statistics.median(times),
        "kB read": statistics.median(read) / 1e3,
        "ms from the front": 1e3 * statistics.median(front),
        "kB from the front": statistics.median(read_in_front) / 1e3,
        "ratio": statistics.median(time / whole for time, whole in zip(times, front, strict=True)),
    }


def state(dataset: tdi.DistributedDataset) -> Result:
    """What a state costs at every step, and its size."""
    sizes = [len(json.dumps(dataset.state_dict()))]
    with iter(dataset) as iterator:
        times = [seconds_of(dataset.state_dict) for _ in islice(iterator, STEPS)]
        sizes.append(len(json.dumps(dataset.state_dict())))
    return {"us": 1e6 * statistics.median(times), "us of the first": 1e6 * times[0], "bytes": max(sizes)}


def states(folder: Path) -> Iterator[tuple[str, Result]]:
    """The states of each kind of input."""
    numbers = Numbers(1_000_000)
    generator = torch.Generator().manual_seed(1)
    yield "state, generator", state(distribute(DataLoader(numbers, BATCH, shuffle=True, generator=generator)))
    yield "state, default state", state(distribute(DataLoader(numbers, BATCH, shuffle=True)))
    sampler = tdi.ShuffleSampler(len(numbers), seed=1)
    yield "state, ShuffleSampler", state(distribute(DataLoader(numbers, BATCH, sampler=sampler)))
    for open_files in (1, 16):
        names = [str(folder / "text.txt")] * open_files
        data = tdi.FileDataset(names, readers.text_lines, cycle_length=open_files, shuffle_buffer=64)
        yield f"state, {open_files} open file(s)", state(distribute(DataLoader(data, BATCH)))


def machine() -> Result:
    """Where and when."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
        "machine": platform.platform(),
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def measured(small: bool) -> Iterator[tuple[str, Result]]:  # noqa: FBT001 - one switch of a script
    """Everything, one after the other."""
    shrink = 100 if small else 1
    yield "shuffle", shuffle(10**9 // shrink)
    yield "random", random(10**7 // shrink)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = text_file(folder, 200 / shrink)
        yield "files", files(folder, lines)
        yield from states(folder)


def shown(value: float | str) -> str:
    """A value of the table."""
    if isinstance(value, float):
        return f"{value:,.1f}" if value >= 10 else f"{value:.3g}"
    return f"{value}"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--small", action="store_true", help="a hundredth of everything")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {"where": machine()}
    for name, result in measured(arguments.small):
        found[name] = result
        if not arguments.json:
            print(f"{name:24}" + "   ".join(f"{key} {shown(value)}" for key, value in result.items()), flush=True)
    where = found["where"]
    if arguments.json:
        json.dump(found, sys.stdout, indent=2)
        print()
    else:
        print(", ".join(f"{key} {value}" for key, value in where.items()))


if __name__ == "__main__":
    main()
