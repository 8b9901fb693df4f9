"""What the oracle does not ask of data: lengths, draws in the loop, no end, pinning; samplers that give one part."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

import torchdistinput as tdi
from tests.data import Count, Repeated, Stream
from tests.support import inputs
from tests.support.epochs import cut_by_s, epoch, pieces
from tests.support.platforms import FORK_WARNING


def chained() -> ChainDataset:
    """Has a ``__len__``, but one of its parts has none."""
    return ChainDataset([Count(5), Repeated(3)])


class OfNoLength(Dataset[int]):
    """As a base class says that its children may have a length."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.filterwarnings("ignore:.*is read again from its front")
@pytest.mark.parametrize(
    ("make", "size"),
    [
        (chained, 2),
        (lambda: DataLoader(chained(), batch_size=2), None),
        (lambda: DataLoader(OfNoLength(), batch_size=2, sampler=SequentialSampler(range(8))), None),
    ],
)
def test_data_whose_length_raises_is_read_and_resumed_as_data_without_one(make: Any, size: int | None) -> None:
    strategy = tdi.Strategy(devices=["cpu"])
    dataset = strategy.distribute_dataset(make(), global_batch_size=size)
    whole = epoch(strategy, dataset)
    assert len(whole) == 4
    states = [dataset.state_dict() for _ in dataset]
    with strategy.distribute_dataset(make(), global_batch_size=size) as resumed:
        resumed.load_state_dict(states[1])
        assert epoch(strategy, resumed) == whole[2:]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_draws_in_the_loop_and_after_it_are_those_of_a_loop_over_torchs_loader(prefetch: int) -> None:
    """The sampler draws where torch's would, so a seed gives the same dropout with and without the library."""

    def draws(make: Any) -> list[float]:
        torch.manual_seed(3)
        loader = make(DataLoader(range(23), batch_size=5, shuffle=True))  # type: ignore[arg-type]
        found = [torch.rand(()).item() for _ in range(2) for _ in loader]
        return [*found, torch.rand(()).item()]

    strategy = tdi.Strategy(devices=["cpu"])
    options = tdi.InputOptions(prefetch=prefetch)
    assert draws(lambda data: strategy.distribute_dataset(data, options)) == draws(lambda data: data)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_an_infinite_source_is_delivered_for_as_long_as_it_is_asked(prefetch: int, replicas: int) -> None:
    def endless() -> Iterator[torch.Tensor]:
        return (torch.arange(6 * step, 6 * step + 6) for step in itertools.count())

    strategy = tdi.Strategy(devices=["cpu"] * replicas)
    dataset = strategy.distribute_dataset(endless, tdi.InputOptions(prefetch=prefetch))
    for _ in range(2):
        found = [pieces(strategy, element) for element in itertools.islice(dataset, 20)]
        assert found == [cut_by_s(batch, replicas) for batch in itertools.islice(endless(), 20)]
    with pytest.raises(TypeError):
        len(dataset)
    dataset.close()


def test_an_iterator_has_the_step_of_its_own_last_batch() -> None:
    strategy = tdi.Strategy(devices=["cpu"])
    dataset = strategy.distribute_dataset(DataLoader(range(8), batch_size=2))  # type: ignore[arg-type]
    first, second = iter(dataset), iter(dataset)
    next(first)
    next(first)
    next(second)
    assert (first.step.epoch, first.step.index) == (0, 1)
    assert (second.step.epoch, second.step.index) == (1, 0)
    first.close()
    second.close()


def test_arrays_become_tensors() -> None:
    strategy = tdi.Strategy(devices=["cpu"] * 2)
    batches = [torch.arange(4, dtype=torch.float32).numpy()]
    ((element),) = strategy.distribute_dataset(lambda: batches)
    assert [(value.dtype, value.tolist()) for value in element.values] == [
        (torch.float32, [0.0, 1.0]),
        (torch.float32, [2.0, 3.0]),
    ]


@pytest.mark.parametrize("kind", ["map", "iterable", "files", "drop-in", "function"])
@pytest.mark.parametrize("workers", [0, 1])
def test_what_goes_to_a_device_is_pinned_for_that_and_not_before(
    kind: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    inputs.write_numbers(tmp_path)
    data: dict[str, Any] = {"iterable": Count(7), "files": inputs.numbers_of(tmp_path)}
    make: Any = tdi.DataLoader if kind == "drop-in" else DataLoader
    loader = make(data.get(kind, range(7)), batch_size=2, pin_memory=True, num_workers=workers)
    strategy = tdi.Strategy(["cpu"])
    distribute: Any = strategy.distribute_dataset
    given = loader
    if kind == "function":
        distribute, given = strategy.distribute_datasets_from_function, lambda _: loader
    monkeypatch.setattr(tdi.Strategy, "_on_host", False)
    warnings.filterwarnings("ignore", FORK_WARNING)
    found = [batch.tolist() for batch in distribute(given)]
    assert [str(each.message) for each in recwarn] == []  # torch's loader says that there is nothing to pin for
    assert loader.pin_memory
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="no accelerator is found"):
        assert found == [batch.tolist() for batch in loader]


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


def test_the_parts_of_ready_batches_put_together_are_the_batches() -> None:
    parts = []
    for rank in range(2):
        loader = DataLoader(tdi.ShardedIterableDataset(Stream(ready_batches), 2, rank), batch_size=None)
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
