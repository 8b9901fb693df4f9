"""Data that cannot be distributed is refused when it is given, with the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torchdistinput as tdi

LOADER: Any = DataLoader(TensorDataset(torch.arange(8)))


class WithoutLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def distribute(data: Any) -> object:
    return tdi.Strategy(["cpu"]).distribute_dataset(data, global_batch_size=4)


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda: distribute(WithoutLength()), tdi.InputError, "a WithoutLength .* without __len__.* Add __len__"),
        (lambda: distribute(3), tdi.InputError, "found data of type int; a DataLoader, a Dataset, .* is needed"),
        (lambda: distribute("a.csv"), tdi.InputError, "found data of type str, which is no dataset. Give FileDataset"),
        (lambda: tdi.Packed(WithoutLength(), 4), TypeError, "found a WithoutLength"),
        (lambda: tdi.Packed({1, 2}, 4), TypeError, "found a set"),
    ],
    ids=["no length", "int", "str", "packs without a length", "packs of a set"],
)
def test_other_data_is_refused_with_the_way_out(
    use: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        use()


def test_a_sampler_of_the_users_own_stands_for_the_length() -> None:
    loader = DataLoader(WithoutLength(), batch_sampler=[[3, 1], [2, 0]])
    assert [batch.tolist() for batch in tdi.Strategy(["cpu"]).distribute_dataset(loader)] == [[3, 1], [2, 0]]
