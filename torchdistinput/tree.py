"""Nested batches: what is a leaf, what is structure, and how a batch is cut.

The law of leaves: tensors and arrays are leaves and are cut along dim 0. A list or tuple that holds no tensor,
array or container is one leaf, cut as a list (strings, objects). Everything else is structure: dicts, lists, tuples,
named tuples and dataclasses are containers, and any other object (a number, ``None``, a string) is a constant that
goes to every replica as it is. All leaves of a batch have the same batch size.

``torch.utils._pytree`` is private and knows neither the list leaf nor dataclasses, hence this small walk of our own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import countOf
from typing import Any, Final, NamedTuple, cast, final

import numpy as np
import torch

from torchdistinput.errors import BatchingError

__all__ = [
    "Container",
    "Structure",
    "TensorSpec",
    "batch_size",
    "bytes_held",
    "cut",
    "flatten",
    "holds_arrays",
    "map_leaves",
    "named_leaves",
    "open_container",
    "plain_leaves",
    "plainly_rebuilt",
    "structure_of",
]

_PLAIN: Final = frozenset({str, bytes, int, float, bool, type(None)})
"""Types of rows that are neither tensors nor containers: lists of them, which are long, are looked at in one go."""
_TEXTS_WEIGHED: Final = 32
_BYTES_OF_AN_OBJECT: Final = 64  # about, with its place in a list


@final
@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of a leaf, as in TensorFlow.

    Args:
      shape: the dimensions; ``None`` where a dimension may change.
      dtype: a torch dtype; ``str`` or ``object`` for a leaf that is a list.
      name: the path of the leaf in its batch, for example ``['x']``.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype | type
    name: str | None = None


class Container(NamedTuple):
    """A container taken apart: its kind, its keys, its children, and how to put others in their place."""

    kind: str
    keys: tuple[Any, ...]
    children: list[Any]
    rebuild: Callable[[Iterable[Any]], Any]


def open_container(value: Any) -> Container | None:
    """Takes one level of a container apart; ``None`` if the value is no container.

    Containers are mappings, lists, tuples, named tuples and dataclass instances. A mapping comes back as a ``dict``
    unless its class can be called with one.
    """
    if isinstance(value, torch.Tensor | np.ndarray | str | bytes):
        return None
    if isinstance(value, Mapping):
        keys = tuple(value.keys())
        return Container("dict", keys, list(value.values()), lambda new: _mapping(type(value), keys, new))
    if isinstance(value, tuple):
        fields = _named_tuple_fields(type(value))
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


def _mapping(cls: type, keys: Sequence[Any], values: Iterable[Any]) -> Any:
    plain = dict(zip(keys, values, strict=True))
    if cls is dict:
        return plain
    try:
        return cls(plain)
    except TypeError:
        return plain  # a mapping that is built in another way (a defaultdict wants its factory): its content counts


def _named_tuple_fields(cls: type) -> tuple[str, ...] | None:
    fields = cls.__dict__.get("_fields")
    if fields is None:  # a class that extends a named tuple keeps the fields of its base
        fields = next((base.__dict__["_fields"] for base in cls.__mro__ if "_fields" in base.__dict__), None)
    return cast("tuple[str, ...] | None", fields)


@final
@dataclasses.dataclass(frozen=True)
class Structure:
    """What every batch of an input has in common: nesting, field names, dtypes; and the inner dims of one example.

    ``kind`` is ``tensor``, ``rows`` (a list leaf), ``constant``, or the kind of a container. Two structures are the
    same kind if nesting, names and dtypes agree; inner dims and constants may differ from batch to batch.
    """

    kind: str
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()
    dtype: torch.dtype | type | None = None
    inner_dims: tuple[int, ...] = ()
    constant: Any = None
    cls: type | None = None

    def signature(self) -> Any:
        """Nesting, names and dtypes as plain nested tuples: equal for batches of the same kind."""
        if self.kind == "constant":
            return "constant"
        if not self.children and self.kind in ("tensor", "rows"):
            return (self.kind, str(self.dtype), len(self.inner_dims)) if self.kind == "tensor" else self.kind
        pairs = [(_key_name(key), child.signature()) for key, child in zip(self.keys, self.children, strict=True)]
        if self.kind == "dict":  # the order of its keys is no part of it
            pairs.sort(key=lambda pair: pair[0])
        return (self.kind, *pairs)

    def arrange(self, batch: Any) -> Any:
        """A batch of the same signature with the keys of its dicts in this structure's order."""
        if self.kind in ("tensor", "rows", "constant"):
            return batch
        container = open_container(batch)
        if container is None:
            return batch
        found = dict(zip(container.keys, container.children, strict=True))
        children = [child.arrange(found[key]) for key, child in zip(self.keys, self.children, strict=True)]
        if container.keys == self.keys and all(a is b for a, b in zip(children, container.children, strict=True)):
            return batch
        return _mapping(type(batch), self.keys, children) if self.kind == "dict" else container.rebuild(children)

    def size_of_same(self, batch: Any) -> int | None:
        """The batch size, if the batch is plainly of this structure; else ``None``: look closer. For every step.

        It knows the common cases only: tensors of these inner dims, and lists of strings and numbers, in dicts, lists
        and tuples.
        """
        if self.kind == "tensor":
            alike = isinstance(batch, torch.Tensor) and batch.dtype is self.dtype
            return int(batch.shape[0]) if alike and batch.dim() > 0 and batch.shape[1:] == self.inner_dims else None
        if self.kind == "rows":
            return len(batch) if self._holds_same_rows(batch) else None
        found: type = type(batch)
        if self.kind not in ("dict", "tuple", "list", "namedtuple") or found is not self.cls:
            return None
        values: Iterable[Any] = batch
        if self.kind == "dict":
            if tuple(batch) != self.keys:
                return None
            values = batch.values()
        elif len(batch) != len(self.children):
            return None
        size: int | None = None
        for child, value in zip(self.children, values, strict=True):
            own = child.size_of_same(value)
            if own is None or (size is not None and own != size):
                return None
            size = own
        return size

    def _holds_same_rows(self, batch: Any) -> bool:
        if not isinstance(batch, list | tuple) or type(batch) is not self.cls:
            return False
        if self.dtype is str:
            return countOf(map(type, batch), str) == len(batch)
        kinds = set(map(type, batch))
        return kinds <= _PLAIN and not kinds <= {str}

    def digest(self) -> int:
        """A 24-bit number of the signature, the same in every process."""
        return int.from_bytes(hashlib.sha256(repr(self.signature()).encode()).digest()[:3], "big")

    def __str__(self) -> str:
        if self.kind == "tensor":
            return f"{self.dtype}[{', '.join(['batch', *map(str, self.inner_dims)])}]".replace("torch.", "")
        if self.kind == "rows":
            return "list of rows"
        if self.kind == "constant":
            return type(self.constant).__name__
        inner = ", ".join(f"{key}: {child}" for key, child in zip(self.keys, self.children, strict=True))
        return f"{self.kind}({inner})"

    def empty(self) -> Any:
        """A batch of size 0: the right nesting, dtypes and inner dims, no sample. On the CPU."""
        if self.kind == "tensor":
            return torch.zeros((0, *self.inner_dims), dtype=cast(torch.dtype, self.dtype), device="cpu")
        if self.kind == "rows":
            return () if self.cls is tuple else []
        if self.kind == "constant":
            return self.constant
        return _build(self, [child.empty() for child in self.children])

    def build(self, leaves: Iterator[Any]) -> Any:
        """A batch of this nesting with other leaves, taken in order."""
        if self.kind in ("tensor", "rows"):
            return next(leaves)
        if self.kind == "constant":
            return self.constant
        return _build(self, [child.build(leaves) for child in self.children])

    def leaves(self) -> list[Structure]:
        """The structures of the leaves, in order."""
        if self.kind in ("tensor", "rows"):
            return [self]
        return [leaf for child in self.children for leaf in child.leaves()]

    def spec(self, dim0: int | None, wrap: Callable[[TensorSpec], Any], path: str = "") -> Any:
        """The same nesting with a ``TensorSpec`` at each leaf.

        Args:
          dim0: the batch size where it is certain, else ``None``.
          wrap: what to put in the place of a spec.
          path: where this structure stands in its batch; names the specs.
        """
        if self.kind == "tensor":
            return wrap(TensorSpec((dim0, *self.inner_dims), cast(torch.dtype, self.dtype), path or None))
        if self.kind == "rows":
            return wrap(TensorSpec((dim0,), cast(type, self.dtype), path or None))
        if self.kind == "constant":
            return self.constant
        pairs = zip(self.keys, self.children, strict=True)
        return _build(self, [child.spec(dim0, wrap, f"{path}[{key!r}]") for key, child in pairs])

    def to_json(self) -> Any:
        """Plain lists, dicts, strings and numbers, for a rank that never saw a sample. Refuses what is not plain."""
        if self.kind == "tensor":
            return {"kind": "tensor", "dtype": str(self.dtype).removeprefix("torch."), "dims": list(self.inner_dims)}
        if self.kind == "rows":
            return {"kind": "rows", "dtype": "str" if self.dtype is str else "object", "tuple": self.cls is tuple}
        if self.kind == "constant":
            if not isinstance(self.constant, str | int | float | bool | None):
                raise BatchingError(
                    f"a batch holds a constant of type {type(self.constant).__name__}, and a rank without a sample "
                    "needs it to make its empty batch; only numbers, strings and None can be sent. Keep such objects "
                    "out of the batch, or put them in a list with one entry per sample."
                )
            return {"kind": "constant", "value": self.constant}
        for key in self.keys:
            if not isinstance(key, str | int):
                raise BatchingError(f"a batch has the key {key!r}; other ranks can only be told strings and ints.")
        cls = None if self.cls is None else f"{self.cls.__module__}:{self.cls.__qualname__}"
        return {
            "kind": self.kind,
            "keys": list(self.keys),
            "class": cls,
            "children": [child.to_json() for child in self.children],
        }

    @staticmethod
    def from_json(data: Any) -> Structure:
        """The structure that another rank described. Classes are looked up only among modules already imported.

        Raises:
          BatchingError: it is no structure, or of a class or dtype that is not known here.
        """
        try:
            return Structure._from_json(data)
        except BatchingError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:  # a RecursionError is one too
            raise BatchingError(
                "another rank described the structure of its batches in a way that is not understood here "
                f"({type(error).__name__}: {error!s:.200}); every rank must run the same version of torchdistinput."
            ) from error

    @staticmethod
    def _from_json(data: Any) -> Structure:
        kind = data["kind"]
        if kind == "tensor":
            dtype = getattr(torch, data["dtype"], None)
            if not isinstance(dtype, torch.dtype):
                raise BatchingError(f"another rank has a leaf of dtype {data['dtype']!r}, unknown to torch here.")
            dims = tuple(int(size) for size in data["dims"])
            torch.empty((0, *dims), dtype=dtype, device="meta")  # refuses what no tensor can have
            return Structure("tensor", dtype=dtype, inner_dims=dims)
        if kind == "rows":
            dtype = str if data["dtype"] == "str" else object
            return Structure("rows", dtype=dtype, cls=tuple if data["tuple"] else list)
        if kind == "constant":
            return Structure("constant", constant=data["value"])
        children = tuple(Structure._from_json(child) for child in data["children"])
        keys, cls = tuple(data["keys"]), _find_class(kind, data["class"])
        if kind not in ("dict", "list", "tuple") and cls is None:
            raise ValueError(f"{kind!r:.40} without a class")
        if len(keys) != len(children) or not all(isinstance(key, str | int) for key in keys):
            raise ValueError(f"{len(keys)} keys for {len(children)} children")
        return Structure(kind, keys, children, cls=cls)


def _key_name(key: Any) -> str:
    """The same in every process, but not the same for 1 and "1"."""
    return repr(key) if isinstance(key, str) else str(key)


def _find_class(kind: str, name: Any) -> type | None:
    if name is None or kind not in ("namedtuple", "dataclass", "dict"):
        return None
    if type(name) is not str:
        raise TypeError(f"{name!r:.40} is no name of a class")
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = None if found is None else vars(found).get(part)
    if kind == "dict":  # one that is not found, or is built in another way, is a plain dict: its content counts
        return found if isinstance(found, type) and issubclass(found, Mapping) else None
    fits = isinstance(found, type) and (
        _named_tuple_fields(found) is not None if kind == "namedtuple" else dataclasses.is_dataclass(found)
    )
    if not fits:
        raise BatchingError(
            f"this rank has seen no sample and cannot build the batch's {kind} {name}: the class is not importable "
            "here by that name. Define it at the top of a module that every rank imports."
        )
    return cast(type, found)


def _build(structure: Structure, children: Iterable[Any]) -> Any:
    if structure.kind == "dict":
        return _mapping(structure.cls or dict, structure.keys, children)
    if structure.kind == "tuple":
        return tuple(children)
    if structure.kind == "list":
        return list(children)
    cls = cast(type, structure.cls)
    if structure.kind == "namedtuple":
        return cls(*children)
    return cls(**dict(zip(structure.keys, children, strict=True)))


def _is_rows(value: Any) -> bool:
    """Whether a list or tuple is one leaf: it holds no tensor, no array, no container. An empty one has size 0."""
    if type(value) not in (list, tuple):
        return False
    return _PLAIN.issuperset(map(type, value)) or not any(map(_is_nested, value))


def _is_nested(item: Any) -> bool:
    """Whether what is in a list makes it more than one leaf. NumPy's strings are strings, its numbers arrays."""
    if isinstance(item, str | bytes):
        return False
    return isinstance(item, torch.Tensor | np.ndarray | np.generic) or open_container(item) is not None


def _as_leaf(value: Any) -> Any | None:
    """The value as a leaf (arrays become tensors), or ``None`` if it is a container or a constant."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "biufc":
            native = value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))
            plain = native.flags.writeable and all(stride >= 0 for stride in native.strides)
            return torch.from_numpy(native if plain else native.copy())
        return value.tolist()
    return value if _is_rows(value) else None


def flatten(batch: Any) -> tuple[list[Any], Structure]:
    """The leaves of a batch, in order, and its structure. Arrays become tensors. Local."""
    leaves: list[Any] = []
    return leaves, _flatten(batch, leaves)


def _flatten(value: Any, leaves: list[Any]) -> Structure:
    leaf = _as_leaf(value)
    if leaf is not None:
        leaves.append(leaf)
        if isinstance(leaf, torch.Tensor):
            return Structure("tensor", dtype=leaf.dtype, inner_dims=tuple(leaf.shape[1:]))
        strings = all(isinstance(item, str) for item in leaf)
        return Structure("rows", dtype=str if strings else object, cls=type(leaf))
    container = open_container(value)
    if container is None:
        return Structure("constant", constant=value)
    children = tuple(_flatten(child, leaves) for child in container.children)
    return Structure(container.kind, container.keys, children, cls=type(value))


def structure_of(batch: Any) -> Structure:
    """The structure of a batch. Local."""
    return flatten(batch)[1]


def map_leaves(fn: Callable[[Any], Any], batch: Any) -> Any:
    """The batch with ``fn`` applied to each leaf; containers are built anew, constants kept. Local."""
    leaf = _as_leaf(batch)
    if leaf is not None:
        return fn(leaf)
    container = open_container(batch)
    if container is None:
        return batch
    return container.rebuild(map_leaves(fn, child) for child in container.children)


def holds_arrays(batch: Any) -> bool:
    """Whether some leaf is a NumPy array. Local."""
    if isinstance(batch, np.ndarray):
        return True
    if isinstance(batch, list | tuple) and _PLAIN.issuperset(map(type, batch)):
        return False
    container = None if isinstance(batch, torch.Tensor) else open_container(batch)
    return container is not None and any(holds_arrays(child) for child in container.children)


def named_leaves(value: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    """The leaves of a batch with their paths, in order. Local."""
    leaf = _as_leaf(value)
    if leaf is not None:
        yield path or "the batch", leaf
        return
    container = open_container(value)
    if container is not None:
        for key, child in zip(container.keys, container.children, strict=True):
            yield from named_leaves(child, f"{path}[{key!r}]")


def plain_leaves(batch: Any) -> Collection[torch.Tensor]:
    """The leaves, if the batch is plainly a tensor, or a dict, list or tuple of tensors; else none. For every step.

    Local.
    """
    kind = type(batch)
    if kind is torch.Tensor:
        return (batch,)
    leaves: Collection[Any] = batch.values() if kind is dict else batch if kind is tuple or kind is list else ()
    return leaves if all(type(leaf) is torch.Tensor for leaf in leaves) else ()


def plainly_rebuilt(batch: Any, leaves: list[Any]) -> Any:
    """A batch that has ``plain_leaves``, with others in their place. Local."""
    if type(batch) is dict:
        return dict(zip(batch, leaves, strict=True))
    return leaves[0] if type(batch) is torch.Tensor else type(batch)(leaves)


def batch_size(batch: Any) -> int:
    """The number of samples in a batch, the same for each of its leaves. Local.

    Raises:
      BatchingError: there is no leaf, a leaf is a scalar, or two leaves differ; the leaves are named by path.
    """
    alike = {leaf.shape[:1] for leaf in plain_leaves(batch)}
    if len(alike) == 1 and () not in alike:
        return int(alike.pop()[0])
    sizes: dict[int, str] = {}
    for path, leaf in named_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 0:
            raise BatchingError(
                f"{path} is a scalar tensor; a leaf of a batch needs a batch dimension. If the source yields single "
                "samples, give global_batch_size= so that they are batched."
            )
        sizes.setdefault(len(leaf), path)
    if len(sizes) == 1:
        return next(iter(sizes))
    if not sizes:
        raise BatchingError(
            f"found an element of type {type(batch).__name__} without a tensor, array or list in it; a global batch "
            "must have a batch dimension. If the source yields single samples, give global_batch_size=."
        )
    found = ", ".join(f"{path} has {size}" for size, path in sizes.items())
    raise BatchingError(
        f"the leaves of a batch have different batch sizes: {found}. All must have one entry per sample; if the source "
        "yields single samples, give global_batch_size=."
    )


def bytes_held(batch: Any) -> int | None:
    """About how much memory the tensors and texts of a batch take; ``None`` where it holds other things. Local.

    Of a long list of texts some 32 are looked at.
    """
    held = 0
    for leaf in flatten(batch)[0]:
        if isinstance(leaf, torch.Tensor):
            held += leaf.numel() * leaf.element_size()
            continue
        some = leaf[:: 1 + len(leaf) // _TEXTS_WEIGHED]
        if not all(isinstance(item, str | bytes) for item in some):
            return None
        if some:
            held += sum(_BYTES_OF_AN_OBJECT + len(item) for item in some) * len(leaf) // len(some)
    return held


def cut(batch: Any, lo: int, hi: int) -> Any:
    """Rows ``[lo, hi)`` of every leaf; a view where the leaf is a tensor. Local."""
    leaves = [leaf[lo:hi] for leaf in plain_leaves(batch)]
    return plainly_rebuilt(batch, leaves) if leaves else map_leaves(lambda leaf: leaf[lo:hi], batch)
