"""Torch loaders that others make of a divided loader's attributes: refused unless something divides them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

import torchdistinput as tdi
from torchdistinput.testing import run_ranks

SAMPLES, BATCH = 12, 4


class Skipping:
    """As frameworks pass over the first batches."""

    def __init__(self, batches: Any, skipped: int) -> None:
        self.batches, self.skipped = batches, skipped

    def __iter__(self) -> Any:
        for number, batch in enumerate(self.batches):
            if number >= self.skipped:
                yield batch


class Wrapping:
    """A batch sampler that is not torch's, around a sampler that is not torch's either."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Any:
        for number in self.batch_sampler:
            yield [number]


class Counting(SequentialSampler):
    """A user's sampler with ``set_epoch``."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def data() -> TensorDataset:
    return TensorDataset(torch.arange(SAMPLES))


def read(loader: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


def refusals() -> list[str]:
    """What is said of each loader that nobody divides."""
    loader = tdi.DataLoader(data(), batch_size=BATCH, shuffle=True)
    wrapping = tdi.DataLoader(data(), batch_sampler=Wrapping(range(SAMPLES)))
    made = [
        DataLoader(loader.dataset, batch_sampler=loader.batch_sampler),
        DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, num_workers=1),
        DataLoader(loader.dataset, batch_size=BATCH, sampler=loader.sampler),
        DataLoader(loader.dataset, batch_sampler=BatchSampler(loader.sampler, 2, drop_last=False)),
        DataLoader(loader.dataset, batch_sampler=Skipping(loader.batch_sampler, 1)),
        DataLoader(loader.dataset, batch_size=BATCH, collate_fn=loader.collate_fn),
        DataLoader(loader.dataset, batch_size=BATCH, sampler=loader.batch_sampler.sampler),
        DataLoader(loader.dataset, batch_sampler=BatchSampler(loader.batch_sampler.sampler, 2, drop_last=False)),
        DataLoader(loader.dataset, batch_size=BATCH, sampler=wrapping.batch_sampler.batch_sampler),
        loader.sampler,
        copy.copy(loader.sampler),
        pickle.loads(pickle.dumps(loader.batch_sampler)),
        tdi.Strategy().distribute_dataset(DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)),
    ]
    told = []
    for each in made:
        with pytest.raises(tdi.InputError) as caught:
            list(each)
        told.append(str(caught.value))
    with pytest.raises(tdi.InputError) as caught:
        loader.collate_fn([loader.dataset[0]])
    told.append(str(caught.value))
    return told


def test_a_torch_loader_of_the_attributes_of_a_divided_one_is_refused_also_without_its_collate_fn() -> None:
    for told in run_ranks(2, refusals):
        assert len(told) == 14
        for message in told:
            assert "with it every rank would read whole batches" in message
            assert "integrations.accelerate.prepare(accelerator, loader)" in message
            assert "loader.seek(epoch, step)" in message
            assert "loader.torch_loader" in message


def divided() -> dict[str, Any]:
    """What is made of the attributes and divided, and what else one may do with them."""
    loader = tdi.DataLoader(data(), batch_size=BATCH, sampler=Counting(data()))
    parts = (loader.dataset, loader.batch_sampler)
    found: dict[str, Any] = {
        "drop-in": read(tdi.DataLoader(parts[0], batch_sampler=parts[1], collate_fn=loader.collate_fn)),
        "with workers": read(
            tdi.DataLoader(parts[0], batch_sampler=parts[1], collate_fn=loader.collate_fn, num_workers=1)
        ),
        "inner sampler": read(tdi.DataLoader(parts[0], batch_size=BATCH, sampler=parts[1].sampler)),
        "inside another": read(tdi.DataLoader(parts[0], batch_sampler=Skipping(parts[1], 0))),
        "by hand": list(loader.torch_loader.batch_sampler or ()),
        "whole": read(loader.torch_loader),
        "kind": (isinstance(loader.sampler, Counting), isinstance(loader.batch_sampler.sampler, Counting)),
        "not": isinstance(loader.sampler, RandomSampler),
        "lengths": (len(loader.sampler), len(loader.batch_sampler), loader.batch_sampler.batch_size),
        "same": repr(loader.sampler) == repr(loader.torch_loader.sampler),
    }
    loader.batch_sampler.sampler = loader.sampler
    found["same inside"] = loader.torch_loader.batch_sampler.sampler is loader.torch_loader.sampler  # type: ignore[union-attr]
    loader.batch_sampler.sampler.set_epoch(5)
    list(loader)
    found["epochs"] = loader.step.epoch, loader.sampler.epoch
    return found


def test_what_is_divided_all_the_same_works_and_the_attributes_look_as_they_are() -> None:
    first, second = run_ranks(2, divided)
    for name in ("drop-in", "with workers", "inner sampler", "inside another"):
        assert first[name] == [[0, 1], [4, 5], [8, 9]], name
        assert second[name] == [[2, 3], [6, 7], [10, 11]], name
    for found in (first, second):
        assert found["by hand"] == found["whole"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        assert found["kind"] == (True, True)
        assert found["not"] is False
        assert found["lengths"] == (12, 3, BATCH)
        assert found["same"] is True
        assert found["same inside"] is True
        assert found["epochs"] == (5, 5)
