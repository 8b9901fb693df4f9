"""The laws of reduce and gather in one process; ``test_reduce_on_ranks.py`` has them over real ranks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torchdistinput.batches.per_replica import PerReplica, ReduceOp
from torchdistinput.coordination import reduce as reductions

CPU = torch.device("cpu")


def reduce(op: Any, value: Any, axis: Any = None, num_local: int = 2) -> Any:
    return reductions.reduce(op, value, axis, num_local=num_local, workers=None, device=CPU)


def gather(value: Any, axis: Any, num_local: int = 2) -> Any:
    return reductions.gather(value, axis, num_local=num_local, workers=None, device=CPU)


def same(found: Any, want: Tensor) -> None:
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------------------------------------ reduce


def test_mean_over_an_axis_is_the_mean_of_the_rows_for_every_cut_of_them() -> None:
    rows = torch.arange(10, dtype=torch.float64).reshape(5, 2)
    for first, second in itertools.combinations_with_replacement(range(6), 2):
        parts = PerReplica([rows[:first], rows[first:second], rows[second:]])
        same(reduce("MEAN", parts, 0, 3), rows.mean(dim=0))
        same(reduce("SUM", parts, 0, 3), rows.sum(dim=0))
        same(reduce("MEAN", parts, [0, 1], 3), rows.mean())
        same(gather(parts, 0, 3), rows)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_floats_keep_their_dtype(dtype: torch.dtype) -> None:
    values = PerReplica([torch.tensor([1.0, 2.0]).to(dtype), torch.tensor([3.0, 5.0]).to(dtype)])
    same(reduce("MEAN", values), torch.tensor([2.0, 3.5]).to(dtype))


def test_the_mean_of_no_row_at_all_is_nan_and_the_sum_zero() -> None:
    nothing = PerReplica([torch.zeros(0, 2, dtype=torch.int32)] * 2)
    same(reduce("MEAN", nothing, 0), torch.full((2,), float("nan"), dtype=torch.float64))
    same(reduce("SUM", nothing, 0), torch.zeros(2, dtype=torch.int32))


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


# ------------------------------------------------------------------------------------------------ gather


def test_gather_takes_uneven_sizes_along_any_axis_in_replica_order() -> None:
    whole = torch.arange(24).reshape(2, 6, 2)
    parts = PerReplica([whole[:, :1], whole[:, 1:1], whole[:, 1:]])
    same(gather(parts, 1, 3), whole)


def test_gather_of_nothing_is_nothing_of_the_right_shape() -> None:
    assert gather(PerReplica([torch.zeros(0, 3, dtype=torch.int16)] * 2), 0).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.bfloat16, torch.complex64])
def test_gather_takes_every_dtype(dtype: torch.dtype) -> None:
    assert gather(PerReplica([torch.ones(1, dtype=dtype)] * 2), 0).dtype == dtype


def test_a_structure_is_gathered_leaf_by_leaf() -> None:
    found = gather({"ids": PerReplica([torch.tensor([1]), torch.tensor([2, 3])])}, 0)
    same(found["ids"], torch.tensor([1, 2, 3]))


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


def test_a_bad_axis_is_refused_at_every_number_of_replicas() -> None:
    for replicas in (1, 2):
        with pytest.raises(ValueError, match="not negative"):
            gather(PerReplica([torch.ones(2)] * replicas), -1, replicas)
