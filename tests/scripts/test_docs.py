"""The site of the documentation: built without a warning, and shown by a browser."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import torchdistinput as tdi
from tests.support.interpreters import ROOT

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
