"""The loader that a command is about: ``train.py:make_loader``, made in this process as if on many ranks."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeAlias

from torch.utils.data import DataLoader as TorchDataLoader

from torchdistinput.coordination.launch import plan_ranks
from torchdistinput.data_loader import DataLoader
from torchdistinput.dataset import DistributedDataset
from torchdistinput.errors import InputError

Loader: TypeAlias = DistributedDataset | DataLoader[Any]

_NOTE_SECONDS: Final = 10.0  # after which a target that hangs is spoken of


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
    what = f"importing {place}"
    way_out = "it is only imported: what a script does goes under  if __name__ == '__main__':"
    note = threading.Timer(_NOTE_SECONDS, _still_waits, [target])
    note.daemon = True
    note.start()
    try:
        module = _module(place)
        found = vars(module).get(name)
        if found is None:
            own = vars(module).items()
            here = [each for each, value in own if getattr(value, "__module__", "") == module.__name__]
            has = f"it has {', '.join(sorted(here))[:200]}" if here else "it defines no function"
            raise InputError(f"{place} has no {name}; {has}. Name the function that makes the loader.")
        if isinstance(found, DistributedDataset | DataLoader) or not callable(found):
            return found
        what, way_out = target, "it is called without arguments, and should only make the loader."
        return _returned(found())
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{what} raised {type(error).__name__}: {error}{_place_in(error)}. This is one process without a process "
            f"group; {way_out}"
        ) from error
    finally:
        note.cancel()


def _returned(made: Any) -> Any:
    if inspect.iscoroutine(made):
        made.close()  # else Python warns that it was never awaited
    return made


def _still_waits(target: str) -> None:
    sys.stderr.write(
        f"{target} has not returned after {_NOTE_SECONDS:.0f} s. If it makes a process group, it waits for ranks that "
        "are not started here: name a function that only makes the loader.\n"
    )


def _place_in(error: BaseException) -> str:
    """The last line of the user's file that an error came through, in brackets; empty if it came through none."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in {__file__, importlib.__file__} and not frame.filename.startswith("<")
    ]
    lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename]
    return f" (line {lines[-1]} of {frames[0].filename})" if lines else ""


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        is_name = all(part.isidentifier() for part in place.split("."))
        spec = importlib.util.find_spec(place) if is_name else None
        if spec is None or spec.origin is None:  # without one it is a folder
            raise InputError(
                f"{place} is no .py file, and there is no module of that name; FILE.py:FUNCTION is needed, such as "
                "train.py:make_loader."
            )
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
