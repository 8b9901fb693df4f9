"""The rules of the house that no single file shows: who may import whom, who opens the doors, what its page tells."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from torchdistinput import errors

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torchdistinput"

# The floors of the house: a module imports from the floors below its own.
FLOORS = {
    "errors": 0,
    "frameworks": 1,
    "statistics": 1,
    "plan": 1,
    "step_types": 1,
    "batches": 2,
    "coordination": 3,
    "tracing": 3,
    "devices": 3,
    "pipeline": 4,
    "replicas": 4,
    "sources": 5,
    "inspection": 6,
    "dataset": 6,
    "iterator": 6,
    "checkpoint": 6,
    "build_pipeline": 6,
    "loader_iterator": 6,
    "data_loader": 7,
    "losses": 7,
    "strategy": 7,
    "analysis": 8,
    "preprocessing": 9,
    "__init__": 10,
    "integrations": 11,
    "testing": 11,
    "__main__": 12,
}

# Floors whose modules know each other (never in a circle); everywhere else neighbours are strangers.
NEIGHBOURS_MAY_MEET = {
    *(
        "statistics",
        "batches",
        "plan",
        "step_types",
        "coordination",
        "devices",
        "pipeline",
        "replicas",
        "sources",
        "testing",
        "tracing",
        "integrations",
        "preprocessing",
    ),
    *("inspection", "checkpoint", "dataset", "loader_iterator", "iterator", "build_pipeline"),
    *("data_loader", "losses", "strategy"),
}

# Floors that leave out some of the floors below.
NARROWER = {
    "plan": {"errors"},
    "statistics": set(),
    "coordination": {"batches", "errors", "plan", "step_types"},
    "devices": {"batches", "errors"},
    "pipeline": {"batches", "coordination", "devices", "errors", "plan", "step_types", "tracing"},
    "replicas": {"batches", "coordination"},
}

RUN_TIME_PACKAGES = {"torch", "numpy", "fsspec"}

# The doors to the outside, and the files that open each; run_ranks makes the group that the library then finds.
DOORS = {
    "torch.distributed": {
        "coordination/store.py",
        "coordination/launch.py",
        "coordination/process_group.py",
        "testing/ranks.py",
    },
    "torch.accelerator": {"devices/accelerators.py"},
    "torch.cuda": {"devices/accelerators.py"},
    "torch.Stream": {"devices/accelerators.py"},
    "torch.Event": {"devices/accelerators.py"},
    "fsspec": {"sources/storage/io.py"},
}

MODULES = sorted(PACKAGE.rglob("*.py"))


def short(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def unit(name: str) -> str:
    """The part of the house that a module belongs to: ``plan`` for ``torchdistinput.plan.batching``."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path) for path in MODULES}


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """The syntax tree of a file, all of it."""
    return tuple(ast.walk(parsed(path)))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file; ``from a import b`` is ``a.b`` if that is a module."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{short(path)}: a relative import hides the floor"
            module = node.module or ""
            for alias in node.names:
                full = f"{module}.{alias.name}"
                yield full if full in NAMES or module == "torch" else module


def dotted_names(path: Path) -> Iterator[str]:
    """Every ``a.b`` of two plain names in the expressions of a file."""
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"


@cache
def used_names(path: Path) -> frozenset[str]:
    return frozenset([*imports(path), *dotted_names(path)])


def is_inside(name: str, door: str) -> bool:
    return name == door or name.startswith(f"{door}.")


def test_imports_point_down() -> None:
    for path in MODULES:
        check_imports(path)


def check_imports(path: Path) -> None:
    here = unit(module_name(path))
    for name in imports(path):
        if not is_inside(name, "torchdistinput"):
            continue
        there = unit(name)
        if there == here:
            assert here in NEIGHBOURS_MAY_MEET, f"{short(path)} imports its sibling {name}"
        elif FLOORS[there] == FLOORS[here]:
            assert {here, there} <= NEIGHBOURS_MAY_MEET, f"{short(path)} imports {name} on its own floor"
        else:
            assert FLOORS[there] < FLOORS[here], f"{short(path)} imports {name} from a floor above"
            assert there in NARROWER.get(here, {there}), f"{short(path)} may not know {name}"


def test_no_two_modules_import_each_other_in_a_circle() -> None:
    graph = {module_name(path): {name for name in imports(path) if name in NAMES} for path in MODULES}
    TopologicalSorter(graph).prepare()


def test_only_the_run_time_packages_are_imported() -> None:
    for path in MODULES:
        strange = {name.split(".")[0] for name in imports(path)} - packages_of(path)
        assert not strange, f"{short(path)} imports {strange}"


def packages_of(path: Path) -> set[str]:
    """The packages that a module may import."""
    allowed = set(sys.stdlib_module_names) | {"torchdistinput"} | RUN_TIME_PACKAGES
    allowed -= {"torch", "fsspec"} if unit(module_name(path)) in {"plan", "statistics", "report"} else set()
    allowed |= {path.stem} if unit(module_name(path)) == "integrations" else set()
    allowed |= {"pyarrow"} if path.stem in {"arrow", "parquet"} else set()  # of the extra "parquet"
    allowed |= {"google_crc32c"} if path.stem == "tfrecords" else set()  # of the extra "tfrecord"
    return allowed


@pytest.mark.parametrize("door", DOORS)
def test_each_door_to_the_outside_is_opened_in_one_place(door: str) -> None:
    visitors = {short(path) for path in MODULES if any(is_inside(name, door) for name in used_names(path))}
    assert visitors <= DOORS[door]


def test_every_module_defers_its_annotations() -> None:
    for path in MODULES:
        body = [node for node in parsed(path).body if not isinstance(node, ast.Expr)]
        assert not body or (isinstance(body[0], ast.ImportFrom) and body[0].module == "__future__"), short(path)


def test_the_kernel_of_reading_knows_no_kind_of_data() -> None:
    for path in (PACKAGE / "sources" / "kernel").glob("*.py"):
        kinds = re.findall(r"sources\.(datasets|readers|formats|map_style|iterable|torch_loader)\b", path.read_text())
        assert kinds == [], short(path)


def test_the_page_of_the_house_shows_the_tree_as_it_is() -> None:
    page = (ROOT / "examples" / "house.md").read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    trees = [block for block in blocks if re.search(r"torchdistinput/\s", block) and "errors.py" in block]
    assert len(trees) == 1, "the page needs one block with the tree of torchdistinput/"
    shown = re.findall(r"\b\w+(?:\.py\b|/(?=\s))", trees[0].split("torchdistinput/", 1)[1])
    modules = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in MODULES if path.parent != PACKAGE}
    assert sorted(shown) == sorted(modules | folders)


def test_the_readme_can_be_read_in_one_sitting() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 200
    assert len(text.split()) <= 1400


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES} - {PACKAGE}), ids=short)
def test_the_docstring_of_a_folder_tells_of_each_of_its_modules(folder: Path) -> None:
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    told = re.findall(r"^- ``(\w+)``: ", docstring, flags=re.MULTILINE)
    assert sorted(told) == sorted(path.stem for path in folder.glob("*.py") if path.name != "__init__.py")


def test_the_text_of_an_error_is_short() -> None:
    """The fact, the values, the way out; what else there is to say stands on a page."""
    sites = list(runpy.run_path(str(ROOT / "scripts" / "error_texts.py"))["error_sites"](ROOT))
    assert any(site.text for site in sites)
    assert [(site.module, site.line) for site in sites if len(site.text) > 400] == []


def test_the_reference_knows_the_kind_of_every_error_of_this_library() -> None:
    kinds = runpy.run_path(str(ROOT / "scripts" / "error_texts.py"))["KINDS_OF_ERRORS"]
    own = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception)}
    assert own <= set(kinds)
