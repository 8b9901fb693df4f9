"""One trial of ``scripts/chaos.py`` whose ranks do what a trial must find; prints what it found, a line for each.

Rank 0 ends at once, without its steps, and leaves a process that listens, a file, and shared memory. Rank 1 hangs. Rank
2 is killed by the event. The bound on survivors is three seconds here, as nothing else would end the wait.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from trials import playing, trial
from trials.events import Event
from trials.playing import Tell
from trials.programs import Input, Opening, Program
from trials.verdicts import verdict_on

PROGRAM = Program(
    world=3,
    own_store=False,
    own_group=False,
    timeout_seconds=0.5,
    seed=0,
    inputs=(Input("items", 6, 2),),
    openings=(Opening((0,), None, "drop"),),
    rounds=1,
    think_seconds=0.0,
    calls=(),
    calls_every=1,
    closes=False,
    exits_fully=True,
)


def be_rank(program: Program, rank: int, port: int, folder: Path, tell: Tell) -> None:
    """In place of the rank of a trial."""
    if rank == 0:
        (folder / "temporary" / "forgotten").touch()
        Path(f"/dev/shm/planted_{os.getpid()}_0").touch()
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            listener.listen()
            if not os.fork():
                os.setsid()
                time.sleep(600)
        tell("start")
        tell("end")
        os._exit(0)
    (folder / f"rank-{rank}.txt").touch()
    tell("start")
    time.sleep(600)


def main() -> Any:
    """Runs the trial, in a process of its own."""
    playing.be_rank = be_rank  # what conduct() starts
    planted = trial.Trial(0, PROGRAM, Event("kill", "rank", 2, "start", 1, 0.2), slack_seconds=-2.5)
    folder = Path(tempfile.mkdtemp(prefix="planted-"))
    leader = os.fork()
    if not leader:
        return partial(trial.conduct, planted, folder)
    os.waitpid(leader, 0)
    found = trial.found_in(folder)
    assert found is not None
    for problem in verdict_on(planted, found).problems:
        sys.stdout.write(f"{problem}\n")
    for entry in Path("/dev/shm").glob("planted_*"):
        entry.unlink()
    trial.clear(folder, None)
    return 0


task = main()
while callable(task):
    task = task()
sys.exit(task)
