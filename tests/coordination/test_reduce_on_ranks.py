"""reduce, gather and the collectives inside ``run`` over real ranks: the laws of one process, errors on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.conformance.test_values import CASES, numbers
from torchdistinput.batches.per_replica import PerReplica, local_results
from torchdistinput.replicas.run import ReplicaContext, get_replica_context
from torchdistinput.strategy import Strategy
from torchdistinput.testing import run_ranks

SIZES_AND_SPLITS = [(2, 1), (3, 1), (2, 2)]  # (ranks, replicas in each)


def wrong_cases(replicas_per_rank: int) -> tuple[int, list[Any]]:
    """The number of cases for so many replicas, and those that came out wrong."""
    strategy = Strategy(devices=["cpu"] * replicas_per_rank)
    cases = [case for case in CASES if len(case["values"]) == strategy.num_replicas_in_sync]
    return len(cases), [found for case in cases if (found := difference(strategy, case)) is not None]


def difference(strategy: Strategy, case: dict[str, Any]) -> Any:
    described = [case["values"][replica] for replica in strategy.replica_ids]
    local = [torch.tensor(one["flat"], dtype=getattr(torch, one["dtype"])).reshape(one["shape"]) for one in described]
    value = PerReplica(local) if len(local) > 1 else local[0]
    if case["kind"] == "gather":
        found = strategy.gather(value, case["axis"])
    else:
        found = strategy.reduce(case["op"], value, case["axis"])
    want = torch.tensor(numbers(case["want"]["data"]), dtype=getattr(torch, case["want"]["dtype"]))
    want = want.reshape(case["want"]["shape"])
    # The order of a sum over ranks is the backend's; one rounding of the type is allowed.
    bound = 0.0 if not want.is_floating_point() else 4 * torch.finfo(want.dtype).eps
    same = (found.dtype, found.shape) == (want.dtype, want.shape)
    return None if same and torch.allclose(found, want, rtol=bound, atol=bound, equal_nan=True) else (case, found)


@pytest.mark.parametrize(("world", "replicas"), SIZES_AND_SPLITS)
def test_every_conformance_case_of_values_holds_over_ranks(world: int, replicas: int) -> None:
    for number, wrong in run_ranks(world, wrong_cases, replicas):
        assert number > 100
        assert not wrong


# ------------------------------------------------------------------------------------------------ errors


def error_of(call: Any) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def errors_of_calls_that_differ() -> dict[str, tuple[str, str]]:
    strategy, rank = Strategy(), dist.get_rank()
    first = rank == 0

    def step() -> Tensor:
        return context().all_reduce("SUM", torch.ones(2 + rank))  # type: ignore[no-any-return]

    calls: dict[str, Any] = {
        "shapes": lambda: strategy.reduce("SUM", torch.ones(2 + rank)),
        "dims": lambda: strategy.gather(torch.ones(1, 2 + rank), 0),
        "dtypes": lambda: strategy.reduce("MEAN", torch.ones(2, dtype=torch.float64 if first else torch.float32)),
        "ops": lambda: strategy.reduce("MEAN" if first else "SUM", 1.0),
        "axes": lambda: strategy.reduce("MEAN", torch.ones(2, 2), 0 if first else 1),
        "calls": lambda: strategy.gather(torch.ones(2), 0) if first else strategy.reduce("SUM", torch.ones(2)),
        "leaves": lambda: strategy.reduce("SUM", {"a": 1} if first else {"b": 1}),
        "one bad op": lambda: strategy.reduce("SUM" if first else "MAX", 1.0),
        "one bad value": lambda: strategy.reduce("SUM", 1.0 if first else "text"),
        "in run": lambda: strategy.run(step),
    }
    return {name: error_of(call) for name, call in calls.items()} | {
        "afterwards": ("", str(strategy.reduce("SUM", 1).item()))
    }


def test_whatever_differs_between_ranks_is_an_error_on_every_rank_and_harms_nothing_later() -> None:
    wanted = {
        "shapes": ("ValueError", "reduce needs one shape on all replicas, found [2] on replica 0, [3] on replica 1"),
        "dims": ("ValueError", "gather needs equal sizes outside axis [0]"),
        "dtypes": ("ValueError", "float64 on replica 0, float32 on replica 1"),
        "ops": ("RankDisagreement", "reduce(MEAN, axis=None)"),
        "axes": ("RankDisagreement", "reduce(MEAN, axis=1)"),
        "calls": ("RankDisagreement", "gather"),
        "leaves": ("RankDisagreement", "['b']"),
        "one bad op": ("ValueError", "'MAX' is not a valid ReduceOp"),
        "one bad value": ("TypeError", "takes tensors, arrays and numbers, got str"),
        "in run": (
            "ValueError",
            "all_reduce needs one shape on all replicas, found [2] on replica 0, [3] on replica 1",
        ),
        "afterwards": ("", "2"),
    }
    for found in run_ranks(2, errors_of_calls_that_differ):
        for name, (kind, text) in wanted.items():
            assert found[name][0] == kind, (name, found[name])
            assert text in found[name][1], (name, found[name])


# ------------------------------------------------------------------------------------------------ inside run


def context() -> ReplicaContext:
    found = get_replica_context()
    assert found is not None
    return found


def collectives_inside_run(replicas_per_rank: int) -> list[tuple[Any, ...]]:
    """For each local replica: the sum and the gathered values, and the gradients that came back through both."""

    def step(x: Tensor) -> Tensor:
        k = context().replica_id_in_sync_group
        total = context().all_reduce("SUM", {"x": x.sum(), "n": len(x)})
        whole = context().all_gather(x, 0)
        loss = (k + 1) * total["x"] + (whole * torch.arange(1.0, len(whole) + 1)).sum()
        torch.autograd.backward(loss)
        return torch.cat([total["x"].detach().reshape(1), torch.tensor([float(total["n"])]), whole.detach()])

    strategy = Strategy(devices=["cpu"] * replicas_per_rank)
    xs = [torch.full((k,), float(k), requires_grad=True) for k in strategy.replica_ids]
    found = local_results(strategy.run(step, (PerReplica(xs),)), replicas_per_rank)
    return [
        (result.tolist(), x.grad.tolist() if x.grad is not None else None) for result, x in zip(found, xs, strict=True)
    ]


@pytest.mark.parametrize(("world", "replicas"), [(3, 1), (2, 2)])
def test_collectives_inside_run_and_their_gradients_span_all_replicas_of_all_ranks(world: int, replicas: int) -> None:
    count = world * replicas
    found = [each for rank in run_ranks(world, collectives_inside_run, replicas) for each in rank]
    whole = [float(k) for k in range(count) for _ in range(k)]
    sum_of_factors, position = sum(range(1, count + 1)), 0
    for k, (result, grad) in enumerate(found):
        assert result == [sum(whole), len(whole), *whole]
        # The sum brings the sum of the factors of all replicas; each of them adds its weight of the gathered row.
        assert grad == [sum_of_factors + count * (position + row + 1) for row in range(k)]
        position += k
    assert len(found) == count


# ------------------------------------------------------------------------------------------------ a mesh


def reduce_over_the_data_dim_of_a_mesh() -> tuple[float, float, list[int]]:
    strategy = Strategy(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp")), data_dims=["dp"])
    worker = strategy.input_pipeline_id
    rows = torch.arange(3) if worker == 0 else torch.tensor([10])
    return (
        strategy.reduce("SUM", float(worker + 1)).item(),
        strategy.reduce("MEAN", rows, 0).item(),
        strategy.gather(rows, 0).tolist(),
    )


def test_ranks_that_share_their_data_count_once() -> None:
    assert run_ranks(4, reduce_over_the_data_dim_of_a_mesh) == [(3.0, 13 / 4, [0, 1, 2, 10])] * 4
