"""``scripts/chaos.py``: its trials hold, and it finds what must not be."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.interpreters import ROOT, Interpreters, printed
from tests.support.platforms import linux_processes

pytestmark = linux_processes

SCRIPTS = ROOT / "scripts"
HANG_BOUND_SECONDS = 600.0
LOST = "RankLost", "rank 1 died"


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


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
    trials, seed = ("30", "13") if all_cells else ("6", "780")  # which have each event below
    told = run("--trials", trials, "--seed", seed, "--jobs", "6", "--timeout", "25", "--slack", "20")
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


def test_a_trial_finds_hangs_and_all_that_is_left_behind(interpreters: Interpreters) -> None:
    told = printed(interpreters.run(["tests/support/planted_trial.py"], places=[{"PYTHONPATH": str(SCRIPTS)}]))
    problems = [
        r"rank 0 ended normally after 0 of 3 steps of iterator 0",
        r"rank 1 did not end: .*",
        r"left behind: process \d+ \(forked by nobody known, state [SDR]\)",
        r"left behind: /dev/shm/planted_\d+_0",
        r"left behind: socket tcp .*",
        r"left behind: temporary file forgotten",
    ]
    for problem in problems:
        assert re.search(rf"^{problem}$", told, re.M), told
    assert len(told.splitlines()) == len(problems), told


def test_a_trial_follows_from_its_number_and_the_seed(part: Callable[[str], Any]) -> None:
    chaos = part("chaos")
    asked, other = chaos.parsed(["--seed", "3"]), chaos.parsed(["--seed", "4"])
    trials = [chaos.trial_of(number, asked) for number in range(200)]
    assert trials == [chaos.trial_of(number, asked) for number in range(200)]
    assert trials != [chaos.trial_of(number, other) for number in range(200)]
    assert {trial.program.world for trial in trials} == {2, 3, 4}
    assert {trial.event.target for trial in trials} == {"rank", "all ranks", "store", "loader worker"}
    assert {each.prefetch for trial in trials for each in trial.program.inputs} == {None, 0, 1, 3, 32}


# ------------------------------------------------------------------------------------------- the right sequence


def program_with(part: Callable[[str], Any], *inputs: Any, world: int = 2, **more: Any) -> Any:
    programs = part("trials.programs")
    arguments: dict[str, Any] = {
        "world": world,
        "own_store": False,
        "own_group": False,
        "timeout_seconds": 5.0,
        "seed": 1,
        "inputs": inputs,
        "openings": (programs.Opening((0,), None, "drop"),),
        "rounds": 1,
        "think_seconds": 0.0,
        "calls": (),
        "calls_every": 1,
        "closes": False,
        "exits_fully": False,
    }
    return programs.Program(**{**arguments, **more})


# ------------------------------------------------------------------------------------------------ the verdict


@pytest.fixture
def judged(part: Callable[[str], Any]) -> Callable[..., Any]:
    """The verdict where rank 1 of three was killed; what each rank did can be changed."""

    def judge(
        event: tuple[str, str] = ("kill", "rank"),
        left: tuple[str, ...] = (),
        prefetch: int | None = None,
        **changes: dict[str, Any],
    ) -> Any:
        trials, verdicts = part("trials.trial"), part("trials.verdicts")
        program = program_with(part, part("trials.programs").Input("items", 60, 3, prefetch=prefetch), world=3)
        trial = trials.Trial(0, program, part("trials.events").Event(*event, 1, "step", 2, 0.0), 0.0)
        expected = list(part("trials.expected").expected_steps(program))
        ranks = []
        for rank in range(3):
            usual: dict[str, Any] = {"code": -9} if rank == 1 else {"code": 1, "raised": LOST}
            usual.update(at=101.0, delivered=[expected[0][0][rank][step] for step in range(2)])
            usual.update(changes.get(f"rank{rank}", {}))
            steps = {0: [[each] for each in usual.pop("delivered")]}
            ranks.append(trials.RankEnd(steps=steps, **usual))
        found = trials.Found(ranks, expected, event_at=100.0, hit="rank 1", left=list(left))
        return verdicts.verdict_on(trial, found)

    return judge


def test_survivors_that_name_the_lost_rank_are_right(judged: Callable[..., Any]) -> None:
    verdict = judged()
    assert verdict.problems == ()
    assert verdict.outcome == "all named"
    assert verdict.seconds == 1.0


@pytest.mark.parametrize("at", [100.5, 101.5])
def test_a_survivor_may_name_one_whose_own_error_names_the_lost_rank_whenever_that_one_ended(
    judged: Callable[..., Any], at: float
) -> None:
    assert judged(rank0={"raised": ("RankLost", "rank 2 gave up"), "at": at}).problems == ()


WHOLE = {"code": 0, "end_at": 90.0, "delivered": [[3 * step] for step in range(20)]}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"rank0": {"raised": ("RankLost", "rank 2 died")}, "rank2": {"raised": ("RankLost", "rank 0 died")}},
            "rank 0 does not name who was lost: RankLost",
        ),
        ({"rank0": {"raised": ("RankLost", "rank 11 died")}}, "rank 0 does not name who was lost: RankLost"),
        ({"rank0": {"raised": None, "words": "said nothing"}}, "rank 0 ended by itself, exit code 1 said nothing"),
        ({"rank2": {"code": -6, "raised": None}}, "rank 2 ended by itself, SIGABRT "),
        ({"rank2": {"code": -11, "raised": None}}, "rank 2 ended by itself, SIGSEGV "),
        ({"rank2": {"code": None, "raised": None, "words": "x.py:1 f"}}, "rank 2 did not end: x.py:1 f"),
        ({"rank2": {"at": 110.5}}, "rank 2 ended 10.5 s after the event, which is later than 5 + 5 + 0 s"),
        ({"rank1": {"code": 0}}, "rank 1 got SIGKILL, and exit code 0 "),
        ({"rank0": {"delivered": [[0], [4]]}}, "rank 0 got [[4]] at step 1 of iterator 0, not [[[3]]]"),
        ({"rank0": {"delivered": [[0], [0]]}}, "rank 0 got [[0]] at step 1 of iterator 0, not [[[3]]]"),
        ({"rank0": {"delivered": [[3]]}}, "rank 0 got [[3]] at step 0 of iterator 0, not [[[0]]]"),
        ({"rank0": {**WHOLE, "end_at": None}}, "rank 0 ended with 0 before its program had"),
        ({"rank0": {"code": 0, "end_at": 90.0}}, "rank 0 ended normally after 2 of 20 steps of iterator 0"),
        ({"left": ("process 7",)}, "left behind: process 7"),
        ({"event": ("SIGINT", "rank"), "rank1": {"code": 0}}, "rank 1 got SIGINT, and exit code 0 "),
        ({"event": ("SIGTERM", "rank"), "rank1": {"code": -9}}, "rank 1 got SIGTERM, and SIGKILL "),
        (
            {"event": ("freeze for 3 s", "rank"), "rank1": WHOLE | {"delivered": [[3 * s + 1] for s in range(20)]}},
            "rank 0 failed after a freeze that was shorter than its timeout: RankLost",
        ),
    ],
)
def test_what_must_not_be_is_told(judged: Callable[..., Any], changes: dict[str, Any], problem: str) -> None:
    verdict = judged(**changes)
    assert verdict.outcome == "FAILED"
    assert problem in verdict.problems


def test_ranks_may_differ_by_no_more_than_the_steps_in_flight(judged: Callable[..., Any]) -> None:
    assert judged(rank0=WHOLE, rank1={"delivered": []}).problems == ()  # 32 steps ahead
    assert judged(rank0=WHOLE).problems == ()
    problems = judged(rank0=WHOLE, prefetch=3).problems
    assert problems == ("the ranks delivered [20, 2, 2] steps; 5 may be in flight",)


def test_a_lost_store_is_told_by_its_place(part: Callable[[str], Any]) -> None:
    names_store, names_rank = part("trials.verdicts").names_store, part("trials.verdicts").names_rank
    assert names_store("the store at 127.0.0.1:29500 does not answer")
    assert names_store("the store is gone; the rank that hosts it (usually rank 0) ended")
    assert not names_store("the store is gone")
    assert not names_store("127.0.0.1 does not answer")
    for text in ("rank 3 died", "ranks 1, 3", "rank(s) 1, 2 and 3", "rank 1, 3 died", "rank: 3"):
        assert names_rank(text, 3), text
    for text in ("rank 13 died", "rank unknown", "3 ranks", "rank 1 after 3 s"):
        assert not names_rank(text, 3), text
