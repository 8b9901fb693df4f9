"""Nested batches: what is a leaf, how many samples a batch has, and how it is cut.

The law of leaves: tensors and arrays are leaves and are cut along dim 0. A list or tuple that holds no tensor,
array or container is one leaf, cut as a list (strings, objects). Everything else is structure: dicts, lists, tuples,
named tuples and dataclasses are containers, and any other object (a number, ``None``, a string) is a constant that
goes to every replica as it is. All leaves of a batch have the same batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

import numpy as np
import torch

from torchdistinput.containers import PLAIN_TYPES, open_container
from torchdistinput.errors import BatchingError
from torchdistinput.structure import PER_SAMPLE, Structure

__all__ = [
    "batch_size",
    "bytes_held",
    "cut",
    "flatten",
    "holds_arrays",
    "map_leaves",
    "named_leaves",
    "plain_leaves",
    "plainly_rebuilt",
    "structure_of",
]

_SINGLE_SAMPLES: Final = "If the source yields single samples, give global_batch_size= so that they are batched."
_TEXTS_WEIGHED: Final = 32
_BYTES_OF_AN_OBJECT: Final = 64  # about, with its place in a list


def _is_rows(value: Any) -> bool:
    """Whether a list or tuple is one leaf: it holds no tensor, no array, no container. An empty one has size 0."""
    if type(value) not in (list, tuple):
        return False
    return PLAIN_TYPES.issuperset(map(type, value)) or not any(map(_is_nested, value))


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
            return Structure("tensor", dtype=leaf.dtype, inner_dims=tuple(leaf.shape[1:]), layout=leaf.layout)
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
    if isinstance(batch, list | tuple) and PLAIN_TYPES.issuperset(map(type, batch)):
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
                f"{path} is a scalar tensor; a leaf of a batch needs a batch dimension. A number of the whole batch "
                f"may be a plain int or float (item()). {_SINGLE_SAMPLES}"
            )
        sizes.setdefault(len(leaf), path)
    if len(sizes) == 1:
        return next(iter(sizes))
    if not sizes:
        raise BatchingError(
            f"found an element of type {type(batch).__name__} without a tensor, array or list in it; a global batch "
            f"must have a batch dimension. {_SINGLE_SAMPLES}"
        )
    found = ", ".join(f"{path} has {size}" for size, path in sizes.items())
    raise BatchingError(
        f"the leaves of a batch have different batch sizes: {found}. All must have one entry per sample. {PER_SAMPLE} "
        f"{_SINGLE_SAMPLES}"
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
