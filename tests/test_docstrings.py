"""The examples in the docstrings are true, and public names have one."""

from __future__ import annotations

import doctest
import importlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import fsspec
import pytest
import torch

import torchdistinput as tdi
import torchdistinput.testing

NAMES = {"fsspec": fsspec, "io": io, "tdi": tdi, "torch": torch}
PUBLIC = (tdi, tdi.readers, tdi.statistics, tdi.preprocessing, torchdistinput.testing)
ROOT = Path(__file__).parents[1]


def examples() -> dict[str, doctest.DocTest]:
    """Those of public names, by these names, and all others."""
    things = [(f"{module.__name__}.{name}", getattr(module, name)) for module in PUBLIC for name in module.__all__]
    modules = [path for path in (ROOT / "torchdistinput").rglob("*.py") if ">>> " in path.read_text()]
    for path in sorted(modules):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        things.append((name, importlib.import_module(name)))
    found: dict[str, doctest.DocTest] = {}
    for name, thing in things:
        module = thing if isinstance(thing, ModuleType) else sys.modules.get(getattr(thing, "__module__", ""), tdi)
        for each in doctest.DocTestFinder().find(thing, name, globs=vars(module) | NAMES):
            if each.examples:
                found.setdefault(f"{each.docstring}", each)
    return {each.name: each for each in found.values()}


EXAMPLES = examples()


@pytest.fixture
def files_in_memory() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.usefixtures("files_in_memory")
def test_the_example_is_true(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctest.DocTestRunner().run(EXAMPLES[name]).failed == 0, capsys.readouterr().out


# Names without an example of their own, and the example that shows each.
SHOWN_BY = {
    "Fragment": "FragmentSource",
    "FragmentDataset": "FileDataset",
    "InputReplicationMode": "Strategy.distribute_datasets_from_function",
    "PerReplica": "Strategy.run",
    "ReduceOp": "Strategy.reduce",
    "ValueContext": "Strategy.distribute_values_from_function",
}


def test_every_public_name_is_in_an_example() -> None:
    things = {name: getattr(tdi, name) for name in tdi.__all__}
    asked = {name for name, thing in things.items() if not isinstance(thing, ModuleType)}
    asked -= {name for name in asked if isinstance(things[name], type) and issubclass(things[name], Exception)}
    assert asked - {name.split(".")[1] for name in EXAMPLES} == set(SHOWN_BY)
    assert {f"torchdistinput.{name}" for name in SHOWN_BY.values()} <= set(EXAMPLES)
