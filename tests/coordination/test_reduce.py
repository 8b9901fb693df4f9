"""reduce, gather and the collectives inside ``run``, beside the conformance cases; also over real ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.conformance.test_conformance import VALUES, numbers
from torchdistinput import PerReplica, ReduceOp, Strategy, get_replica_context
from torchdistinput.testing import run_ranks


def reduce(op: Any, value: Any, axis: Any = None, num_local: int = 2) -> Any:
    return Strategy(["cpu"] * num_local).reduce(op, value, axis)


def gather(value: Any, axis: Any, num_local: int = 2) -> Any:
    return Strategy(["cpu"] * num_local).gather(value, axis)


def same(found: Any, want: Tensor) -> None:
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_ints_keep_their_dtype_in_a_sum_and_do_not_overflow_in_a_mean(dtype: torch.dtype) -> None:
    top = torch.full((3,), torch.iinfo(dtype).max if dtype != torch.int64 else 2**40, dtype=dtype)
    assert reduce("SUM", PerReplica([top, top])).dtype == dtype
    same(reduce("MEAN", PerReplica([top, top])), top.double())
    same(reduce("MEAN", PerReplica([top, top]), 0), top[0].double())


def test_bools_are_counted() -> None:
    hits = PerReplica([torch.tensor([True, True]), torch.tensor([True, False])])
    same(reduce("SUM", hits, 0), torch.tensor(3))
    same(reduce("MEAN", hits, 0), torch.tensor(0.75, dtype=torch.float64))


def test_the_value_of_one_replica_is_untouched_without_an_axis() -> None:
    value = {"x": torch.ones(2, dtype=torch.int32, requires_grad=False), "note": "anything"}
    assert reduce("MEAN", value, None, 1) is value
    tensor = torch.ones(2)
    assert reduce("MEAN", PerReplica([tensor]), None, 1) is tensor
    with pytest.raises(ValueError, match="'MAX' is not a valid ReduceOp"):
        reduce("MAX", value, None, 1)


def test_the_bare_value_of_one_replica_can_be_reduced_over_an_axis() -> None:
    same(reduce("MEAN", torch.tensor([1, 2]), 0, 1), torch.tensor(1.5, dtype=torch.float64))
    same(gather(torch.tensor([1, 2]), 0, 1), torch.tensor([1, 2]))


def test_numbers_and_arrays_count_as_tensors() -> None:
    same(reduce("SUM", PerReplica([1, 2])), torch.tensor(3))
    same(reduce("MEAN", PerReplica([1, 2])), torch.tensor(1.5, dtype=torch.float64))
    same(reduce("MEAN", PerReplica([1.0, 2.0])), torch.tensor(1.5))
    same(reduce("SUM", PerReplica([np.ones(2), np.ones(2)])), torch.full((2,), 2.0, dtype=torch.float64))
    same(reduce("SUM", PerReplica([np.float32(1), np.float32(2)])), torch.tensor(3.0))


def test_a_structure_is_reduced_leaf_by_leaf() -> None:
    value = {"loss": PerReplica([1.0, 3.0]), "counts": (PerReplica([1, 2]), [PerReplica([4, 5])])}
    found = reduce(ReduceOp.SUM, value)
    assert found == {"loss": torch.tensor(4.0), "counts": (torch.tensor(3), [torch.tensor(9)])}


def test_the_values_stay_as_they_are_and_no_gradient_flows() -> None:
    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    total = reduce("SUM", PerReplica([first, second]))
    assert not total.requires_grad
    total += 1
    assert first.tolist() == second.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("value", "axis", "error", "message"),
    [
        (torch.ones(2), None, ValueError, "bare Tensor, and this process has 2 replicas"),
        (3, None, ValueError, "bare int, and this process has 2 replicas"),
        ({"a": PerReplica([1, 2]), "b": torch.ones(1)}, None, ValueError, r"bare Tensor at \['b'\]"),
        (PerReplica([1, 2, 3]), None, ValueError, r"3 value\(s\), and this process has 2"),
        ({"a": PerReplica([torch.ones(1)] * 2)}, 0, TypeError, "takes one tensor per replica, got a dict"),
        (PerReplica(["a", "b"]), None, TypeError, "takes tensors, arrays and numbers, got str"),
        ([PerReplica([None, None])], None, TypeError, r"got NoneType at \[0\]"),
        (PerReplica([torch.ones(2), torch.ones(3)]), None, ValueError, r"one shape .* \[2\] on replica 0, \[3\] on"),
        (PerReplica([torch.ones(2), torch.ones(1, 2)]), 0, ValueError, "same number of dimensions"),
        (PerReplica([torch.ones(2, 3), torch.ones(2, 4)]), 0, ValueError, "equal sizes outside axis"),
        (
            PerReplica([torch.ones(2), torch.ones(2).long()]),
            None,
            ValueError,
            "float32 on replica 0, int64 on replica 1",
        ),
        (PerReplica([torch.ones(2)] * 2), 1, ValueError, r"axis \[1\], out of range"),
        (PerReplica([torch.ones(2)] * 2), -2, ValueError, r"axis \[-2\], out of range"),
        (PerReplica([torch.ones(2, 2)] * 2), [0, -2], ValueError, "names a dimension twice"),
        (PerReplica([torch.ones(())] * 2), 0, ValueError, "at least one dimension, found scalars"),
        (PerReplica([torch.ones(2)] * 2), 0.5, TypeError, "axis must be an int"),
        (PerReplica([torch.ones(2)] * 2), True, TypeError, "axis must be an int"),
        (PerReplica([torch.ones(2)] * 2), [], TypeError, "not empty"),
    ],
)
def test_what_cannot_be_reduced_is_refused(value: Any, axis: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        reduce("SUM", value, axis)


@pytest.mark.parametrize(
    ("value", "axis", "error", "message"),
    [
        (PerReplica([torch.ones(2)] * 2), -1, ValueError, "not negative"),
        (PerReplica([torch.ones(2)] * 2), 1, ValueError, "out of range"),
        (PerReplica([torch.ones(2)] * 2), None, TypeError, "one axis"),
        (PerReplica([torch.ones(2)] * 2), [0], TypeError, "one axis"),
        (PerReplica([1, 2]), 0, ValueError, "found scalars"),
        (PerReplica([torch.ones(2), torch.ones(2, 1)]), 0, ValueError, "same number of dimensions"),
        (PerReplica([torch.ones(2, 2), torch.ones(2, 1)]), 0, ValueError, "equal sizes outside axis"),
        (PerReplica([torch.ones(2), torch.ones(2).double()]), 0, ValueError, "one dtype on all replicas"),
        (torch.ones(2), 0, ValueError, "bare Tensor"),
    ],
)
def test_what_cannot_be_gathered_is_refused(value: Any, axis: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gather(value, axis)


# Over real ranks


SIZES_AND_SPLITS = [(2, 1), (3, 1), (2, 2)]  # (ranks, replicas in each)


def wrong_cases(replicas_per_rank: int) -> tuple[int, list[Any]]:
    """The number of cases for so many replicas, and those that came out wrong."""
    strategy = Strategy(devices=["cpu"] * replicas_per_rank)
    cases = [case for case in VALUES if len(case["values"]) == strategy.num_replicas_in_sync]
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


def context() -> Any:
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
    found = strategy.local_results(strategy.run(step, (PerReplica(xs),)))
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


def reduce_over_the_data_dim_of_a_mesh() -> tuple[float, float, list[int], list[int]]:
    strategy = Strategy(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp")), data_dims=["dp"])
    worker = strategy.input_pipeline_id
    rows = torch.arange(3) if worker == 0 else torch.tensor([10])
    return (
        strategy.reduce("SUM", float(worker + 1)).item(),
        strategy.reduce("MEAN", rows, 0).item(),
        strategy.gather(rows, 0).tolist(),
        strategy.gather_ordered(20 - rows, rows).tolist(),
    )


def test_ranks_that_share_their_data_count_once() -> None:
    assert run_ranks(4, reduce_over_the_data_dim_of_a_mesh) == [(3.0, 13 / 4, [0, 1, 2, 10], [10, 2, 1, 0])] * 4
