"""Data with a state of its own, beside torchdata's ``StatefulDataLoader``: the same rest after a resume."""

from __future__ import annotations

import io
import json
import random
import tarfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

import torchdistinput as tdi
from tests.ecosystem import test_kinds as kinds
from tests.support.epochs import lists, raised
from torchdistinput.testing import run_ranks

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


SAMPLES = 103
SHARDS = 4


def write_tars(folder: Path) -> list[str]:
    names = []
    for shard in range(SHARDS):
        names.append(str(folder / f"{shard}.tar"))
        with tarfile.open(names[-1], "w") as tar:
            for number in range(shard, SAMPLES, SHARDS):
                member = tarfile.TarInfo(f"{number:04}.cls")
                content = str(number).encode()
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return names


def webdataset(names: list[str], splits: bool) -> Any:
    wds = pytest.importorskip("webdataset")
    data = wds.WebDataset(names, nodesplitter=wds.split_by_node if splits else None, shardshuffle=False)
    return data.decode().to_tuple("cls").map(number_of)


def number_of(sample: tuple[int]) -> int:
    return sample[0]


def streamed(_: list[str], splits: bool) -> Any:
    datasets, distributed = pytest.importorskip("datasets"), pytest.importorskip("datasets.distributed")
    data = datasets.Dataset.from_dict({"n": list(range(SAMPLES))}).to_iterable_dataset(num_shards=SHARDS)
    return distributed.split_dataset_by_node(data, dist.get_rank(), dist.get_world_size()) if splits else data


def rows(_: list[str], splits: bool) -> Any:
    datasets, distributed = pytest.importorskip("datasets"), pytest.importorskip("datasets.distributed")
    data = datasets.Dataset.from_dict({"n": list(range(SAMPLES))})
    return distributed.split_dataset_by_node(data, dist.get_rank(), dist.get_world_size()) if splits else data


MAKERS: dict[str, tuple[Callable[..., Any], list[str], str]] = {
    "webdataset": (webdataset, ["nodesplitter=None", "AutoShardPolicy.OFF"], "OFF"),
    "datasets, streamed": (streamed, ["split_dataset_by_node", "AutoShardPolicy.OFF"], "OFF"),
    "datasets": (rows, ["split_dataset_by_node", "distribute_datasets_from_function"], "function"),
}


def read(kind: str, names: list[str], splits: bool, policy: str, workers: int) -> Any:
    data = MAKERS[kind][0](names, splits)
    seen: list[int] = []

    def loop() -> None:
        loader: Any
        if policy == "function":
            of_one = DataLoader(data, batch_size=5, num_workers=workers)
            loader = tdi.Strategy(["cpu"]).distribute_datasets_from_function(lambda _: of_one)
        else:
            options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy[policy])
            loader = tdi.DataLoader(data, batch_size=10, num_workers=workers, options=options)
        with loader:
            for batch in loader:
                seen.extend((batch["n"] if isinstance(batch, dict) else batch).tolist())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return raised(loop), seen


WORKERS = (0, 2)


def read_in_turn(kind: str, names: list[str], ways: list[tuple[bool, str]]) -> list[Any]:
    return [[read(kind, names, splits, policy, workers) for splits, policy in ways] for workers in WORKERS]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_source_that_divides_itself(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("webdataset" if kind == "webdataset" else "datasets")
    names = write_tars(tmp_path)
    _, ways_out, way_out = MAKERS[kind]
    ways = [(True, "DATA"), (True, way_out), (False, "DATA")]
    for workers, ranks in zip(WORKERS, zip(*run_ranks(2, read_in_turn, kind, names, ways), strict=True), strict=True):
        refused, *good = zip(*ranks, strict=True)
        for error, seen in refused:
            assert error.kind == "RankDisagreement", error
            assert all(text in error.message for text in ways_out)
            assert not seen
        for way, of_ranks in zip(ways[1:], good, strict=True):
            assert [error for error, _ in of_ranks] == [None, None]
            samples = sorted(number for _, seen in of_ranks for number in seen)
            assert samples == list(range(SAMPLES)), (way, workers)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("shuffle", ["seed", "rng", "detshuffle"])
def test_a_webdataset_goes_on_in_a_later_epoch_where_its_seed_is_that_of_each_epoch(
    shuffle: str, workers: int, tmp_path: Path
) -> None:
    """Others draw on, or count epochs, in an object that a resume makes anew (workers that do not live on, too)."""
    wds = pytest.importorskip("webdataset")
    names = write_tars(tmp_path)

    def made() -> Any:
        shards: Any = {"shardshuffle": SHARDS, "seed": 1, "detshuffle": shuffle == "detshuffle"}
        data = wds.WebDataset(names, nodesplitter=None, **shards).decode().to_tuple("cls").map(number_of)
        settings = {"rng": random.Random(3)} if shuffle == "rng" else {"seed": 3}
        return tdi.DataLoader(data.shuffle(20, **settings), batch_size=10, num_workers=workers)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is read again
        loader = made()
        epochs = [[batch.tolist() for batch in loader]]
        iterator = iter(loader)
        epochs.append([next(iterator).tolist() for _ in range(4)])
        state = loader.state_dict()
        epochs[1] += [batch.tolist() for batch in iterator]
        resumed = made()
        resumed.load_state_dict(state)
        exact = shuffle == "seed" or workers > 0
        assert (epochs[1] == epochs[0]) == exact
        if exact:
            assert [batch.tolist() for batch in resumed] == epochs[1][4:]
        else:
            with pytest.raises(tdi.StateMismatch, match="other elements came"):
                list(resumed)


# ---------------------------------------------------- streams that drop or repeat samples to make parts of one size

STREAMS = {
    "litdata": (kinds.write_litdata, kinds.litdata_stream),
    "streaming": (kinds.write_mosaicml, kinds.mosaicml_stream),
}


def read_stream(package: str, folder: str, workers: int) -> tuple[Any, list[int], list[int]]:
    """What DATA says; the samples of this rank under OFF; those that the library gives it by itself."""
    make = partial(STREAMS[package][1], Path(folder))

    def numbers(loader: Any) -> list[int]:
        with loader:
            return [number for batch in loader for number in batch["x"].tolist()]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        error = raised(lambda: numbers(tdi.DataLoader(make(), batch_size=10, num_workers=workers)))
    off = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.OFF)
    settings: Any = {"batch_size": 10, "num_workers": workers, "options": off}
    ours = numbers(tdi.DataLoader(make(), **settings))
    with tdi.DataLoader(make(), **settings) as begun:
        iterator = iter(begun)
        part = [number for _ in range(3) for number in next(iterator)["x"].tolist()]
        state = begun.state_dict()
    with tdi.DataLoader(make(), **settings) as resumed:
        resumed.load_state_dict(state)
        assert part + numbers(resumed) == ours
    alone = [
        number for batch in DataLoader(make(), batch_size=5, num_workers=workers) for number in batch["x"].tolist()
    ]
    return error, ours, alone


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("package", STREAMS)
def test_a_stream_is_refused_under_data_and_divided_by_its_own_rule_under_off(
    package: str, workers: int, tmp_path: Path
) -> None:
    pytest.importorskip(package)
    folder = tmp_path / "stream"
    STREAMS[package][0](folder)
    seen = set()
    for error, ours, alone in run_ranks(2, read_stream, package, str(folder), workers, timeout_seconds=120):
        assert error.kind == "RankDisagreement", error
        assert "stream[index]" in error.message
        assert "AutoShardPolicy.OFF" in error.message
        assert sorted(ours) == sorted(alone)
        seen.update(ours)
    assert len(seen) >= kinds.SAMPLES - 1  # LitData drops, so that the parts are of one size; MosaicML repeats
