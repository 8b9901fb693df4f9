"""The pages of ``examples/``: their cells run, and print what the pages show."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import torchdistinput as tdi
from tests.support.interpreters import ROOT, Interpreters, printed
from tests.test_readme import snippets

PAGES = [path for path in sorted((ROOT / "examples").rglob("*.md")) if "{code-cell}" in path.read_text()]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT / "examples").as_posix()


def head(page: Path, key: str) -> list[str]:
    """The words of a line between the first two rules of a page: ``packages`` that it needs, ``slow``."""
    found = re.search(rf"^{key}: (.*)$", page.read_text().split("---\n")[1], flags=re.MULTILINE)
    return found[1].strip("[]").replace(",", " ").split() if found else []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_cells_of_a_page_print_what_the_page_shows(page: Path, interpreters: Interpreters, all_cells: bool) -> None:
    missing = [name for name in head(page, "packages") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"could not import {', '.join(missing)}")
    if head(page, "slow") and not all_cells:
        pytest.skip("runs with --all")
    cells = page.read_text().count("\n```{code-cell}")
    assert printed(interpreters.run(["scripts/run_pages.py", str(page)])) == f"{page}: {cells} cells ran\n"


def test_python_that_is_no_cell_is_run_with_its_package() -> None:
    """By ``tests/ecosystem``, where the package is at hand."""
    for page in (ROOT / "examples").rglob("*.md"):
        for snippet in snippets(page.relative_to(ROOT).as_posix()):
            assert "torchdistinput.integrations.transformers" in snippet or "torchtitan." in snippet, snippet


def test_each_cell_of_tensorflows_guide_has_its_counterpart() -> None:
    """Fifteen code cells, and six pieces of code in its text."""
    page = (ROOT / "examples" / "guide.md").read_text()
    for number in [*range(1, 16), *"abcdef"]:
        assert re.search(rf"^\*\*Cell {number}[.:].*?^```{{code-cell}}", page, flags=re.DOTALL | re.MULTILINE), number
    cells = re.findall(r"^\*\*Cell (\w+)[.:]|^```{(code)-cell}", page, flags=re.MULTILINE)
    ours = "".join(first or "-" for first, _ in cells)
    assert not re.search(r"\w\w(?<!1\d)", ours), f"a cell without its counterpart: {ours}"


def test_every_public_name_is_on_a_page() -> None:
    pages = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "examples").rglob("*.md")])
    assert [name for name in tdi.__all__ if not re.search(rf"\b{name}\b", pages)] == []
