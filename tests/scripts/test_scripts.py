"""The scripts: planted faults fit the tree, the site is built, a release has one version, parts for a device run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import torchdistinput as tdi
from tests.support.interpreters import ROOT, Interpreters, printed
from tests.support.platforms import linux_processes

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "mutants"))
FILE = "torchdistinput/halves/half.py"
HALF = "def half(n: int) -> int:\n    return n // 2\n"
TESTS = {"halves/test_four": "half(4) == 2", "oracle/test_five": "half(5) == 2", "test_negative": "half(-1) == -1"}
FOUR = "tests/halves/test_four.py"
FIVE = "tests/oracle/test_five.py"
NEGATIVE = "tests/test_negative.py"


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "mutants").glob("*.patch")), ids=lambda path: path.stem)
def test_each_patch_fits_the_tree(path: Path) -> None:
    mutant = SCRIPT["read"](path)
    assert mutant.source != (ROOT / mutant.file).read_text()


def tree(folder: Path, **patches: str) -> Path:
    """A package with one function, three tests of it, and these planted faults."""
    files = {FILE: HALF, "torchdistinput/__init__.py": ""}
    files |= {f"tests/mutants/{name}.patch": text for name, text in patches.items()}
    for name, holds in TESTS.items():
        head = "from torchdistinput.halves.half import half\n\n\ndef test_it():\n"
        files[f"tests/{name}.py"] = f"{head}    assert {holds}\n"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "scripts").mkdir()
    return Path(shutil.copy(ROOT / "scripts" / "mutants", folder / "scripts"))


def patch(new: str, old: str = "    return n // 2", head: str = "A fault.", hint: str = "") -> str:
    second = f"# tests: {hint}\n" if hint else ""
    return f"# {head}\n{second}--- a/{FILE}\n+++ b/{FILE}\n@@\n-{old}\n+{new}\n"


THIRD = "    return n // 3"
UP = "    return (n + 1) // 2"
TO_ZERO = "    return int(n / 2)"
SAME = "    return n // 2 + 0"


def told(script: Path, *arguments: str) -> tuple[int, list[str]]:
    """How the script ends, and what it prints, without its times."""
    command = [sys.executable, str(script), *arguments]
    quickly = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=quickly)
    return ended.returncode, re.sub(r" +\d+ s  ", " ", ended.stdout + ended.stderr).splitlines()


def test_a_fault_is_looked_for_by_its_hint_its_room_the_oracle_and_all(tmp_path: Path) -> None:
    script = tree(
        tmp_path,
        a=patch(THIRD),
        b=patch(THIRD, hint=f"tests/gone.py {FIVE}::test_gone"),
        c=patch(UP, hint=FOUR),
        d=patch(TO_ZERO),
        e=patch(SAME, hint=f"{FOUR}::test_it"),
        f=patch("def third(n: int) -> int:", old="def half(n: int) -> int:", hint=FOUR),
    )
    status, lines = told(script, "--jobs=2")
    assert status == 1
    broken = next(index for index, line in enumerate(lines) if line.startswith("BROKEN"))
    assert lines[broken].startswith(f"BROKEN f: {FOUR}: ")
    assert [*lines[:broken], lines[-1]] == [
        "b: its hint tests/gone.py is not there",
        f"b: its hint {FIVE}::test_gone is not there",
        f"found a: {FOUR}::test_it",
        f"found b: {FOUR}::test_it",
        f"found c: {FIVE}::test_it (its hint misses it)",
        f"found d: {NEGATIVE}::test_it",
        "MISSED e: A fault.",
        "4 of 6 were found",
    ]
    assert (tmp_path / FILE).read_text() == HALF


def test_tests_that_stand_still_have_found_the_fault(tmp_path: Path) -> None:
    script = tree(tmp_path, it=patch("    while True: pass", hint=FOUR))
    assert told(script, "--seconds=2") == (0, [f"found it: {FOUR} stood still", "1 of 1 were found"])


def test_only_the_tests_that_are_asked_for_run_and_a_matrix_runs_each_file(tmp_path: Path) -> None:
    script = tree(tmp_path, third=patch(THIRD), up=patch(UP, hint=FOUR), to_zero=patch(TO_ZERO))
    found = f"found third: {FIVE}::test_it"
    alone = f"found up: {FIVE}::test_it"
    status, lines = told(script, "--by", "tests/oracle", "--by", NEGATIVE, "t", "u")
    assert (status, lines) == (0, [found, f"found to_zero: {NEGATIVE}::test_it", alone, "3 of 3 were found"])
    status, lines = told(script, "--by", FOUR, "up")
    assert (status, lines) == (1, ["MISSED up: A fault.", "0 of 1 were found"])
    status, lines = told(script, "--matrix", "--by", "tests/halves", "--by", FIVE, "third", "up")
    found = f"found third: {FOUR}::test_it {FIVE}::test_it"
    assert (status, lines) == (
        0,
        [found, f"{alone} (its hint misses it)", "These find none alone:", FOUR, "2 of 2 were found"],
    )
    assert told(script, "--by", "tests/gone.py")[0] == 2


def test_a_test_that_fails_without_a_fault_has_found_none(tmp_path: Path) -> None:
    script = tree(tmp_path, it=patch(THIRD))
    (tmp_path / FOUR).write_text("def test_it():\n    assert False\n")
    assert told(script) == (1, [f"RED without a fault, too: {FOUR}::test_it"])


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        (patch("    return n //"), f"with it, {FILE} is no Python"),
        (patch("    return 2", old="    return n"), f"these lines stand 0 times in {FILE}"),
        (patch(THIRD, head="a fault"), "its first line is no sentence"),
        (patch("\n+".join(["    n = n"] * 9)), "it changes 10 lines"),
    ],
)
def test_a_patch_that_does_not_fit_is_broken(text: str, broken: str, tmp_path: Path) -> None:
    status, (first, last) = told(tree(tmp_path, it=text), "--check")
    assert first.startswith(f"BROKEN it: {broken}")
    assert (status, last) == (1, "0 patches fit")


SHOWN = ("index.html", "examples/guide.html", "reference/torchdistinput.Strategy.html", "reference/errors.html")


def test_the_site_is_built_without_a_warning_and_a_browser_shows_it(all_cells: bool, tmp_path: Path) -> None:
    if not all_cells or importlib.util.find_spec("sphinx") is None:
        pytest.skip("runs with --all, and needs the extra docs")
    site = tmp_path / "site"
    command = [sys.executable, "scripts/build_docs.py", str(site)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr
    for name in tdi.__all__:
        if not isinstance(getattr(tdi, name), ModuleType):
            assert (site / "reference" / f"torchdistinput.{name}.html").exists(), name
    assert (site / "searchindex.js").stat().st_size > 10_000
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        return
    for page in SHOWN:
        for width in (1300, 500):  # 500: the narrowest window that Chromium opens
            picture = tmp_path / "page.png"
            options = ["--headless", "--no-sandbox", "--disable-gpu", f"--screenshot={picture}"]
            options += [f"--window-size={width},900", (site / page).as_uri()]
            subprocess.run([chromium, *options], capture_output=True, timeout=120, check=True)
            assert picture.stat().st_size > 20_000, (page, width)
            picture.unlink()


GPU = Path(__file__).parents[2] / "scripts" / "test_gpu"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(GPU), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_BOUND_SECONDS)


def test_all_parts_run_on_the_simulated_accelerator(all_cells: bool) -> None:
    if not all_cells:
        pytest.skip("the simulated accelerator is compiled first: run with --all-cells")
    if not (shutil.which("g++") and shutil.which("ninja")):
        pytest.skip("the simulated accelerator needs a C++ compiler and ninja")
    parts = ["values", "sanitizer", "memory", "step_time", "loader_workers", "graphs", "training"]
    done = run("--small", *parts)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["part"] for line in lines] == parts
    assert all(line["ok"] for line in lines), done.stdout
    assert done.returncode == 0


RELEASE = runpy.run_path(str(ROOT / "scripts" / "build_release.py"))


def version() -> str:
    found: str = RELEASE["version_of"](ROOT)
    return found


def test_the_version_stands_in_one_place_and_the_changelog_begins_with_it() -> None:
    assert RELEASE["first"](r"^## (\S+)", ROOT / "examples" / "changelog.md") == version()
    assert [path for path in (ROOT / "torchdistinput").rglob("*.py") if version() in path.read_text()] == []


def test_the_links_of_the_front_page_lead_to_the_address_of_the_pages() -> None:
    text = "![a picture](examples/a.svg) and [a page](examples/b.md#c), [another](https://example.org/d), [here](#e)"
    led = RELEASE["with_address"](text, "https://host/x/")
    assert led == text.replace("examples/", "https://host/x/examples/").replace(".svg", ".svg?raw=true")


@pytest.mark.parametrize("arguments", [[], ["somewhere", "--check"], [str(ROOT / "dist")]])
def test_a_command_without_a_folder_outside_of_the_repository_is_refused(arguments: list[str]) -> None:
    command = [str(ROOT / "scripts" / "release"), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert "either a folder, or --check" in ended.stderr or "nothing built belongs there" in ended.stderr


def test_the_wheel_works_in_an_empty_environment_with_its_lowest_and_its_newest_torch(all_cells: bool) -> None:
    if not all_cells or sys.version_info >= (3, 13):
        pytest.skip("runs with --all, on a Python that the lowest NumPy has wheels for: installs some GB")
    command = [sys.executable, str(ROOT / "scripts" / "build_release.py"), "--check"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=5400, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


SCRIPTS = ROOT / "scripts"
HANG_BOUND_SECONDS = 600.0


def chaos(*arguments: str) -> str:
    """Runs the script by itself: the ranks are forks of it, and come to their ends all the sooner without pytest.

    SIGINT is ignored at its start, as it is for a job in the background of a shell.
    """
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, str(SCRIPTS / "chaos.py"), *arguments]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_BOUND_SECONDS, check=False, env={"PYTHONPATH": str(ROOT)}
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@linux_processes
def test_ranks_that_are_killed_frozen_or_interrupted_are_named_in_time_and_leave_nothing(all_cells: bool) -> None:
    """The slack is for other tests at the same time; a trial that fails says how to run it again.

    torch looks up names when it connects to a store, which takes 5 s each where no name server answers.
    """
    trials = "30" if all_cells else "6"  # the kinds of events come in turns
    told = chaos("--trials", trials, "--seed", "13", "--jobs", "6", "--timeout", "25", "--slack", "20")
    assert re.search(rf"^{trials} trials, \d+ iterators, 0 failed", told, re.M), told
    for action in ("kill", "freeze for 3 s", "freeze", "SIGINT", "SIGTERM"):
        assert re.search(rf"^{action}: \w+", told, re.M), told


@linux_processes
def test_iterators_that_are_opened_and_dropped_under_load_end_no_rank(all_cells: bool) -> None:
    load = [] if all_cells else ["--idle"]  # else the load is that of other tests at the same time
    trials = 5 if all_cells else 1
    told = chaos("--churn", str(trials), "--seed", "1", "--timeout", "60", *load)
    found = re.search(rf"^{trials} trials?, (\d+) iterators, 0 failed", told, re.M)
    assert found is not None, told
    assert int(found[1]) > 25 * trials


PROGRAMS = 12


def test_random_programs_one_after_the_other_are_exact_and_leave_nothing_behind(interpreters: Interpreters) -> None:
    """A wrong log, or a process that has grown, ends the script with 1, and its output says the seed."""
    told = printed(interpreters.run(["scripts/soak.py", "--programs", str(PROGRAMS), "--seed", "2"]))
    summary = re.search(rf"^{PROGRAMS} programs: (.*); each as the laws say", told, re.M)
    assert summary is not None, told
    happened = {what: int(number) for number, what in re.findall(r"(\d+) (\w[\w ]*)", summary[1])}
    assert happened["steps"] > happened["turns"] >= PROGRAMS
    assert 0 < happened["no error"] < happened["turns"]
