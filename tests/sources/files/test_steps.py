"""The steps of an epoch of files, where they are known by the indices; and the sizes of files."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from torchdistinput import SourceError, readers
from torchdistinput.sources.datasets.record_source import sizes_of

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


# ---------------------------------------------------------------------------------------------------- sizes of files


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
