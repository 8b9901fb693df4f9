"""Reduce and gather over the values of all replicas: first the replicas of this process, then the workers.

Problem: gloo aborts the whole process when ranks send tensors of different sizes, and other backends wait for ever.

Decision: a collective has two halves. First every worker sends to the others, as JSON, its operation with the dtypes
and shapes, or the error that keeps it from taking part. All workers then know the same facts, so all of them raise the
same error, or all continue. Tensors are sent only then. The laws below need no further communication: the divisor of a
mean and the sizes of a gather follow from the shapes.

Laws (N replicas in replica order, v_k the value of replica k):
  (R1) without an axis, SUM is v_0 + … + v_{N-1}, all of one shape; MEAN is that, divided by N.
  (R2) over axes, SUM is the sum of v_k.sum(axes), the other dims agree; MEAN is that, divided by the sum over k of the
      product of v_k's sizes along the axes. So it is the mean of the rows: empty parts do no harm; no row is nan.
  (R3) the dtype stays, but MEAN of ints is float64, and bools count as int64.
  (R4) gather: concatenation along an axis >= 0; the sizes along it may differ, the other dims agree.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from torchdistinput.batches.per_replica import PerReplica, ReduceOp, select, take_apart
from torchdistinput.coordination.failures import OF_RANKS
from torchdistinput.coordination.fingerprints import agree
from torchdistinput.coordination.process_group import Ranks


@final
class Operands(NamedTuple):
    """The contribution of this worker to a collective.

    Args:
      name: the caller's name for it: ``reduce``, ``all_reduce``, ``gather``, ``all_gather``.
      op: how values are reduced; ``None`` to gather them.
      axes: the axes to reduce over, or ``None``; the one axis to gather along.
      leaves: for each path in the value (``""`` for a bare one), one tensor per local replica.
    """

    name: str
    op: ReduceOp | None
    axes: tuple[int, ...] | None
    leaves: dict[str, tuple[Tensor, ...]]


@final
class LeafResult(NamedTuple):
    """The result for the leaves at one path; equal on all workers.

    Args:
      result: the sum, mean or concatenation; without a gradient.
      wants_grad: whether the value of some replica needs a gradient.
      shapes: the shapes of the values of all replicas, in replica order.
    """

    result: Tensor
    wants_grad: bool
    shapes: list[tuple[int, ...]]


@final
class NoValue:
    """Stands for a value that this replica failed to make: all replicas that wait for the value learn why.

    Args:
      error: the reason why there is no value.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error


def opened(value: Any) -> tuple[tuple[str, ...], list[Any], Callable[[Iterable[Any]], Any]]:
    """``take_apart``; for a value that cannot be read, a ``NoValue`` is the only leaf. Local."""
    try:
        return take_apart(value)
    except Exception as error:  # for example in a mapping class of the user's
        return take_apart(NoValue(error))


class _Meta(NamedTuple):
    """The facts about one replica's tensor that the laws need."""

    dtype: str
    shape: tuple[int, ...]
    wants_grad: bool


def _describe_call(name: str, op: ReduceOp | None, axes: tuple[int, ...] | None) -> str:
    """The call as a message shows it, for example ``reduce(MEAN, axis=0)``."""
    axis = "None" if axes is None else str(axes[0] if len(axes) == 1 else list(axes))
    return f"{name}(axis={axis})" if op is None else f"{name}({op.value}, axis={axis})"


# ------------------------------------------------------------------------------------------- the two public operations


def reduce(
    op: ReduceOp | str,
    value: Any,
    axis: int | Sequence[int] | None = None,
    *,
    num_local: int,
    workers: Ranks | None,
    device: torch.device,
) -> Any:
    """See ``Strategy.reduce``. Collective if there are several workers. Gradients do not flow through it.

    Args:
      op: SUM or MEAN.
      value: a ``PerReplica``, or nested containers with one at each leaf (without an axis only); with one local
        replica also bare tensors and numbers.
      axis: the axis or axes of each replica's tensor to reduce over; negative ones count from the end.
      num_local: the number of local replicas.
      workers: the other workers; ``None`` in one process.
      device: where the result lives.
    """
    if axis is None and num_local == 1 and _alone(workers):
        ReduceOp.parse(op)
        return select(value, 0)  # one replica: untouched, whatever it is
    paths, leaves, rebuild = opened(value)

    def prepare() -> Operands:
        parsed, axes = ReduceOp.parse(op), _axes(axis)
        if axes is not None and paths != ("",):
            raise TypeError(
                f"reduce over an axis takes one tensor per replica, got a {type(value).__name__}; "
                "reduce its leaves one by one"
            )
        tensors = _tensors("reduce", paths, leaves, num_local)
        return Operands(name="reduce", op=parsed, axes=axes, leaves=tensors)

    outcomes = perform("reduce", prepare, workers, device)
    return rebuild(outcomes[path].result for path in paths)


def gather(value: Any, axis: int, *, num_local: int, workers: Ranks | None, device: torch.device) -> Any:
    """See ``Strategy.gather``, and ``reduce`` for the arguments. Containers are gathered leaf by leaf."""
    paths, leaves, rebuild = opened(value)

    def prepare() -> Operands:
        axes = gather_axis(axis)
        return Operands(name="gather", op=None, axes=axes, leaves=_tensors("gather", paths, leaves, num_local))

    outcomes = perform("gather", prepare, workers, device)
    return rebuild(outcomes[path].result for path in paths)


def perform(
    name: str, prepare: Callable[[], Operands], workers: Ranks | None, device: torch.device
) -> dict[str, LeafResult]:
    """One collective from start to end: agree, check, compute. Collective if there are several workers.

    Args:
      name: names the wait for the other workers.
      prepare: makes this worker's operands; if it raises, the other workers get the error before it is raised.
      workers: the other workers; ``None`` in one process.
      device: where the sums are made and the results live.

    Returns:
      The outcome for each path of the operands.
    """
    others = None if _alone(workers) else workers
    try:
        operands, local, calls = _agree(name, prepare, others, device)
    except OF_RANKS as error:
        raise error.with_traceback(None) from error.__cause__
    checked = []
    for index, path in enumerate(operands.leaves):
        of_workers = [call[index] for call in calls]
        metas = [meta for metas in of_workers for meta in metas]
        checked.append((path, of_workers, metas, _check(operands, path, metas)))
    outcomes = {}
    for path, of_workers, metas, axes in checked:
        with torch.no_grad():
            if operands.op is None:
                result = _gather(local[path], of_workers, axes or (0,), others)
            else:
                result = _reduce(operands.op, local[path], metas, axes, others)
        outcomes[path] = LeafResult(result, any(meta.wants_grad for meta in metas), [meta.shape for meta in metas])
    return outcomes


def _alone(workers: Ranks | None) -> bool:
    return workers is None or workers.num_workers == 1


# ------------------------------------------------------------------------------------------------------- the arguments


def _axes(axis: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if axis is None:
        return None
    found = tuple(axis) if isinstance(axis, list | tuple) else (axis,)
    if not found or any(isinstance(one, bool) or not isinstance(one, int | np.integer) for one in found):
        raise TypeError(f"axis must be an int, a list of ints (not empty), or None; got {axis!r}")
    return tuple(operator.index(one) for one in found)


def gather_axis(axis: Any) -> tuple[int, ...]:
    """The axis to gather along, checked: one int, not negative."""
    axes = _axes(axis)
    if axes is None or isinstance(axis, list | tuple):
        raise TypeError(f"gather needs one axis, an int; got {axis!r}")
    if axes[0] < 0:
        raise ValueError(f"gather needs an axis that is not negative, got {axis}")
    return axes


def _tensors(name: str, paths: Sequence[str], leaves: Sequence[Any], num_local: int) -> dict[str, tuple[Tensor, ...]]:
    # Sorted, as dicts may have been filled in another order on another rank.
    by_path = sorted(zip(paths, leaves, strict=True), key=lambda pair: pair[0])
    return {path: _local_tensors(name, path, leaf, num_local) for path, leaf in by_path}


def _local_tensors(name: str, path: str, leaf: Any, num_local: int) -> tuple[Tensor, ...]:
    values = (leaf,) if isinstance(leaf, NoValue) else values_of(name, path, leaf, num_local)
    return tuple(as_tensor(value, name, path) for value in values)


def values_of(name: str, path: str, leaf: Any, num_local: int) -> tuple[Any, ...]:
    """The value of each local replica.

    Raises:
      ValueError: it does not tell them.
    """
    if not isinstance(leaf, PerReplica):
        if num_local == 1:
            return (leaf,)
        raise ValueError(
            f"{name} found a bare {type(leaf).__name__}{_at(path)}, and this process has {num_local} replicas: whose "
            "value is it? Give a PerReplica with one value per local replica, as run and the iterators return."
        )
    if len(leaf.values) != num_local:
        raise ValueError(
            f"{name} found a PerReplica with {len(leaf.values)} value(s){_at(path)}, and this process has {num_local} "
            "local replica(s); give one value per local replica"
        )
    return leaf.values


def as_tensor(value: Any, name: str, path: str) -> Tensor:
    """The value of one replica as a tensor: tensors as they are, numbers and arrays by torch's own rules.

    Raises:
      TypeError: the value is no tensor, array or number. For a ``NoValue``, the error of the replica that failed.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, NoValue):
        raise value.error
    number = isinstance(value, bool | int | float | complex)
    if number or (isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc"):
        return torch.as_tensor(value, device="cpu")
    raise TypeError(f"{name} takes tensors, arrays and numbers, got {type(value).__name__}{_at(path)}")


def _at(path: str) -> str:
    return f" at {path}" if path else ""


# ----------------------------------------------------------------------------------------------------------- agreement


def _agree(
    name: str, prepare: Callable[[], Operands], ranks: Ranks | None, device: torch.device
) -> tuple[Operands, dict[str, list[Tensor]], list[list[list[_Meta]]]]:
    """This worker's operands, their tensors on the device, and all workers' facts: ``[worker][leaf][local replica]``.

    Raises alike on all workers.
    """
    try:
        operands = prepare()
        if ranks is not None:
            _refuse_special(operands)
        extra = [[_facts_of(tensor) for tensor in leaf] for leaf in operands.leaves.values()]
        local = {path: [tensor.detach().to(device) for tensor in leaf] for path, leaf in operands.leaves.items()}
    except Exception as error:  # of any kind: without a message from here the others would wait for this worker
        agree(ranks, name, {}, error=error)
        raise
    does = _describe_call(operands.name, operands.op, operands.axes)
    facts = {"the call": does, "the leaves of the value": list(operands.leaves)}
    gathered = by_worker(ranks, agree(ranks, name, facts, extra=extra))
    metas = [[[_Meta(dtype, tuple(shape), grad) for dtype, shape, grad in leaf] for leaf in one] for one in gathered]
    return operands, local, metas


def by_worker(ranks: Ranks | None, answers: list[Any]) -> list[Any]:
    """The answer of each worker, from those of all ranks: the ranks of one worker send the same facts. Local."""
    return answers if ranks is None else [answers[first] for first in ranks.firsts]


def _refuse_special(operands: Operands) -> None:
    for path, tensors in operands.leaves.items():
        for tensor in tensors:
            if tensor.is_nested or tensor.layout is not torch.strided:
                kind = "nested" if tensor.is_nested else str(tensor.layout)
                raise TypeError(
                    f"{operands.name} among several processes takes dense tensors, found a {kind} one{_at(path)}. Give "
                    "its to_dense(), or what it consists of."
                )


def _facts_of(tensor: Tensor) -> tuple[str, list[int], bool]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.requires_grad


# ----------------------------------------------------------------------------------------------------------- the laws


def _check(operands: Operands, path: str, metas: Sequence[_Meta]) -> tuple[int, ...] | None:
    """The axes, counted from the front; raises if the replicas' tensors (all of them, in replica order) do not fit."""
    where = f"{operands.name}{_at(path)}"
    if len({meta.dtype for meta in metas}) > 1:
        raise ValueError(f"{where} needs one dtype on all replicas, found {_each(metas, lambda meta: meta.dtype)}")
    shapes = f"found {_each(metas, lambda meta: str(list(meta.shape)))}"
    rank = len(metas[0].shape)
    if any(len(meta.shape) != rank for meta in metas):
        raise ValueError(f"{where} needs the same number of dimensions on all replicas, {shapes}")
    axes = None if operands.axes is None else _from_the_front(where, operands.axes, rank)
    kept = [dim for dim in range(rank) if axes is None or dim not in axes]
    if any(meta.shape[dim] != metas[0].shape[dim] for meta in metas for dim in kept):
        needed = "one shape" if axes is None else f"equal sizes outside axis {list(axes)}"
        raise ValueError(f"{where} needs {needed} on all replicas, {shapes}")
    return axes


def _each(metas: Sequence[_Meta], show: Callable[[_Meta], str]) -> str:
    return ", ".join(f"{show(meta)} on replica {replica}" for replica, meta in enumerate(metas))


def _from_the_front(where: str, axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    if rank == 0:
        raise ValueError(f"{where} along axis {list(axes)} needs tensors with at least one dimension, found scalars")
    if any(not -rank <= axis < rank for axis in axes):
        raise ValueError(f"{where} found axis {list(axes)}, out of range for tensors with {rank} dimension(s)")
    counted = tuple(axis % rank for axis in axes)
    if len(set(counted)) != len(counted):
        raise ValueError(f"{where} found axis {list(axes)}, which names a dimension twice")
    return counted


def _reduce(
    op: ReduceOp,
    local: Sequence[Tensor],
    metas: Sequence[_Meta],
    axes: tuple[int, ...] | None,
    workers: Ranks | None,
) -> Tensor:
    dtype = _sum_dtype(op, local[0].dtype)
    parts = [v.to(dtype) if axes is None else v.sum(dim=axes, dtype=dtype) for v in local]
    total = functools.reduce(torch.add, parts)
    if workers is not None:
        total = _sum_over_workers(total, workers)
    if op is ReduceOp.SUM:
        return total
    divisor = len(metas) if axes is None else sum(math.prod(meta.shape[axis] for axis in axes) for meta in metas)
    return (total if total.is_floating_point() or total.is_complex() else total.double()) / divisor


def _sum_dtype(op: ReduceOp, dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point or dtype.is_complex:
        return dtype
    return torch.int64 if op is ReduceOp.MEAN or dtype == torch.bool else dtype  # the sum of a mean must not overflow


def _sum_over_workers(total: Tensor, workers: Ranks) -> Tensor:
    wire = torch.int32 if total.dtype == torch.int16 else total.dtype  # gloo has no 16-bit ints
    return workers.all_reduce_sum(total.to(wire).contiguous()).to(total.dtype)


def _gather(
    local: Sequence[Tensor], of_workers: Sequence[Sequence[_Meta]], axes: tuple[int, ...], workers: Ranks | None
) -> Tensor:
    axis = axes[0]
    joined = local[0] if len(local) == 1 else torch.cat(list(local), dim=axis)
    return concatenate(joined, axis, [sum(meta.shape[axis] for meta in metas) for metas in of_workers], workers)


def concatenate(joined: Tensor, axis: int, sizes: Sequence[int], workers: Ranks | None) -> Tensor:
    """The tensors of all workers, one after the other along an axis. Collective if there are several workers.

    Args:
      joined: this worker's tensor, of any dtype.
      axis: the axis.
      sizes: the size of each worker's tensor along it; the other dims and the dtype are the same everywhere.
      workers: the other workers; ``None`` in one process.
    """
    if workers is None:
        return joined
    rest = [size for dim, size in enumerate(joined.shape) if dim != axis]
    row = math.prod(rest) * joined.element_size()
    if sum(sizes) * row == 0:
        return joined.new_empty([sum(sizes) if dim == axis else size for dim, size in enumerate(joined.shape)])
    # The tensors are sent as bytes with the axis in front: this works for every dtype (gloo has no 16-bit ints), and
    # nothing is padded inside.
    sent = joined.movedim(axis, 0).contiguous().view(-1).view(torch.uint8)
    received = workers.all_gather_uneven(sent, [size * row for size in sizes], 0)
    parts = [part.view(joined.dtype).view(size, *rest) for part, size in zip(received, sizes, strict=True) if size]
    return torch.cat(parts).movedim(0, axis).contiguous()
