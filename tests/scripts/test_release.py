"""``scripts/release``: what its archives hold, and the version in one place; with --all they are installed and used."""

from __future__ import annotations

import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.interpreters import ROOT

RELEASE = runpy.run_path(str(ROOT / "scripts" / "build_release.py"))
BUILD = "import sys; from flit_core import buildapi as b; print(b.build_sdist(sys.argv[1]), b.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist and the wheel of this tree, as it is."""
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-c", BUILD, str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stderr
    sdist, wheel = built.stdout.split()
    return folder / sdist, folder / wheel


def test_the_archives_hold_the_package_its_types_and_its_pages_and_nothing_else(archives: tuple[Path, Path]) -> None:
    assert RELEASE["faults"](*archives, ROOT) == []
    assert RELEASE["lowest"](archives[1]) == ["torch==2.8", "numpy==1.26", "fsspec==2023.5"]


def test_what_an_archive_lacks_or_has_too_much_is_told(archives: tuple[Path, Path], tmp_path: Path) -> None:
    sdist, whole = archives
    other = tmp_path / whole.name
    with zipfile.ZipFile(whole) as before, zipfile.ZipFile(other, "w") as after:
        for name in before.namelist():
            if name != "torchdistinput/py.typed":
                after.writestr(name, before.read(name).replace(b"\nVersion: ", b"\nVersion: 9."))
        after.writestr("tests/__init__.py", "")
    assert RELEASE["faults"](sdist, other, ROOT) == [
        "the wheel lacks torchdistinput/py.typed",
        "the wheel has tests/__init__.py, which does not belong there",
        f"the wheel is of version 9.{version()}, pyproject.toml of {version()}",
    ]


def version() -> str:
    found: str = RELEASE["version_of"](ROOT)
    return found


def test_the_version_stands_in_one_place() -> None:
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
