"""The structure that all batches of an input have in common: nesting, field names and dtypes.

An empty batch is made from the structure, and a batch of the same structure is recognised by it. A rank that never saw
a sample gets the structure from another rank.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch

from torchdistinput.batches.containers import (
    is_non_tensor,
    is_tensor_collection,
    kind_of,
    tensor_collection,
)
from torchdistinput.batches.pytree import Nesting, as_tensor, flatten, paths, unflatten
from torchdistinput.errors import BatchingError

PER_SAMPLE: Final = (
    "Pad and stack the tensors, or give InputOptions(split_fn=, count_fn=), which cut and count such batches."
)
"""The way out for ready batches whose structures differ."""

ARRAY_KINDS: Final = "biufcmMSU"
"""The kinds of NumPy's dtypes of which an empty array can be made from the name of the dtype."""


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


@final
@dataclasses.dataclass(frozen=True)
class Leaf:
    """What a leaf is like. Two are equal if kind, class, dtype, inner dims and layout are.

    Args:
      kind: ``tensor``; ``array`` of NumPy; ``rows``, a list or tuple; ``tensors``, a ``TensorDict`` or tensorclass;
        ``constant``; ``unknown``, of which no empty one can be made.
      dtype: a torch dtype, NumPy's as text, or of rows ``str`` or ``object``.
      dims: the shape but for the dim of the samples.
      dim: the dim that has one entry for each sample.
      layout: of a tensor.
      cls: the class, of rows, constants and tensor collections.
      inside: of a tensor collection, the structure of its entries.
      value: the constant; a tensor collection without a sample; or the type and why no empty one can be made.
    """

    kind: str
    dtype: Any = None
    dims: tuple[int, ...] = ()
    dim: int = 0
    layout: torch.layout = torch.strided
    cls: type | None = None
    inside: Structure | None = None
    value: Any = dataclasses.field(default=None, compare=False)

    @property
    def signature(self) -> Any:
        """What is the same in all batches of an input."""
        if self.kind == "tensor":
            return "tensor", str(self.dtype), len(self.dims)
        return self.kind if self.inside is None else (self.kind, self.inside.signature())

    def __str__(self) -> str:
        if self.kind == "tensor":
            return f"{self.dtype}{list(self.shape('batch'))}".replace("torch.", "").replace("'", "")
        if self.kind == "constant":
            return type(self.value).__name__
        if self.inside is not None:
            return str(self.inside).replace("dict", "tensors", 1)
        if self.kind == "rows":
            return "list of rows"
        return f"array of {self.dtype}" if self.kind == "array" else str(self.value[0])

    def shape(self, size: Any) -> tuple[Any, ...]:
        """The shape for so many samples."""
        return (*self.dims[: self.dim], size, *self.dims[self.dim :])

    def empty(self, path: str) -> Any:
        """The leaf without a sample. See ``Structure.empty``."""
        if self.kind == "tensor":
            return torch.zeros(self.shape(0), dtype=self.dtype, layout=self.layout, device="cpu")
        if self.kind == "array":
            return np.zeros(self.shape(0), dtype=self.dtype)
        if self.kind == "rows":
            return () if self.cls is tuple else []
        if self.kind == "unknown":
            raise BatchingError(self.value[1])
        if self.inside is not None and self.cls is not None:
            content = self.inside.empty(path)
            return self.value.clone() if self.value is not None else tensor_collection(self.cls, content, self.shape(0))
        if self.value is not None:
            name = type(self.value).__name__
            raise BatchingError(f"{path or 'it'} is of type {name}, a value that each batch has of its own")
        return None

    def spec(self, size: int | None, wrap: Callable[[TensorSpec], Any], path: str) -> Any:
        """What stands at the leaf in a spec. See ``Structure.spec``."""
        if self.kind == "constant":
            return self.value
        if self.inside is not None:
            return self.inside.spec(size, wrap, path)
        dtype = np.dtype(self.dtype).type if self.kind == "array" else self.dtype or object
        return wrap(TensorSpec(() if self.kind == "unknown" else self.shape(size), dtype, path or None))

    def to_json(self) -> list[Any]:
        """See ``Structure.to_json``."""
        if self.inside is not None and not self.inside.leaves:
            raise BatchingError(
                f"a batch holds a {self.cls} without a tensor in it, and a rank without a sample cannot be told how to "
                "make an empty one. Give InputOptions(empty_fn=), which makes the empty batch."
            )
        dtype = self.dtype.__name__ if isinstance(self.dtype, type) else str(self.dtype).removeprefix("torch.")
        inside = None if self.inside is None else self.inside.to_json()
        value = self.value if self.inside is None else None
        if not isinstance(value, str | int | float | bool | tuple | None):  # no batch is made with it
            value = type(value).__name__
        layout = str(self.layout).removeprefix("torch.")
        return [self.kind, dtype, list(self.dims), self.dim, layout, _name_of(self.cls), inside, value]

    @staticmethod
    def from_json(data: Any) -> Leaf:
        """See ``Structure.from_json``."""
        kind, dtype, dims, dim, layout, name, inside, value = data
        dims, dim = tuple(int(size) for size in dims), int(dim)
        cls: type | None = None
        if not 0 <= dim <= len(dims):
            raise ValueError(f"dim {dim} of {len(dims) + 1}")
        torch.empty((0, *dims), device="meta")  # refuses sizes that no tensor can have
        if kind == "tensor":
            found = getattr(torch, dtype, None), getattr(torch, layout, None)
            if not (isinstance(found[0], torch.dtype) and isinstance(found[1], torch.layout)):
                told = f"dtype {dtype!r:.40} and layout {layout!r:.40}"
                raise BatchingError(f"another rank has a leaf of {told}, one of them unknown to torch here.")
            return Leaf(kind, found[0], dims, dim, found[1])
        if kind == "array":
            dtype = np.dtype(str(dtype)).str
            if np.dtype(dtype).kind not in ARRAY_KINDS:
                raise TypeError(f"an array of {dtype}")
        elif kind == "rows":
            dtype, cls = str if dtype == "str" else object, tuple if name == "builtins:tuple" else list
        elif kind == "tensors":
            cls = _find_class(kind, name)
        elif kind == "unknown":
            value = str(value[0]), str(value[1])
        elif kind == "constant":
            cls = type(value)
        else:
            raise ValueError(f"a leaf of kind {kind!r:.40}")
        entries = Structure.from_json(inside) if kind == "tensors" else None
        return Leaf(kind, dtype if kind in ("array", "rows") else None, dims, dim, cls=cls, inside=entries, value=value)


@final
class Structure(NamedTuple):
    """The nesting of a batch, and what its leaves are like.

    Two batches are alike if their structures are equal. Two structures are of the same kind, as all batches of an
    input must be, if nesting, names and dtypes agree (``signature``): inner dims may differ from batch to batch.

    Args:
      nesting: of the batch; ``None`` of a batch that is one leaf.
      leaves: in order.
    """

    nesting: Nesting | None
    leaves: tuple[Leaf, ...]

    @staticmethod
    def of_leaf(kind: str, dtype: Any = None, **facts: Any) -> Structure:
        """The structure of a batch that is one leaf."""
        return Structure(None, (Leaf(kind, dtype, **facts),))

    @staticmethod
    def together(*parts: Structure) -> Structure:
        """The structure of a tuple of batches."""
        nesting = Nesting(tuple, tuple(range(len(parts))), tuple(part.nesting for part in parts))
        return Structure(nesting, tuple(leaf for part in parts for leaf in part.leaves))

    @property
    def parts(self) -> list[Structure]:
        """The structures of the children of a batch; none of a leaf."""
        leaves = iter(self.leaves)
        children = () if self.nesting is None else self.nesting.children
        return [Structure(each, tuple(islice(leaves, sum(1 for _ in paths(each))))) for each in children]

    @property
    def is_unknown(self) -> bool:
        """Whether nothing is known of the batch."""
        return self.nesting is None and self.leaves[0].kind == "unknown"

    def signature(self) -> Any:
        """Nesting, names and dtypes as plain nested tuples: equal for batches of the same kind."""
        return _signature(self.nesting, iter(self.leaves))

    def digest(self) -> int:
        """A 24-bit number of the signature, the same in every process."""
        return int.from_bytes(hashlib.sha256(repr(self.signature()).encode()).digest()[:3], "big")

    def __str__(self) -> str:
        return _text(self.nesting, iter(self.leaves))

    def _build(self, make: Callable[[Leaf, str], Any], path: str = "") -> Any:
        return unflatten(self.nesting, map(make, self.leaves, paths(self.nesting, path)))

    def empty(self, path: str = "") -> Any:
        """A batch of size 0: the right nesting, dtypes, inner dims and layouts, no sample. On the CPU.

        Args:
          path: where this structure stands in its batch; for messages.

        Raises:
          BatchingError: it has an ``unknown`` leaf, or a value of another batch (``constant``) that is not ``None``.
        """
        return self._build(Leaf.empty, path)

    def spec(self, size: int | None, wrap: Callable[[TensorSpec], Any], path: str = "") -> Any:
        """The same nesting with a ``TensorSpec`` at each leaf.

        Args:
          size: the batch size where it is certain, else ``None``.
          wrap: returns the value to put in the place of a spec.
          path: where this structure stands in its batch; names the specs.
        """
        return self._build(lambda leaf, at: leaf.spec(size, wrap, at), path)

    def to_json(self) -> Any:
        """The structure in plain lists, strings and numbers, for a rank that never saw a sample.

        Raises:
          BatchingError: a key is no plain value, or a tensor collection is empty.
        """
        return [_nesting_to_json(self.nesting), [leaf.to_json() for leaf in self.leaves]]

    @staticmethod
    def from_json(data: Any) -> Structure:
        """The structure that another rank described. Classes are looked up only among modules already imported.

        Raises:
          BatchingError: it is no structure, or of a class or dtype that is not known here.
        """
        try:
            nesting, leaves = data
            found = Structure(_nesting_from_json(nesting), tuple(map(Leaf.from_json, leaves)))
            if sum(1 for _ in paths(found.nesting)) != len(found.leaves):
                raise ValueError(f"{len(found.leaves)} leaves of another nesting")
        except BatchingError:
            raise
        except (IndexError, KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise BatchingError(  # a RecursionError is a RuntimeError
                "another rank described the structure of its batches in a way that is not understood here "
                f"({type(error).__name__}: {error!s:.200}); every rank must run the same version of torchdistinput."
            ) from error
        return found


def structure_of(batch: Any) -> Structure:
    """The structure of a ready batch, whose arrays become tensors. Local."""
    leaves, nesting = flatten(batch)
    return described(map(as_tensor, leaves), nesting)


def described(leaves: Iterable[Any], nesting: Nesting | None) -> Structure:
    """The structure of a batch that was flattened. Local."""
    return Structure(nesting, tuple(map(_leaf_of, leaves)))


def _leaf_of(leaf: Any) -> Leaf:
    if isinstance(leaf, torch.Tensor):  # torch has no shape of some nested tensors
        return Leaf("tensor", leaf.dtype, () if leaf.is_nested else tuple(leaf.shape[1:]), 0, leaf.layout)
    if isinstance(leaf, np.ndarray):
        return Leaf("array", leaf.dtype.str, leaf.shape[1:])
    if isinstance(leaf, list | tuple):
        strings = {*map(type, leaf)} <= {str} or all(isinstance(item, str) for item in leaf)
        return Leaf("rows", str if strings else object, cls=type(leaf))
    if is_tensor_collection(leaf) and leaf.dim():
        entries = {key: each.data if is_non_tensor(each) else each for key, each in leaf.items()}
        empty = leaf[:0].clone()  # a slice keeps the memory of the whole
        return Leaf("tensors", None, tuple(leaf.shape[1:]), cls=type(leaf), inside=_of_entries(entries), value=empty)
    return Leaf("constant", cls=type(leaf), value=leaf)


def _of_entries(entries: Mapping[str, Any]) -> Structure:
    parts = [structure_of(entry) for entry in entries.values()]
    nesting = Nesting(dict, tuple(entries), tuple(part.nesting for part in parts))
    return Structure(nesting, tuple(leaf for part in parts for leaf in part.leaves))


def _signature(nesting: Nesting | None, leaves: Iterator[Leaf]) -> Any:
    if nesting is None:
        return next(leaves).signature
    kind, names = kind_of(nesting.cls), map(_key_name, nesting.keys)
    pairs = [(name, _signature(child, leaves)) for name, child in zip(names, nesting.children, strict=True)]
    if kind == "dict":  # the order of its keys is no part of it
        pairs.sort(key=lambda pair: pair[0])
    return (kind, *pairs)


def _text(nesting: Nesting | None, leaves: Iterator[Leaf]) -> str:
    if nesting is None:
        return str(next(leaves))
    pairs = zip(nesting.keys, nesting.children, strict=True)
    return f"{kind_of(nesting.cls)}({', '.join(f'{key}: {_text(child, leaves)}' for key, child in pairs)})"


def _key_name(key: Any) -> str:
    """The same in every process, but not the same for 1 and "1"."""
    return repr(key) if isinstance(key, str) else str(key)


def _name_of(cls: type | None) -> str:
    return "" if cls is None else f"{cls.__module__}:{cls.__qualname__}"


def _nesting_to_json(nesting: Nesting | None) -> Any:
    if nesting is None:
        return None
    for key in nesting.keys:
        if not isinstance(key, str | int):
            raise BatchingError(f"a batch has the key {key!r}; other ranks can only be told strings and ints.")
    children = list(map(_nesting_to_json, nesting.children))
    return [kind_of(nesting.cls), _name_of(nesting.cls), list(nesting.keys), children]


def _nesting_from_json(data: Any) -> Nesting | None:
    if data is None:
        return None
    kind, name, keys, children = data
    if len(keys) != len(children) or not all(isinstance(key, str | int) for key in keys):
        raise ValueError(f"{len(keys)} keys for {len(children)} children")
    return Nesting(_find_class(kind, name), tuple(keys), tuple(map(_nesting_from_json, children)))


def _find_class(kind: str, name: Any) -> type:
    """The class of a container or tensor collection."""
    if kind in ("list", "tuple"):
        return list if kind == "list" else tuple
    if type(name) is not str or kind not in ("dict", "namedtuple", "dataclass", "tensors"):
        raise TypeError(f"{name!r:.40} is no name of a class, or {kind!r:.40} no kind")
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = None if found is None else vars(found).get(part)
    if isinstance(found, type) and (is_tensor_collection(found) if kind == "tensors" else kind_of(found) == kind):
        return found
    if kind == "dict":  # one that is not found, or is built in another way, is a plain dict: its content counts
        return dict
    raise BatchingError(
        f"this rank has seen no sample and cannot build the batch's {kind} {name}: the class is not importable "
        "here by that name. Define it at the top of a module that every rank imports."
    )
