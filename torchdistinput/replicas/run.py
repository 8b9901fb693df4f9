"""``Strategy.run``: calls a function once for each local replica; the function may call collectives.

Problem: a replica must be able to wait in the middle of the function, at a collective, until all replicas of the
process have come there. But results and draws from the global random state must be the same in every run.

Decision: one local replica is a direct call on the caller's thread. Several replicas are coroutines: exactly one runs
at a time, in the order of the replicas, until its next collective or its end. The caller's thread runs them in turn,
and does the collectives itself, so that the other workers and Ctrl-C always meet the same thread.

Alternative refused: threads that run freely, as their draws from a shared random state come in any order.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchdistinput.batches.per_replica import ReduceOp, regroup, select
from torchdistinput.coordination.process_group import Ranks
from torchdistinput.coordination.reduce import LeafResult, NoValue, Operands, as_tensor, gather_axis, opened, perform
from torchdistinput.replicas.coroutines import Coroutine, Ended, Modes

_current: contextvars.ContextVar[ReplicaContext | None] = contextvars.ContextVar("replica context", default=None)


@final
class _Collective(NamedTuple):
    """A collective that one replica calls; for a gather ``op`` is ``None``, and ``axis`` is the user's argument."""

    name: str
    op: ReduceOp | str | None
    axis: Any
    leaves: dict[str, Any]


_Outcomes = dict[str, LeafResult]
_Replica = Coroutine[_Collective, _Outcomes]
_Meet = Callable[[_Collective], _Outcomes]
_Gradient = Callable[[_Collective, _Outcomes, dict[str, Tensor]], list[Tensor]]


# --------------------------------------------------------------------------------------------------- the user's side


def get_replica_context() -> ReplicaContext | None:
    """The context of the replica that is running, inside a function given to ``run``; ``None`` elsewhere. Local.

    >>> tdi.Strategy(["cpu", "cpu"]).run(lambda: tdi.get_replica_context().replica_id_in_sync_group)
    PerReplica(0: 0, 1: 1)
    """
    return _current.get()


def require_no_replica(what: str) -> None:
    """Refuses a call that belongs outside of ``run``.

    Raises:
      RuntimeError: if a replica is running.
    """
    if _current.get() is not None:
        raise RuntimeError(
            f"{what} was called inside a function given to run, where it would be called once per replica. "
            "Call it outside; inside, get_replica_context() has all_reduce and all_gather."
        )


@final
class ReplicaContext:
    """The replica in which a function given to ``run`` runs: its number, and collectives with the other replicas.

    Made by ``run``; take it from ``get_replica_context()``.
    """

    def __init__(self, replica_id: int, num_replicas: int, meet: _Meet) -> None:
        self._replica_id = replica_id
        self._num_replicas = num_replicas
        self._meet = meet

    @property
    def replica_id_in_sync_group(self) -> int:
        """This replica's number among all replicas of all workers."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas there are, over all workers."""
        return self._num_replicas

    def all_reduce(self, op: ReduceOp | str, value: Any) -> Any:
        """The sum or mean of the value over all replicas, the same on each.

        Collective: every replica calls this, in the same order. Gradients flow as in TensorFlow: the gradient of the
        value is the sum (mean) over the replicas of their gradients of the result, so ``backward`` is collective too.

        Args:
          op: SUM or MEAN; MEAN of ints is float64. With one replica the value comes back as it is.
          value: a tensor or number, or nested containers of them; shapes and dtypes agree between replicas.

        Raises:
          ValueError: for an unknown op, or shapes or dtypes that differ between replicas.
          TypeError: for a value that is no tensor or number.
          RuntimeError: if the replicas of this process call different collectives, or bring different structures.
          RankDisagreement: if the workers do, or another worker could not take part.
        """
        if self._num_replicas == 1:
            ReduceOp.parse(op)
            return value
        return self._collective(_Collective("all_reduce", op, None, {}), value, self._gradient_of_reduce)

    def all_gather(self, value: Any, axis: int) -> Any:
        """The values of all replicas concatenated in replica order, the same on each.

        Collective: every replica calls this, in the same order. Gradients flow: each replica gets the sum over the
        replicas of their gradients of its part.

        Args:
          value: a tensor with at least one dimension, or nested containers of them.
          axis: the axis to concatenate along, not negative; sizes along it may differ, 0 included.

        Raises:
          ValueError: for a bad axis, a scalar, or dtypes or other dims that differ between replicas.
          TypeError: for a value that is no tensor.
          RuntimeError: if the replicas of this process call different collectives, or bring different structures.
          RankDisagreement: if the workers do, or another worker could not take part.
        """
        return self._collective(_Collective("all_gather", None, axis, {}), value, self._gradient_of_gather)

    def __repr__(self) -> str:
        return f"ReplicaContext(replica {self._replica_id} of {self._num_replicas})"

    def _collective(self, blank: _Collective, value: Any, gradient: _Gradient) -> Any:
        paths, leaves, rebuild = opened(value)
        request = _Collective(blank.name, blank.op, blank.axis, dict(zip(paths, leaves, strict=True)))
        outcomes = self._meet(request)
        results = {path: outcome.result for path, outcome in outcomes.items()}
        linked = [path for path, outcome in outcomes.items() if outcome.wants_grad and torch.is_grad_enabled()]
        if linked:
            # All replicas link if one needs it: otherwise backward would be a collective for some of them only.
            own = [_in_graph(as_tensor(request.leaves[path], request.name, path)) for path in linked]
            outputs = _Linked.apply(  # type: ignore[no-untyped-call] # torch's
                lambda grads: gradient(request, outcomes, dict(zip(linked, grads, strict=True))),
                [results[path] for path in linked],
                *own,
            )
            results.update(zip(linked, outputs, strict=True))
        return rebuild(results[path] for path in paths)

    def _gradient_of_reduce(self, request: _Collective, outcomes: _Outcomes, grads: dict[str, Tensor]) -> list[Tensor]:
        del outcomes
        met = self._meet(_Collective("the gradient of all_reduce", request.op, None, grads))
        return [met[path].result for path in grads]

    def _gradient_of_gather(self, request: _Collective, outcomes: _Outcomes, grads: dict[str, Tensor]) -> list[Tensor]:
        met = self._meet(_Collective("the gradient of all_gather", ReduceOp.SUM, None, grads))
        own = []
        for path in grads:
            sizes = [shape[request.axis] for shape in outcomes[path].shapes]
            start = sum(sizes[: self._replica_id])
            own.append(met[path].result.narrow(request.axis, start, sizes[self._replica_id]))
        return own


def _in_graph(value: Tensor) -> Tensor:
    return value if value.requires_grad else value.detach().requires_grad_()


class _Linked(torch.autograd.Function):
    """An autograd function: the outputs are results that were computed elsewhere, the inputs this replica's values."""

    @staticmethod
    def forward(ctx: Any, undo: Callable[[Sequence[Tensor]], list[Tensor]], results: list[Tensor], *own: Tensor) -> Any:
        ctx.undo = undo
        ctx.devices = [value.device for value in own]
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back = [grad.to(device) for grad, device in zip(ctx.undo(grads), ctx.devices, strict=True)]
        return None, None, *back


# ------------------------------------------------------------------------------------------- running the replicas


def run_replicas(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    replica_ids: Sequence[int],
    num_replicas_in_sync: int,
    devices: Sequence[torch.device],
    workers: Ranks | None,
    enter_thread: Callable[[int], None] = lambda local_replica: None,
) -> Any:
    """Calls ``fn`` for each local replica with its part of every ``PerReplica``, and regroups the results.

    Local, except for collectives that ``fn`` calls.

    Args:
      fn: the function; inside it ``get_replica_context()`` returns the replica's context.
      args: its positional arguments; each ``PerReplica``, also inside containers, is replaced by the replica's part.
      kwargs: its keyword arguments, likewise.
      replica_ids: the numbers of the local replicas among all replicas.
      num_replicas_in_sync: the number of all replicas.
      devices: the devices of the local replicas.
      workers: the other workers; ``None`` in one process.
      enter_thread: called first on the thread of a local replica (with its local number), if it has its own thread.

    Raises:
      RuntimeError: if called inside ``run``; or if a replica returned while others wait for it in a collective.
      TypeError: if ``args`` or ``kwargs`` are not containers of arguments.
      Exception: the error that ``fn`` raised. The first replica that raises ends the others at their collectives.
    """
    require_no_replica("run")
    if not isinstance(args, list | tuple):
        raise TypeError(
            f"run needs args as a tuple, one entry per argument, got {type(args).__name__}; write args=(value,)"
        )
    if not isinstance(kwargs, Mapping | None):
        raise TypeError(f"run needs kwargs as a dict of arguments, got {type(kwargs).__name__}")

    def meet(requests: Sequence[_Collective]) -> list[_Outcomes]:
        return _meet(requests, devices, workers)

    def call(local_replica: int, meet_others: _Meet) -> Any:
        its_args, its_kwargs = select((tuple(args), dict(kwargs or {})), local_replica)
        token = _current.set(ReplicaContext(replica_ids[local_replica], num_replicas_in_sync, meet_others))
        try:
            return fn(*its_args, **its_kwargs)
        finally:
            _current.reset(token)

    if len(replica_ids) == 1:
        return call(0, lambda request: meet([request])[0])
    modes = Modes.capture(devices)

    def on_its_thread(local_replica: int) -> Callable[[_Replica], Any]:
        def body(coroutine: _Replica) -> Any:
            enter_thread(local_replica)
            with modes.entered():
                return call(local_replica, coroutine.pause)

        return body

    replicas = [_Replica(on_its_thread(local), f"torchdistinput replica {k}") for local, k in enumerate(replica_ids)]
    return _conduct(replicas, replica_ids, meet)


def _conduct(
    replicas: Sequence[_Replica], replica_ids: Sequence[int], meet: Callable[[Sequence[_Collective]], list[_Outcomes]]
) -> Any:
    answers: list[_Outcomes | BaseException] = []
    try:
        reached = [replica.start() for replica in replicas]
        while not all(isinstance(one, Ended) for one in reached):
            requests = [one for one in reached if isinstance(one, _Collective)]
            if len(requests) < len(reached):
                raise RuntimeError(_skipped(reached, replica_ids))
            try:
                answers = list(meet(requests))
            except Exception as error:  # an error for the replicas: each raises it where it called the collective
                answers = [error] * len(replicas)
            reached = [replica.resume(answers.pop(0)) for replica in replicas]
        return regroup([one.value for one in reached if isinstance(one, Ended)])
    finally:
        answers.clear()  # an error would otherwise keep itself alive through the traceback of this frame
        for replica in replicas:
            replica.close()


def _skipped(reached: Sequence[_Collective | Ended], replica_ids: Sequence[int]) -> str:
    all_replicas = list(zip(replica_ids, reached, strict=True))
    waiting = [f"replica {k} in {one.name}" for k, one in all_replicas if isinstance(one, _Collective)]
    done = [str(k) for k, one in all_replicas if isinstance(one, Ended)]
    return (
        f"replica(s) {', '.join(done)} returned from the function given to run, while others wait for them: "
        f"{', '.join(waiting)}. Every replica must make the same collective calls, in the same order."
    )


def _meet(requests: Sequence[_Collective], devices: Sequence[torch.device], workers: Ranks | None) -> list[_Outcomes]:
    """The collective for which all local replicas wait; one answer for each, and the answers share no memory."""
    first = requests[0]

    def prepare() -> Operands:
        for leaf in (leaf for one in requests for leaf in one.leaves.values() if isinstance(leaf, NoValue)):
            raise leaf.error
        for local, other in enumerate(requests):
            if (other.name, set(other.leaves)) != (first.name, set(first.leaves)):
                raise RuntimeError(
                    f"the replicas of this process are not in the same collective: the first is in {_shown(first)}, "
                    f"number {local} in {_shown(other)}. Every replica must make the same calls, in the same order, on "
                    "values of the same structure."
                )
        ops = {None if one.op is None else ReduceOp.parse(one.op) for one in requests}
        axes = {None if one.op is not None else gather_axis(one.axis) for one in requests}
        if len(ops) > 1 or len(axes) > 1:
            raise RuntimeError(
                f"the replicas of this process call {first.name} with different ops or axes: {ops}, {axes}"
            )
        leaves = {
            path: tuple(as_tensor(one.leaves[path], first.name, path) for one in requests)
            for path in sorted(first.leaves)
        }
        return Operands(name=first.name, op=ops.pop(), axes=axes.pop(), leaves=leaves)

    outcomes = perform(first.name, prepare, workers, devices[0])
    return [
        {path: _on(outcome, devices[local], copy=local > 0) for path, outcome in outcomes.items()}
        for local in range(len(requests))
    ]


def _on(outcome: LeafResult, device: torch.device, *, copy: bool) -> LeafResult:
    return LeafResult(outcome.result.to(device, copy=copy), outcome.wants_grad, outcome.shapes)


def _shown(request: _Collective) -> str:
    return request.name if list(request.leaves) == [""] else f"{request.name} of {sorted(request.leaves)}"
