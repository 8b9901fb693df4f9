"""``average_loss``: a loss whose gradients are exact for the global batch, also when replicas have uneven parts of it.

``groups`` puts steps together whose gradients are accumulated before an update.

Problem: when parts differ in size, the mean of the replicas' means is not the mean over the batch (and nan if a part is
empty). DDP and FSDP average gradients over processes as if it were.

Decision: each replica takes ``sum of its losses * W / global size``. Within a process the replicas' gradients add up;
over the ``W`` processes they are averaged, which takes the ``W`` away again:

    (1/W) * sum over processes of sum over replicas (sum of its losses * W / G)  =  (sum of all losses) / G

Where tokens are averaged, ``G`` is the number of tokens: with ``total=`` a sum that came with the vote of the step, and
is known without a collective. Over a group of steps, ``G`` is that of the whole group.

Example: G = 5 over W = 2, parts of 3 and 2: the factors are 2/5 and 2/5, where plain means would have 1/3 and 1/2.

Limit: over gloo, FSDP2 of torch 2.8 adds gradients in float32 and bfloat16 where it is to average them, as gloo's
reduce-scatter adds there (that of torch 2.9.1 averages). ``module.set_force_sum_reduction_for_comms(True)``, for each
module that was given to ``fully_shard``, makes FSDP2 divide by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol, final

import torch
from torch import Tensor

from torchdistinput.batches.per_replica import ReduceOp
from torchdistinput.coordination.reduce import NoValue
from torchdistinput.plan.options import Step
from torchdistinput.replicas.run import get_replica_context
from torchdistinput.strategy import get_strategy


class _Loader(Iterable[Any], Protocol):
    """A loader of this library, also one that ``integrations`` prepared."""

    @property
    def step(self) -> Step | None:
        """The step of the batch delivered last."""


@final
class Group(tuple[tuple[Any, Step], ...]):
    """Steps whose gradients are accumulated: a tuple of pairs of a batch and its step. Made by ``groups``."""

    __slots__ = ()

    @property
    def global_size(self) -> int | None:
        """The samples of its steps, over all replicas; ``None`` with ``coordination="off"``. Local."""
        sizes = [step.global_size for _, step in self]
        return None if None in sizes else sum(size or 0 for size in sizes)

    @property
    def sums(self) -> dict[str, int]:
        """By the names of ``InputOptions.sums``: the sums of its steps, over all replicas. Local."""
        return {name: sum(step.sums[name] for _, step in self) for name in self[0][1].sums}


def groups(loader: _Loader, count: int) -> Iterator[Group]:
    """One epoch in groups of ``count`` steps, for gradient accumulation; the last one may be shorter.

    All steps of a group are read before it is given: its size and its sums are known at its first step, and an error in
    a group comes before it. A state is that after its last step, also one that is asked for inside of the group, which
    then does not have the gradients of its first steps: save after the update.

    >>> loader = tdi.Strategy().distribute_dataset(range(5), global_batch_size=2)
    >>> [(group.global_size, [step.index for batch, step in group]) for group in tdi.groups(loader, 2)]
    [(4, [0, 1]), (1, [2])]

    Args:
      loader: the loader.
      count: steps of a group.

    Raises:
      ValueError: ``count`` is less than 1.
    """
    if count < 1:
        raise ValueError(f"groups got count={count}; a group has 1 step or more.")
    return _groups(loader, count)


def _groups(loader: Any, count: int) -> Iterator[Group]:
    steps = ((batch, loader.step) for batch in loader)
    while group := Group(islice(steps, count)):
        yield group


def average_loss(
    per_sample_loss: Tensor,
    step: Step | Group,
    weights: Tensor | None = None,
    *,
    rows: slice | None = None,
    total: str | None = None,
) -> Tensor:
    """This replica's part of the mean loss over the global batch, to call ``backward`` on.

    Local, except with weights and without ``total``: then collective, every replica calls this, in the same order.

    >>> strategy = tdi.Strategy(["cpu", "cpu"])
    >>> loader = strategy.distribute_dataset([1.0, 2.0, 6.0], global_batch_size=3)  # the parts are [1, 2] and [6]
    >>> for losses in loader:
    ...     print(strategy.reduce("SUM", strategy.run(tdi.average_loss, args=(losses, loader.step))).item())
    3.0

    Args:
      per_sample_loss: ``(b, ...)``, one entry per sample of this replica's part along dim 0 (``reduction="none"``).
        Further dims are summed: the mean is over samples. An empty part gives 0, with a graph. With ``total`` the
        losses of its items, in any shape.
      step: the step of the batch, ``loader.step``; or the group that it is in, see ``groups``: then the loss is divided
        by the samples, or by ``total``, of all its steps, so that their gradients add up to those of the mean over it.
      weights: ``(b,)``, one per sample; or of more leading dims of the loss, up to its whole shape (a mask of tokens).
        With ``InputOptions(partial_batch="pad")`` the mask of the element, which leaves the padded rows out: where a
        bool mask is false, the loss does not count, whatever it is.
        The weighted sum is then divided by the sum of the weights of all replicas instead of the number of samples;
        if that is 0 the result is 0. Outside of ``run`` this needs ``strategy.scope()``. ``total`` needs neither.
      rows: the rows of the part that these are the losses of, from ``step.micro_batches``; by default all. The
        gradients of all micro-batches of a step add up to those of the mean over the global batch.
      total: the name of the sum in ``InputOptions.sums`` to divide by, instead of the number of samples: that of the
        weights, or of the tokens that count. If it is 0 the result is 0.

    Returns:
      A scalar. Its gradients, summed over the replicas of a process and averaged over processes (as DDP and FSDP do),
      are those of the mean over the global batch. For logging, ``reduce(SUM, ...) / num_workers`` of it is that mean.

    Raises:
      TypeError: if the loss or the weights are no tensor, or the step is neither a ``Step`` nor a group.
      ValueError: if the loss is a scalar, does not have one entry per sample, or the weights do not fit it; if weights
        are given with rows or for a group, but no ``total``: the other weights are not known; or there is no such sum.
      RuntimeError: if the step has no global size, or the replicas to sum the weights over are not known here.
    """
    if weights is not None and total is None:
        if rows is not None or isinstance(step, Group):
            raise ValueError(
                "average_loss got weights with rows, or with a group, and knows only these weights, not all of them. "
                "Sum them with the votes: InputOptions(sums={'weights': function of the batch}), and give "
                "total='weights'."
            )
        found = _sum_over_replicas(_own_weight(per_sample_loss, step, weights), step).to(per_sample_loss.device)
        weighted = _weighted_sum(per_sample_loss, weights)
        return weighted * step.num_workers / torch.where(found == 0, 1.0, found).to(weighted.dtype)
    _check_loss(per_sample_loss)
    divisor: float = _global_size(step)
    steps = [each for _, each in step] if isinstance(step, Group) else [step]
    if total is None:
        _check_size(per_sample_loss, steps, rows)
    else:
        divisor = _sum_named(total, step.sums)
    if weights is not None:
        _check_weights(weights, per_sample_loss)
        return _weighted_sum(per_sample_loss, weights) * steps[0].num_workers / (divisor or 1)
    return per_sample_loss.sum() * steps[0].num_workers / (divisor or 1)


def _weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    spread = weights.reshape(weights.shape + (1,) * (losses.dim() - weights.dim()))
    if spread.dtype == torch.bool:
        return losses.masked_fill(~spread, 0).sum()  # a padded row may well have a loss of nan
    return (losses * spread.to(losses.dtype)).sum()


def _sum_named(name: str, sums: Mapping[str, float]) -> float:
    if name not in sums:
        raise ValueError(
            f"average_loss got total={name!r}, and the step has {', '.join(map(repr, sums)) or 'no sums'}. Give "
            f"InputOptions(sums={{{name!r}: function}}), a function that returns this sum for a part of a batch."
        )
    return sums[name]


def _global_size(step: Step | Group) -> int:
    if not isinstance(step, Step | Group):
        raise TypeError(
            f"average_loss needs the step of the batch, got {type(step).__name__}. Give loader.step, asked for in the "
            "loop over the data, right after the batch came; or the group of tdi.groups(loader, count)."
        )
    if step.global_size is None:
        raise RuntimeError(
            "average_loss needs the size of the global batch, and step.global_size is None: with coordination='off' a "
            "rank knows only its own part. Use coordination='on', or scale the loss yourself."
        )
    if step.global_size < 1:
        raise ValueError(
            f"average_loss found a step with global_size={step.global_size}; a step has at least one sample"
        )
    return step.global_size


def _check_loss(loss: Tensor) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(f"average_loss needs the loss as a tensor with one entry per sample, got {type(loss).__name__}")
    if loss.dim() == 0:
        raise ValueError(
            "average_loss got a scalar: this loss is reduced already, over this replica's part only. Compute it with "
            "reduction='none', so that there is one entry per sample."
        )


def _check_size(loss: Tensor, steps: list[Step], rows: slice | None) -> None:
    context = get_replica_context()
    possible: list[int] = []
    for step in steps:
        sizes = step.local_sizes
        possible += sizes if context is None else [sizes[context.replica_id_in_sync_group % len(sizes)]]
    if rows is not None:
        possible = [len(range(size)[rows]) for size in possible]
    if loss.shape[0] not in possible:
        raise ValueError(
            f"average_loss got {loss.shape[0]} losses (shape {list(loss.shape)}), and this replica's part of the step "
            f"has {' or '.join(map(str, {*possible}))} sample(s). Give one loss per sample along dim 0, and the step "
            "of this very batch; to leave samples, tokens or padded rows out, give weights (a mask)."
        )


def _check_weights(weights: Tensor, loss: Tensor) -> None:
    if not isinstance(weights, Tensor):
        raise TypeError(f"average_loss needs weights as a tensor, got {type(weights).__name__}")
    if weights.dim() == 0 or weights.shape != loss.shape[: weights.dim()]:
        raise ValueError(
            f"average_loss got weights of shape {list(weights.shape)} for losses of shape {list(loss.shape)}; the "
            "shape must be the loss's, or its leading part, so that it is clear how often a weight counts."
        )


def _own_weight(loss: Tensor, step: Step, weights: Tensor) -> Tensor | NoValue:
    """This replica's part of the sum of weights; or its error, which the sum tells to the other replicas."""
    try:
        _check_loss(loss)
        _global_size(step)
        _check_weights(weights, loss)
        # float64, as counts of tokens leave the exact range of float32; one accelerator (mps) has none.
        exact = torch.float32 if weights.device.type == "mps" else torch.float64
        return weights.detach().sum(dtype=exact)
    except Exception as error:
        return NoValue(error)


def _sum_over_replicas(own: Tensor | NoValue, step: Step) -> Tensor:
    context = get_replica_context()
    total: Any = own
    if context is not None:
        total = context.all_reduce(ReduceOp.SUM, own)
    elif step.num_replicas > 1:
        strategy = get_strategy()
        if strategy.num_replicas_in_sync != step.num_replicas or len(step.local_sizes) > 1:
            if isinstance(own, NoValue):
                raise own.error
            raise RuntimeError(
                f"average_loss cannot sum the weights over the {step.num_replicas} replicas of the step here. Call "
                "it in a function given to strategy.run, or (with one replica per process) under strategy.scope()."
            )
        total = strategy.reduce(ReduceOp.SUM, own)
    if isinstance(total, NoValue):  # there was no other replica to tell
        raise total.error
    found: Tensor = total
    return found
