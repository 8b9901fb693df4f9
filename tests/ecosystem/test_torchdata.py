"""Data with a state of its own, beside torchdata's ``StatefulDataLoader``: the same rest after a resume.

``TORCHDATA_TEST_STATE_DICT=test_state_dict.py pytest tests/ecosystem/test_torchdata.py`` runs torchdata's own tests
with the class exchanged. The file is in ``test/stateful_dataloader`` of its repository; it needs ``expecttest`` and
``parameterized``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler

import torchdistinput as tdi
from tests.data_loader.torch_suite.failures import failures
from tests.data_loader.torch_suite.known_of_torchdata import KNOWN
from tests.support.epochs import lists

OURS = """
import torchdistinput

class StatefulDataLoader(torchdistinput.DataLoader):
    def __init__(self, *args, snapshot_every_n_steps=16, **more):  # which is no argument of ours
        super().__init__(*args, **more)

"""
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]


class Own(IterableDataset[int]):
    """Its own iterator."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Any:
        self.place = 0
        return self

    def __next__(self) -> int:
        if self.place == 11:
            raise StopIteration
        self.place += 1
        return self.place - 1

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Epochs(IterableDataset[int]):
    """Counts its epochs in its state."""

    def __init__(self) -> None:
        self.epoch = -1
        self.place = self.begin = 0

    def __iter__(self) -> Iterator[int]:
        if not self.begin:
            self.epoch += 1
        begin, self.begin = self.begin, 0
        for place in range(begin, 11):
            self.place = place + 1
            yield 100 * self.epoch + place

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.begin = state["epoch"], state["place"]


def left_after(loader: Any, steps: int, epochs: int = 0) -> tuple[Any, list[Any]]:
    """The state after so many steps, and the rest of that epoch with the next one."""
    for _ in range(epochs):
        lists([*loader])
    iterator = iter(loader)
    for _ in range(steps):
        next(iterator)
    state = loader.state_dict()
    return state, [lists(batch) for batch in iterator]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", [Own, Epochs])
def test_the_rest_is_that_of_torchdatas_loader(data: type[Any], workers: int, all_cells: bool) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    for steps in range(1, 6) if all_cells or not workers else (2, 3):  # at a snapshot, and after it
        found = []
        for cls in (torchdata.StatefulDataLoader, tdi.DataLoader):
            arguments: dict[str, Any] = {"batch_size": 2, "num_workers": workers}
            state, rest = left_after(cls(data(), **arguments), steps)
            resumed = cls(data(), **arguments)
            resumed.load_state_dict(json.loads(json.dumps(state)) if cls is tdi.DataLoader else state)
            assert [lists(batch) for batch in resumed] == rest
            found.append(rest)
        assert found[0] == found[1]


def test_between_two_epochs_a_count_of_epochs_goes_on() -> None:
    loader = tdi.DataLoader(Epochs(), batch_size=11)
    assert [lists(next(iter([*loader]))) for _ in range(2)] == [[*range(11)], [*range(100, 111)]]
    state = loader.state_dict()
    resumed = tdi.DataLoader(Epochs(), batch_size=11)
    resumed.load_state_dict(state)
    for epoch in (2, 3):
        assert [lists(batch) for each in (loader, resumed) for batch in each] == [
            [100 * epoch + place for place in range(11)]
        ] * 2


class Numbers(Dataset[int]):
    """Map-style, with a state as torchdata's loader saves it."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("it is not asked")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("it is not asked")


def test_that_the_state_of_map_style_data_is_not_saved_is_said_and_can_be_known() -> None:
    def epoch(own_state: Any) -> list[Any]:
        loader = tdi.DataLoader(Numbers(), batch_size=4, options=tdi.InputOptions(own_state=own_state))
        iterator = iter(loader)
        next(iterator)
        resumed = tdi.DataLoader(Numbers(), batch_size=4, options=tdi.InputOptions(own_state="ignore"))
        resumed.load_state_dict(loader.state_dict())
        return [lists(batch) for batch in resumed]

    with pytest.warns(UserWarning, match="map-style Numbers is neither saved nor restored.*seed_samples=True"):
        assert epoch("auto") == [[4, 5, 6, 7], [8, 9]]
    assert epoch("ignore") == [[4, 5, 6, 7], [8, 9]]
    with pytest.raises(tdi.InputError, match='own_state="use" was given, but the state_dict'):
        epoch("use")


def test_an_empty_state_changes_nothing_and_is_said_to_be_none(caplog: pytest.LogCaptureFixture) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    for cls in (torchdata.StatefulDataLoader, tdi.DataLoader):
        loader = cls(Own(), batch_size=6)
        loader.load_state_dict({})
        assert [lists(batch) for batch in loader] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    numbers: Any = range(11)
    sought: tdi.DataLoader[Any] = tdi.DataLoader(numbers, batch_size=6)
    sought.seek(3, 1)
    sought.load_state_dict({})
    told = [record.getMessage() for record in caplog.records]
    assert all("stands for no state, as in torchdata's loaders" in text for text in told)
    assert [text[-16:] for text in told] == ["epoch 0, step 0.", "epoch 3, step 1."]
    assert [lists(batch) for batch in sought] == [[6, 7, 8, 9, 10]]


def nodes_over(sampler: Any) -> tdi.DistributedDataset:
    nodes: Any = pytest.importorskip("torchdata.nodes")
    read = nodes.ParallelMapper(nodes.MapStyleWrapper(range(103), sampler), int, num_workers=2, method="thread")
    return tdi.Strategy(["cpu"]).distribute_dataset(nodes.Loader(read), global_batch_size=10)


@pytest.mark.parametrize("draws_itself", [False, True])
def test_nodes_go_on_in_a_later_epoch_where_their_sampler_does(draws_itself: bool) -> None:
    """A sampler with a generator of its own has drawn on: a node does not save it, and begins it anew."""

    def made() -> Any:
        generator = torch.Generator().manual_seed(3)
        return nodes_over(
            RandomSampler(range(103), generator=generator) if draws_itself else tdi.ShuffleSampler(103, 3)
        )

    with made() as loader:
        state, rest = left_after(loader, 4, epochs=1)
    with made() as resumed:
        resumed.load_state_dict(json.loads(json.dumps(state)))
        if draws_itself:
            with pytest.raises(tdi.StateMismatch, match="own state does not restore it exactly"):
                list(resumed)
        else:
            assert [lists(batch) for batch in resumed] == rest


def test_torchdatas_own_tests_pass_but_for_those_listed(tmp_path: Path) -> None:
    if "TORCHDATA_TEST_STATE_DICT" not in os.environ:
        pytest.skip("TORCHDATA_TEST_STATE_DICT is not set: the path of test_state_dict.py of torchdata's repository")
    content = Path(os.environ["TORCHDATA_TEST_STATE_DICT"]).read_text()
    theirs = "from torchdata.stateful_dataloader import Stateful, StatefulDataLoader\n"
    assert content.count(theirs) == 1
    assert failures(content.replace(theirs, theirs + OURS), tmp_path) == set(KNOWN)
