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
from torchdistinput.batches.pytree import structure_of
from torchdistinput.batches.schema import ARRAY_KINDS, Structure


def structure_of_collated(one: Any, two: Any, path: str = "") -> Structure:
    """The structure of the batches of a collate function. Local.

    Args:
      one: its batch for one sample.
      two: its batch for the same sample twice.
      path: where these stand in the batch; for messages.
    """
    if type(one) is not type(two):
        return unknown(one, path, f"{type(one).__name__} for one sample and {type(two).__name__} for two")
    if isinstance(one, torch.Tensor | np.ndarray) or is_tensor_collection(one):
        return _structure_of_tensors(one, two, path)
    if one is None:
        return Structure("constant")
    container, twice = open_container(one), open_container(two)
    if container is None or twice is None:
        return unknown(one, path, "which has no entry for each sample")
    if type(one) in (list, tuple) and (len(one), len(two)) == (1, 2):
        dtype = str if all(isinstance(item, str) for item in two) else object
        return Structure("rows", dtype=dtype, cls=type(one))
    if container.keys != twice.keys:
        return unknown(one, path, f"of {len(container.keys)} entries for one sample and {len(twice.keys)} for two")
    if not container.keys:
        return unknown(one, path, "which is empty")
    pairs = zip(container.keys, container.children, twice.children, strict=True)
    children = tuple(structure_of_collated(first, second, f"{path}[{key!r}]") for key, first, second in pairs)
    return Structure(container.kind, container.keys, children, cls=type(one))


def unknown(value: Any, path: str, why: str) -> Structure:
    """The structure of a part of a batch of which no empty one can be made. Local."""
    name = type(value).__name__
    return Structure("unknown", constant=(name, f"{path or 'it'} is of type {name}, {why}"))


def _structure_of_tensors(one: Any, two: Any, path: str) -> Structure:
    if isinstance(one, torch.Tensor) and (one.is_nested or two.is_nested):
        return unknown(one, path, "and nested")
    tensors = not isinstance(one, torch.Tensor | np.ndarray)
    shapes = (one.batch_size, two.batch_size) if tensors else (one.shape, two.shape)
    dim = _batch_dim(*shapes)
    if dim is None or (not tensors and one.dtype != two.dtype):
        kinds = f"of shape {tuple(shapes[0])} for one sample and {tuple(shapes[1])} for two"
        return unknown(one, path, f"{kinds}: no dim follows their number")
    if tensors:
        return structure_of(one) if dim == 0 else unknown(one, path, f"whose dim {dim} follows the number of samples")
    dims = (*shapes[0][:dim], *shapes[0][dim + 1 :])
    if type(one) is torch.Tensor:
        return Structure("tensor", dtype=one.dtype, inner_dims=dims, layout=one.layout, batch_dim=dim)
    if type(one) is np.ndarray and one.dtype.kind in ARRAY_KINDS:
        return Structure("array", inner_dims=dims, constant=one.dtype.str, batch_dim=dim)
    return unknown(one, path, "a class or dtype of which no empty one can be made")


def _batch_dim(one: Sequence[int], two: Sequence[int]) -> int | None:
    """The only dim in which the shapes differ, if it is 1, then 2."""
    if len(one) != len(two):
        return None
    differ = [dim for dim, sizes in enumerate(zip(one, two, strict=True)) if sizes[0] != sizes[1]]
    return differ[0] if len(differ) == 1 and (one[differ[0]], two[differ[0]]) == (1, 2) else None
