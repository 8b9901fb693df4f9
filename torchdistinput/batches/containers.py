"""Opens and rebuilds one level of a container: a mapping, list, tuple, named tuple or dataclass.

``torch.utils._pytree`` is private and does not know dataclasses, so this module has functions of its own.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast, final

import numpy as np
import torch

MANY_ENTRIES: Final = 16
"""A list of so many dicts, tuples or lists is a list of samples, and only the first of them is looked into."""
PLAIN_TYPES: Final = frozenset({str, bytes, int, float, bool, type(None)})
"""Types that are certainly neither tensors nor containers: a long list of such values is checked in one go."""
_MOST_LOOKED_AT: Final = 32


@final
class Container(NamedTuple):
    """An open container: its kind and class, its keys, its children."""

    kind: str
    cls: type
    keys: tuple[Any, ...]
    children: list[Any]

    def rebuild(self, children: Iterable[Any]) -> Any:
        """The container with other children."""
        return rebuilt(self.cls, self.keys, children)


def some_of(entries: Sequence[Any]) -> Sequence[Any]:
    """Some 32 entries of a long list, which are looked at in the place of all."""
    return entries[:: 1 + len(entries) // _MOST_LOOKED_AT]


def kind_of(cls: type) -> str | None:
    """``dict``, ``list``, ``tuple``, ``namedtuple`` or ``dataclass``; ``None`` for a class of no container. Local."""
    if issubclass(cls, Mapping):
        return "dict"
    if issubclass(cls, tuple):
        return "tuple" if named_tuple_fields(cls) is None else "namedtuple"
    if issubclass(cls, list):
        return "list"
    return "dataclass" if dataclasses.is_dataclass(cls) else None


def open_container(value: Any) -> Container | None:
    """Takes one level of a container apart; ``None`` if the value is no container. Local."""
    cls = type(value)
    kind = None if isinstance(value, torch.Tensor | np.ndarray | str | bytes | type) else kind_of(cls)
    if kind is None:
        return None
    if kind == "dict":
        return Container(kind, cls, tuple(value.keys()), list(value.values()))
    if kind == "dataclass":
        names = tuple(field.name for field in dataclasses.fields(value) if field.init)
        return Container(kind, cls, names, [getattr(value, name) for name in names])
    return Container(kind, cls, named_tuple_fields(cls) or tuple(range(len(value))), list(value))


def rebuilt(cls: type, keys: Sequence[Any], children: Iterable[Any]) -> Any:
    """A container of a class. Lists and tuples come back plain, and a mapping, if it must, as a ``dict``. Local."""
    kind = kind_of(cls)
    if kind == "list":
        return list(children)
    if kind == "tuple":
        return tuple(children)
    if kind == "namedtuple":
        return cls(*children)
    plain = dict(zip(keys, children, strict=True))
    if cls is dict:
        return plain
    if kind == "dataclass":
        return cls(**plain)
    try:
        return cls(plain)
    except TypeError:
        return plain  # a mapping that is built in another way (a defaultdict wants its factory): its content counts


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


def tensor_collection(cls: type, content: dict[str, Any], batch_size: Sequence[int]) -> Any:
    """A ``TensorDict``, or a tensorclass of that class. Local."""
    package = sys.modules["tensordict"]
    if package.is_tensorclass(cls):
        return cls(**content, batch_size=batch_size)
    return package.TensorDict(content, batch_size=batch_size)


def named_tuple_fields(cls: type) -> tuple[str, ...] | None:
    """The fields of a class of named tuples; ``None`` of another class. Local."""
    fields = cls.__dict__.get("_fields")
    if fields is None:  # a class that extends a named tuple keeps the fields of its base
        fields = next((base.__dict__["_fields"] for base in cls.__mro__ if "_fields" in base.__dict__), None)
    return cast("tuple[str, ...] | None", fields)
