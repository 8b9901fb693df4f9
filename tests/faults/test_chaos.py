"""``scripts/chaos.py``: its trials hold."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.support.interpreters import ROOT
from tests.support.platforms import linux_processes

pytestmark = linux_processes

SCRIPTS = ROOT / "scripts"
HANG_BOUND_SECONDS = 600.0


def run(*arguments: str) -> str:
    """Runs the script by itself: the ranks are forks of it, and come to their ends all the sooner without pytest.

    SIGINT is ignored at its start, as it is for a job in the background of a shell.
    """
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, str(SCRIPTS / "chaos.py"), *arguments]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_BOUND_SECONDS, check=False, env={"PYTHONPATH": str(ROOT)}
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def test_ranks_that_are_killed_frozen_or_interrupted_are_named_in_time_and_leave_nothing(all_cells: bool) -> None:
    """The slack is for other tests at the same time; a trial that fails says how to run it again.

    torch looks up names when it connects to a store, which takes 5 s each where no name server answers.
    """
    trials = "30" if all_cells else "6"  # the kinds of events come in turns
    told = run("--trials", trials, "--seed", "13", "--jobs", "6", "--timeout", "25", "--slack", "20")
    assert re.search(rf"^{trials} trials, \d+ iterators, 0 failed", told, re.M), told
    for action in ("kill", "freeze for 3 s", "freeze", "SIGINT", "SIGTERM"):
        assert re.search(rf"^{action}: \w+", told, re.M), told


def test_iterators_that_are_opened_and_dropped_under_load_end_no_rank(all_cells: bool) -> None:
    load = [] if all_cells else ["--idle"]  # else the load is that of other tests at the same time
    trials = 5 if all_cells else 1
    told = run("--churn", str(trials), "--seed", "1", "--timeout", "60", *load)
    found = re.search(rf"^{trials} trials?, (\d+) iterators, 0 failed", told, re.M)
    assert found is not None, told
    assert int(found[1]) > 25 * trials
