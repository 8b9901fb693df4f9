"""The structure that all batches of an input have in common: nesting, field names and dtypes.

An empty batch is made from the structure, and a batch of the same structure is recognised by it. A rank that never saw
a sample gets the structure from another rank.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, cast, final

import numpy as np
import torch

from torchdistinput.batches.containers import (
    PLAIN_TYPES,
    is_tensor_collection,
    mapping_like,
    named_tuple_fields,
    open_container,
    tensor_collection,
)
from torchdistinput.errors import BatchingError

PER_SAMPLE: Final = (
    "Pad and stack the tensors, or give InputOptions(split_fn=, count_fn=), which cut and count such batches."
)
"""The way out for ready batches whose structures differ."""

COUNT_OR_SPLIT: Final = (
    "If it is a batch, InputOptions(count_fn=) tells how many samples it has, and split_fn= how to cut it."
)
"""The way out for a ready batch that cannot be counted or cut by its leaves."""


@final
@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of a leaf, as in TensorFlow.

    >>> with tdi.Strategy().distribute_dataset([{"x": 1.0}] * 3, global_batch_size=2) as loader:
    ...     loader.element_spec
    {'x': TensorSpec(shape=(None,), dtype=torch.float64, name="['x']")}

    Args:
      shape: the dimensions; ``None`` where a dimension may change.
      dtype: a torch dtype; ``str`` or ``object`` for a leaf that is a list.
      name: the path of the leaf in its batch, for example ``['x']``.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype | type
    name: str | None = None


_LEAVES: Final = ("tensor", "rows", "tensors", "array", "unknown")
ARRAY_KINDS: Final = "biufcmMSU"
"""The kinds of NumPy's dtypes of which an empty array can be made from the name of the dtype."""


@final
@dataclasses.dataclass(frozen=True)
class Structure:
    """Nesting, field names and dtypes, which all batches of an input share; inner dims and layouts of one batch.

    ``kind`` is ``tensor``, ``rows`` (a list leaf), ``tensors`` (a ``TensorDict`` or tensorclass, with an empty one as
    ``constant`` where it was seen here), ``constant``, or the kind of a container. Only batches that were collated here
    have an ``array`` of NumPy (its dtype as text is the ``constant``). No empty one can be made of an ``unknown`` leaf;
    its ``constant`` says why. Two structures are the same kind if nesting, names and dtypes agree; the
    rest may differ from batch to batch. ``batch_dim`` is the dim of a tensor or array that has one entry per sample.
    """

    kind: str
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()
    dtype: torch.dtype | type | None = None
    inner_dims: tuple[int, ...] = ()
    layout: torch.layout = torch.strided
    constant: Any = None
    cls: type | None = None
    batch_dim: int = 0

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape of a tensor or array without a sample."""
        return (*self.inner_dims[: self.batch_dim], 0, *self.inner_dims[self.batch_dim :])

    def signature(self) -> Any:
        """Nesting, names and dtypes as plain nested tuples: equal for batches of the same kind."""
        if self.kind == "constant":
            return "constant"
        if not self.children and self.kind in ("tensor", "rows"):
            return (self.kind, str(self.dtype), len(self.inner_dims)) if self.kind == "tensor" else self.kind
        pairs = [(_key_name(key), child.signature()) for key, child in zip(self.keys, self.children, strict=True)]
        if self.kind in ("dict", "tensors"):  # the order of its keys is no part of it
            pairs.sort(key=lambda pair: pair[0])
        return (self.kind, *pairs)

    def has_order_of(self, other: Structure) -> bool:
        """Whether the dicts of another structure of the same signature have their keys in the order of this one."""
        if self.kind == "dict" and self.keys != other.keys:
            return False
        pairs = zip(self.children, other.children, strict=False)
        return all(mine.has_order_of(its) for mine, its in pairs)

    def arrange(self, batch: Any) -> Any:
        """A batch of the same signature with the keys of its dicts in this structure's order."""
        if self.kind in (*_LEAVES, "constant"):
            return batch
        container = open_container(batch)
        if container is None:
            return batch
        found = dict(zip(container.keys, container.children, strict=True))
        children = [child.arrange(found[key]) for key, child in zip(self.keys, self.children, strict=True)]
        if container.keys == self.keys and all(a is b for a, b in zip(children, container.children, strict=True)):
            return batch
        return mapping_like(type(batch), self.keys, children) if self.kind == "dict" else container.rebuild(children)

    def size_of_same(self, batch: Any) -> int | None:
        """The batch size, if the batch is plainly of this structure; else ``None``: look closer. For every step.

        It knows the common cases only: tensors of these inner dims, and lists of strings and numbers, in dicts, lists
        and tuples.
        """
        if self.kind == "tensor":
            alike = isinstance(batch, torch.Tensor) and batch.dtype is self.dtype
            return int(batch.shape[0]) if alike and batch.dim() > 0 and batch.shape[1:] == self.inner_dims else None
        found: Any = type(batch)
        if found is not self.cls:
            return None
        if self.kind == "rows":
            kinds = set(map(type, batch))
            return len(batch) if kinds <= PLAIN_TYPES and (self.dtype is str) == (kinds <= {str}) else None
        if self.kind not in ("dict", "tuple", "list", "namedtuple"):
            return None
        values = batch.values() if self.kind == "dict" else batch
        if (tuple(batch) != self.keys) if self.kind == "dict" else (len(batch) != len(self.children)):
            return None
        size: int | None = None
        for child, value in zip(self.children, values, strict=True):
            own = child.size_of_same(value)
            if own is None or (size is not None and own != size):
                return None
            size = own
        return size

    def digest(self) -> int:
        """A 24-bit number of the signature, the same in every process."""
        return int.from_bytes(hashlib.sha256(repr(self.signature()).encode()).digest()[:3], "big")

    def __str__(self) -> str:
        if self.kind == "tensor":
            dims = [str(size) for size in self.inner_dims]
            dims.insert(self.batch_dim, "batch")
            return f"{self.dtype}[{', '.join(dims)}]".replace("torch.", "")
        if self.kind == "rows":
            return "list of rows"
        if self.kind == "constant":
            return type(self.constant).__name__
        if self.kind in ("array", "unknown"):
            return f"array of {self.constant}" if self.kind == "array" else str(self.constant[0])
        inner = ", ".join(f"{key}: {child}" for key, child in zip(self.keys, self.children, strict=True))
        return f"{self.kind}({inner})"

    def empty(self, path: str = "") -> Any:
        """A batch of size 0: the right nesting, dtypes, inner dims and layouts, no sample. On the CPU.

        Args:
          path: where this structure stands in its batch; for messages.

        Raises:
          BatchingError: it has an ``unknown`` leaf, or a value of another batch (``constant``) that is not ``None``.
        """
        if self.kind == "tensor":
            return torch.zeros(self.dims, dtype=cast(torch.dtype, self.dtype), layout=self.layout, device="cpu")
        if self.kind == "array":
            return np.zeros(self.dims, dtype=self.constant)
        if self.kind == "unknown":
            raise BatchingError(self.constant[1])
        if self.kind == "rows":
            return () if self.cls is tuple else []
        if self.kind == "constant":
            if self.constant is not None:
                name = type(self.constant).__name__
                raise BatchingError(f"{path or 'it'} is of type {name}, a value that each batch has of its own")
            return None
        children = [child.empty(f"{path}[{key!r}]") for key, child in zip(self.keys, self.children, strict=True)]
        if self.kind == "tensors" and self.constant is not None:
            return self.constant.clone()
        return _build(self, children)

    def build(self, leaves: Iterator[Any]) -> Any:
        """A batch of this nesting with other leaves, taken in order."""
        if self.kind in _LEAVES:
            return next(leaves)
        if self.kind == "constant":
            return self.constant
        return _build(self, [child.build(leaves) for child in self.children])

    @property
    def is_leaf(self) -> bool:
        """Whether it is no container and no constant."""
        return self.kind in _LEAVES

    @functools.cached_property
    def is_flat(self) -> bool:
        """Whether it is a dict, list or tuple of tensors, as nearly all batches are."""
        return self.kind in ("dict", "list", "tuple") and all(child.kind == "tensor" for child in self.children)

    def leaves(self) -> list[Structure]:
        """The structures of the leaves, in order."""
        if self.kind in _LEAVES:
            return [self]
        return [leaf for child in self.children for leaf in child.leaves()]

    def constants(self) -> list[Any]:
        """The values in the batch that are neither leaf nor container, in order."""
        if self.kind == "constant":
            return [self.constant]
        return [] if self.kind in _LEAVES else [found for child in self.children for found in child.constants()]

    def spec(self, size: int | None, wrap: Callable[[TensorSpec], Any], path: str = "") -> Any:
        """The same nesting with a ``TensorSpec`` at each leaf.

        Args:
          size: the batch size where it is certain, else ``None``.
          wrap: returns the value to put in the place of a spec.
          path: where this structure stands in its batch; names the specs.
        """
        if self.kind in ("tensor", "array"):
            shape: list[int | None] = [*self.inner_dims]
            shape.insert(self.batch_dim, size)
            dtype = self.dtype if self.kind == "tensor" else np.dtype(self.constant).type
            return wrap(TensorSpec(tuple(shape), cast(torch.dtype | type, dtype), path or None))
        if self.kind in ("rows", "unknown"):
            rows = self.kind == "rows"
            return wrap(TensorSpec((size,) if rows else (), cast(type, self.dtype) if rows else object, path or None))
        if self.kind == "constant":
            return self.constant
        specs = [
            child.spec(size, wrap, f"{path}[{key!r}]") for key, child in zip(self.keys, self.children, strict=True)
        ]
        return dict(zip(self.keys, specs, strict=True)) if self.kind == "tensors" else _build(self, specs)

    def to_json(self) -> Any:
        """The structure in plain lists, dicts, strings and numbers, for a rank that never saw a sample.

        Raises:
          BatchingError: a key is no plain value, or a tensor collection is empty.
        """
        if self.kind == "tensor":
            names = {"dtype": str(self.dtype), "layout": str(self.layout)}
            plain = {key: name.removeprefix("torch.") for key, name in names.items()}
            return {"kind": "tensor", **plain, "dims": list(self.inner_dims), "batch_dim": self.batch_dim}
        if self.kind == "array":
            dims = {"dims": list(self.inner_dims), "batch_dim": self.batch_dim}
            return {"kind": "array", "dtype": self.constant, **dims}
        if self.kind == "unknown":
            return {"kind": "unknown", "why": list(self.constant)}
        if self.kind == "rows":
            return {"kind": "rows", "dtype": "str" if self.dtype is str else "object", "tuple": self.cls is tuple}
        if self.kind == "constant":  # no batch is made with it
            is_plain = isinstance(self.constant, str | int | float | bool | None)
            return {"kind": "constant", "value": self.constant if is_plain else type(self.constant).__name__}
        if self.kind == "tensors" and not self.keys:
            raise BatchingError(
                f"a batch holds a {self.cls} without a tensor in it, and a rank without a sample cannot be told how to "
                "make an empty one. Give InputOptions(empty_fn=), which makes the empty batch."
            )
        for key in self.keys:
            if not isinstance(key, str | int):
                raise BatchingError(f"a batch has the key {key!r}; other ranks can only be told strings and ints.")
        cls = None if self.cls is None else f"{self.cls.__module__}:{self.cls.__qualname__}"
        return {
            "kind": self.kind,
            "keys": list(self.keys),
            "class": cls,
            "dims": list(self.inner_dims),
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
        if kind in ("tensor", "array"):
            return _tensor_from_json(data)
        if kind == "unknown":
            name, why = data["why"]
            return Structure("unknown", constant=(str(name), str(why)))
        if kind == "rows":
            dtype = str if data["dtype"] == "str" else object
            return Structure("rows", dtype=dtype, cls=tuple if data["tuple"] else list)
        if kind == "constant":
            return Structure("constant", constant=data["value"])
        children = tuple(Structure._from_json(child) for child in data["children"])
        dims = tuple(int(size) for size in data["dims"])
        keys, cls = tuple(data["keys"]), _find_class(kind, data["class"])
        if kind not in ("dict", "list", "tuple") and cls is None:
            raise ValueError(f"{kind!r:.40} without a class")
        if len(keys) != len(children) or not all(isinstance(key, str | int) for key in keys):
            raise ValueError(f"{len(keys)} keys for {len(children)} children")
        return Structure(kind, keys, children, None, dims, cls=cls)


def _tensor_from_json(data: Any) -> Structure:
    dims, batch_dim = tuple(int(size) for size in data["dims"]), int(data.get("batch_dim", 0))
    if not 0 <= batch_dim <= len(dims):
        raise ValueError(f"dim {batch_dim} of {len(dims) + 1}")
    if data["kind"] == "array":
        plain = np.dtype(str(data["dtype"]))
        if plain.kind not in ARRAY_KINDS:
            raise TypeError(f"an array of {plain}")
        torch.empty((0, *dims), device="meta")  # refuses sizes that no tensor can have
        return Structure("array", inner_dims=dims, constant=plain.str, batch_dim=batch_dim)
    dtype = getattr(torch, data["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise BatchingError(f"another rank has a leaf of dtype {data['dtype']!r}, unknown to torch here.")
    layout = getattr(torch, data["layout"], None)
    if not isinstance(layout, torch.layout):
        raise BatchingError(f"another rank has a leaf of layout {data['layout']!r}, unknown to torch here.")
    torch.empty((0, *dims), dtype=dtype, device="meta")
    return Structure("tensor", dtype=dtype, inner_dims=dims, layout=layout, batch_dim=batch_dim)


def _key_name(key: Any) -> str:
    """The same in every process, but not the same for 1 and "1"."""
    return repr(key) if isinstance(key, str) else str(key)


_FITS: Final[Mapping[str, Callable[[type], bool]]] = {
    "namedtuple": lambda cls: named_tuple_fields(cls) is not None,
    "dataclass": dataclasses.is_dataclass,
    "tensors": is_tensor_collection,
}
"""A check of the class, for each kind of container that is made of a class."""


def _find_class(kind: str, name: Any) -> type | None:
    if name is None or kind not in ("namedtuple", "dataclass", "dict", "tensors"):
        return None
    if type(name) is not str:
        raise TypeError(f"{name!r:.40} is no name of a class")
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = None if found is None else vars(found).get(part)
    if kind == "dict":  # one that is not found, or is built in another way, is a plain dict: its content counts
        return found if isinstance(found, type) and issubclass(found, Mapping) else None
    fits = isinstance(found, type) and _FITS[kind](found)
    if not fits:
        raise BatchingError(
            f"this rank has seen no sample and cannot build the batch's {kind} {name}: the class is not importable "
            "here by that name. Define it at the top of a module that every rank imports."
        )
    return cast(type, found)


def _build(structure: Structure, children: Iterable[Any]) -> Any:
    if structure.kind == "dict":
        return mapping_like(structure.cls or dict, structure.keys, children)
    if structure.kind == "tuple":
        return tuple(children)
    if structure.kind == "list":
        return list(children)
    if structure.kind == "tensors":
        return tensor_collection(cast(type, structure.cls), structure.keys, children, (0, *structure.inner_dims))
    cls = cast(type, structure.cls)
    if structure.kind == "namedtuple":
        return cls(*children)
    return cls(**dict(zip(structure.keys, children, strict=True)))
