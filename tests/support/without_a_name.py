"""A script that reads with a torch that lacks private names: ``python without_a_name.py HOW FILE NAME ...``.

The name is hidden from this library only, as torch itself needs it. Prints ``equal`` once all batches are torch's.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import pkgutil
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

EPOCHS = 2


def asks_from_outside() -> bool:
    """Whether this library asks for an attribute, itself or by ``pkgutil``."""
    asker: str = sys._getframe(2).f_globals.get("__name__", "")
    return asker == "pkgutil" or asker.startswith("torchdistinput.")


def hide(name: str) -> None:  # noqa: C901 - a branch for each kind of place
    """Lets this library not find what has that dotted name."""
    place, _, last = name.rpartition(".")
    owner: Any = pkgutil.resolve_name(place)

    def found(self: Any, attribute: str) -> Any:
        if attribute == last and asks_from_outside():
            raise AttributeError(attribute)
        return own(self, attribute)

    if name in ("_thread.RLock._is_owned", "torch.distributed.Store.clone"):  # of a type that nobody can change
        hide(place)
    elif name == "ctypes.pythonapi.Py_IncRef":
        ctypes.pythonapi = types.SimpleNamespace()  # type: ignore[assignment] # a library without it
    elif name == "torch.UntypedStorage.buffer":
        owner.__setattr__ = refuse
    elif name.endswith("WorkerInfo.dataset"):
        member = vars(owner).get("dataset")  # torch 2.8 has it in each object instead

        def get(self: Any) -> Any:
            return vars(self)["dataset"] if member is None else member.__get__(self)

        def put(self: Any, value: Any) -> None:
            if asks_from_outside():
                raise AttributeError(last)
            if member is None:
                vars(self)["dataset"] = value
            else:
                member.__set__(self, value)

        owner.dataset = property(get, put)
    elif isinstance(owner, types.ModuleType):
        own: Any = types.ModuleType.__getattribute__
        owner.__class__ = type("Hiding", (types.ModuleType,), {"__getattribute__": found})
    elif last in vars(owner) and not callable(vars(owner)[last]):  # of the class, not of its objects
        hide(place)
    else:
        own = owner.__getattribute__
        owner.__getattribute__ = found


def refuse(self: Any, attribute: str, value: Any) -> None:
    raise AttributeError(attribute)


class Squares(Dataset[Any]):
    """Samples by their index, with tensors of two sizes, a number and a text."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        return {"large": torch.full((6_000,), float(index)), "small": torch.arange(3) * index, "is": str(index)}


class Counting(IterableDataset[Any]):
    """The same in turn; loader workers share them."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (Squares()[index] for index in range(first, 23, step))


def plain(batches: Iterable[Any]) -> list[Any]:
    return [
        {
            key: (each.dtype, each.shape, each.numpy().tobytes()) if torch.is_tensor(each) else each
            for key, each in batch.items()
        }
        for batch in batches
    ]


Kind = tuple[Dataset[Any], dict[str, Any]]
"""Data, and the settings of its loader."""

LASTING: Kind = Squares(), {"num_workers": 2, "shuffle": True, "persistent_workers": True}
OTHERS: list[Kind] = [(Counting(), {"num_workers": 2}), (Squares(), {"shuffle": True}), (Counting(), {})]


def new(loader: Any, kind: Kind) -> Any:
    return loader(kind[0], batch_size=4, generator=torch.Generator().manual_seed(3), **kind[1])


def torchs(kind: Kind) -> list[list[Any]]:
    """The batches of torch's own loader."""
    loader = new(DataLoader, kind)
    return [plain(loader) for _ in range(EPOCHS)]


def compare(kind: Kind, expected: list[list[Any]]) -> None:
    """The epochs, and a resume in the middle of the last."""
    import torchdistinput as tdi  # noqa: PLC0415 - not before the names are hidden

    ours = new(tdi.DataLoader, kind)
    state: dict[str, Any] = {}
    for epoch in expected:
        read: list[Any] = []
        for batch in ours:
            read += plain([batch])
            state = ours.state_dict() if len(read) == 2 else state
        assert read == epoch
    resumed = new(tdi.DataLoader, kind)
    resumed.load_state_dict(state)
    assert plain(resumed) == expected[-1][2:]
    resumed.close()
    ours.close()


def compare_on_ranks() -> None:
    """This rank's part of an epoch. Collective: every rank calls this."""
    import torchdistinput as tdi  # noqa: PLC0415 - as above

    rank = int(os.environ["RANK"])
    expected = [list(range(first, min(first + 4, 23)))[2 * rank :][:2] for first in range(0, 23, 4)]
    loader = tdi.DataLoader(range(23), batch_size=4)  # type: ignore[arg-type, var-annotated] # a dataset by its methods
    assert [batch.tolist() for batch in loader] == expected
    loader.close()


def main(how: str, path: str, *names: str) -> None:
    """Hides the names, and compares.

    Args:
      how: ``all``, ``loader workers`` of a map-style dataset only, or ``torch`` to write the batches of these.
      path: the file with these batches of torch.
      names: the names to hide.
    """
    if how == "torch":
        Path(path).write_bytes(pickle.dumps(torchs(LASTING)))
        return
    logging.basicConfig(format="%(message)s")
    for name in names:
        hide(name)
    for module in [each for each in sys.modules if each.partition(".")[0] == "torchdistinput"]:
        del sys.modules[module]
    if "RANK" in os.environ:
        compare_on_ranks()
    else:
        compare(LASTING, pickle.loads(Path(path).read_bytes()))
        for kind in OTHERS if how == "all" else ():
            compare(kind, torchs(kind))
    print("equal")  # noqa: T201 - it is a script


if __name__ == "__main__":
    main(*sys.argv[1:])
