"""A batch as a flat list of leaves and one nesting: counts the samples of a batch, and cuts it along dim 0.

The law of leaves: tensors, arrays, ``TensorDict``s and tensorclasses are leaves and are cut along dim 0. A list or
tuple that holds no tensor, array or container is one leaf, cut as a list (strings, objects). Dicts, lists, tuples,
named tuples and dataclasses are containers, and make up the nesting. Any other object (a number, ``None``, a string) is
a leaf without rows, a *constant*, that goes to every replica unchanged. All leaves with rows have the same batch size.

Batches that are made of samples here need no law: ``collated`` says what in them has an entry for each sample.

NumPy arrays: those of a ready batch become tensors where the batch is read, so at any number of ranks and on any device
(``as_tensor``). What a collate function returned is handed over as it is: its arrays stay arrays, and on the host, as
torch has no arrays elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, cast, final

import numpy as np
import torch
from torch import Tensor

from torchdistinput.batches.containers import (
    MANY_ENTRIES,
    PLAIN_TYPES,
    is_tensor_collection,
    open_container,
    rebuilt,
    some_of,
)
from torchdistinput.errors import BatchingError

COUNT_OR_SPLIT: Final = (
    "If it is a batch, InputOptions(count_fn=) tells how many samples it has, and split_fn= how to cut it."
)
"""The way out for a ready batch that cannot be counted or cut by its leaves."""

_SINGLE_SAMPLES: Final = "If the source yields single samples, give global_batch_size= so that they are batched."
_WITH_ROWS: Final = (torch.Tensor, np.ndarray, list, tuple)  # a union type would take three times as long
_LISTS: Final = (list, tuple)
_BYTES_OF_AN_OBJECT: Final = 64  # about, with its place in a list


@final
class Nesting(NamedTuple):
    """A container in a batch: its class, its keys, and for each the container there; ``None`` is a leaf. Hashable."""

    cls: type
    keys: tuple[Any, ...]
    children: tuple[Nesting | None, ...]


def flatten(value: Any) -> tuple[list[Any], Nesting | None]:
    """The leaves of a batch, constants among them, in order; and its nesting. Local."""
    leaves: list[Any] = []
    return leaves, _flatten(value, leaves, _is_leaf)


def flatten_all(value: Any) -> tuple[list[Any], Nesting | None]:
    """As ``flatten``, but each list and tuple is opened, as for values of replicas. Local."""
    leaves: list[Any] = []
    return leaves, _flatten(value, leaves, lambda _: False)


def _flatten(value: Any, leaves: list[Any], is_leaf: Callable[[Any], bool]) -> Nesting | None:
    cls, children = type(value), value
    if cls is torch.Tensor:
        leaves.append(value)
        return None
    if cls is dict:
        keys, children = tuple(value), value.values()
    elif (cls is tuple or cls is list) and value and type(value[0]) is torch.Tensor:  # as nearly all batches are
        keys = tuple(range(len(value)))
    else:
        container = None if is_leaf(value) else open_container(value)
        if container is None:
            leaves.append(value)
            return None
        keys, children = container.keys, container.children
    return Nesting(cls, keys, tuple([_flatten(child, leaves, is_leaf) for child in children]))


def leaves_like(nesting: Nesting | None, value: Any) -> Collection[Any] | None:
    """The leaves of a batch of the same dicts, lists and tuples; ``None`` of another one. For every step. Local."""
    if nesting is None:
        return (value,)
    cls, keys, children = nesting
    parts: Any = value
    if type(value) is not cls:
        return None
    if cls is dict:
        if (*parts,) != keys:
            return None
        parts = parts.values()
    elif not issubclass(cls, _LISTS) or len(parts) != len(keys):
        return None
    if not any(children):
        return cast("Collection[Any]", parts)
    leaves: list[Any] = []
    for child, part in zip(children, parts, strict=True):
        inner = leaves_like(child, part)
        if inner is None:
            return None
        leaves += inner
    return leaves


def flatten_like(nesting: Nesting | None, value: Any) -> list[Any] | None:
    """The leaves of a batch down to a nesting, with its dicts in the order there; ``None`` for another one. Local."""
    if nesting is None:
        return [value]
    container = open_container(value)
    if container is None or container.cls is not nesting.cls or {*container.keys} != {*nesting.keys}:
        return None
    found = dict(zip(container.keys, container.children, strict=True))
    leaves: list[Any] = []
    for key, child in zip(nesting.keys, nesting.children, strict=True):
        inner = flatten_like(child, found[key])
        if inner is None:
            return None
        leaves += inner
    return leaves


def unflatten(nesting: Nesting | None, leaves: Iterable[Any]) -> Any:
    """The batch of a nesting with these leaves, in order. Local."""
    return _unflatten(nesting, iter(leaves))


def _unflatten(nesting: Nesting | None, leaves: Iterator[Any]) -> Any:
    if nesting is None:
        return next(leaves)
    cls, keys, children = nesting
    made = [next(leaves) if child is None else _unflatten(child, leaves) for child in children]
    if cls is dict:
        return dict(zip(keys, made, strict=True))
    return tuple(made) if cls is tuple else made if cls is list else rebuilt(cls, keys, made)


def paths(nesting: Nesting | None, path: str = "") -> Iterator[str]:
    """The path of each leaf, in order, such as ``['x'][0]``; empty for a batch that is one leaf. Local."""
    if nesting is None:
        yield path
        return
    for key, child in zip(nesting.keys, nesting.children, strict=True):
        yield from paths(child, f"{path}[{key!r}]")


def _is_leaf(value: Any) -> bool:
    """Whether a value is a leaf and no container, though it may look like one: a list of plain values, for example."""
    if type(value) in (list, tuple):
        return PLAIN_TYPES.issuperset(map(type, value)) or not any(map(_is_nested, value))
    return is_tensor_collection(value) and bool(value.dim())  # without a batch dimension it is a dict of its entries


def _is_nested(item: Any) -> bool:
    """Whether an item of a list makes the list more than one leaf. NumPy's strings are strings, its numbers arrays."""
    if isinstance(item, str | bytes):
        return False
    nested = isinstance(item, torch.Tensor | np.ndarray | np.generic) or open_container(item) is not None
    return nested or is_tensor_collection(item)


def has_rows(leaf: Any) -> bool:
    """Whether a leaf is cut, and no constant. Local."""
    return isinstance(leaf, _WITH_ROWS) or is_tensor_collection(leaf)


def num_rows(leaf: Any) -> int | None:
    """The entries of a leaf; ``None`` of a constant, a scalar or a nested tensor. Local."""
    if isinstance(leaf, torch.Tensor | np.ndarray):
        return len(leaf) if leaf.ndim and not getattr(leaf, "is_nested", False) else None
    return len(leaf) if has_rows(leaf) else None


def as_tensor(leaf: Any) -> Any:
    """An array as what torch can hold: a tensor that shares its memory if it can, or a list; other leaves as they are.

    Local.
    """
    if not isinstance(leaf, np.ndarray):
        return leaf
    if leaf.dtype.kind not in "biufc":
        return leaf.tolist()
    native = leaf if leaf.dtype.isnative else leaf.astype(leaf.dtype.newbyteorder("="))
    plain = native.flags.writeable and all(stride >= 0 for stride in native.strides)
    return torch.from_numpy(native if plain else native.copy())


def map_leaves(fn: Callable[[Any], Any], batch: Any) -> Any:
    """The batch with ``fn`` applied to each leaf, constants among them; containers are built anew. Local."""
    leaves, nesting = flatten(batch)
    return unflatten(nesting, map(fn, leaves))


def map_values(fn: Callable[[Any], Any], batch: Any) -> Any:
    """As ``map_leaves``, with ``fn`` applied to each entry of a list that is a leaf, and not to the list. Local."""

    def each(leaf: Any) -> Any:
        if not isinstance(leaf, list | tuple):
            return fn(leaf)
        return leaf if PLAIN_TYPES.issuperset(map(type, leaf)) else type(leaf)(map(fn, leaf))

    return map_leaves(each, batch)


def moves_itself(value: object) -> bool:
    """Whether an object is no tensor but has a method ``to``: a ``TensorDict``, a graph, a user class. Local.

    An array with such a method converts its unit by it.
    """
    return not isinstance(value, torch.Tensor | np.ndarray | type) and callable(getattr(value, "to", None))


def objects_in(leaves: Iterable[Any]) -> Iterator[Any]:
    """The objects among leaves that are no tensor: also the entries of lists, but for plain values. Local."""
    for leaf in leaves:
        if isinstance(leaf, list | tuple):
            yield from () if PLAIN_TYPES.issuperset(map(type, leaf)) else leaf
        elif not isinstance(leaf, torch.Tensor):
            yield leaf


def is_list_of_samples(batch: Any) -> bool:
    """Whether the batch is a list of dicts, or of tuples, or of lists. Of thousands, some 32 are looked at. Local."""
    if type(batch) is not list or len(batch) < MANY_ENTRIES:
        return False
    kinds = set(map(type, some_of(batch)))
    return len(kinds) == 1 and issubclass(kinds.pop(), dict | tuple | list)


def _facts_of(leaf: Any) -> Any:
    """What is compared of a leaf at every step; ``None`` of other things than tensors and lists of plain values."""
    if type(leaf) is torch.Tensor:
        return None if leaf.is_nested else (leaf.dtype, leaf.shape, leaf.layout)  # torch has no shape of a nested one
    if type(leaf) in (list, tuple) and leaf and PLAIN_TYPES.issuperset(kinds := {*map(type, leaf)}):
        return type(leaf), len(leaf), kinds == {str}
    return None


@final
class KnownShapes:
    """The dtypes, shapes and layouts of the last batch, by which one like it is recognised. For every step."""

    def __init__(self) -> None:
        self._nesting: Nesting | None = None
        self._flat: Any = None  # the class of a batch that is a dict, list or tuple of leaves
        self._keys: Any = ()  # of such a dict
        self._known: Any = ()  # a chain: the facts of the first leaf, and the chain of those after it
        self.size = 0
        """The size of the last batch."""

    def remember(self, batch: Any, size: int) -> None:
        """Notes a batch of so many samples."""
        (leaves, nesting), self._known, self.size = flatten(batch), (), size
        is_flat = nesting is not None and not any(nesting.children)
        is_flat = is_flat and (type(batch) is dict or isinstance(batch, _LISTS))
        self._nesting, self._flat = nesting, type(batch) if is_flat else None
        self._keys = (*batch,) if type(batch) is dict else ()
        facts = [*map(_facts_of, leaves)]
        for each in reversed(() if None in facts else facts):
            self._known = (*each, self._known)

    def leaves_of(self, batch: Any) -> Collection[Any] | None:
        """The leaves of a batch that has the shapes of the last one, and so its size; else ``None``: look closer."""
        keys, known = self._keys, self._known
        if type(batch) is not self._flat or (keys and (*batch,) != keys):
            leaves = leaves_like(self._nesting, batch)
        else:
            leaves = batch.values() if keys else batch
        try:
            for leaf in leaves or ():
                dtype, shape, layout, known = known  # zip() takes as long as the comparisons
                if type(leaf) is not Tensor:
                    if _facts_of(leaf) != (dtype, shape, layout):
                        return None
                elif leaf.dtype is not dtype or leaf.layout is not layout or leaf.shape != shape:
                    return None
        except (RuntimeError, ValueError):  # torch's, of a nested tensor, which has no shape; or there are more leaves
            return None
        return None if known else leaves or None


def batch_size(batch: Any) -> int:
    """The number of samples in a batch, by the law of leaves. Local.

    Raises:
      BatchingError: there is no leaf, a leaf is a scalar, or two leaves differ; the leaves are named by path.
    """
    return size_of_leaves(batch, *flatten(batch))


def size_of_leaves(batch: Any, leaves: Sequence[Any], nesting: Nesting | None) -> int:
    """``batch_size`` of a batch that is flattened. Local."""
    found = {*map(num_rows, leaves)}
    if len(found) == 1 and None not in found:
        return int(found.pop() or 0)
    sizes: dict[int, str] = {}
    problem = ""
    for path, leaf in zip(paths(nesting), map(as_tensor, leaves), strict=True):
        size, name = num_rows(leaf), path or "the batch"
        if size is not None:
            sizes.setdefault(size, name)
        elif isinstance(leaf, torch.Tensor):
            problem = problem or (
                f"{name} is a nested tensor, which torch cannot cut."
                if leaf.is_nested
                else f"{name} is a scalar tensor; a leaf of a batch needs a batch dimension. A number of the whole "
                "batch may be a plain int or float (item())."
            )
    if len(sizes) == 1 and not problem:
        return next(iter(sizes))
    if not (sizes or problem):
        problem = (
            f"found an element of type {type(batch).__name__} without a tensor, array or list in it; a global batch "
            "must have a batch dimension."
        )
    told = ", ".join(f"{path} has {size}" for size, path in sizes.items())
    problem = problem or (
        f"the leaves of a batch have different batch sizes: {told}. All must have one entry per sample."
    )
    raise BatchingError(f"{problem} {COUNT_OR_SPLIT} {_SINGLE_SAMPLES}")


def all_have_rows(leaves: Iterable[Any], size: int) -> bool:
    """Whether there is a leaf that is no constant, and each such leaf has so many entries. Local."""
    return {num_rows(leaf) for leaf in leaves if has_rows(leaf)} == {size}


def check_cuttable(batch: Any) -> None:
    """Refuses a batch with tensors that torch cannot cut along dim 0. Local.

    Raises:
      BatchingError: a tensor is sparse or nested; it is named by its path.
    """
    leaves, nesting = flatten(batch)
    for path, leaf in zip(paths(nesting), leaves, strict=True):
        if isinstance(leaf, torch.Tensor) and (leaf.is_nested or leaf.layout is not torch.strided):
            kind = "nested" if leaf.is_nested else "sparse"
            raise BatchingError(
                f"{path or 'the batch'} is a {kind} tensor, which torch cannot cut along dim 0. Give "
                "InputOptions(split_fn=), which cuts such a batch, and empty_fn=, which makes one without a sample."
            )


def num_bytes(leaf: Any) -> int:
    """The bytes of a tensor, or of the tensors of a ``TensorDict`` or tensorclass. Local."""
    if not isinstance(leaf, torch.Tensor):
        return sum(map(num_bytes, flatten(dict(leaf.items()))[0])) if is_tensor_collection(leaf) else 0
    return int(leaf.numel() * leaf.element_size())


def bytes_held(batch: Any) -> int | None:
    """About how much memory the tensors and texts of a batch take; ``None`` where it holds other things. Local.

    Of a long list of texts, or of samples, some 32 are looked at.
    """
    if is_list_of_samples(batch):
        weights = [bytes_held(sample) for sample in some_of(batch)]
        known = [weight for weight in weights if weight is not None]
        return sum(known) * len(batch) // len(known) if len(known) == len(weights) else None
    held = 0
    for leaf in flatten(batch)[0]:
        if not isinstance(leaf, list | tuple):
            held += num_bytes(leaf)
            continue
        some = some_of(leaf)
        if not all(isinstance(item, str | bytes) for item in some):
            return None
        if some:
            held += sum(_BYTES_OF_AN_OBJECT + len(item) for item in some) * len(leaf) // len(some)
    return held


def cut_leaves(leaves: Iterable[Any], lo: int, hi: int) -> list[Any]:
    """Rows ``[lo, hi)`` of each leaf; a view where it is a tensor. Constants stay. Local."""
    return [leaf[lo:hi] if type(leaf) is torch.Tensor or has_rows(leaf) else leaf for leaf in leaves]


def cut(batch: Any, lo: int, hi: int) -> Any:
    """Rows ``[lo, hi)`` of a batch. Local."""
    leaves, nesting = flatten(batch)
    return unflatten(nesting, cut_leaves(leaves, lo, hi))
