"""The steps of an epoch of files: known by the indices under DATA, and told of where FILE makes them more."""

from __future__ import annotations

import gzip
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from torchdistinput import SourceError, readers
from torchdistinput.plan.batching import Cutter
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.datasets.steps import sizes_of, skew_warning
from torchdistinput.testing import run_ranks

UNEVEN = (11, 9, 73, 10)  # 103 records: worker 2 of 3 has 73
EVEN = (26, 26, 26, 26, 26, 26)


def write(folder: Path, sizes: tuple[int, ...]) -> str:
    """Files of so many lines of 4 bytes."""
    folder.mkdir(exist_ok=True)
    for number, size in enumerate(sizes):
        (folder / f"{number}.txt").write_text("".join(f"{number}{record:02}\n" for record in range(size)))
    return str(folder / "*.txt")


def lines(files: Any, **more: Any) -> tdi.FileDataset:
    return tdi.FileDataset(files, readers.text_lines, **more)


# ------------------------------------------------------------------------------------------------- a known length


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_length_of_files_that_know_their_records_is_the_number_of_steps(drop_last: bool, tmp_path: Path) -> None:
    for number, records in enumerate(UNEVEN):
        (tmp_path / f"{number}.bin").write_bytes(b"abc" * records)
    pattern, names = str(tmp_path / "*.bin"), sorted(map(str, tmp_path.iterdir()))
    for files in (pattern, [*names, names[1]]):
        dataset = tdi.FileDataset(files, readers.fixed_length_records(3), shuffle_files=True, shuffle_buffer=5)
        drop_in = tdi.DataLoader(dataset, batch_size=10, drop_last=drop_last)
        distributed = tdi.Strategy().distribute_dataset(DataLoader(dataset, batch_size=10, drop_last=drop_last))
        steps = sum(1 for _ in drop_in)
        assert steps == (103 if files is pattern else 112) // 10 + (not drop_last)
        assert len(drop_in) == len(iter(drop_in)) == len(distributed) == steps


def test_of_other_files_the_length_is_unknown(tmp_path: Path) -> None:
    pattern = write(tmp_path / "data", (3, 4))
    (tmp_path / "2.bin.gz").write_bytes(gzip.compress(b"1\n2\n"))
    compressed = tdi.FileDataset(str(tmp_path / "2.*"), readers.fixed_length_records(2))
    for unknown in (lines(pattern), compressed):
        with pytest.raises(TypeError, match="not known before the"):
            len(tdi.DataLoader(unknown, batch_size=2))
        with pytest.raises(TypeError, match="not known before the"):
            len(tdi.Strategy().distribute_dataset(unknown, global_batch_size=2))


# ------------------------------------------------------------------------------------------------------- uneven files


def told(dataset: tdi.FileDataset, workers: int = 3, *, drop_last: bool = False) -> str:
    topology = Topology(num_workers=workers, replicas_per_worker=1, worker=0)
    return skew_warning(dataset, Cutter(topology, shared=False, global_batch_size=10), drop_last=drop_last)


def test_uneven_files_are_told_of_by_what_is_known(tmp_path: Path) -> None:
    pattern = write(tmp_path / "data", UNEVEN)
    by_bytes = told(lines(pattern))
    assert "4 file(s) out to 3 data-parallel ranks: rank 2 reads 71% of the bytes, rank 1 9%" in by_bytes
    assert "An epoch takes about 2.1 times as many steps as under policy DATA" in by_bytes
    assert "AutoShardPolicy.DATA" in by_bytes
    names = sorted(map(str, (tmp_path / "data").iterdir()))
    by_names = told(lines(names))
    assert "rank 0 reads 50% of the files, rank 1 25%" in by_names
    assert "If the files are of one size, an epoch takes about 1.5 times as many steps" in by_names


def test_of_even_files_nothing_is_told(tmp_path: Path) -> None:
    pattern = write(tmp_path / "data", EVEN)
    for dataset in (lines(pattern), lines(sorted(map(str, (tmp_path / "data").iterdir())))):
        assert not told(dataset)
    assert not told(lines(write(tmp_path / "empty", (0, 0, 0))))


def test_files_by_size_are_told_of_by_their_shares(tmp_path: Path) -> None:
    dataset = lines(write(tmp_path, (11, 9, 20, 10)))
    topology = Topology(num_workers=3, replicas_per_worker=1, worker=0)
    cutter = Cutter(topology, shared=False, global_batch_size=10)
    sizes = sizes_of(dataset)
    assert sizes == [44, 36, 80, 40]
    assert "rank 0 reads 42% of the bytes" in skew_warning(dataset, cutter, drop_last=False)
    assert not skew_warning(dataset, cutter, sizes, drop_last=False)


def test_sizes_are_asked_for_where_no_folder_was_listed_and_no_file_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = write(tmp_path, (2, 1))
    monkeypatch.setattr("torchdistinput.sources.storage.io._opened_by", None)
    names = [f"{tmp_path}/1.txt", pattern]
    dataset = lines(names)
    assert dataset.num_bytes() is None
    assert sizes_of(dataset) == [4, 8, 4] == dataset.num_bytes()
    with pytest.raises(SourceError, match=r"9\.txt: cannot be read"):
        sizes_of(lines([pattern, f"{tmp_path}/9.txt"]))


class Unsized:
    """A source that does not know how large its fragments are."""

    def fragments(self) -> list[tdi.Fragment]:
        return [tdi.Fragment("a"), tdi.Fragment("b", num_bytes=1)]

    def read(self, fragment: tdi.Fragment, position: Any) -> Any:
        yield 0, [fragment.name]


def test_data_without_sizes_and_without_files_is_not_divided_by_size() -> None:
    options = tdi.InputOptions(file_assignment="by_size", auto_shard_policy=tdi.AutoShardPolicy.FILE)
    with pytest.raises(tdi.ShardingError, match="needs the size of each fragment, and one of them is not known"):
        tdi.Strategy(["cpu"]).distribute_dataset(Unsized(), options, global_batch_size=2)
    for data in (range(3), [torch.zeros(2)]):
        with pytest.raises(tdi.ShardingError, match="divides files or fragments, and the data has none"):
            tdi.Strategy(["cpu"]).distribute_dataset(data, tdi.InputOptions(file_assignment="by_size"))
    with pytest.raises(ValueError, match="file_assignment is 'size'; it must be 'in_turn' or 'by_size'"):
        tdi.InputOptions(file_assignment="size")  # type: ignore[arg-type]


def steps_and_what_was_told(pattern: str, policy: str) -> tuple[int, list[str]]:
    """One rank: its steps of two epochs, and the warnings."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchdistinput").addHandler(handler)
    options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy[policy])
    loader = tdi.Strategy().distribute_dataset(lines(pattern), options, global_batch_size=10)
    return sum(1 for _ in range(2) for _ in loader), messages


def test_where_auto_becomes_file_the_first_worker_tells_of_uneven_files_once(tmp_path: Path) -> None:
    pattern = write(tmp_path / "data", UNEVEN)
    auto = run_ranks(3, steps_and_what_was_told, pattern, "AUTO")
    assert [steps for steps, _ in auto] == [48] * 3
    assert [len(messages) for _, messages in auto] == [1, 0, 0]
    assert "rank 2 reads 71% of the bytes" in auto[0][1][0]
