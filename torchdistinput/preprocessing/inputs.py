"""Inputs of a layer: tensors, arrays, nested lists and single values, as flat values and a shape."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["holds_strings", "ints", "nested", "numbers", "strings"]


def numbers(inputs: Any, layer: str) -> Tensor:
    """The input as a tensor of numbers.

    Raises:
      TypeError: it holds no numbers.
    """
    if isinstance(inputs, Tensor):
        return inputs
    try:
        return torch.as_tensor(np.asarray(inputs))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{layer}: the input is {inputs!r:.80}; numbers are needed, all rows of one length.") from error


def ints(inputs: Any, layer: str) -> Tensor:
    """The input as an int64 tensor.

    Raises:
      TypeError: it holds no ints.
    """
    found = numbers(inputs, layer)
    if found.dtype.is_floating_point or found.dtype.is_complex:
        if found.numel():
            raise TypeError(f"{layer}: the input is {found.dtype}; ints are needed, as a fraction would be lost.")
        return found.to(torch.int64)  # an empty list has no type
    return found.to(torch.int64)


def holds_strings(inputs: Any) -> bool:
    """Whether the first value of the input is a string; an empty list may be one of strings."""
    while isinstance(inputs, list | tuple) or (isinstance(inputs, np.ndarray) and inputs.ndim):
        if not len(inputs):
            return True
        inputs = inputs[0]
    return isinstance(inputs.item() if isinstance(inputs, np.ndarray) else inputs, str)


def strings(inputs: Any, layer: str) -> tuple[list[str], tuple[int, ...]]:
    """The input as a flat list of strings, and its shape.

    Raises:
      TypeError: it holds other values than strings.
      ValueError: rows have different lengths.
    """
    if isinstance(inputs, np.ndarray):
        shape = inputs.shape
        flat = inputs.reshape(-1).tolist()
    elif isinstance(inputs, list | tuple):
        flat, shape = list(inputs), (len(inputs),)
        while flat and isinstance(flat[0], list | tuple | np.ndarray):
            lengths = {len(row) if isinstance(row, list | tuple | np.ndarray) else -1 for row in flat}
            if len(lengths) > 1:
                raise ValueError(f"{layer}: rows of lengths {sorted(lengths)}; rows of one length are needed.")
            shape += (lengths.pop(),)
            flat = list(chain.from_iterable(flat))
    else:
        flat, shape = [inputs], ()
    wrong = {kind.__name__ for kind in set(map(type, flat)) if not issubclass(kind, str)}
    if wrong:
        raise TypeError(f"{layer}: the input holds {', '.join(sorted(wrong))}; strings are needed, or lists of them.")
    return flat, shape


def nested(flat: Sequence[Any], shape: Sequence[int]) -> Any:
    """The flat values as nested lists of a shape; the value itself of shape ``()``."""
    if not shape:
        return flat[0]
    if len(shape) == 1:
        return list(flat)
    size = int(np.prod(shape[1:]))
    return [nested(flat[row * size : (row + 1) * size], shape[1:]) for row in range(shape[0])]
