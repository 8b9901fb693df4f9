"""Tar archives on ranks: each sample once, in step, on from a state at another world size, damaged or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.sources.files.test_webdataset import tar
from tests.support.epochs import Raised, steps_until_raised
from tests.support.resume import check_worlds
from torchdistinput import readers
from torchdistinput.testing import run_ranks

SIZES = (5, 9, 0, 3, 1, 7, 12)
G = 4
BAD = 103


def write(folder: Path, *, bad: bool) -> None:
    for shard, size in enumerate(SIZES):
        numbers = [(f"s{shard}/{sample:02}", 100 * shard + sample) for sample in range(size)]
        members = [(f"{key}.{end}", b"%d" % number) for key, number in numbers for end in ("jpg", "id", "cls")]
        lost = (f"s1/{BAD - 100:02}.cls", b"%d" % BAD)
        (folder / f"{shard}.tar").write_bytes(tar([each for each in members if not bad or each != lost]))


def make_loader(folder: str, indexed: bool, workers: int) -> DataLoader[Any]:
    index: Any = {"index_folder": f"{folder}/index"} if indexed else {}
    read = readers.webdataset("auto", ["cls", "id"])
    return DataLoader(tdi.FileDataset(f"{folder}/?.tar", read, map_fn=checked, **index), G, num_workers=workers)


def checked(sample: dict[str, Any]) -> int:
    assert [*sample] == ["__key__", "cls", "id"]
    assert sample["__key__"] == f"s{sample['cls'] // 100}/{sample['cls'] % 100:02}"
    assert sample["id"] == sample["cls"]
    return int(sample["cls"])


@pytest.mark.parametrize(("indexed", "workers"), [(False, 2), (True, 0)])
def test_each_sample_comes_once_over_several_worlds(tmp_path: Path, indexed: bool, workers: int) -> None:
    write(tmp_path, bad=False)
    numbers = [100 * shard + sample for shard, size in enumerate(SIZES) for sample in range(size)]
    batches = [numbers[start : start + G] for start in range(0, len(numbers), G)]
    check_worlds(make_loader, (str(tmp_path), indexed, workers), batches, [(2, 3), (3, 4), (1, 100)], "DATA")


def read_bad(folder: str) -> list[tuple[int, Raised | None] | list[int]]:
    """One rank: what a sample that lacks something raises, and the epoch without it."""
    found: list[Any] = []
    for policy in tdi.AutoShardPolicy.DATA, tdi.AutoShardPolicy.FILE:
        for indexed in (False, True):
            data = make_loader(folder, indexed, 0)
            strategy = tdi.Strategy(["cpu"])
            found.append(
                steps_until_raised(strategy.distribute_dataset(data, tdi.InputOptions(auto_shard_policy=policy)))
            )
            options = tdi.InputOptions(auto_shard_policy=policy, on_error="skip")
            found.append([int(each) for batch in strategy.distribute_dataset(data, options) for each in batch])
    return found


def test_a_sample_that_lacks_something_is_an_error_on_every_rank_or_left_out(tmp_path: Path) -> None:
    write(tmp_path, bad=True)
    ranks: Any = run_ranks(2, read_bad, str(tmp_path))
    one, other = ranks
    whole = sorted({100 * shard + sample for shard, size in enumerate(SIZES) for sample in range(size)} - {BAD})
    for mine, theirs in zip(one, other, strict=True):
        if isinstance(mine, list):
            assert sorted(mine + theirs) == whole
            continue
        (steps, error), (steps_there, error_there) = mine, theirs
        assert steps == steps_there
        for each in (error, error_there):
            assert (each.kind, "the sample 's1/03' at byte" in each.message) == ("SourceError", True)
            assert "1.tar: " in each.message
            assert "'cls' of keys=('cls', 'id') is not there" in each.message
