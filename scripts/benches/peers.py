"""The packages beside which the library is measured: imported where a contender needs them, never before."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterable
from types import ModuleType

__all__ = ["missing", "peer", "versions"]


def peer(module: str) -> ModuleType:
    """The module. It is not imported at the top: a contender's process has only what that contender needs."""
    return importlib.import_module(module)


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    return {package: importlib.metadata.version(package) for package in packages if not missing((package,))}


def missing(packages: Iterable[str]) -> list[str]:
    """Those that are not installed."""
    return [package for package in packages if not _installed(package)]


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
