"""Libraries' sources that divide themselves: refused under DATA with the way out, which then gives each sample once."""

from __future__ import annotations

import io
import random
import tarfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.ecosystem import kinds
from tests.support.epochs import raised
from torchdistinput.testing import run_ranks

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


def read_with_a_sampler_of_lhotse() -> Any:
    loader = tdi.DataLoader(kinds.Speech(), sampler=kinds.lhotse_sampler(), batch_size=None)
    return raised(lambda: list(loader))


def test_a_sampler_of_lhotse_that_divides_is_refused() -> None:
    """It asks for the rank by itself; ``test_kinds.py`` has one that is told of one rank."""
    pytest.importorskip("lhotse")
    for error in run_ranks(2, read_with_a_sampler_of_lhotse, timeout_seconds=120):
        assert error.kind == "RankDisagreement"
        assert "lhotse: rank=0, world_size=1" in error.message


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
