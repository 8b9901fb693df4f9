"""``scripts/release``: the version in one place; with --all the archives are built, installed and used."""

from __future__ import annotations

import runpy
import subprocess
import sys

import pytest

from tests.support.interpreters import ROOT

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
