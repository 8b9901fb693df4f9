"""Batches of every structure, and datasets whose length is told by a list: for tests of the end of the data."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

import torchdistinput as tdi


class Pair(NamedTuple):
    """A batch as a named tuple."""

    image: torch.Tensor
    label: torch.Tensor


@dataclasses.dataclass
class Batch:
    """A batch as a dataclass."""

    tokens: torch.Tensor
    text: list[str]


def bare(n: int) -> Any:
    return torch.arange(n)


def halves(n: int) -> Any:
    return torch.ones(n, 2, 3, dtype=torch.float16)


def flags(n: int) -> Any:
    return (torch.zeros(n, dtype=torch.bool), torch.zeros(n, 4, dtype=torch.uint8))


def mapping(n: int) -> Any:
    return {"x": torch.zeros(n, 5, dtype=torch.float64), "y": torch.zeros(n, dtype=torch.int32)}


def strings(n: int) -> Any:
    return {"text": [f"row {k}" for k in range(n)], "n": torch.arange(n)}


def named(n: int) -> Any:
    return Pair(torch.zeros(n, 3, 2, 2), torch.arange(n))


def data_class(n: int) -> Any:
    return Batch(torch.zeros(n, 7, dtype=torch.int64), ["x"] * n)


def nested(n: int) -> Any:
    return {"a": [torch.zeros(n, 1), {"b": (torch.arange(n), ["s"] * n)}], "c": Pair(torch.zeros(n), torch.ones(n, 2))}


def with_constant(n: int) -> Any:
    return {"x": torch.arange(n), "scale": 0.5, "none": None, "name": "train"}


KINDS: dict[str, Callable[[int], Any]] = {
    "bare": bare,
    "halves": halves,
    "flags": flags,
    "mapping": mapping,
    "strings": strings,
    "strings of NumPy": lambda size: [torch.arange(size), [*np.full(size, "a")]],
    "ordered mapping": lambda size: OrderedDict(y=torch.arange(size), x=torch.zeros(size, 2)),
    "named": named,
    "data class": data_class,
    "nested": nested,
    "with a constant": with_constant,
}
EMPTIABLE = {kind: make for kind, make in KINDS.items() if make is not with_constant}
"""The kinds of which an empty batch can be made from the structure."""


def described(batch: Any) -> Any:
    """A batch as plain values that show its classes, keys, dtypes and shapes."""
    if isinstance(batch, torch.Tensor):
        return ("tensor", str(batch.dtype), tuple(batch.shape))
    if isinstance(batch, dict):
        return (type(batch).__name__, {key: described(value) for key, value in batch.items()})
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [described(getattr(batch, field.name)) for field in dataclasses.fields(batch)]
        return (type(batch).__name__, fields)
    if isinstance(batch, list | tuple):
        return (type(batch).__name__, [described(value) for value in batch])
    return batch


def batches_of(sizes: list[list[int]], make: Callable[[int], Any] = bare) -> Callable[[tdi.InputContext], list[Any]]:
    """A dataset function: worker ``i`` has batches of ``sizes[i]``."""

    def dataset_fn(context: tdi.InputContext) -> list[Any]:
        return [make(size) for size in sizes[context.input_pipeline_id]]

    return dataset_fn
