"""The table of examples/my_data, row by row: ``check_source`` at several numbers of ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.ecosystem.kinds import KINDS, SAMPLES, numbers_in, numbers_of, sources, write_all
from torchdistinput.testing import check_source, run_ranks


def is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def skip_without(packages: tuple[str, ...]) -> None:
    for package in packages:
        if not is_there(package):
            pytest.skip(f"could not import {package!r}")


def read_alone(folder: Path, all_cells: bool) -> dict[str, list[int]]:
    """Writes all files, and reads each kind once, in a process of its own: once Lance is imported, each fork warns."""
    write_all(folder, {package for kind in KINDS.values() for package in kind.packages if is_there(package)})
    return {name: numbers_of(make()) for name, make in sources(folder, is_there, all_cells=all_cells).items()}


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory, all_cells: bool) -> dict[str, list[int]]:
    """What one process has read of each kind; all of them have passed the check."""
    folder = tmp_path_factory.mktemp("kinds")
    (found,) = run_ranks(1, read_alone, folder, all_cells, timeout_seconds=240)
    given = sources(folder, is_there, all_cells=all_cells)
    check_source(given, worlds=(2, 3, 1) if all_cells else (2, 1), samples=numbers_in)
    return found


LONG = {name: [pytest.mark.long] if kind.long else [] for name, kind in KINDS.items()}


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in LONG.items()])
def test_a_kind_is_read_right_on_ranks_and_in_one_process(name: str, checked: dict[str, list[int]]) -> None:
    """With ``--all-cells`` at three ranks too, and also without loader workers."""
    skip_without(KINDS[name].packages)
    of_kind = [read for row, read in checked.items() if row == name or row[: -len(", 0 workers")] == name]
    assert of_kind
    assert all(read == [*KINDS[name].truth] for read in of_kind)


def read_by_workers(folder: Path) -> list[int]:
    write_all(folder, {"lance"})
    return numbers_of(KINDS["Lance"].make(folder, 2))


def test_lance_is_read_by_loader_workers_that_are_not_forked(tmp_path: Path) -> None:
    skip_without(("lance",))
    assert run_ranks(1, read_by_workers, tmp_path, timeout_seconds=120) == [[*range(SAMPLES)]]
