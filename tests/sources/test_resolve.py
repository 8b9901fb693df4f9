"""Which policy a source gets, what a collate function makes of samples, and datasets that wrap others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

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


SAMPLES = TensorDataset(torch.arange(22), torch.arange(22) * 2.0)


def batch_sampler(*, seed: int, batch_size: int, drop_last: bool = False) -> BatchSampler:
    generator = torch.Generator().manual_seed(seed)
    return BatchSampler(RandomSampler(range(22), generator=generator), batch_size, drop_last)


def put_together(parts: list[list[Any]]) -> list[torch.Tensor]:
    return [torch.cat(pieces) for pieces in zip(*parts, strict=True)]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("batch_size", "num_replicas"), [(6, 2), (8, 3), (5, 2), (22, 4)])
def test_the_parts_of_a_batch_sampler_put_together_are_its_batches(
    batch_size: int, num_replicas: int, num_workers: int
) -> None:
    parts = []
    for rank in range(num_replicas):
        sampler = tdi.DistributedBatchSampler(batch_sampler(seed=3, batch_size=batch_size), num_replicas, rank)
        loader = DataLoader(SAMPLES, batch_sampler=sampler, num_workers=num_workers)
        parts.append([x for x, _ in loader])
        assert len(parts[-1]) == len(sampler) == len(loader)
    whole = [x for x, _ in DataLoader(SAMPLES, batch_sampler=batch_sampler(seed=3, batch_size=batch_size))]
    assert [batch.tolist() for batch in put_together(parts)] == [batch.tolist() for batch in whole]


def test_a_batch_that_leaves_a_replica_empty_is_refused_at_construction_and_the_step_is_named() -> None:
    with pytest.raises(tdi.BatchingError, match=r"batch of step 7 has 1 sample.* replica 1 of 2"):
        tdi.DistributedBatchSampler(batch_sampler(seed=0, batch_size=3), 2, 0)
    with pytest.raises(tdi.BatchingError, match=r"batch of step 0 has 4 sample.* replica 2 of 3"):
        tdi.DistributedBatchSampler(batch_sampler(seed=0, batch_size=4), 3, 1)
    dropped = batch_sampler(seed=0, batch_size=3, drop_last=True)
    assert len(list(tdi.DistributedBatchSampler(dropped, 2, 1))) == 7


def test_a_sampler_of_unknown_sizes_is_refused_when_the_batch_is_drawn() -> None:
    sampler = tdi.DistributedBatchSampler([[0, 1], [2]], 2, 0)
    batches = iter(sampler)
    assert next(batches) == [0]
    with pytest.raises(tdi.BatchingError, match="batch of step 1 has 1 sample"):
        next(batches)


@pytest.mark.parametrize(("num_replicas", "rank"), [(2, 2), (2, -1)])
def test_a_replica_that_does_not_exist_is_refused(num_replicas: int, rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank is {rank}"):
        tdi.DistributedBatchSampler([[0, 1]], num_replicas, rank)
    with pytest.raises(ValueError, match=f"rank is {rank}"):
        tdi.ShardedIterableDataset([torch.zeros(2)], num_replicas, rank)


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_a_number_of_replicas_that_is_none_is_refused(count: Any) -> None:
    with pytest.raises(tdi.BatchingError, match="num_replicas is"):
        tdi.DistributedBatchSampler(BatchSampler(SequentialSampler(range(4)), 2, drop_last=False), count, 0)


def ready_batches() -> Iterator[dict[str, torch.Tensor]]:
    for start in (0, 5, 9):
        yield {"x": torch.arange(start, start + 5), "y": torch.zeros(5, 2) + start}


class Repeated:
    """An iterable without a length."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return ready_batches()


def test_the_parts_of_ready_batches_put_together_are_the_batches() -> None:
    parts = []
    for rank in range(2):
        loader = DataLoader(tdi.ShardedIterableDataset(Repeated(), 2, rank), batch_size=None)
        parts.append([batch["x"] for batch in loader])
    assert [len(piece) for piece in parts[0]] == [3, 3, 3]
    assert [batch.tolist() for batch in put_together(parts)] == [batch["x"].tolist() for batch in ready_batches()]


def test_the_parts_of_samples_put_together_are_torchs_batches() -> None:
    parts = []
    for rank in range(3):
        dataset = tdi.ShardedIterableDataset(range(21), 3, rank, global_batch_size=6)
        parts.append(list(DataLoader(dataset, batch_size=None)))
    whole = [x for (x,) in DataLoader(TensorDataset(torch.arange(21)), batch_size=6)]
    # 20 = 3 * 6 + 2, and two samples over three replicas would leave one of them without any
    with pytest.raises(tdi.BatchingError, match="batch of step 3 has 2 sample"):
        tdi.ShardedIterableDataset(range(20), 3, 0, global_batch_size=6)
    assert [batch.tolist() for batch in put_together(parts)] == [batch.tolist() for batch in whole]


def test_an_empty_piece_of_an_iterable_is_refused_at_its_step() -> None:
    batches = iter(tdi.ShardedIterableDataset([torch.arange(4), torch.arange(1)], 2, 0))
    assert next(batches).tolist() == [0, 1]
    with pytest.raises(tdi.BatchingError, match="batch of step 1 has 1 sample"):
        next(batches)
