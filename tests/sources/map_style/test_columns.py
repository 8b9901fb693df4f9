"""Rows of one column: the same to the last bit whoever gathers them, of the memory that the column has now."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchdistinput.sources.map_style.columns import Column, column_of

PLACES = np.random.default_rng(0).integers(0, 40_000, 30_000)


def opened(column: object) -> Column:
    found = column_of(column)
    assert found is not None
    return found


def alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
    same = found.dtype is expected.dtype and found.shape == expected.shape and found.stride() == expected.stride()
    return same and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("rows", [3, 4_000, 30_000])
def test_rows_are_those_of_torch_for_batches_of_every_size(dtype: torch.dtype, rows: int) -> None:
    tensor = torch.randn(40_000, 3).to(dtype)
    column, places = opened(tensor), PLACES[:rows]
    assert alike(column.take(places), tensor[torch.from_numpy(places)])
    assert alike(column.cut(7, 7 + rows), tensor[7 : 7 + rows].clone())


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_numbers_that_torch_cannot_gather_are_gathered_too(dtype: torch.dtype) -> None:
    tensor = torch.arange(40_000).to(dtype)
    assert alike(opened(tensor).take(PLACES), torch.from_numpy(tensor.numpy()[PLACES]))


@pytest.mark.parametrize("place", [40_000, -40_001])
def test_rows_that_are_not_there_are_refused(place: int) -> None:
    column = opened(torch.zeros(40_000, 3))
    for others in (PLACES[:3], PLACES):
        with pytest.raises(IndexError):
            column.take(np.append(others, place))


def test_rows_are_read_where_the_tensor_is_now() -> None:
    other = torch.arange(100.0).view(10, 10)
    moved, grown = torch.zeros(10, 10), torch.zeros(10, 10)
    columns = [opened(moved), opened(grown)]
    moved.data = other
    grown.resize_(1_000, 10).copy_(torch.arange(10_000.0).view(1_000, 10))  # a view would have made that an error
    for column, tensor in zip(columns, (moved, grown), strict=True):
        assert not column.is_still(tensor)
        assert alike(column.take(PLACES[:0] + 3), other[3:3])
        assert alike(column.take(np.array([7, 2])), other[[7, 2]])
        assert alike(column.cut(4, 9), other[4:9])
        assert opened(tensor).is_still(tensor)
        assert not opened(tensor).is_still(tensor.clone())
