"""Finds torch loaders whose class iterates in a way of its own: what it yields is not what its attributes say.

Such a loader (one that normalises or repeats its batches, or turns indices into graphs) is an iterable of ready batches
for this library: its dataset, sampler and batch size do not tell what comes.
"""

from __future__ import annotations

from typing import Final

_ITERATION: Final = ("__iter__", "__len__", "_get_iterator", "_index_sampler")
_KNOWN: Final = ("torch", "torchdata", "torchdistinput")


def own_iteration(loader: object) -> list[str]:
    """The names of torch's loader that decide what it yields and that the loader's class defines anew. Local.

    Empty for classes of torch and torchdata, and for subclasses that change other things, such as their arguments.
    """
    found: list[str] = []
    for kind in type(loader).__mro__:
        if kind.__module__.partition(".")[0] in _KNOWN:
            break
        found += [name for name in _ITERATION if name in vars(kind)]
    return found
