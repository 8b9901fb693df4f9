"""A soak: many short epochs on real ranks, with breaks, faults and resumes. Every count is exact, and nothing grows.

    python scripts/soak.py                              1,000 epochs on 2 ranks
    python scripts/soak.py --seed 7 --epochs 312        again what failed in epoch 311 of seed 7
    python scripts/soak.py --epochs 10000000 --seconds 3600     as many as there are in an hour

A *round* is one input, drawn from the seed, that is read for some epochs. Each epoch is read to its end, left early by
all ranks, left and taken up again from its state (by the same loader, or by a fresh one), or hit by a sample that
cannot be read, after which the next epoch, or a resume, goes on. What the ranks got is put together and compared with
the data; the sizes of the process are compared between an early epoch and the last.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import mmap
import multiprocessing
import os
import random
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

import torchdistinput as tdi
from torchdistinput import readers
from torchdistinput.testing import RankFailed, run_ranks

REPORT_EVERY = 100
FOLDERS = 6
HANG_SECONDS = 120.0
SECONDS_PER_EPOCH = 5.0
GRACE_SECONDS = 20.0
RSS_GROWTH_KIB = 16 * 1024
"""What a process may grow by after the first epochs; the allocator's pools alone move by a few MiB."""

# -------------------------------------------------------------------------------------------------------- the plan


@dataclasses.dataclass(frozen=True)
class Event:
    """What happens in one epoch.

    Args:
      kind: ``whole``, ``break``, ``resume``, ``fault`` or ``fault, resume``.
      at: the step at which all ranks leave the loop.
      closes: whether the iterator is closed; else it is just left.
      fresh: whether a fresh loader takes the epoch up again.
      spoiled: which sample cannot be read, as a part of all.
    """

    kind: str
    at: int
    closes: bool
    fresh: bool
    spoiled: float


@dataclasses.dataclass(frozen=True)
class Round:
    """An input and the epochs that are read of it.

    Args:
      data: its kind.
      values: all its samples.
      skips: of them, those that cannot be read and are left out; none where that is an error.
      folder: of its files.
      policy: how it is divided.
      batch: the global batch size.
      drop_last: whether the short last batch is dropped.
      replicas: of each process; 0 for the drop-in loader.
      prefetch: steps ahead.
      workers: arguments for loader workers.
      events: one for each epoch.
    """

    data: str
    values: tuple[int, ...]
    skips: frozenset[int]
    folder: str
    policy: str
    batch: int
    drop_last: bool
    replicas: int
    prefetch: int
    workers: dict[str, Any]
    events: tuple[Event, ...]


def round_of(seed: int, number: int, folders: Sequence[tuple[str, tuple[int, ...]]]) -> Round:
    """The round of that number: it follows from the seed, and no other round has a part in it."""
    rng = random.Random(f"{seed}/{number}")
    data = rng.choice(["in order", "drawn", "shuffled", "permuted", "files", "mixed files", "stream", "batches"])
    folder, values = rng.choice(folders)
    files = "files" in data
    if not files:
        folder, values = "", tuple(range(rng.choice([0, 1, 3, rng.randint(4, 60), rng.randint(4, 60)])))
    num_workers = rng.choice([0] * 14 + [1, 2]) if data not in ("stream", "batches") else 0
    workers = {"num_workers": num_workers, "persistent_workers": rng.random() < 0.5} if num_workers else {}
    policy = rng.choice(["DATA", "FILE"]) if files else "DATA"
    replicas = rng.choice([1, 1, 2] + [0] * (policy == "DATA" and data != "batches"))
    skips: frozenset[int] = frozenset()
    kinds = ["whole", "whole", "break", "break", "resume", "fault", "fault, resume"]
    if replicas and values and data not in ("stream", "batches") and rng.random() < 0.25:
        skips, kinds = frozenset(rng.sample(values, min(len(values), 3))), kinds[:5]
    events = [
        Event(rng.choice(kinds), rng.randint(1, 9), rng.random() < 0.5, rng.random() < 0.5, rng.random())
        for _ in range(rng.randint(1, 8))
    ]
    drops = data != "batches" and rng.random() < 0.25
    arguments = (policy, rng.randint(1, 9), drops, replicas, rng.randrange(6), workers, tuple(events))
    return Round(data, values, skips, folder, *arguments)


def warm_up() -> Iterator[Round]:
    """One round for each strategy, so that every pool of connections is there before anything is measured."""
    events = tuple(Event(kind, 2, closes, closes, 0.5) for kind in ("break", "fault") for closes in (False, True))
    for replicas in range(3):
        yield Round("in order", tuple(range(20)), frozenset(), "", "DATA", 4, False, replicas, 2, {}, events)


# -------------------------------------------------------------------------------------------------------- the data


class Spoiled(ValueError):
    """Raised for a sample that cannot be read."""


class Trap:
    """Tells which samples cannot be read: some always, one if armed. Loader workers see it, as the memory is shared."""

    def __init__(self, always: frozenset[int]) -> None:
        self._always = always
        self._armed = mmap.mmap(-1, 8)
        self.arm(-1)

    def arm(self, value: int) -> None:
        """Spoils one more sample; -1 for none."""
        self._armed[:] = struct.pack("q", value)

    def __call__(self, value: int | str) -> int:
        """The sample, if it can be read."""
        number = int(value)
        if number in self._always or number == struct.unpack("q", self._armed[:])[0]:
            raise Spoiled(f"sample {number} is spoiled")
        return number


class Numbers(Dataset[int]):
    """0 .. n-1, by their place."""

    def __init__(self, length: int, trap: Trap) -> None:
        self.length, self.trap = length, trap

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return self.trap(index)


class Stream(IterableDataset[Any]):
    """0 .. n-1 in order, one by one or in batches."""

    def __init__(self, length: int, batch: int | None, trap: Trap) -> None:
        self.length, self.batch, self.trap = length, batch, trap

    def __iter__(self) -> Iterator[Any]:
        if self.batch is None:
            yield from map(self.trap, range(self.length))
            return
        for start in range(0, self.length, self.batch):
            yield torch.tensor([self.trap(number) for number in range(start, min(start + self.batch, self.length))])


def open_loader(plan: Round, trap: Trap, strategies: Sequence[tdi.Strategy], seed: int) -> Any:
    """A fresh loader for a round. Collective."""
    length = len(plan.values)
    arguments: dict[str, Any] = {"batch_size": plan.batch, "drop_last": plan.drop_last, **plan.workers}
    if plan.folder:
        mixed = {"shuffle_files": True, "shuffle_buffer": 5, "cycle_length": 2} if plan.data == "mixed files" else {}
        names = plan.folder + "/*.txt"
        data: Any = tdi.FileDataset(names, readers.text_lines, map_fn=trap, seed=seed, **mixed)  # type: ignore[arg-type]
    elif plan.data in ("stream", "batches"):
        data = Stream(length, plan.batch if plan.data == "batches" else None, trap)
    else:
        data = Numbers(length, trap)
        generator = torch.Generator().manual_seed(seed) if plan.data == "shuffled" else None
        arguments.update(shuffle=plan.data in ("drawn", "shuffled") and length > 0, generator=generator)
        if plan.data == "permuted":
            arguments.update(shuffle=None, sampler=tdi.ShuffleSampler(length, seed=seed))
    if not plan.replicas:
        return tdi.DataLoader(data, prefetch=plan.prefetch, **arguments)
    options = tdi.InputOptions(
        auto_shard_policy=tdi.AutoShardPolicy[plan.policy],
        prefetch=plan.prefetch,
        on_error="skip" if plan.skips else "raise",
    )
    distributed = data if plan.data == "batches" else DataLoader(data, **arguments)
    return strategies[plan.replicas - 1].distribute_dataset(distributed, options)


# ------------------------------------------------------------------------------------------------------- one epoch


@dataclasses.dataclass
class Got:
    """What one rank got in an epoch.

    Args:
      steps: of each, its index, the samples of all ranks, and those of this one.
      raised: whether the data failed.
    """

    steps: list[tuple[int, int, list[int]]] = dataclasses.field(default_factory=list)
    raised: bool = False


def read(loader: Any, got: Got, event: Event, until: int | None, pids: set[int]) -> None:
    """Reads to the end, to an error in the data, or for some steps. Adds the processes of the loader workers."""
    iterator = iter(loader)
    pids.update(child.pid for child in multiprocessing.active_children() if child.pid is not None)
    try:
        for element in iterator:
            parts = element.values if isinstance(element, tdi.PerReplica) else (element,)
            step = loader.step
            got.steps.append((step.index, step.global_size, [number for part in parts for number in part.tolist()]))
            until = None if until is None else until - 1
            if until == 0:
                break
    except (tdi.SourceError, Spoiled):  # the drop-in raises what torch does where it is alone
        got.raised = True
    if event.closes:
        iterator.close()


def check(plan: Round, event: Event, ranks: Sequence[Got]) -> None:
    """Compares what all ranks got with the data."""
    heads = [[(index, size) for index, size, _ in got.steps] for got in ranks]
    require(all(each == heads[0] for each in heads), f"the ranks made different steps: {heads}")
    require([index for index, _ in heads[0]] == [*range(len(heads[0]))], f"steps are missing: {heads[0]}")
    samples = [number for got in ranks for _, _, numbers in got.steps for number in numbers]
    require(sum(size for _, size in heads[0]) == len(samples), "the steps' sizes are not those of their samples")
    wanted = Counter(value for value in plan.values if value not in plan.skips)
    found = Counter(samples)
    require(found <= wanted, f"samples that came twice: {found - wanted}")
    raised = {got.raised for got in ranks}
    require(len(raised) == 1, f"some ranks raised: {[got.raised for got in ranks]}")
    faulty = "fault" in event.kind and bool(plan.values)
    may_drop_it = faulty and plan.drop_last and plan.data != "stream"  # a sample of the tail that nobody wants
    require(raised == {faulty} or may_drop_it, f"raised: {raised}")
    missing = wanted - found
    dropped = (plan.batch - 1) * (len(ranks) if plan.policy == "FILE" else 1) if plan.drop_last else 0
    if event.kind in ("whole", "resume", "fault, resume") or (raised == {False} and faulty):
        require(missing.total() <= dropped, f"samples that did not come: {missing}")
        if plan.policy == "DATA" and plan.drop_last and not plan.skips:
            require(len(samples) == len(plan.values) // plan.batch * plan.batch, f"not dropped: {samples}")
    if faulty and plan.data in ("in order", "stream", "batches") and event.kind == "fault" and raised == {True}:
        step = int(event.spoiled * len(plan.values)) // plan.batch
        require(len(heads[0]) == step, f"the failure is at step {step}: {heads[0]}")
    if plan.policy == "DATA" and event.kind == "break" and not plan.skips:
        most = len(plan.values) // plan.batch * plan.batch if plan.drop_last else len(plan.values)
        require(len(samples) == min(most, event.at * plan.batch), f"other steps than asked for: {heads[0]}")


def require(holds: bool, otherwise: str) -> None:  # noqa: FBT001 - as assert has it, which -O leaves out
    """Raises what is told otherwise."""
    if not holds:
        raise ValueError(otherwise)


class Player:
    """One rank: plays rounds, and keeps the books."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.strategies = [tdi.Strategy(devices=["cpu"] * local, timeout_seconds=HANG_SECONDS) for local in (1, 2)]
        self.epochs = self.steps = self.samples = 0
        self.happened: Counter[str] = Counter()
        self.pids = {os.getpid()}

    def play(self, plan: Round) -> None:
        """Reads the epochs of a round. Collective."""
        trap = Trap(plan.skips)
        loader = open_loader(plan, trap, self.strategies, self.seed)
        for event in plan.events:
            try:
                loader, got = self._epoch(plan, event, trap, loader)
                ranks: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(ranks, got)
                check(plan, event, ranks)
            except Exception as error:
                again = f"--seed {self.seed} --epochs {self.epochs + 1} --ranks {dist.get_world_size()}"
                raise RuntimeError(f"epoch {self.epochs}: {event} of {plan}; again: soak.py {again}") from error
            self.epochs += 1
            self.steps += len(got.steps)
            self.samples += sum(size for _, size, _ in got.steps)
            self.happened[event.kind] += 1
        loader.close()

    def _epoch(self, plan: Round, event: Event, trap: Trap, loader: Any) -> tuple[Any, Got]:
        """One epoch; the loader is another one where a fresh one took it up again."""
        got = Got()
        reads_it = dist.get_rank() == 0 or plan.data not in ("stream", "batches")  # every rank reads all of a stream
        if "fault" in event.kind and plan.values and reads_it:
            trap.arm(plan.values[int(event.spoiled * len(plan.values))])
        read(loader, got, event, event.at if event.kind in ("break", "resume") else None, self.pids)
        trap.arm(-1)
        if "resume" in event.kind:
            state = json.loads(json.dumps(loader.state_dict()))
            if event.fresh:
                loader.close()
                loader = open_loader(plan, trap, self.strategies, self.seed)
            loader.load_state_dict(state)
            if state["step"] or not got.steps:  # else the epoch was over, and this is the start of the next
                read(loader, got, event, None, self.pids)
        return loader, got


# ------------------------------------------------------------------------------------------------------- the books


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a process holds: resident memory, and the numbers of its descriptors, threads, children, shared files."""

    rss_kib: int
    descriptors: int
    threads: int
    children: int
    shared: int

    @classmethod
    def now(cls, pids: set[int]) -> Sizes:
        """Those of this process; a file in /dev/shm bears the number of the process that made it."""
        gc.collect()
        children = len(multiprocessing.active_children())
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        shared = [name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name for pid in pids)]
        descriptors = len(os.listdir("/proc/self/fd"))
        return cls(int(status["VmRSS"].split()[0]), descriptors, int(status["Threads"]), children, len(shared))

    def exceeds(self, early: Sizes) -> bool:
        """Whether anything has grown since: memory by more than a process moves by itself, the rest at all."""
        counts, before = dataclasses.astuple(self)[1:], dataclasses.astuple(early)[1:]
        grown = any(now > then for now, then in zip(counts, before, strict=True))
        return grown or self.rss_kib > early.rss_kib + RSS_GROWTH_KIB

    def __str__(self) -> str:
        return (
            f"{self.rss_kib / 1024:.1f} MiB, {self.descriptors} descriptors, {self.threads} threads, "
            f"{self.children} children, {self.shared} shared files"
        )


def settled(early: Sizes | None, pids: set[int]) -> Sizes:
    """The sizes of this process, once what is ending has ended."""
    until = time.monotonic() + GRACE_SECONDS
    while (sizes := Sizes.now(pids)).exceeds(early or sizes) and time.monotonic() < until:
        time.sleep(0.1)
    return sizes


@dataclasses.dataclass(frozen=True)
class Report:
    """What one rank says at the end: what it did, and its sizes at an early epoch and at the last."""

    epochs: int
    steps: int
    samples: int
    happened: Counter[str]
    early_epoch: int
    early: Sizes
    last: Sizes


def soak(seed: int, epochs: int, seconds: float, folders: Sequence[tuple[str, tuple[int, ...]]]) -> Report:
    """One rank: rounds until there were so many epochs, or the time is over."""
    warnings.simplefilter("ignore", UserWarning)  # that streams are read by every rank, and passed over on a resume
    logging.getLogger("torchdistinput").setLevel(logging.ERROR)  # what is skipped is logged
    torch.manual_seed(seed)
    player, began = Player(seed), time.monotonic()
    for plan in warm_up():
        player.play(plan)
    player.epochs = 0
    every = min(REPORT_EVERY, max(1, epochs // 4))
    early: tuple[int, Sizes] | None = None
    over = [False]
    number, next_report = 0, every
    while player.epochs < epochs and not over[0]:
        plan = round_of(seed, number, folders)
        player.play(dataclasses.replace(plan, events=plan.events[: epochs - player.epochs]))
        number += 1
        if player.epochs >= next_report:
            next_report += every
            sizes = settled(None if early is None else early[1], player.pids)
            early = early or (player.epochs, sizes)
            if dist.get_rank() == 0:
                took = time.monotonic() - began
                print(f"epoch {player.epochs}: {player.steps} steps, {took:.0f} s, {sizes}", flush=True)
        over = [seconds > 0 and time.monotonic() - began > seconds]
        dist.broadcast_object_list(over, 0)
    last = settled(None if early is None else early[1], player.pids)
    at, sizes = early or (player.epochs, last)
    return Report(player.epochs, player.steps, player.samples, player.happened, at, sizes, last)


def write_files(folder: Path, seed: int, ranks: int) -> list[tuple[str, tuple[int, ...]]]:
    """Folders of text files of different sizes, some empty: their names and the numbers in them."""
    rng = random.Random(seed)
    made = []
    for number in range(FOLDERS):
        inside = folder / str(number)
        inside.mkdir()
        values: list[int] = []
        for file in range(ranks + rng.randint(0, 4)):
            numbers = [100 * file + record for record in range(rng.choice([0, 1, 5, 12, 20]))]
            (inside / f"{file:02d}.txt").write_text("".join(f"{each}\n" for each in numbers))
            values += numbers
        made.append((str(inside), tuple(values)))
    return made


def main() -> None:
    """Runs the soak; ends with 1 where a count was wrong or something grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=1000, help="epochs to read (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="what all else follows from (default 0)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--seconds", type=float, default=0, help="ends after so many; 0 for no bound (default)")
    given = parser.parse_args()
    bound = HANG_SECONDS + (given.seconds or SECONDS_PER_EPOCH * given.epochs)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        arguments = (given.seed, given.epochs, given.seconds, write_files(Path(folder), given.seed, given.ranks))
        try:
            reports = run_ranks(given.ranks, soak, *arguments, timeout_seconds=bound)
        except RankFailed as failed:
            sys.exit(f"seed {given.seed}: {failed}")
    first = reports[0]
    print(
        f"{first.epochs} epochs ({', '.join(f'{count} {kind}' for kind, count in sorted(first.happened.items()))}), "
        f"{first.steps} steps, {first.samples} samples, each as it should be; {time.monotonic() - began:.0f} s"
    )
    for rank, report in enumerate(reports):
        print(f"rank {rank}: {report.early} at epoch {report.early_epoch}; {report.last} at the end")
    grown = [rank for rank, report in enumerate(reports) if report.last.exceeds(report.early)]
    if grown:
        again = f"--seed {given.seed} --epochs {first.epochs} --ranks {given.ranks}"
        sys.exit(f"rank(s) {grown} have grown; again: soak.py {again}")


if __name__ == "__main__":
    main()
