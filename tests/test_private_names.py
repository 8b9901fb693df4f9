"""Private names of torch, CPython and frameworks: where they may stand, and what is read where one is missing."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.data import Mapped, Stream
from tests.support.interpreters import Interpreters, printed
from torchdistinput import frameworks
from torchdistinput.coordination import private_names as of_ranks
from torchdistinput.sources.torch_loader import private_names as of_loaders

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torchdistinput"
MODULES = sorted(PACKAGE.rglob("*.py"))

UNDOCUMENTED = {
    *("backend_capability", "collate_tensor_fn", "default_collate_fn_map", "default_device_backend_map"),
    *("distributed_c10d", "ForkingPickler", "python_exit_status"),
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
    "sources/iterable/user_state.py": frameworks.PRIVATE_NAMES,
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


OF_LOADERS = {name: part for name, part in vars(of_loaders).items() if isinstance(part, of_ranks.OptionalFeature)}


@pytest.mark.parametrize("name", OF_LOADERS)
def test_a_part_is_left_out_where_one_of_its_attributes_is_missing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    attributes = [each.rpartition(".")[2] for each in OF_LOADERS[name].attributes]
    for missing in (None, *attributes):
        part = of_ranks.OptionalFeature("another way", [], OF_LOADERS[name].attributes)
        owner = SimpleNamespace(**{each: None for each in attributes if each != missing})
        assert [part.is_usable(owner) for _ in range(2)] == [missing is None] * 2
    lines = [record.message.partition(" has no ")[2].partition(":")[0] for record in caplog.records]
    assert lines == [*OF_LOADERS[name].attributes]
    assert not of_ranks.OptionalFeature("another way", ["torch.a_name_of_tomorrow"]).is_usable()


def squares(index: int) -> Any:
    """Tensors of two sizes, a number and a text."""
    return {"large": torch.full((6_000,), float(index)), "small": torch.arange(3) * index, "is": str(index)}


def divided() -> Iterable[Any]:
    """The same in turn; loader workers share them."""
    info = torch.utils.data.get_worker_info()
    first, step = (0, 1) if info is None else (info.id, info.num_workers)
    return map(squares, range(first, 23, step))


KINDS: list[tuple[Any, dict[str, Any]]] = [
    (Mapped(23, squares), {"num_workers": 2, "shuffle": True, "persistent_workers": True}),
    (Stream(divided), {"num_workers": 2}),
    (Mapped(23, squares), {"shuffle": True}),
]


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The variable that leaves out all parts of loader workers."""
    monkeypatch.setenv("TORCHDISTINPUT_LOADER_INTERNALS", "0")
    of_loaders._is_on.cache_clear()
    yield monkeypatch
    of_loaders._is_on.cache_clear()


def new(loader: Any, data: Any, options: dict[str, Any]) -> Any:
    return loader(data, batch_size=4, generator=torch.Generator().manual_seed(3), **options)


@pytest.mark.filterwarnings("ignore:the iterable Stream is read again")
def test_without_the_parts_of_loader_workers_the_batches_are_torchs(switch: pytest.MonkeyPatch) -> None:
    del switch
    assert not any(part.is_usable() for part in OF_LOADERS.values())
    for kind in KINDS:
        compare(*kind)


@pytest.mark.parametrize("name", OF_LOADERS)
def test_without_one_part_the_batches_are_torchs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OF_LOADERS[name], "_is_on", bool)
    compare(*KINDS[0])


def plain(batches: Iterable[Any]) -> list[Any]:
    return [
        {key: getattr(each, "tolist", lambda each=each: each)() for key, each in batch.items()} for batch in batches
    ]


def compare(data: Any, options: dict[str, Any]) -> None:
    """Two epochs, and a resume in the middle of the last."""
    torchs, ours = new(DataLoader, data, options), new(tdi.DataLoader, data, options)
    epochs = [plain(torchs) for _ in range(2)]
    state: dict[str, Any] = {}
    for expected in epochs:
        read: list[Any] = []
        for batch in ours:
            read += plain([batch])
            if len(read) == 2:
                state = ours.state_dict()
        assert read == expected
    resumed = new(tdi.DataLoader, data, options)
    resumed.load_state_dict(state)
    assert plain(resumed) == epochs[-1][2:]
    resumed.close()
    ours.close()


PART_OF_A_RANK = """
import torchdistinput as tdi
from torchdistinput.coordination import private_names
for part in vars(private_names).values():
    if isinstance(part, private_names.OptionalFeature):
        part._is_on = bool
print([batch.tolist() for batch in tdi.DataLoader(range(23), batch_size=4)], flush=True)
"""


def test_without_the_private_names_of_ranks_each_gets_its_part(interpreters: Interpreters, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(PART_OF_A_RANK)
    for rank, found in enumerate(printed(interpreters.run_as_torchrun(2, str(script))).splitlines()):
        assert found == str([list(range(first, min(first + 4, 23)))[2 * rank :][:2] for first in range(0, 23, 4)])


LOADED = """
import ctypes, importlib, mmap, multiprocessing, os, pkgutil, select, signal, sys
import multiprocessing.context, multiprocessing.reduction, multiprocessing.queues
import fsspec, numpy, pyarrow.compute, torch, torch.distributed.checkpoint, torch.utils.data

def lose(module, *names):
    for name in names:
        vars(module).pop(name, None)

for name in [name for name in sys.modules if name.partition(".")[0] == "torchdistinput"]:
    del sys.modules[name]  # it is loaded anew, on the other system

lose(mmap, *[name for name in vars(mmap) if name.startswith(("MADV_", "MAP_"))])
lose(os, "memfd_create", "pidfd_open", "eventfd", "pipe2", "sched_getaffinity", "posix_fadvise")
"""

MACOS = """
sys.platform = "darwin"
sys.modules["fcntl"].__dict__.pop("F_SETPIPE_SZ", None)
"""

WINDOWS = """
sys.platform = "win32"
lose(os, "fork", "register_at_fork", "sched_yield", "getpgid", "setpgid", "killpg", "getuid", "geteuid", "O_CLOEXEC")
lose(os, "O_NONBLOCK", "WNOHANG", "waitpid", "mkfifo")
lose(signal, "SIGALRM", "SIGKILL", "SIGUSR1", "SIGCHLD", "alarm", "setitimer")
lose(select, "poll", "POLLIN", "epoll")
lose(multiprocessing.reduction, "DupFd", "sendfds", "recvfds")
lose(multiprocessing.context, "ForkContext", "ForkProcess", "ForkServerContext", "ForkServerProcess")
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None

class CDLL:
    def __init__(self, name, *_):
        raise TypeError("LoadLibrary() argument 1 must be str, not None")

ctypes.CDLL = CDLL
"""

USED = """
import torchdistinput as tdi
for module in pkgutil.walk_packages(tdi.__path__, "torchdistinput."):
    if ".integrations." not in module.name:  # which load other packages
        importlib.import_module(module.name)
assert [batch.tolist() for batch in tdi.DataLoader(torch.arange(5), 2)] == [[0, 1], [2, 3], [4]]
lines = tdi.FileDataset([__file__], tdi.readers.text_lines)
for data in (torch.utils.data.DataLoader(range(5), 2), torch.utils.data.DataLoader(lines, 2), torch.arange(4).split(2)):
    dataset = tdi.Strategy(["cpu", "cpu"]).distribute_dataset(data)
    assert list(dataset)
    dataset.load_state_dict(dataset.state_dict())
    for _ in dataset:
        break
    dataset.close()
print("done")
"""


@pytest.mark.parametrize("system", [MACOS, WINDOWS], ids=["macOS", "Windows"])
def test_all_modules_load_and_steps_are_made_on_a_system_that_has_less(
    system: str, interpreters: Interpreters, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOADED + system + USED)
    assert printed(interpreters.run([str(script)])) == "done\n"
