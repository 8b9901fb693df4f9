"""Hugging Face's streaming datasets: another order in each epoch, and an exact resume with and without a buffer."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support.epochs import lists

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def streaming(*, buffer: int | None) -> Any:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"a": list(range(60))}).to_iterable_dataset(num_shards=4)
    return data if buffer is None else data.shuffle(seed=3, buffer_size=buffer)


def distributed(buffer: int | None, workers: int, options: tdi.InputOptions | None = None) -> Any:
    loader = DataLoader(
        streaming(buffer=buffer), 4, num_workers=workers, multiprocessing_context="fork" if workers else None
    )
    return tdi.Strategy(["cpu"]).distribute_dataset(loader, options)


def flat(epoch: Any) -> list[int]:
    return [number for batch in epoch for number in lists(batch["a"])]


@pytest.mark.parametrize("workers", [0, 2])
def test_each_epoch_has_another_order(workers: int) -> None:
    with distributed(20, workers) as loader:
        epochs = [flat(loader) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [[*range(60)]] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("buffer", [None, 20])
def test_a_resume_is_exact(buffer: int | None, workers: int) -> None:
    with distributed(buffer, workers) as loader:
        flat(loader)
        iterator = iter(loader)
        for _ in range(6):
            next(iterator)
        state = loader.state_dict()
        rest = [flat(iterator), flat(loader)]
    with distributed(buffer, workers) as resumed:
        resumed.load_state_dict(state)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert [flat(resumed), flat(resumed)] == rest
    again = [str(each.message) for each in told if "read again" in str(each.message)]
    assert len(again) == (buffer is not None)
    assert all("does not hold its shuffle buffer" in each for each in again)


def test_a_state_that_does_not_restore_exactly_is_a_mismatch() -> None:
    use = tdi.InputOptions(own_state="use")
    with distributed(20, 0, use) as loader:
        iterator = iter(loader)
        for _ in range(6):
            next(iterator)
        state = loader.state_dict()
        rest = flat(iterator)
        iterator.close()
    found = []
    for own_state in ("use", "ignore"):
        with distributed(20, 0, tdi.InputOptions(own_state=own_state)) as resumed:
            resumed.load_state_dict(state)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found.append(flat(resumed) == rest)
    assert found == [False, True]
