"""Files of which each reader takes its part only: by their size, or by an index that is made when asked for."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pytest
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.sources.files.test_webdataset import tar
from tests.support.formats import npy, tfrecord
from tests.support.records import records_of
from torchdistinput import SourceError, readers
from torchdistinput.plan.batching import Cutter
from torchdistinput.plan.file_resharding import ReaderCursor
from torchdistinput.plan.sharding import AutoShardPolicy
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.datasets.file_dataset import FileDataset
from torchdistinput.sources.kernel.cut import Cut, as_is
from torchdistinput.sources.kernel.read_failures import Failure
from torchdistinput.sources.records.record_rows import RecordRows, RecordStart
from torchdistinput.testing import run_ranks

# By reader: files of several lengths, with what each format has of the unusual.
FILES: dict[str, tuple[Any, list[bytes]]] = {
    "fixed": (readers.fixed_length_records(7), [b"", b"abcdefg" * 5, bytes(range(7 * 13)), b"1234567"]),
    "npy": (readers.npy_rows, [npy(np.arange(n * 3).reshape(n, 3)) for n in (5, 13, 1)]),
    "npy of numbers": (readers.npy_rows, [npy(np.arange(n)) for n in (5, 13, 0, 1)]),
    "npy by columns": (readers.npy_rows, [npy(np.asfortranarray(np.arange(12).reshape(6, 2)))]),
    "text": (readers.text_lines, ["\ufeffa\nb\r\n\nd".encode(), b"", b"x\n" * 9, "é\n\n\n\ufeff".encode()]),
    "json": (readers.json_lines, [b"\xef\xbb\xbf1\n\n[2]\n  \n3", b"", b'{"a": 4}\n' * 9, b"\n \n"]),
    "tfrecords": (readers.tfrecords, [tfrecord(*(b"a" * k for k in range(n))) for n in (5, 0, 9)]),
    "tar": (
        readers.webdataset("auto", ["cls", "txt"]),
        [tar([(f"{k}.{end}", b"%d" % k) for k in range(n) for end in ("txt", "no", "cls")]) for n in (5, 0, 9)],
    ),
}
INDEXED = ("text", "json", "tfrecords", "tar")


def written(folder: Path, kind: str) -> list[str]:
    names = [folder / f"{number}.data" for number in range(len(FILES[kind][1]))]
    for name, content in zip(names, FILES[kind][1], strict=True):
        name.write_bytes(content)
    return list(map(str, names))


def dataset(folder: Path, kind: str, **options: Any) -> FileDataset:
    if kind in INDEXED:
        options["index_folder"] = folder / "indices"
    made = FileDataset(written(folder, kind), FILES[kind][0], **options)
    if kind in INDEXED:
        made.build_index()
    return made


def plain(records: list[Any]) -> list[Any]:
    return [record.tolist() if isinstance(record, np.ndarray) else record for record in records]


READERS_THEN = {"text": "text_lines", "json": "json_lines", "tfrecords": "tfrecords"}


@pytest.mark.parametrize("kind", READERS_THEN)
def test_an_index_lies_where_version_0_1_put_it_and_names_the_same_reader(tmp_path: Path, kind: str) -> None:
    data = dataset(tmp_path, kind)
    folder = tmp_path / "indices"
    reader = f"torchdistinput.sources.readers.{READERS_THEN[kind]}"
    for name in data.files:
        path = folder / f"{hashlib.sha256(json.dumps([name, reader]).encode()).hexdigest()[:32]}.index"
        content = path.read_bytes()
        said = int.from_bytes(content[-8:], "little")
        assert json.loads(content[-8 - said : -8])["reader"] == reader


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


@pytest.mark.parametrize("kind", ["fixed", "npy", "text", "json", "tfrecords"])
def test_the_workers_together_read_the_files_once(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted()
    monkeypatch.setattr("torchdistinput.sources.storage.io._opened_by", counted.open)
    monkeypatch.setattr("torchdistinput.sources.storage.io._mark_of_ends", lambda _: "")  # which reads too
    large = {
        "fixed": bytes(14_000),
        "npy": npy(np.zeros((1000, 7), np.int32)),
        "text": b"some line\n" * 1500,
        "json": b"[1, 2, 3]\n" * 1500,
        "tfrecords": tfrecord(*[b"payload"] * 900),
    }[kind]
    monkeypatch.setitem(FILES, kind, (FILES[kind][0], [large]))
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


def index_files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "indices")) if (folder / "indices").exists() else []


def test_an_index_is_made_only_where_it_is_asked_for_and_once(tmp_path: Path) -> None:
    names = written(tmp_path, "text")
    before = sorted(os.listdir(tmp_path))
    list(FileDataset(names, readers.text_lines).reader([0], 0, in_ranges=True).reserve(9)[:])
    assert sorted(os.listdir(tmp_path)) == before
    data = FileDataset([*names, names[0]], readers.text_lines, index_folder=tmp_path / "indices")
    assert index_files(tmp_path) == []
    assert [data.build_index(worker, 3) for worker in range(3)] == [2, 1, 1]
    made = index_files(tmp_path)
    assert (len(made), data.build_index()) == (4, 0)
    assert index_files(tmp_path) == made
    with pytest.raises(ValueError, match="has no index_folder"):
        FileDataset(names, readers.text_lines).build_index()


@pytest.mark.parametrize("reader", [readers.csv_rows, readers.npy_rows, readers.fixed_length_records(3), iter])
def test_a_reader_without_an_index_is_refused(tmp_path: Path, reader: Any) -> None:
    with pytest.raises(ValueError, match="index_folder was given with the reader"):
        FileDataset(["a"], reader, index_folder=tmp_path)


def change_size(file: Path, _: Path) -> None:
    file.write_bytes(file.read_bytes() + b"more\n")


def change_time(file: Path, _: Path) -> None:
    os.utime(file, (1, 1))


def remove_index(_: Path, index: Path) -> None:
    index.unlink()


def cut_index(_: Path, index: Path) -> None:
    index.write_bytes(index.read_bytes()[8:])


def empty_index(_: Path, index: Path) -> None:
    index.write_bytes(b"")


def say_nonsense(_: Path, index: Path) -> None:
    said = json.dumps({"records": "many"}).encode()
    index.write_bytes(said + len(said).to_bytes(8, "little"))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (change_size, r"not the one of which the index .* was made \(size 10 then, 15 now"),
        (change_time, r"not the one of which the index .* was made \(changed .*remove the index"),
        (remove_index, "is not there. Every rank must see the same index_folder"),
        (cut_index, "is damaged; remove it"),
        (empty_index, "is damaged; remove it"),
        (say_nonsense, "is damaged; remove it"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(
    tmp_path: Path, harm: Callable[[Path, Path], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FILES, "text", (readers.text_lines, [b"a\nbb\nccccc"]))
    data = dataset(tmp_path, "text")
    (index,) = (tmp_path / "indices").iterdir()
    harm(Path(data.files[0]), index)
    with pytest.raises(SourceError, match=said) as raised:
        data.reader([0], 0, in_ranges=True).reserve(1)
    assert raised.value.file == data.files[0]
    assert records_of(data.reader([0], 0))[:3] in (["a", "bb", "ccccc"], ["a", "bb", "cccccmore"])


def test_an_index_is_shared_with_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FILES, "text", (readers.text_lines, [b"a\nbb\nccccc"]))
    before = os.umask(0o027)
    try:
        data = dataset(tmp_path, "text")
    finally:
        os.umask(before)
    (index,) = (tmp_path / "indices").iterdir()
    assert index.stat().st_mode & 0o777 == 0o640

    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("torchdistinput.sources.storage.record_index._header_of", refuse)
    with pytest.raises(SourceError, match=r"its index .* cannot be read: PermissionError"):
        data.reader([0], 0, in_ranges=True).reserve(1)


def test_a_file_that_shrinks_behind_its_index_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FILES, "text", (readers.text_lines, [b"a\n" * 50]))
    data = dataset(tmp_path, "text")
    reader = data.reader([0], 0, in_ranges=True)
    reserved = reader.reserve(50)
    Path(data.files[0]).write_bytes(b"a\n" * 20)
    with pytest.raises(SourceError, match=r"0.data: found 5 of the 25 records from number 15 on"):
        reserved[15:40]


def test_an_index_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any, __: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        dataset(tmp_path, "text")
    assert index_files(tmp_path) == []


def test_compressed_files_are_read_as_before(tmp_path: Path) -> None:
    name = tmp_path / "a.txt.gz"
    name.write_bytes(gzip.compress(b"a\nb\nc\n"))
    data = FileDataset([str(name)], readers.text_lines, index_folder=tmp_path / "indices")
    assert data.build_index() == 0
    assert data.reader([0], 0, in_ranges=True).reserve(2)[1:] == ["b"]


def read_as_rank(folder: str, kind: str, num_workers: int) -> tuple[list[Any], Any]:
    """One rank: its parts under DATA, and a state in the middle, from which the rest comes again."""
    options: dict[str, Any] = {"index_folder": f"{folder}/indices"} if kind in INDEXED else {}
    names = [f"{folder}/{number}.data" for number in range(len(FILES[kind][1]))]
    data = FileDataset(names, FILES[kind][0], cycle_length=2, **options)
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
    """One rank: with an index or by the size of the files, without loader workers and with two."""
    cells = [("text", 0), ("fixed", 0), ("text", 2)]
    return [read_as_rank(f"{folder}/{kind}", kind, num_workers) for kind, num_workers in cells]


def test_ranks_deliver_and_resume_what_one_process_reads(tmp_path: Path) -> None:
    wholes = []
    for kind in ("text", "fixed"):
        (tmp_path / kind).mkdir()
        data = FileDataset(written(tmp_path / kind, kind), FILES[kind][0], cycle_length=2)
        wholes.append(records_of(data.reader(range(len(data.files)), 0)))
    first, second = run_ranks(2, read_all_as_rank, str(tmp_path))
    assert len(index_files(tmp_path / "text")) == 4
    for (one, state), (other, its_state), whole in zip(first, second, [*wholes, wholes[0]], strict=True):
        assert [a + b for a, b in zip(one, other, strict=True)] == [
            whole[at : at + 3] for at in range(0, len(whole), 3)
        ]
        assert state == its_state
