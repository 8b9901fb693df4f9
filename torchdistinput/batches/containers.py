"""Opens and rebuilds one level of a container: a mapping, list, tuple, named tuple or dataclass.

``torch.utils._pytree`` is private and does not know dataclasses, so this module has functions of its own.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch

MANY_ENTRIES: Final = 16
"""A list of so many dicts, tuples or lists is a list of samples, and only the first of them is looked into."""
PLAIN_TYPES: Final = frozenset({str, bytes, int, float, bool, type(None)})
"""Types that are certainly neither tensors nor containers: a long list of such values is checked in one go."""
_MOST_LOOKED_AT: Final = 32


class Container(NamedTuple):
    """An open container: its kind, its keys, its children, and a function that builds it with other children."""

    kind: str
    keys: tuple[Any, ...]
    children: list[Any]
    rebuild: Callable[[Iterable[Any]], Any]


def some_of(entries: Sequence[Any]) -> Sequence[Any]:
    """Some 32 entries of a long list, which are looked at in the place of all."""
    return entries[:: 1 + len(entries) // _MOST_LOOKED_AT]


def open_container(value: Any) -> Container | None:
    """Takes one level of a container apart; ``None`` if the value is no container.

    Containers are mappings, lists, tuples, named tuples and dataclass instances. A mapping comes back as a ``dict``
    unless its class can be called with one.
    """
    if isinstance(value, torch.Tensor | np.ndarray | str | bytes):
        return None
    if isinstance(value, Mapping):
        keys = tuple(value.keys())
        return Container("dict", keys, list(value.values()), lambda new: mapping_like(type(value), keys, new))
    if isinstance(value, tuple):
        fields = named_tuple_fields(type(value))
        if fields is not None:
            return Container("namedtuple", fields, list(value), lambda new: type(value)(*new))
        return Container("tuple", tuple(range(len(value))), list(value), tuple)
    if isinstance(value, list):
        return Container("list", tuple(range(len(value))), list(value), list)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value) if field.init)
        children = [getattr(value, name) for name in names]
        return Container("dataclass", names, children, lambda new: type(value)(**dict(zip(names, new, strict=True))))
    return None


def is_tensor_collection(value: object) -> bool:
    """Whether the value is a ``TensorDict`` or tensorclass, which is cut and moved as one tensor is. Local.

    The package is not imported here: a process that has such a value has imported it.
    """
    package = sys.modules.get("tensordict")
    return package is not None and bool(package.is_tensor_collection(value))


def is_non_tensor(value: object) -> bool:
    """Whether the value is an entry of a ``TensorDict`` that is no tensor, one for the whole batch. Local."""
    package = sys.modules.get("tensordict")
    return package is not None and isinstance(value, package.NonTensorData)


def tensor_collection(cls: type, keys: Sequence[Any], values: Iterable[Any], batch_size: Sequence[int]) -> Any:
    """A ``TensorDict``, or a tensorclass of that class. Local."""
    package, content = sys.modules["tensordict"], dict(zip(keys, values, strict=True))
    if package.is_tensorclass(cls):
        return cls(**content, batch_size=batch_size)
    return package.TensorDict(content, batch_size=batch_size)


def mapping_like(cls: type, keys: Sequence[Any], values: Iterable[Any]) -> Any:
    """A mapping of that class, or a plain ``dict`` where the class cannot be called with one. Local."""
    plain = dict(zip(keys, values, strict=True))
    if cls is dict:
        return plain
    try:
        return cls(plain)
    except TypeError:
        return plain  # a mapping that is built in another way (a defaultdict wants its factory): its content counts


def named_tuple_fields(cls: type) -> tuple[str, ...] | None:
    """The fields of a class of named tuples; ``None`` of another class. Local."""
    fields = cls.__dict__.get("_fields")
    if fields is None:  # a class that extends a named tuple keeps the fields of its base
        fields = next((base.__dict__["_fields"] for base in cls.__mro__ if "_fields" in base.__dict__), None)
    return cast("tuple[str, ...] | None", fields)
