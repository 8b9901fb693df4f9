"""``scripts/test_gpu``: its parts run whole on the simulated accelerator, where no figure means anything."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "test_gpu"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)


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
