"""Inputs of a layer: tensors, arrays, nested lists and single values, as flat values and a shape."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Texts: TypeAlias = Any
"""A list of strings, an array of fixed width (``U``, or ``S`` in UTF-8), or an Arrow array of strings without nulls."""


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
    if is_arrow(inputs):
        return True
    while isinstance(inputs, list | tuple) or (isinstance(inputs, np.ndarray) and inputs.ndim):
        if not len(inputs):
            return True
        inputs = inputs[0]
    return isinstance(inputs.item() if isinstance(inputs, np.ndarray) else inputs, str | bytes)


def texts_of(inputs: Any, layer: str) -> tuple[Texts, tuple[int, ...]]:
    """The input as flat texts, and its shape. The entries of lists are not looked at.

    Raises:
      TypeError: an Arrow array holds nulls or other values than strings.
      ValueError: rows have different lengths.
    """
    if isinstance(inputs, np.ndarray):
        flat = inputs.reshape(-1)
        return flat if inputs.dtype.kind in "US" else flat.tolist(), inputs.shape
    if is_arrow(inputs):
        return _of_arrow(inputs, layer), (len(inputs),)
    if not isinstance(inputs, list | tuple):
        return [inputs], ()
    found = inputs
    shape: tuple[int, ...] = (len(inputs),)
    while found and isinstance(found[0], list | tuple | np.ndarray):
        lengths = {len(row) if isinstance(row, list | tuple | np.ndarray) else -1 for row in found}
        if len(lengths) > 1:
            raise ValueError(f"{layer}: rows of lengths {sorted(lengths)}; rows of one length are needed.")
        shape += (lengths.pop(),)
        found = list(chain.from_iterable(found))
    return list(found) if isinstance(found, tuple) else found, shape


def _of_arrow(inputs: Any, layer: str) -> Any:
    array = inputs.combine_chunks() if type(inputs).__name__ == "ChunkedArray" else inputs
    values = array.dictionary if str(array.type).startswith("dictionary") else array
    nulls = max(array.null_count, values.null_count)
    if str(values.type) not in ("string", "large_string") or nulls:
        raise TypeError(
            f"{layer}: the input is Arrow's {array.type} with {nulls} nulls; strings without nulls are needed. "
            "fill_null gives nulls a value."
        )
    return array


def strings(inputs: Any, layer: str) -> tuple[list[str], tuple[int, ...]]:
    """The input as a flat list of strings, and its shape.

    Raises:
      TypeError: it holds other values than strings.
      ValueError: rows have different lengths, or bytes are not UTF-8.
    """
    texts, shape = texts_of(inputs, layer)
    flat = listed(texts)
    wrong = {kind.__name__ for kind in set(map(type, flat)) if not issubclass(kind, str)}
    if wrong:
        raise TypeError(f"{layer}: the input holds {', '.join(sorted(wrong))}; strings are needed, or lists of them.")
    return flat, shape


def is_arrow(texts: object) -> bool:
    """Whether it is of pyarrow, which is not imported for this."""
    return type(texts).__module__.split(".")[0] == "pyarrow"


def listed(texts: Texts) -> list[Any]:
    """The texts as a list of strings.

    Raises:
      ValueError: an entry of an ``S`` array is not UTF-8.
    """
    if isinstance(texts, np.ndarray):
        return [each.decode() if isinstance(each, bytes) else each for each in texts.tolist()]
    return texts.to_pylist() if is_arrow(texts) else list(texts)


def taken(texts: Texts, rows: npt.NDArray[np.int64]) -> Texts:
    """Some of the texts."""
    return [texts[row] for row in rows.tolist()] if isinstance(texts, list) else texts.take(rows)


def nested(flat: Sequence[Any], shape: Sequence[int]) -> Any:
    """The flat values as nested lists of a shape; the value itself of shape ``()``."""
    values = np.empty(len(flat), object)
    values[:] = flat
    return values.reshape(shape).tolist()
