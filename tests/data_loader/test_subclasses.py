"""Subclasses of the drop-in, written as well-known projects write theirs of torch's loader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.data.dataloader import _DatasetKind, _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

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


# ---------------------------------------------------------------------------------------- torch's private iterators


class _AsTorchsLoader:
    """An iterable dataset that shows torch's private iterators the attributes of a loader, as fastai's does."""

    _IterableDataset_len_called = None
    _auto_collation = drop_last = pin_memory = persistent_workers = False
    _dataset_kind = _DatasetKind.Iterable
    _index_sampler = range(1_000_000)
    generator = multiprocessing_context = None
    prefetch_factor = 2
    timeout = 0
    in_order = True
    pin_memory_device = ""

    def __init__(self, of: OwnLoader, num_workers: int) -> None:
        self.dataset = self
        self.of = of
        self.num_workers = num_workers
        self.collate_fn = as_it_is
        self.worker_init_fn = None

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        return islice(self.of.batches(), number, None, count)

    def check_worker_number_rationality(self) -> None:
        pass


def as_it_is(batch: Any) -> Any:
    return batch


class OwnLoader:
    """A loader that is no torch loader, and reads by torch's private iterators."""

    def __init__(self, samples: int, batch_size: int, num_workers: int = 0) -> None:
        self.data = [*range(samples)]
        self.batch_size = batch_size
        self._inner = _AsTorchsLoader(self, num_workers)

    def batches(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(self.data[start : start + self.batch_size]) for start in self.starts())

    def __len__(self) -> int:
        return len(self.starts())

    def starts(self) -> range:
        return range(0, len(self.data), self.batch_size)

    @contextmanager
    def in_this_process(self) -> Iterator[None]:
        kept, self._inner.num_workers = self._inner.num_workers, 0
        yield
        self._inner.num_workers = kept

    def __iter__(self) -> Iterator[torch.Tensor]:
        kind: Any = _MultiProcessingDataLoaderIter if self._inner.num_workers else _SingleProcessDataLoaderIter
        yield from kind(self._inner)


def parts_of_own_loader(num_workers: int) -> tuple[list[Any], list[int]]:
    strategy = tdi.Strategy()
    loader = strategy.distribute_dataset(OwnLoader(7, 4, num_workers))
    found = [lists([*loader]) for _ in range(2)]
    return found, [loader.step.index, loader.step.global_size or 0]


def test_a_loader_over_torchs_private_iterators_is_divided_as_an_iterable() -> None:
    assert [batch.tolist() for batch in OwnLoader(7, 4, 2)] == [[0, 1, 2, 3], [4, 5, 6]]
    own = OwnLoader(7, 4, 2)
    with own.in_this_process():
        assert len([*own]) == len(own)
    for num_workers in (0, 2):
        first, second = run_ranks(2, parts_of_own_loader, num_workers, timeout_seconds=60)
        assert first == ([[[0, 1], [4, 5]]] * 2, [1, 3])
        assert second == ([[[2, 3], [6]]] * 2, [1, 3])


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
