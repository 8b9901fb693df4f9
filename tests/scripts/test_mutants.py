"""``scripts/mutants``: every planted fault fits the tree, and the runner tells what was found from what was missed."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "mutants"))
PATCHES = sorted((ROOT / "tests" / "mutants").glob("*.patch"))

PACKAGE = "def half(n: int) -> int:\n    return n // 2\n"
TESTS = "from torchdistinput import half\n\n\ndef test_half():\n    assert half(4) == 2\n"


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_each_patch_fits_the_tree(path: Path) -> None:
    mutant = SCRIPT["read"](path)
    assert mutant.source != (ROOT / mutant.file).read_text()


def test_no_room_of_the_package_is_without_planted_faults() -> None:
    rooms = Counter(Path(SCRIPT["read"](path).file).parts[1] for path in PATCHES)
    assert rooms.total() >= 60
    folders = {path.parent.name for path in (ROOT / "torchdistinput").glob("*/__init__.py")}
    assert folders - set(rooms) <= {"integrations", "testing"}


def patch(old: str, new: str, head: str = "A fault.", tests: str = "tests/test_half.py") -> str:
    file = "torchdistinput/__init__.py"
    return f"# {head}\n# tests: {tests}\n--- a/{file}\n+++ b/{file}\n@@\n{old}\n{new}\n"


LINE = "-    return n // 2"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (patch(LINE, "+    return n // 3"), r"found +\d+ s  it: tests/test_half.py::test_half"),
        (patch(LINE, "+    return n // 2 + 0"), r"MISSED +\d+ s  it: A fault\."),
        (patch(LINE, "+    while True: pass"), r"found +\d+ s  it: stood still"),
        (patch(LINE, "+    return n //"), "BROKEN it: .* no Python"),
        (patch("-    return n", "+    return 2"), "BROKEN it: these lines stand 0 times in torchdistinput/__init__.py"),
        (patch(LINE, "+    return 3", head="a fault"), "BROKEN it: its first line is no sentence"),
        (patch(LINE, "+    return 3", tests="tests/test_third.py"), "BROKEN it: tests/test_third.py is not there"),
        (patch(LINE, "+    return 3", tests="tests/test_half.py::test_third"), "BROKEN it: .*third is not there"),
        (patch(LINE, "\n".join(["+    n = n"] * 9)), "BROKEN it: it changes 10 lines"),
    ],
)
def test_the_runner_tells_what_is_found_missed_and_broken(text: str, told: str, tmp_path: Path) -> None:
    for name in ("scripts", "tests/mutants", "torchdistinput"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "mutants", tmp_path / "scripts")
    (tmp_path / "torchdistinput" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "tests" / "test_half.py").write_text(TESTS)
    (tmp_path / "tests" / "mutants" / "it.patch").write_text(text)
    seconds = "4" if "stood still" in told else "120"
    command = [sys.executable, str(tmp_path / "scripts" / "mutants"), "--seconds", seconds]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    first = ended.stdout.splitlines()[0]
    assert re.match(told, first), ended.stdout + ended.stderr
    assert ended.returncode == (0 if told.startswith("found") else 1)
    assert (tmp_path / "torchdistinput" / "__init__.py").read_text() == PACKAGE
