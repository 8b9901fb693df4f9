"""What only some systems have."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any, Final, final

import pytest

__all__ = ["FORK_WARNING", "linux_memory", "linux_processes"]

FORK_WARNING: Final = "This process .* is multi-threaded, use of fork"
"""What Python itself warns of, from 3.12 on, where loader workers are forked."""

_ELSEWHERE: Final = sys.platform != "linux"

linux_memory = pytest.mark.skipif(_ELSEWHERE, reason="memory is shared without a name on Linux only")
linux_processes = pytest.mark.skipif(_ELSEWHERE, reason="what processes hold is read from /proc")


@final
class _Package:
    """A module: each public attribute is that of the module, imported when it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):  # pytest asks all objects of a module for some
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def package(name: str) -> Any:
    """The module of this name. Without its package, the tests of the module that asks for it are skipped."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"could not import {name!r}", allow_module_level=True)
    return _Package(name)
