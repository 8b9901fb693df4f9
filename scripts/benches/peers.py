"""The packages beside which the library is measured: imported where a contender needs them, never before."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from types import ModuleType

__all__ = ["APART", "missing", "missing_apart", "peer", "versions"]

APART = Path(__file__).parents[2] / ".venv-apart" / "bin" / "python"
"""The interpreter of the environment that ``scripts/test_apart`` makes."""


def peer(module: str) -> ModuleType:
    """The module. It is not imported at the top: a contender's process has only what that contender needs."""
    return importlib.import_module(module)


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    return {package: importlib.metadata.version(package) for package in packages if not missing((package,))}


def missing(packages: Iterable[str]) -> list[str]:
    """Those that are not installed."""
    return [package for package in packages if not _installed(package)]


def missing_apart(packages: Iterable[str]) -> list[str]:
    """Those that are not installed in the environment of ``scripts/test_apart``."""
    return [package for package in packages if not _installed_apart(package)]


@lru_cache
def _installed_apart(package: str) -> bool:
    code = f"import importlib.metadata; importlib.metadata.version({package!r})"
    return APART.exists() and not subprocess.run([APART, "-c", code], capture_output=True, check=False).returncode


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
