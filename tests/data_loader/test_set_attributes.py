"""Attributes of the drop-in that are set between epochs count from the next epoch on, as torch's do."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset, get_worker_info

import torchdistinput as tdi
from tests.data import Count, Numbers
from tests.support.epochs import lists

Ours: Any = tdi.DataLoader  # torch's types ask for a Dataset; lists and ranges will do
Torchs: Any = DataLoader


class DrawsWhenAsked:
    """A batch sampler that draws as soon as it is asked for its batches."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(7, generator=self.generator).tolist()
        return iter([order[start : start + 2] for start in range(0, 7, 2)])


def by_worker(rows: list[Any]) -> tuple[list[Any], str]:
    info = get_worker_info()
    return [int(torch.as_tensor(row).sum()) for row in rows], "here" if info is None else f"worker {info.id}"


def with_seed(rows: list[Any]) -> tuple[list[Any], int]:
    """The seed of a loader worker follows from the loader's generator."""
    info = get_worker_info()
    return [int(torch.as_tensor(row).sum()) for row in rows], -1 if info is None else info.seed


def note_it(worker: int) -> None:
    os.environ["OF_A_TEST"] = f"noted in {worker}"


def with_note(rows: list[Any]) -> tuple[int, str]:
    return len(rows), os.environ.get("OF_A_TEST", "nothing")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def collate(loader: Any) -> None:
    loader.collate_fn = by_worker


def workers(loader: Any) -> None:
    loader.num_workers, loader.prefetch_factor, loader.collate_fn = 2, 2, with_seed


def workers_and_back(loader: Any) -> None:
    loader.num_workers, loader.prefetch_factor = 0 if loader.num_workers else 2, 2


def generator(loader: Any) -> None:
    loader.generator, loader.collate_fn, loader.num_workers, loader.prefetch_factor = seeded(9), with_seed, 1, 2


def the_rest(loader: Any) -> None:
    loader.num_workers, loader.prefetch_factor, loader.timeout = 1, 3, 20
    loader.multiprocessing_context, loader.worker_init_fn, loader.collate_fn = "fork", note_it, with_note


LOADERS: dict[str, Callable[[Any], Any]] = {
    "in memory, shuffled": lambda cls: cls(TensorDataset(torch.arange(7)), batch_size=2, shuffle=True),
    "in memory, own generator": lambda cls: cls(range(7), batch_size=2, shuffle=True, generator=seeded(3)),
    "map-style, loader workers": lambda cls: cls(
        Numbers(7), batch_size=2, shuffle=True, generator=seeded(4), num_workers=2
    ),
    "batch sampler that draws": lambda cls: cls(Numbers(7), batch_sampler=DrawsWhenAsked(None)),
    "batch sampler with a generator": lambda cls: cls(Numbers(7), batch_sampler=DrawsWhenAsked(seeded(5))),
    "iterable": lambda cls: cls(Count(7), batch_size=2, generator=seeded(6)),
    "iterable, loader workers": lambda cls: cls(Count(7), batch_size=2, num_workers=2),
    "ShuffleSampler": lambda cls: cls(range(7), batch_size=2, sampler=tdi.ShuffleSampler(7, seed=1)),
    "batches of a ShuffleSampler": lambda cls: cls(
        range(7), batch_sampler=BatchSampler(tdi.ShuffleSampler(7, seed=1), 2, drop_last=False)
    ),
}


CHANGES: list[Callable[[Any], None]] = [collate, workers, workers_and_back, generator, the_rest]


@pytest.mark.parametrize("name", LOADERS)
def test_what_is_set_counts_from_the_next_epoch_on_as_in_torch(
    name: str, all_cells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of loader with one of the changes, in turn; with ``--all-cells`` with each."""
    monkeypatch.delenv("OF_A_TEST", raising=False)
    row = [*LOADERS].index(name)
    for change in CHANGES if all_cells else (CHANGES[row % len(CHANGES)],):
        check_what_is_set(name, change)


def check_what_is_set(name: str, change: Callable[[Any], None]) -> None:
    found = []
    for cls in (Torchs, Ours):
        torch.manual_seed(11)
        loader = LOADERS[name](cls)
        epochs = [lists([*loader]), lists([*loader])]
        for _ in range(2):
            change(loader)
            epochs += [lists([*loader]), lists([*loader])]
        found.append((epochs, torch.get_rng_state().tolist()))
    assert found[1][0] == found[0][0], change
    assert found[1][1] == found[0][1], (change, "the default random state")


def test_an_epoch_that_is_read_goes_on_as_it_began() -> None:
    found = []
    for cls in (Torchs, Ours):
        loader = cls(Numbers(7), batch_size=3)
        before = iter(loader)
        seen = [lists(next(before))]
        loader.collate_fn = by_worker
        after = iter(loader)
        seen += [lists(next(after)), lists(next(before)), lists(next(after)), lists([*before]), lists([*after])]
        found.append(seen)
    assert found[0] == found[1]


def test_epochs_are_counted_on_and_closing_ends_those_that_began_before() -> None:
    loader = Ours(Numbers(7), batch_size=3)
    for _ in range(2):
        for _ in loader:
            pass
    before = iter(loader)
    next(before)
    loader.collate_fn = list
    after = iter(loader)
    next(after)
    assert (before.step.epoch, after.step.epoch) == (2, 3)
    with pytest.raises(tdi.InputError, match="an iterator of this dataset is alive"):
        loader.seek(0)
    loader.close()
    for each in (before, after):
        assert [*each] == []
    loader.seek(1, 2)
    assert [*loader] == [[6]]


@pytest.mark.parametrize("sought", [False, True])
def test_a_place_that_was_loaded_or_sought_stays(sought: bool) -> None:
    make = LOADERS["in memory, own generator"]
    loader = make(Ours)
    expected = [lists([*loader]), lists([*loader])][1]
    loader = make(Ours)
    list(loader)
    epoch = iter(loader)
    next(epoch)
    next(epoch)
    state = loader.state_dict()
    epoch.close()
    loader = make(Ours)
    if sought:
        loader.seek(1, 2)
    else:
        loader.load_state_dict(state)
    loader.collate_fn = torch.tensor
    assert lists([*loader]) == expected[2:]
    assert loader.step.epoch == 1


@pytest.mark.parametrize("name", ["in memory, own generator", "batch sampler with a generator", "ShuffleSampler"])
@pytest.mark.parametrize("change", [generator, workers_and_back])
def test_an_epoch_that_was_begun_and_not_read_is_the_next_one_as_if_it_was_not_begun(
    name: str, change: Callable[[Any], None]
) -> None:
    found = []
    for begins in (False, True):
        loader = LOADERS[name](Ours)
        if begins:
            iter(loader)
        change(loader)
        found.append([lists([*loader]), lists([*loader]), loader.step.epoch])
    assert found[0] == found[1]


def test_loader_workers_that_live_on_keep_what_they_have_as_in_torch(caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for cls in (Torchs, Ours):
        torch.manual_seed(3)
        loader = cls(
            Numbers(7), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True, collate_fn=by_worker
        )
        epochs = [[*loader]]
        with caplog.at_level(logging.WARNING, "torchdistinput"):
            loader.collate_fn, loader.timeout = list, 30
        epochs.append([*loader])
        loader.num_workers, loader.timeout = 0, 0
        epochs += [[*loader], [*loader]]
        found.append((epochs, torch.get_rng_state().tolist()))
        del loader
    assert found[0] == found[1]
    assert "collate_fn was set while loader workers live on" in caplog.text
