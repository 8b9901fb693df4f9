"""What the oracle does not ask of data: lengths, draws in the loop, data without an end, and what is pinned."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ChainDataset, DataLoader, Dataset, SequentialSampler

import torchdistinput as tdi
from tests.data import Count, Repeated
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
