"""Files in parts: each record is in one part, whichever way the parts are read, and each part is entered anywhere."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import torchdistinput as tdi
from tests.sources.files.test_ranges import FILES, dataset, plain, written
from tests.support.records import records_of
from torchdistinput import FileDataset, SourceError, readers
from torchdistinput.sources.formats.text import next_line
from torchdistinput.testing import run_ranks

KINDS = [kind for kind in FILES if kind not in ("tfrecords", "tar")]
SIZES = (7, 300)


@pytest.mark.parametrize("largest", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_record_is_in_one_part_and_each_part_is_entered_anywhere(kind: str, largest: int, tmp_path: Path) -> None:
    whole = dataset(tmp_path, kind)
    wanted = plain(records_of(whole.reader(range(len(whole.names)), 0)))
    sizes = [Path(name).stat().st_size for name in whole.files]
    largest = max(largest, max(sizes) // 30)
    data = FileDataset(whole.files, FILES[kind].read, fragment_bytes=largest)
    assert data.files == whole.files
    assert len(data.names) == sum(max(1, -(-size // largest)) for size in sizes)
    order = range(len(data.names))
    assert plain(records_of(data.reader(order, 0))) == wanted
    for in_ranges, count in itertools.product((False, True), (1, 3)):
        reader, at = data.reader(order, 0, in_ranges=in_ranges), 0
        while taken := reader.reserve(count)[:] if in_ranges else reader.take(count):
            assert plain([*taken]) == wanted[at : at + count]
            at += len(taken)
            rest = data.reader(order, 0, reader.position(), in_ranges=not in_ranges)
            assert plain([*rest.take(2)] if in_ranges else [*rest.reserve(2)[:]]) == wanted[at : at + 2]
        assert at == len(wanted)


def test_parts_are_found_by_sizes_and_no_file_is_opened_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = written(tmp_path, "text")
    monkeypatch.setattr("torchdistinput.sources.storage.io._opened_by", None)
    data = FileDataset([*names, f"{tmp_path}/*.data"], readers.text_lines, fragment_bytes=9)
    assert data.names[:3] == (f"{names[0]}[0:5]", f"{names[0]}[5:10]", names[1])
    assert data.num_bytes() == [5, 5, 0, 9, 9, 8] * 2


def test_compressed_files_stay_whole_and_one_that_hides_it_is_read_with_its_first_part(tmp_path: Path) -> None:
    content = b"".join(b"line %d\n" % number for number in range(50))
    (tmp_path / "a.gz").write_bytes(gzip.compress(content))
    lines = content.decode().splitlines()
    data = FileDataset(f"{tmp_path}/a.gz", readers.text_lines, fragment_bytes=10)
    assert data.names == data.files
    assert list(data) == lines
    hidden = FileDataset(f"{tmp_path}/a.gz", readers.npy_rows, compression=None, fragment_bytes=10)
    with pytest.raises(SourceError, match=r"a\.gz: this is not a \.npy file"):
        list(hidden)


def test_lines_longer_than_a_part_leave_parts_without_a_record(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 300_000 + b"\n" + b"y\n" * 3)
    data = FileDataset(f"{tmp_path}/a.txt", readers.text_lines, fragment_bytes=50_000)
    found = [len(records_of(data.reader([part], 0))) for part in range(len(data.names))]
    assert found == [1, 0, 0, 0, 0, 0, 3]
    with (tmp_path / "a.txt").open("rb") as file:
        assert [next_line(file, at) for at in (0, 1, 300_000, 300_001, 300_002, 300_007)] == [
            0, 300_001, 300_001, 300_001, 300_003, 300_007,
        ]  # fmt: skip


def test_a_file_that_changed_since_it_was_cut_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1\n2\n3\n")
    data = FileDataset(f"{tmp_path}/a.txt", readers.text_lines, fragment_bytes=2)
    (tmp_path / "a.txt").write_text("1\n2\n3\n4\n")
    with pytest.raises(SourceError, match=r"a\.txt\[0:2\]: the file has 8 bytes, but had 6 when it was cut in parts"):
        list(data)


@pytest.mark.parametrize("read", [readers.csv_rows, readers.tfrecords, readers.webdataset(), iter])
def test_readers_whose_files_cannot_be_cut_are_refused(read: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fragment_bytes was given with the reader .*, whose files cannot be read in"):
        FileDataset(["a"], read, fragment_bytes=100)
    with pytest.raises(ValueError, match="fragment_bytes must be at least 1"):
        FileDataset(["a"], readers.text_lines, fragment_bytes=0)


def test_parts_of_parquet_have_records_of_some_row_groups(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"x": range(50), "y": range(50)}), tmp_path / "a.parquet", row_group_size=16)
    whole = FileDataset(f"{tmp_path}/a.parquet", readers.parquet(["x"]))
    data = FileDataset(f"{tmp_path}/a.parquet", readers.parquet(["x"]), fragment_bytes=300)
    assert len(data.names) > 3
    assert {*(data.num_records(opens=True) or ())} == {0, 2, 16}
    assert sum(data.num_records(opens=True) or []) == 50
    for in_ranges in (False, True):
        reader = data.reader(range(len(data.names)), 0, in_ranges=in_ranges)
        found = [[*(reader.reserve(7)[:] if in_ranges else reader.take(7))] for _ in range(8)]
        assert [record for records in found for record in records] == list(whole)


# --------------------------------------------------------------------------------------------------------- on ranks

LINES = {0: range(1000, 1090), **{number: range(1000 * number + 1000, 1000 * number + 1006) for number in range(1, 16)}}
"""16 files, half of everything in the first."""


def shares(folder: str) -> list[int]:
    """One rank: how many records it gets, of text and of arrays."""
    options = tdi.InputOptions(file_assignment="by_size", auto_shard_policy=tdi.AutoShardPolicy.FILE)
    found = []
    for end, read, largest in (("text", readers.text_lines, 20), ("npy", readers.npy_rows, 100)):
        data = FileDataset(f"{folder}/*.{end}", read, fragment_bytes=largest)
        loader = tdi.Strategy(["cpu"]).distribute_dataset(data, options, global_batch_size=4)
        found.append(sum(len(batch) for batch in loader))
    return found


def test_parts_are_dealt_evenly(tmp_path: Path) -> None:
    for number, values in LINES.items():
        (tmp_path / f"{number:02}.text").write_text("".join(f"{value}\n" for value in values))
        np.save(tmp_path / f"{number:02}.npy", np.array(values))
    total = sum(map(len, LINES.values()))
    for of_ranks in zip(*run_ranks(3, shares, str(tmp_path)), strict=True):
        assert sum(of_ranks) == total
        assert max(of_ranks) <= 1.1 * total / 3, of_ranks
