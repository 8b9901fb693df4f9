"""Nested batches: finds the leaves of a batch, counts its samples, and cuts it along the batch dimension.

The law of leaves: tensors, arrays, ``TensorDict``s and tensorclasses are leaves and are cut along dim 0. A list or
tuple that holds no tensor, array or container is one leaf, cut as a list (strings, objects). Everything else is
structure: dicts, lists, tuples, named tuples and dataclasses are containers, and any other object (a number, ``None``,
a string) is a constant that goes to every replica unchanged. All leaves of a batch have the same batch size.

Batches that are made of samples here need no law: ``collated`` says what in them has an entry for each sample.

NumPy arrays: those of a ready batch become tensors where the batch is read, so at any number of ranks and on any device
(``as_tensor``). What a collate function returned is handed over as it is: its arrays stay arrays, and on the host, as
torch has no arrays elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from torchdistinput.batches.containers import (
    MANY_ENTRIES,
    PLAIN_TYPES,
    is_non_tensor,
    is_tensor_collection,
    open_container,
    some_of,
)
from torchdistinput.batches.schema import COUNT_OR_SPLIT, Structure
from torchdistinput.errors import BatchingError

_SINGLE_SAMPLES: Final = "If the source yields single samples, give global_batch_size= so that they are batched."
_BYTES_OF_AN_OBJECT: Final = 64  # about, with its place in a list


def _is_rows(value: Any) -> bool:
    """Whether a list or tuple is one leaf: it holds no tensor, no array, no container. An empty one has size 0."""
    if type(value) not in (list, tuple):
        return False
    return PLAIN_TYPES.issuperset(map(type, value)) or not any(map(_is_nested, value))


def _is_nested(item: Any) -> bool:
    """Whether an item of a list makes the list more than one leaf. NumPy's strings are strings, its numbers arrays."""
    if isinstance(item, str | bytes):
        return False
    nested = isinstance(item, torch.Tensor | np.ndarray | np.generic) or open_container(item) is not None
    return nested or is_tensor_collection(item)


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


def _as_leaf(value: Any) -> Any | None:
    """The value if it is a leaf, or ``None`` if it is a container or a constant."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value
    if is_tensor_collection(value):
        return value if value.dim() else None  # without a batch dimension it is a dict of its entries
    return value if _is_rows(value) else None


def flatten(batch: Any, *, keeps_arrays: bool = False) -> tuple[list[Any], Structure]:
    """The leaves of a batch, in order, and its structure. Arrays become tensors, unless they are kept. Local."""
    leaves: list[Any] = []
    return leaves, _flatten(batch, leaves, keeps_arrays)


def _flatten(value: Any, leaves: list[Any], keeps_arrays: bool) -> Structure:  # noqa: FBT001 - as in flatten
    leaf = _as_leaf(value)
    if leaf is not None:
        leaf = leaf if keeps_arrays else as_tensor(leaf)
        leaves.append(leaf)
        return _structure_of_leaf(leaf)
    container = open_container(value)
    if container is None:
        return Structure("constant", constant=value)
    children = tuple(_flatten(child, leaves, keeps_arrays) for child in container.children)
    return Structure(container.kind, container.keys, children, cls=type(value))


def _structure_of_leaf(leaf: Any) -> Structure:
    if isinstance(leaf, torch.Tensor):
        inner_dims = () if leaf.is_nested else tuple(leaf.shape[1:])  # torch has no shape of some nested tensors
        return Structure("tensor", dtype=leaf.dtype, inner_dims=inner_dims, layout=leaf.layout)
    if isinstance(leaf, np.ndarray):
        return Structure("array", inner_dims=leaf.shape[1:], constant=leaf.dtype.str)
    if not isinstance(leaf, list | tuple):
        children = tuple(
            Structure("constant", constant=child.data) if is_non_tensor(child) else structure_of(child)
            for child in leaf.values()
        )
        empty = leaf[:0].clone()  # a slice keeps the memory of the whole
        dims = tuple(leaf.shape[1:])
        return Structure("tensors", tuple(leaf.keys()), children, None, dims, constant=empty, cls=type(leaf))
    strings = all(isinstance(item, str) for item in leaf)
    return Structure("rows", dtype=str if strings else object, cls=type(leaf))


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


def map_values(fn: Callable[[Any], Any], batch: Any) -> Any:
    """As ``map_leaves``, and with ``fn`` applied to each constant and to each entry of a list that is a leaf. Local."""
    if _is_rows(batch):
        return batch if PLAIN_TYPES.issuperset(map(type, batch)) else type(batch)(map(fn, batch))
    leaf = _as_leaf(batch)
    container = open_container(batch) if leaf is None else None
    if container is None:
        return fn(batch if leaf is None else leaf)
    return container.rebuild(map_values(fn, child) for child in container.children)


def moves_itself(value: object) -> bool:
    """Whether an object is no tensor but has a method ``to``: a ``TensorDict``, a graph, a user class. Local.

    An array with such a method converts its unit by it.
    """
    return not isinstance(value, torch.Tensor | np.ndarray | type) and callable(getattr(value, "to", None))


def objects_in(leaves: Iterable[Any], structure: Structure) -> Iterator[Any]:
    """The objects in a batch that are no tensor, text, number or container: constants, and entries of lists. Local.

    Args:
      leaves: of the batch.
      structure: of the batch.
    """
    for leaf in leaves:
        if isinstance(leaf, list | tuple):
            yield from () if PLAIN_TYPES.issuperset(map(type, leaf)) else leaf
        elif not isinstance(leaf, torch.Tensor):
            yield leaf
    yield from structure.constants()


def holds_arrays(batch: Any) -> bool:
    """Whether some leaf is a NumPy array; of a list of samples only the first is looked at. Local."""
    if isinstance(batch, np.ndarray):
        return True
    if isinstance(batch, list | tuple) and PLAIN_TYPES.issuperset(map(type, batch)):
        return False
    if is_list_of_samples(batch):
        return holds_arrays(batch[0])
    container = None if isinstance(batch, torch.Tensor) else open_container(batch)
    return container is not None and any(holds_arrays(child) for child in container.children)


def is_list_of_samples(batch: Any) -> bool:
    """Whether the batch is a list of dicts, or of tuples, or of lists. Of thousands, some 32 are looked at. Local."""
    if type(batch) is not list or len(batch) < MANY_ENTRIES:
        return False
    kinds = set(map(type, some_of(batch)))
    return len(kinds) == 1 and issubclass(kinds.pop(), dict | tuple | list)


def named_leaves(value: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    """The leaves of a batch with their paths, in order. Arrays become tensors. Local."""
    leaf = _as_leaf(value)
    if leaf is not None:
        yield path or "the batch", as_tensor(leaf)
        return
    container = open_container(value)
    if container is not None:
        for key, child in zip(container.keys, container.children, strict=True):
            yield from named_leaves(child, f"{path}[{key!r}]")


def plain_leaves(batch: Any) -> Collection[torch.Tensor]:
    """The leaves, if the batch is a tensor, or a dict, list or tuple of tensors; else none. Called for every step.

    Local.
    """
    kind = type(batch)
    if kind is torch.Tensor:
        return (batch,)
    leaves: Collection[Any] = batch.values() if kind is dict else batch if kind is tuple or kind is list else ()
    return leaves if all(type(leaf) is torch.Tensor for leaf in leaves) else ()


def plainly_rebuilt(batch: Any, leaves: list[Any]) -> Any:
    """A batch that has ``plain_leaves``, rebuilt with other leaves. Local."""
    if type(batch) is dict:
        return dict(zip(batch, leaves, strict=True))
    return leaves[0] if type(batch) is torch.Tensor else type(batch)(leaves)


def batch_size(batch: Any) -> int:
    """The number of samples in a batch, by the law of leaves. Local.

    Raises:
      BatchingError: there is no leaf, a leaf is a scalar, or two leaves differ; the leaves are named by path.
    """
    alike = {leaf.shape[:1] for leaf in plain_leaves(batch) if not leaf.is_nested}
    if len(alike) == 1 and () not in alike:
        return int(alike.pop()[0])
    sizes: dict[int, str] = {}
    problem = ""
    for path, leaf in named_leaves(batch):
        size = _length(leaf)
        if size is not None:
            sizes.setdefault(size, path)
        elif leaf.is_nested:
            problem = problem or f"{path} is a nested tensor, which torch cannot cut."
        else:
            problem = problem or (
                f"{path} is a scalar tensor; a leaf of a batch needs a batch dimension. A number of the whole batch "
                "may be a plain int or float (item())."
            )
    if len(sizes) == 1 and not problem:
        return next(iter(sizes))
    if not (sizes or problem):
        problem = (
            f"found an element of type {type(batch).__name__} without a tensor, array or list in it; a global batch "
            "must have a batch dimension."
        )
    found = ", ".join(f"{path} has {size}" for size, path in sizes.items())
    problem = problem or (
        f"the leaves of a batch have different batch sizes: {found}. All must have one entry per sample."
    )
    raise BatchingError(f"{problem} {COUNT_OR_SPLIT} {_SINGLE_SAMPLES}")


def _length(leaf: Any) -> int | None:
    """The entries of a leaf; ``None`` of a nested tensor and a scalar."""
    if isinstance(leaf, torch.Tensor | np.ndarray) and (not leaf.ndim or getattr(leaf, "is_nested", False)):
        return None
    return len(leaf)


def has_rows(leaves: Sequence[Any], size: int) -> bool:
    """Whether there is a leaf, and each leaf has so many entries. Local."""
    return bool(leaves) and all(_length(leaf) == size for leaf in leaves)


def check_cuttable(batch: Any) -> None:
    """Refuses a batch with tensors that torch cannot cut along dim 0. Local.

    Raises:
      BatchingError: a tensor is sparse or nested; it is named by its path.
    """
    for path, leaf in named_leaves(batch):
        if isinstance(leaf, torch.Tensor) and (leaf.is_nested or leaf.layout is not torch.strided):
            kind = "nested" if leaf.is_nested else "sparse"
            raise BatchingError(
                f"{path} is a {kind} tensor, which torch cannot cut along dim 0. Give InputOptions(split_fn=), which "
                "cuts such a batch, and empty_fn=, which makes one without a sample."
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


def cut(batch: Any, lo: int, hi: int) -> Any:
    """Rows ``[lo, hi)`` of every leaf; a view where the leaf is a tensor. Local."""
    leaves = [leaf[lo:hi] for leaf in plain_leaves(batch)]
    return plainly_rebuilt(batch, leaves) if leaves else map_leaves(lambda leaf: leaf[lo:hi], batch)
