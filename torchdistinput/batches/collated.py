"""The structure of the batches that a collate function makes, from its answers for one sample and for two.

Problem. A replica without a sample needs a batch of size 0, a padded piece needs more rows, and the pieces of several
replicas become one element. All three need to know what in a batch has an entry for each sample. The sizes of a batch
do not tell: three images of three channels, or four samples of four time steps, can be read in two ways.

Decision. The collate function is asked with one sample, and with the same sample twice. Only the number of samples
differs, so what differs in the answers follows that number: the one dim of a tensor or array that is 1, then 2; the
length of a list or tuple that is 1, then 2. Containers with the same keys are opened. Everything else is ``unknown``:
tensors that do not follow the number or follow it in another way (packed tokens, offsets), numbers and strings of the
whole batch, objects. An empty one is not made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchdistinput.batches.containers import is_tensor_collection, open_container
from torchdistinput.batches.pytree import Nesting
from torchdistinput.batches.schema import ARRAY_KINDS, Leaf, Structure, structure_of


def structure_of_collated(one: Any, two: Any) -> Structure:
    """The structure of the batches of a collate function. Local.

    Args:
      one: its batch for one sample.
      two: its batch for the same sample twice.
    """
    leaves: list[Leaf] = []
    return Structure(_nesting_of(one, two, "", leaves), tuple(leaves))


def _nesting_of(one: Any, two: Any, path: str, leaves: list[Leaf]) -> Nesting | None:
    """The nesting of a part of both batches; adds its leaves."""
    found = _leaf_of(one, two, path)
    container, twice = open_container(one), open_container(two)
    if found is None and container is not None and twice is not None:
        if container.keys == twice.keys and container.keys:
            pairs = zip(container.keys, container.children, twice.children, strict=True)
            children = [_nesting_of(first, second, f"{path}[{key!r}]", leaves) for key, first, second in pairs]
            return Nesting(container.cls, container.keys, tuple(children))
        sizes = f"of {len(container.keys)} entries for one sample and {len(twice.keys)} for two"
        found = _unknown(one, path, sizes if container.keys or twice.keys else "which is empty")
    leaves.append(found or _unknown(one, path, "which has no entry for each sample"))
    return None


def _leaf_of(one: Any, two: Any, path: str) -> Leaf | None:
    """What stands in both batches, if it is no container."""
    if type(one) is not type(two):
        return _unknown(one, path, f"{type(one).__name__} for one sample and {type(two).__name__} for two")
    if isinstance(one, torch.Tensor | np.ndarray) or is_tensor_collection(one):
        return _leaf_of_tensors(one, two, path)
    if one is None:
        return Leaf("constant", cls=type(None))
    if type(one) in (list, tuple) and (len(one), len(two)) == (1, 2):
        return Leaf("rows", str if all(isinstance(item, str) for item in two) else object, cls=type(one))
    return None


def unknown(value: Any, why: str) -> Structure:
    """The structure of a batch of which no empty one can be made. Local."""
    return Structure(None, (_unknown(value, "", why),))


def _unknown(value: Any, path: str, why: str) -> Leaf:
    name = type(value).__name__
    return Leaf("unknown", value=(name, f"{path or 'it'} is of type {name}, {why}"))


def _leaf_of_tensors(one: Any, two: Any, path: str) -> Leaf:
    if isinstance(one, torch.Tensor) and (one.is_nested or two.is_nested):
        return _unknown(one, path, "and nested")
    tensors = not isinstance(one, torch.Tensor | np.ndarray)
    shapes = (one.batch_size, two.batch_size) if tensors else (one.shape, two.shape)
    dim = _batch_dim(*shapes)
    if dim is None or (not tensors and one.dtype != two.dtype):
        kinds = f"of shape {tuple(shapes[0])} for one sample and {tuple(shapes[1])} for two"
        return _unknown(one, path, f"{kinds}: no dim follows their number")
    if tensors:
        whose = f"whose dim {dim} follows the number of samples"
        return structure_of(one).leaves[0] if dim == 0 else _unknown(one, path, whose)
    dims = (*shapes[0][:dim], *shapes[0][dim + 1 :])
    if type(one) is torch.Tensor:
        return Leaf("tensor", one.dtype, dims, dim, one.layout)
    if type(one) is np.ndarray and one.dtype.kind in ARRAY_KINDS:
        return Leaf("array", one.dtype.str, dims, dim)
    return _unknown(one, path, "a class or dtype of which no empty one can be made")


def _batch_dim(one: Sequence[int], two: Sequence[int]) -> int | None:
    """The only dim in which the shapes differ, if it is 1, then 2."""
    if len(one) != len(two):
        return None
    differ = [dim for dim, sizes in enumerate(zip(one, two, strict=True)) if sizes[0] != sizes[1]]
    return differ[0] if len(differ) == 1 and (one[differ[0]], two[differ[0]]) == (1, 2) else None
