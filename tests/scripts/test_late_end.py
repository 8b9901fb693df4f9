"""The watch over the end of a test run tells where each of its processes stands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.platforms import linux_processes

STANDS = """
import faulthandler, os, signal, sys, time
faulthandler.register(signal.SIGUSR1)
def stand_still():
    os.write(1, b"stands\\n")
    time.sleep(600)
child = os.fork()
stand_still()
"""


def watch(pid: int, seconds: float) -> str:
    """What the watch tells."""
    program = str(Path(__file__).parents[1] / "support" / "late_end.py")
    command = [sys.executable, "-S", program, str(pid), str(seconds)]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr


@linux_processes
def test_a_run_that_does_not_end_tells_where_its_processes_stand() -> None:
    command = [sys.executable, "-S", "-c", STANDS]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as run:
        try:
            assert run.stdout is not None
            assert run.stderr is not None
            assert [run.stdout.readline() for _ in range(2)] == ["stands\n"] * 2
            told = watch(run.pid, 0.1)
        finally:
            os.killpg(run.pid, signal.SIGKILL)
        stacks = run.stderr.read()
    assert told.count("\nprocess ") == 2, told
    assert stacks.count("in stand_still") == 2, stacks


@linux_processes
def test_a_run_that_ends_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as run:
        assert watch(run.pid, 60) == ""
