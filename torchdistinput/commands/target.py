"""The loader that a command is about: ``train.py:make_loader``, made in this process as if on many ranks."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from torch.utils.data import DataLoader as TorchDataLoader

from torchdistinput.coordination.launch import plan_ranks
from torchdistinput.data_loader import DataLoader
from torchdistinput.dataset import DistributedDataset
from torchdistinput.errors import InputError

Loader: TypeAlias = DistributedDataset | DataLoader[Any]


def add_target(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say which loader is meant, and for how many ranks."""
    parser.add_argument(
        "target",
        metavar="FILE.py:FUNCTION",
        help="a function without arguments that makes the loader and returns it, alone or as (strategy, loader); or "
        "package.module:FUNCTION. It is called in this process, no ranks are started, and nothing is read",
    )
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="as if on so many ranks (default: 1)")
    parser.add_argument("--json", action="store_true", help="prints JSON")


@contextlib.contextmanager
def planned_loader(target: str, world_size: int) -> Iterator[Loader]:
    """The loader that a target makes, as if on rank 0 of so many ranks. What it prints goes to stderr.

    Raises:
      InputError: the target cannot be found, fails, starts ranks, reads, or makes no loader.
    """
    if world_size < 1:
        raise InputError(f"--world-size is {world_size}; an int of 1 or more is needed.")
    with plan_ranks(world_size):
        with contextlib.redirect_stdout(sys.stderr):
            loader = _loader_in(target, _made(target))
        yield loader


def _made(target: str) -> Any:
    place, _, name = target.rpartition(":")
    if not place or not name.isidentifier():
        raise InputError(f"the target is {target!r}; FILE.py:FUNCTION is needed, such as train.py:make_loader.")
    try:
        module = _module(place)
        found = vars(module).get(name)
        if found is None:
            own = vars(module).items()
            here = [each for each, value in own if getattr(value, "__module__", "") == module.__name__]
            has = f"it has {', '.join(sorted(here))[:200]}" if here else "it defines no function"
            raise InputError(f"{place} has no {name}; {has}. Name the function that makes the loader.")
        is_loader = isinstance(found, DistributedDataset | DataLoader)
        return found if is_loader or not callable(found) else found()
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise InputError(
            f"{target} raised {type(error).__name__}: {error} (line {at.lineno} of {at.filename}). It is "
            "called without arguments, in one process without a process group; it should only make the loader."
        ) from error


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place)
    if not path.is_file():
        raise InputError(f"there is no file {place}; FILE.py:FUNCTION is needed, such as train.py:make_loader.")
    sys.path.insert(0, str(path.parent.resolve()))  # as for a script
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _loader_in(target: str, made: Any) -> Loader:
    """The loader among what a target returned.

    Raises:
      InputError: there is none, or more than one.
    """
    values = [made]
    if isinstance(made, tuple | list):
        values = [*made]
    elif isinstance(made, Mapping):
        values = [*made.values()]
    loaders = [each for each in values if isinstance(each, DistributedDataset | DataLoader)]
    if len(loaders) == 1:
        return loaders[0]
    if loaders:
        raise InputError(f"{target} returned {len(loaders)} loaders; name a function that returns one of them.")
    found = ", ".join(type(each).__name__ for each in values)[:200] or "nothing"
    way_out = "Return what strategy.distribute_dataset(...) returns, or a torchdistinput.DataLoader."
    if any(isinstance(each, TorchDataLoader) for each in values):
        way_out = "Nothing divides torch's own DataLoader: give it to strategy.distribute_dataset(...)."
    raise InputError(f"{target} returned no loader, but {found}. {way_out}")
