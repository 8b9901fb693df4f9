"""``PerReplica``, a container with one value per local replica, and functions that split and regroup such values.

With one local replica a value is itself. With several, a structure stays outside and each leaf is a ``PerReplica``:
``{"x": PerReplica(x0, x1)}``, so that ``for x, y in loader`` reads the same in both cases.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar, final

from torchdistinput.batches.containers import PLAIN_TYPES, Container, open_container, rebuilt
from torchdistinput.batches.pytree import flatten_all, leaves_like, paths, unflatten
from torchdistinput.batches.schema import Leaf, Structure

T_co = TypeVar("T_co", covariant=True)


@final
class PerReplica(Generic[T_co]):
    """A value for each local replica, in the order of the replicas.

    Args:
      values: one entry per local replica; they may be of any type, and tensors of different shapes.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Sequence[T_co]) -> None:
        if not isinstance(values, list | tuple):
            raise TypeError(
                f"PerReplica needs a list or tuple with one value per local replica, got {type(values).__name__}"
            )
        if not values:
            raise ValueError("PerReplica needs at least one value; a strategy has at least one local replica")
        self._values = tuple(values)

    @property
    def values(self) -> tuple[T_co, ...]:
        """The values, one per local replica."""
        return self._values

    def __repr__(self) -> str:
        inner = [f"{index}: {value!r}" for index, value in enumerate(self._values)]
        if sum(map(len, inner)) > 100 or any("\n" in line for line in inner):
            return "PerReplica(\n  " + ",\n  ".join(line.replace("\n", "\n  ") for line in inner) + ",\n)"
        return f"PerReplica({', '.join(inner)})"


@final
class ReduceOp(enum.Enum):
    """How the values of the replicas become one.

    Attributes:
      SUM: the sum.
      MEAN: the mean; over an axis, the mean of all rows of all replicas.
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @staticmethod
    def parse(op: ReduceOp | str) -> ReduceOp:
        """The op itself, or the op of that name in any case.

        Raises:
          ValueError: if there is no op of that name.
        """
        if isinstance(op, ReduceOp):
            return op
        named = ReduceOp.__members__.get(str(op).upper())
        if named is not None:
            return named
        raise ValueError(f"{op!r} is not a valid ReduceOp; give ReduceOp.SUM, ReduceOp.MEAN, or their names")


def regroup(values: Sequence[Any]) -> Any:
    """The results of the local replicas as one value: the structure outside, a ``PerReplica`` at each leaf. Local.

    A leaf that is the *same object* on all replicas stays bare, as in TensorFlow; so does anything of a single replica.

    Args:
      values: one value per local replica, all of the same structure.

    Raises:
      ValueError: if the structures differ; the message names the path.
    """
    if not values:
        raise ValueError("no value to regroup: a strategy has at least one local replica")
    return _regroup(tuple(values), "")


def _regroup(values: tuple[Any, ...], path: str) -> Any:
    first = values[0]
    if all(value is first for value in values):
        return first
    opened = [open_container(value) for value in values]
    head = opened[0]
    if head is None and not any(opened):
        return PerReplica(values)
    kinds = {type(value) if container else None for value, container in zip(values, opened, strict=True)}
    if head is None or len(kinds) > 1 or any(c is None or set(c.keys) != set(head.keys) for c in opened):
        found = "; ".join(f"replica {index} has {_kind(value)}" for index, value in enumerate(values))
        raise ValueError(
            f"the local replicas returned different structures{f' at {path}' if path else ''}: {found}. "
            "Return the same nesting and the same keys on every replica; rows of different number belong in a tensor."
        )
    by_key = [dict(zip(c.keys, c.children, strict=True)) for c in opened if c is not None]
    return head.rebuild(_regroup(tuple(each[key] for each in by_key), f"{path}[{key!r}]") for key in head.keys)


def _kind(value: Any) -> str:
    container = open_container(value)
    name = type(value).__name__
    if container is None:
        return name
    return f"{name} of length {len(container.keys)}" if isinstance(value, list) else f"{name} with {container.keys}"


def regroup_batches(pieces: Sequence[Any], structure: Structure | None, *, of_one_batch: bool = True) -> Any:
    """The batches of the local replicas as one element: the structure outside, a ``PerReplica`` at each leaf. Local.

    Unlike ``regroup`` it follows the structure that all batches have, and not what the pieces of one step look like: so
    elements have the same structure at each step. The constants of a ready batch, which all its pieces have, stay bare;
    where each piece is a batch of its own, only ``None`` does. Where a piece has another structure, a ``PerReplica`` is
    made.

    Args:
      pieces: one batch per local replica; a single one comes back as it is.
      structure: of the batches; ``None`` where it is not known: a ``PerReplica`` of the batches is made.
      of_one_batch: whether the pieces were cut out of one batch.
    """
    if len(pieces) == 1:
        return pieces[0]
    if structure is None:
        return PerReplica(pieces)
    nesting = structure.nesting
    flat = [leaves for piece in pieces if (leaves := leaves_like(nesting, piece)) is not None]
    if nesting is None or len(flat) == len(pieces):
        element = [
            _of_constant(values, leaf, of_one_batch=of_one_batch) if leaf.kind == "constant" else PerReplica(values)
            for *values, leaf in zip(*flat, structure.leaves, strict=True)
        ]
        return unflatten(nesting, element)
    found = [open_container(piece) for piece in pieces]
    by_key = [dict(zip(each.keys, each.children, strict=True)) for each in found if each is not None]
    keys = nesting.keys
    if len(by_key) < len(pieces) or any({*each} != {*keys} for each in by_key) or len({*map(_kind_of, found)}) > 1:
        return PerReplica(pieces)
    parts = zip(keys, structure.parts, strict=True)
    children = [regroup_batches([each[key] for each in by_key], part, of_one_batch=of_one_batch) for key, part in parts]
    return rebuilt(type(pieces[0]), keys, children)


def _kind_of(container: Container | None) -> str | None:
    return None if container is None else container.kind


def _of_constant(pieces: Sequence[Any], leaf: Leaf, *, of_one_batch: bool) -> Any:
    """The constant of all pieces, if they must have the same; else a ``PerReplica``."""
    first, kind = pieces[0], type(pieces[0])
    is_shared = of_one_batch or leaf.value is None
    same = all(piece is first or (kind in PLAIN_TYPES and type(piece) is kind and piece == first) for piece in pieces)
    return first if is_shared and same else PerReplica(pieces)


def select(value: Any, local_replica: int) -> Any:
    """The value as one local replica sees it: each ``PerReplica`` in nested containers gives way to its entry. Local.

    A container without any ``PerReplica`` in it comes back as the same object.
    """
    if isinstance(value, PerReplica):
        if local_replica >= len(value.values):
            raise ValueError(
                f"a PerReplica with {len(value.values)} value(s) has none for local replica {local_replica}; it needs "
                "one per local replica of the strategy"
            )
        return value.values[local_replica]
    container = open_container(value)
    if container is None:
        return value
    chosen = [select(child, local_replica) for child in container.children]
    if all(new is old for new, old in zip(chosen, container.children, strict=True)):
        return value
    return container.rebuild(chosen)


def local_results(value: Any, num_local: int) -> tuple[Any, ...]:
    """One value per local replica; of a structure, a structure each; of a value without ``PerReplica``, ``(value,)``.

    Local: no communication.

    Args:
      value: what ``run`` returned, or an element.
      num_local: the number of local replicas.

    Raises:
      ValueError: if a ``PerReplica`` in it does not have one value per local replica.
    """
    held = [leaf for leaf in take_apart(value)[1] if isinstance(leaf, PerReplica)]
    wrong = [len(leaf.values) for leaf in held if len(leaf.values) != num_local]
    if wrong:
        raise ValueError(
            f"found a PerReplica with {wrong[0]} value(s), and this process has {num_local} local replica(s); "
            "a value belongs to the strategy that made it"
        )
    return tuple(select(value, replica) for replica in range(num_local)) if held else (value,)


def take_apart(value: Any) -> tuple[tuple[str, ...], list[Any], Callable[[Iterable[Any]], Any]]:
    """The paths and leaves of nested containers, and the function that puts other leaves in their place. Local.

    Every list and tuple is opened; a ``PerReplica`` is a leaf. The path of a value that is no container is ``""``.
    """
    leaves, nesting = flatten_all(value)
    return tuple(paths(nesting)), leaves, partial(unflatten, nesting)
