"""Tests of others, run by pytest in a process of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def failures(content: str, folder: Path) -> set[str]:
    """The tests of a file with this text that fail, as ``Class.test``; one that hangs for 20 minutes ends the run."""
    folder.mkdir(exist_ok=True)
    (folder / "test_exchanged.py").write_text(content)
    call = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=no", "-W", "ignore", "-p", "no:cacheprovider"]
    call += ["-o", "faulthandler_timeout=1200", "-o", "faulthandler_exit_on_timeout=true", "test_exchanged.py"]
    run = subprocess.run(call, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    assert re.search(r"\d+ passed", run.stdout), run.stdout
    found = re.findall(r"^(?:SUB)?FAILED.*?::(\w+)::(\w+)", run.stdout, flags=re.MULTILINE)
    return {f"{cls}.{name}" for cls, name in found}
