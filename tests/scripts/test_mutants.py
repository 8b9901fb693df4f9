"""``scripts/mutants``: every planted fault fits the tree, and the runner tells what was found from what was missed."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
