"""Files of which each reader takes its part only, as their format tells where each record is; and all others."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pytest
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support.formats import FORMATS, npy
from tests.support.records import records_of
from torchdistinput import SourceError, readers
from torchdistinput.plan.batching import Cutter
from torchdistinput.plan.file_resharding import ReaderCursor
from torchdistinput.plan.topology import AutoShardPolicy, Topology
from torchdistinput.sources.datasets.fragment_dataset import FileDataset
from torchdistinput.sources.datasets.record_rows import RecordRows, RecordStart
from torchdistinput.sources.kernel.batcher import Cut, as_is
from torchdistinput.sources.kernel.read_failures import Failure
from torchdistinput.testing import run_ranks

FILES = {name: each for name, each in FORMATS.items() if each.files}


def written(folder: Path, kind: str) -> list[str]:
    names = [folder / f"{number}.data" for number in range(len(FILES[kind].files))]
    for name, content in zip(names, FILES[kind].files, strict=True):
        name.write_bytes(content)
    return list(map(str, names))


def dataset(folder: Path, kind: str, **options: Any) -> FileDataset:
    return FileDataset(written(folder, kind), FILES[kind].read, **options)


def plain(records: list[Any]) -> list[Any]:
    return [record.tolist() if isinstance(record, np.ndarray) else record for record in records]


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize(("cycle", "block"), [(1, 1), (2, 1), (3, 2)])
def test_slices_of_what_is_reserved_are_those_of_the_whole_walk(
    tmp_path: Path, kind: str, cycle: int, block: int
) -> None:
    """And both readers can be left for each other between any two batches."""
    data = dataset(tmp_path, kind, cycle_length=cycle, block_length=block)
    order = range(len(data.files))
    whole = records_of(data.reader(order, 0))
    for count in (1, 3, 4, 50):
        reader, other, at = data.reader(order, 0, in_ranges=True), data.reader(order, 0), 0
        while reserved := reader.reserve(count):
            size = len(other.take(count))
            assert len(reserved) == size
            for lo in range(size + 1):
                for hi in {lo, size, (lo + size + 1) // 2}:
                    got = [*reserved[lo:hi]]
                    assert plain(got) == plain(whole[at + lo : at + hi])
                    assert list(map(type, got)) == list(map(type, whole[at + lo : at + hi]))
            assert reader.places(0, size) == other.places(0, size)
            at += size
            assert plain(records_of(data.reader(order, 0, reader.position()))) == plain(whole[at:])
            entered = data.reader(order, 0, other.position(), in_ranges=True)
            assert plain([*entered.reserve(3)[:]]) == plain(whole[at : at + 3])
        assert at == len(whole)
        assert not reader.reserve(count)


def cuts(
    data: FileDataset, worker: int, num_workers: int, *, in_ranges: bool, first: int = 0, **options: Any
) -> list[Any]:
    cutter = Cutter(
        Topology(num_workers=num_workers, replicas_per_worker=1, worker=worker), shared=True, global_batch_size=6
    )
    settings = {"by_file": False, "drop_last": False, "with_index": True, **options}
    rows = RecordRows(data, cutter, as_is, in_ranges=in_ranges, **settings)
    found: list[Any] = []
    for cut in rows.of_epoch(0, RecordStart((), ReaderCursor(), first)):
        if isinstance(cut, Failure):
            found.append(str(cut.error))
            break
        assert isinstance(cut, Cut)
        numbers = [[None if each is None else each.tolist() for each in row] for row in cut.numbers or ()]  # type: ignore[union-attr]
        found.append(([[None if piece is None else plain(piece) for piece in row] for row in cut.rows], numbers))
    return found


class Counted:
    """Counts the bytes that are read of files."""

    def __init__(self) -> None:
        self.bytes = 0

    def open(self, _: Any, path: str, **__: Any) -> BinaryIO:
        counted = self

        class File(io.FileIO):
            def read(self, size: int | None = -1, /) -> bytes:
                data = super().read(size) or b""
                counted.bytes += len(data)
                return data

        return cast(BinaryIO, File(path))


@pytest.mark.parametrize("kind", ["fixed", "npy"])
def test_the_workers_together_read_the_files_once(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted()
    monkeypatch.setattr("torchdistinput.sources.storage.io._opened_by", counted.open)
    monkeypatch.setattr("torchdistinput.sources.storage.io._mark_of_ends", lambda _: "")  # which reads too
    large = {
        "fixed": bytes(14_000),
        "npy": npy(np.zeros((1000, 7), np.int32)),
    }[kind]
    monkeypatch.setitem(FILES, kind, FILES[kind]._replace(files=[large]))
    data = dataset(tmp_path, kind)
    header = 128 if kind == "npy" else 0  # which is read by all
    for num_workers in (2, 5):
        counted.bytes = 0
        for worker in range(num_workers):
            assert cuts(data, worker, num_workers, in_ranges=True)
        assert counted.bytes == len(large) - header
        counted.bytes = 0
        for worker in range(num_workers):
            assert cuts(data, worker, num_workers, in_ranges=True, first=1)
        first_batch = (len(large) - header) // len(records_of(data.reader([0], 0))) * 6
        assert counted.bytes == len(large) - header - first_batch


def test_a_file_that_shrinks_while_it_is_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        FILES, "fixed", FILES["fixed"]._replace(read=readers.fixed_length_records(2), files=[b"a\n" * 50])
    )
    data = dataset(tmp_path, "fixed")
    reader = data.reader([0], 0, in_ranges=True)
    reserved = reader.reserve(50)
    Path(data.files[0]).write_bytes(b"a\n" * 20)
    with pytest.raises(SourceError, match=r"0.data: found 5 of the 25 records from number 15 on"):
        reserved[15:40]


def read_as_rank(folder: str, kind: str, num_workers: int) -> tuple[list[Any], Any]:
    """One rank: its parts under DATA, and a state in the middle, from which the rest comes again."""
    names = [f"{folder}/{number}.data" for number in range(len(FILES[kind].files))]
    data = FileDataset(names, FILES[kind].read, cycle_length=2)
    policy = tdi.InputOptions(auto_shard_policy=AutoShardPolicy.DATA)

    def opened() -> Any:
        loader = DataLoader(data, batch_size=3, collate_fn=list, num_workers=num_workers)
        return tdi.Strategy().distribute_dataset(loader, policy)

    with opened() as loader, opened() as other:
        iterator = iter(loader)
        first = [next(iterator), next(iterator)]
        state = loader.state_dict()
        rest = list(iterator)
        other.load_state_dict(state)
        assert list(other) == rest
        return first + rest, state


def read_all_as_rank(folder: str) -> list[tuple[list[Any], Any]]:
    """One rank: read as a whole, or by number, without loader workers and with two."""
    cells = [("text", 0), ("fixed", 0), ("fixed", 2)]
    return [read_as_rank(f"{folder}/{kind}", kind, num_workers) for kind, num_workers in cells]


def test_ranks_deliver_and_resume_what_one_process_reads(tmp_path: Path) -> None:
    wholes = []
    for kind in ("text", "fixed"):
        (tmp_path / kind).mkdir()
        data = FileDataset(written(tmp_path / kind, kind), FILES[kind].read, cycle_length=2)
        wholes.append(records_of(data.reader(range(len(data.files)), 0)))
    first, second = run_ranks(2, read_all_as_rank, str(tmp_path))
    for (one, state), (other, its_state), whole in zip(first, second, [*wholes, wholes[1]], strict=True):
        assert [a + b for a, b in zip(one, other, strict=True)] == [
            whole[at : at + 3] for at in range(0, len(whole), 3)
        ]
        assert state == its_state
