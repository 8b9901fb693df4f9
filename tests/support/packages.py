"""Packages of others that are imported when a test uses them, not when tests are collected.

Each fork of a test's process copies its page tables: with all packages in memory, it takes up to twice as long.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, final

import pytest


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
