"""Private names of torch, CPython and frameworks: where they may stand, and what is read where one is missing."""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

import torchdistinput as tdi
from tests.support.interpreters import Interpreters, printed
from torchdistinput import frameworks
from torchdistinput.coordination import private_names as of_ranks
from torchdistinput.sources.map_style import sampler_batches
from torchdistinput.sources.torch_loader import private_names as of_loaders

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torchdistinput"
SCRIPT = "tests/support/without_a_name.py"
MODULES = sorted(PACKAGE.rglob("*.py"))

UNDOCUMENTED = {
    *("backend_capability", "collate_tensor_fn", "default_collate_fn_map", "default_device_backend_map"),
    *("distributed_c10d", "ForkingPickler", "Py_IncRef", "python_exit_status", "pythonapi"),
}
"""Names without an underscore that no documentation of torch or CPython has."""

DOCUMENTED = {"_asdict", "_current_frames", "_exit", "_fields", "_make", "_replace"}
"""Names with an underscore that the documentation of Python has."""

EXEMPT = {"testing/ranks.py": {"_run_exitfuncs", "_dynamo"}}
"""Of the test launcher: multiprocessing ends its processes without the exit functions of scripts; and what takes long
to import is imported once, if it is there."""


def table_of(adapter: str) -> dict[str, str]:
    """Read from the syntax tree: to import the adapter takes the package."""
    for node in ast.parse((PACKAGE / adapter).read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "PRIVATE_NAMES":
            table: dict[str, str] = ast.literal_eval(node.value or ast.Constant(None))
            return table
    raise AssertionError(f"{adapter} has no table")


TABLES = {
    "sources/torch_loader/": of_loaders.PRIVATE_NAMES,
    "coordination/private_names.py": of_ranks.PRIVATE_NAMES,
    "frameworks.py": frameworks.PRIVATE_NAMES,
    "sources/iterable/divided_sources.py": frameworks.PRIVATE_NAMES,
    "sources/iterable/inexact_states.py": frameworks.PRIVATE_NAMES,
    "integrations/accelerate.py": table_of("integrations/accelerate.py"),
    "integrations/datasets.py": table_of("integrations/datasets.py"),
}
"""The tables, by the files in which their names may stand."""


def short(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def defined(tree: ast.Module) -> set[str]:
    """The names that a module makes: of classes, functions, variables, and attributes of its own objects."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
    return found


def is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def is_private(name: str) -> bool:
    return name in UNDOCUMENTED or (name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED)


@cache
def defined_in(path: Path) -> set[str]:
    return defined(ast.parse(path.read_text()))


@cache
def defined_anywhere() -> set[str]:
    return set().union(*map(defined_in, MODULES))


def private_names(tree: ast.Module, here: set[str], anywhere: set[str]) -> Iterator[tuple[int, str]]:
    """The lines of a module and the private names of others on them.

    Args:
      tree: the module.
      here: what it defines.
      anywhere: what the modules of the package define.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            known = anywhere if is_own(node.value) else here
            yield from ((node.lineno, name) for name in of_attribute(node) if name not in known)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if not module.startswith("torchdistinput"):
                parts = ".".join([module, *(alias.name for alias in node.names)]).split(".")
                yield from ((node.lineno, part) for part in parts if is_private(part))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts = node.value.split(".")
            if all(part.isidentifier() for part in parts):
                yield from ((node.lineno, part) for part in parts if is_private(part) and part not in anywhere)


def of_attribute(node: ast.Attribute) -> Iterator[str]:
    """The private name that an attribute is, or by which it is set."""
    if is_private(node.attr):
        yield node.attr
    elif node.attr == "__setattr__" and ast.unparse(node.value) == "object":
        yield "object.__setattr__"
    elif node.attr == "buffer" and isinstance(node.ctx, ast.Store) and not is_own(node.value):
        yield "buffer"


def allowed(place: str) -> set[str]:
    """The private names that may stand in a module: the parts of those in its table."""
    tables = [table for at, table in TABLES.items() if place == at or (at.endswith("/") and place.startswith(at))]
    parts = {part for table in tables for name in table for part in name.split(".")}
    parts |= {"object.__setattr__"} if {"WorkerInfo", "__setattr__"} & parts else set()
    return parts | EXEMPT.get(place, set())


def test_private_names_of_others_stand_in_the_table_of_their_room() -> None:
    for path in MODULES:
        found = set(private_names(ast.parse(path.read_text()), defined_in(path), defined_anywhere()))
        if short(path) in {"frameworks.py", "data_loader.py"}:  # of objects of their own, whose attributes are others'
            found = {each for each in found if each[1] != "object.__setattr__"}
        strange = sorted(each for each in found if each[1] not in allowed(short(path)))
        assert not strange, f"{short(path)}: {strange} are private names of others: put them into a room's table"


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import torch._dynamo", "_dynamo"),
        ("from torch.utils.data import _utils", "_utils"),
        ("from torch._C import _remove_worker_pids", "_C"),
        ("def f(loader):\n    return loader._iterator", "_iterator"),
        ("class A:\n    def f(self):\n        return self._foreign", "_foreign"),
        ("def f(loader):\n    return getattr(loader, '_iterator')", "_iterator"),
        ("def f(look_up):\n    return look_up('torch._C._remove_worker_pids')", "_remove_worker_pids"),
        ("import sys\nsys._getframe(1)", "_getframe"),
        ("import ctypes\nctypes.pythonapi", "pythonapi"),
        ("from torch.utils.data._utils.collate import default_collate_fn_map", "default_collate_fn_map"),
        ("def f(info):\n    object.__setattr__(info, 'dataset', 1)", "object.__setattr__"),
        ("def f(storage):\n    storage.buffer = 1", "buffer"),
        ("def f(dist):\n    return dist.Backend.backend_capability", "backend_capability"),
    ],
)
def test_a_private_name_is_found_in_each_way_to_it(code: str, name: str) -> None:
    tree = ast.parse(code)
    assert name in {found for _, found in private_names(tree, defined(tree), set())}


@pytest.mark.parametrize(("place", "table"), TABLES.items(), ids=lambda value: value if isinstance(value, str) else "")
def test_each_name_of_a_table_is_used_and_has_a_reason(place: str, table: dict[str, str]) -> None:
    files = [
        path
        for at, other in TABLES.items()
        for path in MODULES
        if other is table and (short(path) == at or (at.endswith("/") and short(path).startswith(at)))
    ]
    text = "\n".join(path.read_text() for path in files)
    for name, reason in table.items():
        assert len(reason) > 10, name
        assert text.count(name.rpartition(".")[2]) > 1, f"{name} is in the table of {place}, and nobody uses it"


# Where nothing can be missing, or what is missing is not met on one rank without an accelerator.
NOT_READ = {
    "torch.utils.data.DataLoader._get_iterator",  # looked for in users' classes, never called
    "torch.utils.data.DataLoader.__setattr__",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.distributed.Store.clone",
}
NOT_MET = {
    "torch.distributed.Backend.backend_capability",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._pin_memory_thread_done_event",
    "multiprocessing.process._children",
    "ctypes.pythonapi.Py_IncRef",
    "_thread.RLock._is_owned",
    "logging._lock",
}
NAMES = [name for name in (*of_loaders.PRIVATE_NAMES, *of_ranks.PRIVATE_NAMES) if name not in NOT_READ]
PARTS = [part for part in vars(of_loaders).values() if isinstance(part, of_ranks.OptionalFeature)]


def parts_of(name: str) -> tuple[Any, ...]:
    """The parts, by their places, that are left out where an attribute is missing; for other names the name itself."""
    return tuple(place for place, part in enumerate(PARTS) if name in part.attributes) or (name,)


FIRST_OF_PARTS = {parts_of(name): name for name in reversed(NAMES)}


def is_usable(attributes: Sequence[str], missing: str) -> bool:
    """Whether a part with these attributes takes an object that lacks one of them."""
    there = {name.rpartition(".")[2]: None for name in attributes if name != missing}
    return of_ranks.OptionalFeature("", [], attributes).is_usable(SimpleNamespace(**there))


@pytest.fixture(scope="module")
def torchs(interpreters: Interpreters, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file with the batches of torch's own loader."""
    path = tmp_path_factory.mktemp("torch") / "batches"
    printed(interpreters.run([SCRIPT, "torch", str(path)]))
    return str(path)


@pytest.mark.parametrize("name", NAMES)
def test_where_a_name_is_missing_the_batches_are_torchs_and_a_line_says_so(
    name: str, interpreters: Interpreters, torchs: str, all_cells: bool
) -> None:
    """One attribute for all of the same parts; with ``--all-cells`` each, also without workers, and iterables."""
    if not all_cells and name not in FIRST_OF_PARTS.values():
        for part in (PARTS[place] for place in parts_of(name)):
            found = [is_usable(part.attributes, missing) for missing in (name, "")]
            assert found == [False, True]
        return
    how = "all" if all_cells else "loader workers"
    ended = interpreters.run([SCRIPT, how, torchs, name])
    assert printed(ended) == "equal\n"
    lines = [line for line in ended[0].errors.splitlines() if " has no " in line]
    assert name in NOT_MET or any(name in line for line in lines)


@pytest.mark.parametrize(
    "name",
    [
        "torch.distributed.distributed_c10d._get_default_store",
        "torch.distributed.Store.clone",
        "torch.distributed.Backend.backend_capability",
    ],
)
def test_where_ranks_miss_a_name_each_gets_its_part(name: str, interpreters: Interpreters, torchs: str) -> None:
    ended = interpreters.run_as_torchrun(2, SCRIPT, "all", torchs, name)
    assert printed(ended) == "equal\n" * 2
    assert name in NOT_MET or all(name in each.errors for each in ended)


def test_where_all_is_switched_off_the_batches_are_torchs(interpreters: Interpreters, torchs: str) -> None:
    off = {"TORCHDISTINPUT_LOADER_INTERNALS": "0"}
    assert printed(interpreters.run([SCRIPT, "all", torchs], places=[off])) == "equal\n"


def drawn_by(kind: Any, *, replacement: bool) -> list[Any]:
    """The batches of two epochs."""
    sampler = RandomSampler(range(23), replacement=replacement, generator=torch.Generator().manual_seed(1))
    loader = kind(range(23), batch_size=4, sampler=sampler)
    return [batch.tolist() for _ in range(2) for batch in loader]


@pytest.mark.parametrize("replacement", [False, True])
def test_where_torch_draws_another_order_its_own_is_taken(
    replacement: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def another(sampler: Any) -> Iterator[int]:
        return reversed([*known(sampler)])

    known = RandomSampler.__iter__
    monkeypatch.setattr(RandomSampler, "__iter__", another)
    sampler_batches._draws_as_torch.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "torchdistinput"):
            found, expected = (drawn_by(kind, replacement=replacement) for kind in (tdi.DataLoader, DataLoader))
        assert found == expected
        assert [record.message for record in caplog.records if "draws the order" in record.message]
    finally:
        monkeypatch.undo()
        sampler_batches._draws_as_torch.cache_clear()
