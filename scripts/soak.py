"""A soak: random programs of the oracle on real ranks, one after the other in the same processes. Nothing grows.

    python scripts/soak.py                              500 programs on 2 ranks
    python scripts/soak.py --seed 7 --programs 312      again what failed in program 311 of seed 7
    python scripts/soak.py --seconds 3600               again and again, for an hour

A program (``tests/oracle``) reads some data to its end, leaves early, goes to steps, meets samples that cannot be read,
changed files and odd ranks, and goes on from states. What the ranks got is compared with what the laws say; the sizes
of each process are compared between an early program and the last.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch.distributed as dist

from torchdistinput.testing import RankFailed, run_ranks

sys.path.append(str(Path(__file__).parents[1]))  # for tests.oracle

from tests.oracle.checking import Checker
from tests.oracle.data import write_files
from tests.oracle.playing import Played
from tests.oracle.program import LOOKS, Action, Program, Turn
from tests.oracle.test_on_ranks import drawn, play_anew

REPORT_EVERY = 50
SECONDS_PER_PROGRAM = 10.0
GRACE_SECONDS = 20.0
RSS_GROWTH_KIB = 16 * 1024
"""What a process may grow by after the first programs; the allocator's pools alone move by a few MiB."""


def is_played(turn: Turn, ranks: int) -> bool:
    """Whether a turn can be played by these ranks, which go on together after it."""
    return turn.world == ranks and (turn.odd is None or turn.odd.does != "leaves")


def play_program(program: Program, folder: Path, pids: set[int]) -> Counter[str]:
    """Plays a program, and what goes on from its states, as far as these ranks can. Collective.

    Returns:
      How often each thing happened.
    """
    rank, world, happened = dist.get_rank(), dist.get_world_size(), Counter[str]()
    if rank == 0:
        folder.mkdir()
        if program.has_files:
            write_files(program, folder)
    dist.barrier()
    checkers = [Checker(program, folder)]
    while checkers:
        checker = checkers.pop()
        turn = checker.turn
        if turn is None or not is_played(turn, world):
            continue
        if turn.changes and rank == 0:
            write_files(program, folder, turn.changes)
        dist.barrier()
        mine = play_anew((checker.program, turn, str(folder), checker.targets, checker.state))
        pids.update(child.pid for child in multiprocessing.active_children() if child.pid is not None)
        played: list[Played] = [mine] * world
        dist.all_gather_object(played, mine)
        checker.check(played)
        checkers += [checker, *checker.branches]
        checker.branches = []
        happened.update({"turns": 1, "steps": len(mine.log.steps), mine.log.error or "no error": 1})
    return happened


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
    """What one rank says at the end: what happened, and its sizes after an early program and the last."""

    happened: Counter[str]
    early: Sizes
    last: Sizes


def soak(seed: int, programs: Sequence[Program], seconds: float, folder: str) -> Report:
    """One rank: all programs, again and again until the time is over."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # what is skipped is logged
    began, happened, pids = time.monotonic(), Counter[str](), {os.getpid()}
    early: Sizes | None = None
    every = min(REPORT_EVERY, max(1, len(programs) // 2))
    for replicas in range(1, 4):  # so that every pool of connections is there before anything is measured
        actions = tuple(Action("look", way) for way in range(len(LOOKS)))
        turn = Turn(dist.get_world_size(), replicas, prefetch=2, loader_workers=1, actions=(*actions, Action("read")))
        play_program(Program(sizes=(40,), turns=(turn, turn)), Path(folder, f"first {replicas}"), pids)
    for number in count():
        place = number % len(programs)
        try:
            happened += play_program(programs[place], Path(folder, str(number)), pids)
        except Exception as error:
            again = f"--seed {seed} --programs {place + 1} --ranks {dist.get_world_size()}"
            raise RuntimeError(f"program {number}: {programs[place]}; again: soak.py {again}") from error
        if (number + 1) % every == 0:
            sizes = settled(early, pids)
            early = early or sizes
            if dist.get_rank() == 0:
                print(f"program {number}: {time.monotonic() - began:.0f} s, {sizes}", flush=True)
        over = [number + 1 >= len(programs) and time.monotonic() - began >= seconds]
        dist.broadcast_object_list(over, 0)
        if over[0]:
            break
    last = settled(early, pids)
    return Report(happened, early or last, last)


def main() -> None:
    """Runs the soak; ends with 1 where a law did not hold or something grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=500, help="how many are drawn (default 500)")
    parser.add_argument("--seed", type=int, default=0, help="what all else follows from (default 0)")
    parser.add_argument("--ranks", type=int, default=2, help="processes, 1 to 3 (default 2)")
    parser.add_argument("--seconds", type=float, default=0, help="they are played again until then (default: once)")
    given = parser.parse_args()
    programs: list[Program] = []
    for number in count():
        if len(programs) == given.programs:
            break
        programs += [each for each in drawn(1, 10**6 * given.seed + number) if is_played(each.turns[0], given.ranks)]
    bound = 120.0 + max(given.seconds, SECONDS_PER_PROGRAM * given.programs)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        try:
            reports = run_ranks(given.ranks, soak, given.seed, programs, given.seconds, folder, timeout_seconds=bound)
        except RankFailed as failed:
            sys.exit(f"seed {given.seed}: {failed}")
    told = ", ".join(f"{number} {what}" for what, number in sorted(reports[0].happened.items()))
    print(f"{given.programs} programs: {told}; each as the laws say; {time.monotonic() - began:.0f} s")
    for rank, report in enumerate(reports):
        print(f"rank {rank}: {report.early} early; {report.last} at the end")
    grown = [rank for rank, report in enumerate(reports) if report.last.exceeds(report.early)]
    if grown:
        again = f"--seed {given.seed} --programs {given.programs} --ranks {given.ranks}"
        sys.exit(f"rank(s) {grown} have grown; again: soak.py {again}")


if __name__ == "__main__":
    main()
