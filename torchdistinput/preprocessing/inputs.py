"""Inputs of a layer: tensors, arrays, nested lists and single values, as flat values and a shape."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor


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


def listed(texts: np.ndarray[Any, Any]) -> Any:
    """An array of strings as lists; bytes are read as UTF-8.

    Raises:
      ValueError: bytes are not UTF-8.
    """
    return (np.char.decode(texts, "utf-8") if texts.dtype.kind == "S" else texts).tolist()


def strings(inputs: Any, layer: str) -> tuple[list[str], tuple[int, ...]]:
    """The input as a flat list of strings, and its shape.

    Raises:
      TypeError: it holds other values than strings.
      ValueError: rows have different lengths, or bytes are not UTF-8.
    """
    if isinstance(inputs, np.ndarray):
        flat, shape = listed(inputs.reshape(-1)), inputs.shape
    elif isinstance(inputs, list | tuple):
        flat, shape = list(inputs), (len(inputs),)
    else:
        flat, shape = [inputs], ()
    while flat and isinstance(flat[0], list | tuple | np.ndarray):
        lengths = {len(row) if isinstance(row, list | tuple | np.ndarray) else -1 for row in flat}
        if len(lengths) > 1:
            raise ValueError(f"{layer}: rows of lengths {sorted(lengths)}; rows of one length are needed.")
        shape += (lengths.pop(),)
        flat = list(chain.from_iterable(flat))
    wrong = {kind.__name__ for kind in set(map(type, flat)) if not issubclass(kind, str)}
    if wrong:
        raise TypeError(f"{layer}: the input holds {', '.join(sorted(wrong))}; strings are needed, or lists of them.")
    return flat, shape


def nested(flat: Sequence[Any], shape: Sequence[int]) -> Any:
    """The flat values as nested lists of a shape; the value itself of shape ``()``."""
    values = np.empty(len(flat), object)
    values[:] = flat
    return values.reshape(shape).tolist()
