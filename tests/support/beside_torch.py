"""What the user of a loader class sees, beside what torch's own class shows: values, errors, warnings and draws."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support.platforms import FORK_WARNING

Ours: Any = tdi.DataLoader  # torch's types ask for a Dataset; lists and ranges will do
Torchs: Any = DataLoader
Look = Callable[[Any], Any]
"""Uses a loader class, and gives what it saw."""


def plain(value: Any) -> Any:
    """A batch as values that compare: with the types, the dtypes and the shapes."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return type(value), str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        return type(value), [(key, plain(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [plain(each) for each in value]
    return value


def epochs(loader: Any, count: int = 1) -> list[Any]:
    """The batches of some epochs."""
    return [[plain(batch) for batch in loader] for _ in range(count)]


def seen(look: Look, cls: Any) -> tuple[Any, list[Any], list[float]]:
    """What a look gives or raises, what was warned of, and what each global random state gives next."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", FORK_WARNING)
        try:
            found = look(cls)
        except Exception as error:
            found = type(error), str(error)
    told = [(each.category, str(each.message), _file_of(each)) for each in caught]
    return found, told, [torch.rand(()).item(), random.random(), float(np.random.rand())]


def _file_of(warned: warnings.WarningMessage) -> str:
    """Torch 2.8 names its own file in some, later releases and this loader the one with the loop."""
    return "torch" if warned.filename == torch.utils.data.dataloader.__file__ else "caller"


def as_torch(look: Look) -> Any:
    """Checks that a look sees of ours what it sees of torch's, and gives that, or what was raised."""
    ours, torchs = seen(look, Ours), seen(look, Torchs)
    assert ours[::2] == torchs[::2]
    assert [each[:2] for each in ours[1]] == [each[:2] for each in torchs[1]]
    assert all(each[2] == "caller" for each in ours[1])
    return ours[0]
