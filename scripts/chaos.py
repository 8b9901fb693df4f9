#!/usr/bin/env python
"""Random programs on real ranks, in which a process is killed, frozen or interrupted at a random moment. Linux only.

    python scripts/chaos.py --trials 1000 --seed 1      all trials, in a summary by kind of event
    python scripts/chaos.py --seed 1 --only 17          one of them again
    python scripts/chaos.py --churn 200                 programs that make, half read and drop iterators, under load

A trial is a program (inputs of ``tests/oracle``, iterators, calls) and an event: a rank, all ranks, a loader worker, or
the process that hosts the store is killed, frozen for 3 s or for good, or gets SIGINT or SIGTERM, in turns, from the
start to the exit.
What must hold:

- no survivor lives longer than ``timeout_seconds`` + 5 s after the event (and ``--slack``, on a loaded machine);
- each ends with an error that names who was lost, or normally where the event did no harm; whoever got a signal, by
  that signal; nobody by an abort;
- each rank delivered a prefix of the right sequence, by the laws of the oracle; the ranks differ by no more than the
  steps in flight;
- nothing is left: processes, ``/dev/shm``, sockets, temporary files.

Program and event follow from seed and number; how far the program is when the event comes, within a step, does not.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trials.events import ACTIONS, event_of
from trials.playing import prepare_to_fork
from trials.processes import die_with_parent
from trials.programs import churning_program, program_of
from trials.trial import Task, Trial, clear, conduct, found_in
from trials.verdicts import OUTCOMES, Verdict, verdict_on


def trial_of(number: int, asked: argparse.Namespace) -> Trial:
    """The trial of that number: it follows from the seed."""
    rng = random.Random(f"{asked.seed}/{number}")
    churns = asked.churn is not None
    program = churning_program(rng) if churns else program_of(rng)
    event = None if churns else event_of(rng, program, list(ACTIONS)[number % len(ACTIONS)])
    if event is not None and event.after == "end":
        program = dataclasses.replace(program, exits_fully=True)
    if asked.timeout is not None:
        program = dataclasses.replace(program, timeout_seconds=asked.timeout)
    return Trial(number, program, event, asked.slack)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--seed", type=int, default=1, help="what all else follows from (default 1)")
    parser.add_argument("--only", type=int, help="only the trial of that number")
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time (default 2)")
    parser.add_argument("--slack", type=float, default=5.0, help="seconds that all may take longer (default 5)")
    parser.add_argument("--timeout", type=float, help="timeout_seconds of all programs (default 5 or 6; churning 15)")
    parser.add_argument("--churn", type=int, metavar="N", help="instead, so many programs that churn iterators")
    parser.add_argument("--idle", action="store_true", help="churn without keeping all processors busy")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what the ranks of failed trials printed")
    return parser.parse_args(arguments)


class Books:
    """What came of the trials."""

    def __init__(self, again: str, *, tells_all: bool) -> None:
        self._again, self._tells_all = again, tells_all
        self._counts: Counter[tuple[str, str]] = Counter()
        self._worst: dict[str, float] = {}
        self.failed: list[int] = []
        self.iterators = self.trials = 0

    def add(self, trial: Trial, verdict: Verdict) -> None:
        """Counts a trial, and tells of it if it failed."""
        kind = trial.event.kind if trial.event else "churn"
        self.trials += 1
        self.iterators += trial.program.world * trial.program.num_iterators
        self._counts[kind, verdict.outcome] += 1
        self._worst[kind] = max(self._worst.get(kind, 0.0), verdict.seconds)
        if verdict.problems:
            self.failed.append(trial.number)
        if verdict.problems or self._tells_all:
            print(f"{verdict.outcome}, trial {trial.number}: {'; '.join(verdict.problems)}")
            print(f"  {trial.event}\n  {trial.program}")
            for rank, end in enumerate(verdict.ends):
                print(f"  rank {rank}: {end}")
            print(f"  again: {self._again} --only {trial.number}", flush=True)

    def tell(self, seconds: float) -> None:
        """Prints the summary."""
        kinds = sorted({kind for kind, _ in self._counts})
        print(f"\n{'event':32}{''.join(f'{outcome:>15}' for outcome in OUTCOMES)}{'worst end':>12}")
        for kind in kinds:
            counts = "".join(f"{self._counts[kind, outcome] or '':>15}" for outcome in OUTCOMES)
            print(f"{kind:32}{counts}{self._worst[kind]:>10.1f} s")
        made = f"{self.trials} trials, {self.iterators} iterators"
        print(f"{made}, {len(self.failed)} failed, {seconds:.0f} s", flush=True)


def burn() -> None:
    """Keeps a processor busy until the parent ends."""
    while True:
        pass


class Runner:
    """Runs trials, some at a time, each in a process of its own."""

    def __init__(self, asked: argparse.Namespace) -> None:
        churns = asked.churn is not None
        numbers = range(asked.churn if churns else asked.trials) if asked.only is None else [asked.only]
        self._asked = asked
        self._waiting = [trial_of(number, asked) for number in reversed(numbers)]
        self._running: dict[int, tuple[Trial, Path]] = {}
        again = f"scripts/chaos.py --seed {asked.seed}" + (f" --churn {asked.churn}" if churns else "")
        self._books = Books(again, tells_all=asked.only is not None)
        self._burners = os.cpu_count() or 1 if churns and not asked.idle else 0

    def run(self) -> Task | int:
        """All of them; the exit code. Returns in each process that is forked for a trial, with its task."""
        began = time.monotonic()
        for _ in range(self._burners):
            if not os.fork():
                die_with_parent()
                return burn
        folders = Path(tempfile.mkdtemp(prefix="chaos-"))
        while self._waiting or self._running:
            while self._waiting and len(self._running) < self._asked.jobs:
                task = self._start(folders)
                if task is not None:
                    return task
            self._take_one()
        folders.rmdir()
        self._books.tell(time.monotonic() - began)
        return 1 if self._books.failed else 0

    def _start(self, folders: Path) -> Task | None:
        trial = self._waiting.pop()
        folder = folders / str(trial.number)
        folder.mkdir()
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            return partial(conduct, trial, folder)
        self._running[pid] = (trial, folder)
        return None

    def _take_one(self) -> None:
        """Waits for the end of a trial, and judges it."""
        pid, status = os.waitpid(-1, 0)
        if pid not in self._running:
            return
        trial, folder = self._running.pop(pid)
        found = found_in(folder)
        if found is None:
            verdict = Verdict("FAILED", (f"the trial itself broke off, {os.waitstatus_to_exitcode(status)}",), (), 0.0)
        else:
            verdict = verdict_on(trial, found)
        self._books.add(trial, verdict)
        keep: Path | None = self._asked.keep
        if keep is not None and verdict.problems:
            keep.mkdir(parents=True, exist_ok=True)
            clear(folder, keep / f"{self._asked.seed}-{trial.number}")
        else:
            clear(folder, None)


def main(arguments: Sequence[str] | None = None) -> Callable[[], Any] | int:
    """Runs what was asked for. Returns the exit code; in a forked process what is to be called next, and so on."""
    runner = Runner(parsed(arguments))
    prepare_to_fork()
    return runner.run()


if __name__ == "__main__":
    task: Any = main()
    while callable(task):
        task = task()
    sys.exit(task)
