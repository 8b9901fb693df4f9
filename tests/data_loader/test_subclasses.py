"""Subclasses of the drop-in, written as well-known projects write theirs of torch's loader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import torchdistinput as tdi
from tests.support.epochs import lists
from torchdistinput.testing import run_ranks

Ours: Any = tdi.DataLoader
Torchs: Any = DataLoader


class Endless:
    """Asks for the sampler's epochs one after the other."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


def with_one_iterator(base: Any, unlock: bool) -> Any:
    """One iterator over all epochs: the loader workers never stop.

    Args:
      base: the class.
      unlock: whether torch's own lock is opened for it, as timm's MultiEpochsDataLoader does; else it is gone round, as
        by Ultralytics' InfiniteDataLoader.
    """

    class OneIterator(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            name = "sampler" if self.batch_sampler is None else "batch_sampler"
            self.epoch_length = len(getattr(self, name))
            endless = Endless(getattr(self, name))
            if unlock:
                self._DataLoader__initialized = False
                setattr(self, name, endless)
                self._DataLoader__initialized = True
            else:
                object.__setattr__(self, name, endless)
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            return self.epoch_length

        def __iter__(self) -> Iterator[Any]:
            for _ in range(len(self)):
                yield next(self.iterator)

    return OneIterator


def process_of(rows: list[int]) -> tuple[list[int], int]:
    return rows, os.getpid()


CALLS: dict[str, dict[str, Any]] = {
    "batches": {"batch_size": 3},
    "no batches": {"batch_size": None},
    "loader workers": {"batch_size": 3, "num_workers": 2},
}


@pytest.mark.parametrize("unlock", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_one_iterator_for_all_epochs_gives_torchs_batches(call: str, unlock: bool) -> None:
    found = []
    for base in (Torchs, Ours):
        torch.manual_seed(5)
        loader = with_one_iterator(base, unlock)(range(7), shuffle=True, **CALLS[call])
        found.append((len(loader), [lists([*loader]) for _ in range(3)]))
        with pytest.raises(ValueError, match="batch_sampler attribute should not be set"):
            loader.batch_sampler = [[0]]
    assert found[0] == found[1]


def test_its_loader_workers_are_the_same_in_all_epochs() -> None:
    loader = with_one_iterator(Ours, True)(range(8), batch_size=2, num_workers=2, collate_fn=process_of)
    epochs = [{process for _, process in loader} for _ in range(3)]
    assert len(epochs[0]) == 2
    assert epochs[0] == epochs[1] == epochs[2]
    loader.close()


class Wrapped(tdi.DataLoader[Any]):
    """What most subclasses do: a collate function of their own, and something done to each batch."""

    def __init__(self, data: Any, follow: str = "", **more: Any) -> None:
        more.pop("collate_fn", None)
        self.follow = follow
        super().__init__(data, collate_fn=sorted, **more)

    def __iter__(self) -> Any:
        return ((self.follow, batch) for batch in super().__iter__())


def test_a_subclass_with_attributes_a_collate_function_and_an_iter_of_its_own() -> None:
    loader = Wrapped([3, 1, 2], follow="next", batch_size=2, collate_fn=list)
    assert [*loader] == [("next", [1, 3]), ("next", [2])]
    loader.follow, loader.batches_seen = "after", 2
    assert next(loader.__iter__()) == ("after", [1, 3])


# ------------------------------------------------------------------------------------------------------ on two ranks


def epochs_of_one_iterator(unlock: bool) -> tuple[list[Any], int, str]:
    loader = with_one_iterator(tdi.DataLoader, unlock)(
        range(7), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    )
    found = [lists([*loader]) for _ in range(3)]
    loader.close()
    try:
        data: Any = range(7)
        with_one_iterator(tdi.DataLoader, unlock)(data, batch_size=4, sampler=DistributedSampler(data))
    except tdi.ShardingError as error:
        return found, len(loader), str(error)
    return found, len(loader), "none"


@pytest.mark.parametrize("unlock", [True, False])
def test_one_iterator_for_all_epochs_gives_each_rank_its_part(unlock: bool) -> None:
    whole = with_one_iterator(Torchs, unlock)(
        range(7), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    )
    expected = [lists([*whole]) for _ in range(3)]
    (first, length, refusal), (second, _, _) = run_ranks(2, epochs_of_one_iterator, unlock, timeout_seconds=60)
    assert length == 2
    assert "DistributedSampler" in refusal
    for epochs in zip(first, second, expected, strict=True):
        for one, other, batch in zip(*epochs, strict=True):
            assert one + other == batch
