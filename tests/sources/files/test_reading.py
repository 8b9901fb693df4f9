"""A reader that was left after any record is entered again, and yields exactly the rest."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import torchdistinput as tdi
from tests.support.epochs import pieces, steps_until_raised
from tests.support.formats import FORMATS, npy, records_of, tfrecord
from torchdistinput import FileDataset, SourceError, readers
from torchdistinput.errors import StateMismatch
from torchdistinput.plan.batching import Cutter
from torchdistinput.plan.file_resharding import FileCursor, ReaderCursor
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.datasets.record_rows import RecordRows, RecordStart
from torchdistinput.sources.datasets.record_source import sizes_of
from torchdistinput.sources.formats.reader_api import Block
from torchdistinput.sources.formats.text import next_line
from torchdistinput.sources.kernel.batcher import Cut, as_is
from torchdistinput.sources.kernel.read_failures import CorruptRecord, Failure, RecordPlace
from torchdistinput.sources.readers.interleave import Interleave
from torchdistinput.testing import run_ranks


@readers.in_blocks
def small_blocks(file: BinaryIO, offset: int, *, sizes: tuple[int, ...] = (2, 1, 0, 3)) -> Iterator[Block[str]]:
    """Lines in blocks of a few, also of none; how many depends on the offset, so that a wrong one shows."""
    readers.skip_to(file, offset)
    while True:
        lines = list(itertools.islice(file, sizes[offset % len(sizes)] or 1))
        if not lines:
            return
        if not sizes[offset % len(sizes)]:
            yield offset, []
        yield offset, [line.decode().rstrip("\n") for line in lines]
        offset += sum(map(len, lines))


def plain(file: BinaryIO) -> Iterator[str]:
    """The same lines, from the front only."""
    for line in file:
        yield line.decode().rstrip("\n")


def write(folder: Path, sizes: Iterable[int], ending: str = "txt") -> list[str]:
    """Files a, b, … of so many lines ``a0, a1, …``."""
    names = []
    for letter, size in zip("abcdefghij", sizes, strict=False):
        content = "".join(f"{letter}{number}\n" for number in range(size)).encode()
        path = folder / f"{letter}.{ending}"
        path.write_bytes(gzip.compress(content) if ending == "gz" else content)
        names.append(str(path))
    return names


def written_down(place: ReaderCursor) -> ReaderCursor:
    return ReaderCursor.from_json(json.loads(json.dumps(place.to_json())))


def line(text: str, *, good: bool = True) -> bytes:
    return f"{text}\n".encode() if good else b"\xff" * len(text) + b"\n"


def json_line(text: str, *, good: bool = True) -> bytes:
    return f'"{text}"\n'.encode() if good else b"{\n"


def of_tfrecord(text: str, *, good: bool = True) -> bytes:
    return tfrecord(text.encode(), good=good)


WALKED: list[tuple[Callable[[BinaryIO], Iterable[Any]], Callable[..., bytes], bool]] = [
    (small_blocks, line, False),
    (plain, line, False),
    (readers.text_lines, line, True),
    (readers.json_lines, json_line, True),
    (readers.tfrecords, of_tfrecord, True),
]
"""The reader, what writes a record, and whether reading goes on behind a spoiled one."""


class Walk:
    """A walk over files, record by record: its records, where each comes from, and where it stood before each."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        read, make, skips = rng.choice(WALKED)
        self.skip = skips and rng.random() < 0.6
        pad = rng.choice(["", "", " " * 5000])
        sizes = rng.choice([(5,), (0, 0), (3, 1, 2), (5, 0, 3, 4), (1, 8, 0, 0, 4, 2), (30, 0, 61, 7)])
        self.written: list[list[str | None]] = []
        names = []
        for letter, size in zip("abcdef", sizes, strict=False):
            texts = [f"{letter}{number}{pad}" for number in range(size)]
            good = [not self.skip or rng.random() < 0.7 for _ in texts]
            content = b"".join(make(text, good=each) for text, each in zip(texts, good, strict=True))
            names.append(f"{folder}/{letter}{rng.choice(['', '.gz'])}")
            Path(names[-1]).write_bytes(gzip.compress(content) if names[-1].endswith("gz") else content)
            self.written.append([text if each else None for text, each in zip(texts, good, strict=True)])
        self.dataset = FileDataset(
            names,
            read,
            cycle_length=rng.choice([1, 2, 3, 10]),
            block_length=rng.choice([1, 2, 3, 5]),
            shuffle_buffer=rng.choice([0, 0, 2, 4, 7]),
            shuffle_files=rng.random() < 0.7,
            seed=3,
        )
        self.order = self.dataset.file_order(1)
        reader = self.from_place(None)
        self.records: list[Any] = []
        self.places: list[RecordPlace] = []
        self.stood = [written_down(reader.position())]
        while taken := reader.take(1):
            self.records += taken
            self.places += reader.places(0, 1)
            self.stood.append(written_down(reader.position()))
        assert len(self.records) == sum(sizes)

    def from_place(self, place: ReaderCursor | None) -> Interleave:
        return self.dataset.reader(self.order, 1, place, skip=self.skip)

    def check(self, found: Any, reader: Interleave, at: int) -> int:
        """Records that were taken at a place, and where the reader stands now."""
        assert [*found] == self.records[at : at + len(found)]
        assert reader.places(0, len(found)) == self.places[at : at + len(found)]
        at += len(found)
        assert at == len(self.records) or written_down(reader.position()) == self.stood[at]
        return at


@pytest.mark.parametrize("seed", range(80))
def test_a_walk_goes_on_at_any_record_and_gives_the_same_together_reserved_and_one_by_one(
    seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    walk = Walk(tmp_path, rng)
    length = len(walk.records)
    for record, place in zip(walk.records, walk.places, strict=True):
        text = walk.written[place.file_number][place.record]
        found = record.decode() if isinstance(record, bytes) else record
        assert found == text if text is not None else isinstance(record, CorruptRecord)
        assert place.file == walk.dataset.files[place.file_number]
    for start in range(length + 1) if length < 20 else (0, *rng.sample(range(length + 1), 8)):
        reader, at = walk.from_place(walk.stood[start]), start
        assert reader.position() == walk.stood[start]
        while taken := reader.take(rng.randrange(1, rng.choice([5, 40]))):
            at = walk.check(taken, reader, at)
        assert at == length
        reader, at = walk.from_place(walk.stood[start]), start
        while len(reserved := reader.reserve(size := rng.randrange(1, 40))):
            lo, hi = sorted((rng.randrange(size + 1), rng.randrange(size + 1)))
            assert reserved[lo:hi] == walk.records[at : at + size][lo:hi]
            assert reader.places(lo, hi) == walk.places[at : at + size][lo:hi]
            at += len(reserved)
            assert at == length or written_down(reader.position()) == walk.stood[at]
        assert at == length
    assert records_of(walk.from_place(None)) == walk.records
    if not walk.skip:
        walk.dataset.set_epoch(1)
        assert [*walk.dataset] == walk.records


def test_a_place_after_a_failure_meets_the_failure_again(tmp_path: Path) -> None:
    names = write(tmp_path, (3, 3, 3))
    (tmp_path / "b.txt").write_bytes(b"b0\n\xff\n")
    dataset = FileDataset([names[0], names[1], f"{tmp_path}/missing"], readers.text_lines, cycle_length=3)
    reader = dataset.reader([0, 1, 2], 0)
    assert reader.take(2) == ["a0", "b0"]
    for _ in range(3):
        with pytest.raises(SourceError, match="missing: cannot be opened"):
            reader.take(1)
        reader = dataset.reader([0, 1, 2], 0, reader.position())
    dataset = FileDataset(names, readers.text_lines, cycle_length=3)
    reader = dataset.reader([0, 1, 2], 0)
    assert reader.take(4) == ["a0", "b0", "c0", "a1"]
    for _ in range(3):
        with pytest.raises(SourceError, match="the line at byte 3 is not UTF-8"):
            reader.take(1)
        reader = dataset.reader([0, 1, 2], 0, reader.position())
    (tmp_path / "b.txt").write_bytes(b"b0\nb1\n")
    assert records_of(reader) == ["b1", "c1", "a2", "c2"]


# What is read


class Counting(io.FileIO):
    """A file that counts the bytes that are read from it."""

    count = 0

    def readinto(self, buffer: Any, /) -> int | None:
        number = super().readinto(buffer)
        Counting.count += number or 0
        return number


@pytest.mark.parametrize("buffer", [0, 50])
@pytest.mark.parametrize("name", ["text", "json", "npy", "tfrecords", "fixed"])
def test_entering_near_the_end_of_a_big_file_reads_a_block_and_not_the_file(
    name: str, buffer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, content = FORMATS[name].read, FORMATS[name].large()
    (tmp_path / "big").write_bytes(content)
    dataset = FileDataset([f"{tmp_path}/big"], read, shuffle_buffer=buffer)
    reader = dataset.reader([0], 0)
    whole = records_of(reader)
    reader = dataset.reader([0], 0)
    taken = len(whole) - 7
    reader.take(taken)
    place = written_down(reader.position())
    reader.close()
    monkeypatch.setattr("torchdistinput.sources.storage.io._opened_by", lambda _fs, path, **_: Counting(path))
    monkeypatch.setattr(Counting, "count", 0)
    rest = records_of(dataset.reader([0], 0, place))
    assert [str(record) for record in rest] == [str(record) for record in whole[taken:]]
    assert 0 < Counting.count < (1_400_000 if name == "npy" else 400_000)
    assert Counting.count < len(content) / 5


def test_a_window_is_read_again_and_nothing_before_it(tmp_path: Path) -> None:
    asked: list[int] = []

    @readers.in_blocks
    def asking(file: BinaryIO, offset: int) -> Iterator[Block[str]]:
        asked.append(offset)
        yield from small_blocks.blocks(file, offset, sizes=(2,))

    dataset = FileDataset(write(tmp_path, (10,)), asking, shuffle_buffer=3)
    for taken, offset in ((0, 0), (2, 0), (3, 6), (5, 6), (6, 12), (7, 18), (8, 18), (9, 24), (10, 24)):
        reader = dataset.reader([0], 0)
        reader.take(taken)
        place = reader.position()
        del asked[:]
        records_of(dataset.reader([0], 0, place))
        assert asked == [offset], taken


def test_a_plain_reader_is_asked_for_no_more_records_than_are_taken(tmp_path: Path) -> None:
    read: list[int] = []

    def large(file: BinaryIO) -> Iterator[int]:
        for number in range(10):
            read.append(number)
            yield number
        raise ValueError("no more")

    for buffer, takes in ((0, [(1, 1), (3, 4), (2, 6), (4, 10)]), (4, [(1, 4), (3, 4), (2, 8)])):
        read.clear()
        reader = FileDataset(write(tmp_path, (1,)), large, shuffle_buffer=buffer).reader([0], 0)
        for count, wanted in takes:
            assert len(reader.take(count)) == count
            assert len(read) == wanted
        with pytest.raises(SourceError, match="reading failed.* ValueError: no more"):
            reader.take(3)


# Places that do not fit


def test_a_file_that_is_shorter_than_what_was_read_is_a_mismatch(tmp_path: Path) -> None:
    names = write(tmp_path, (9, 9))
    place = ReaderCursor((FileCursor(1, 0, 0, 12),), opened=2)
    for buffer in (0, 2, 20):
        for dataset in (
            FileDataset(names, small_blocks, shuffle_buffer=buffer),
            FileDataset(names, plain, shuffle_buffer=buffer),
        ):
            with pytest.raises(
                StateMismatch, match=r"b\.txt: the saved state goes on after 12 records, but the file en"
            ):
                dataset.reader([0, 1], 0, place).take(1)


def test_a_place_in_files_that_the_dataset_does_not_have_is_a_mismatch(tmp_path: Path) -> None:
    dataset = FileDataset(write(tmp_path, (1, 1)), plain)
    for place in (ReaderCursor((FileCursor(2),)), ReaderCursor(waiting=(FileCursor(0), FileCursor(2)))):
        with pytest.raises(StateMismatch, match="the saved state is in file 2, but the dataset has 2 files"):
            dataset.reader([0, 1], 0, place)
    with pytest.raises(StateMismatch, match="has opened 3 fresh files for a reader that is dealt 2"):
        dataset.reader([0, 1], 0, ReaderCursor(opened=3))


FILES = {name: each for name, each in FORMATS.items() if each.files}


def written(folder: Path, kind: str) -> list[str]:
    names = [folder / f"{number}.data" for number in range(len(FILES[kind].files))]
    for name, content in zip(names, FILES[kind].files, strict=True):
        name.write_bytes(content)
    return list(map(str, names))


def dataset(folder: Path, kind: str, **options: Any) -> FileDataset:
    return FileDataset(written(folder, kind), FILES[kind].read, **options)


def comparable(records: list[Any]) -> list[Any]:
    return [record.tolist() if isinstance(record, np.ndarray) else record for record in records]


CUT = [(kind, largest) for kind in FILES if kind not in ("tfrecords", "tar") for largest in (7, 300)]


@pytest.mark.parametrize(("kind", "largest"), [*((kind, None) for kind in FILES), *CUT])
@pytest.mark.parametrize(("cycle", "block"), [(1, 1), (2, 1), (3, 2)])
def test_slices_of_what_is_reserved_are_those_of_the_whole_walk(
    tmp_path: Path, kind: str, largest: int | None, cycle: int, block: int
) -> None:
    """And both readers can be left for each other between any two batches; of whole files, and of their parts."""
    data = dataset(tmp_path, kind, cycle_length=cycle, block_length=block)
    if largest is not None:
        sizes, uncut = [Path(name).stat().st_size for name in data.files], data
        largest = max(largest, max(sizes) // 30)
        options: dict[str, Any] = {"cycle_length": cycle, "block_length": block}
        data = FileDataset(data.files, FILES[kind].read, fragment_bytes=largest, **options)
        assert data.files == uncut.files
        assert len(data.names) == sum(max(1, -(-size // largest)) for size in sizes)
        in_order = FileDataset(data.files, FILES[kind].read, fragment_bytes=largest)
        assert comparable([*in_order]) == comparable([*FileDataset(data.files, FILES[kind].read)])
    order = range(len(data.names))
    whole = records_of(data.reader(order, 0))
    for count in (1, 3, 4, 50):
        reader, other, at = data.reader(order, 0, in_ranges=True), data.reader(order, 0), 0
        while reserved := reader.reserve(count):
            size = len(other.take(count))
            assert len(reserved) == size
            for lo in range(size + 1):
                for hi in {lo, size, (lo + size + 1) // 2}:
                    got = [*reserved[lo:hi]]
                    assert comparable(got) == comparable(whole[at + lo : at + hi])
                    assert list(map(type, got)) == list(map(type, whole[at + lo : at + hi]))
            assert reader.places(0, size) == other.places(0, size)
            at += size
            assert comparable(records_of(data.reader(order, 0, reader.position()))) == comparable(whole[at:])
            entered = data.reader(order, 0, other.position(), in_ranges=True)
            assert comparable([*entered.reserve(3)[:]]) == comparable(whole[at : at + 3])
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
        numbers = [[each.tolist() for each in row] for row in cut.numbers or ()]
        found.append(([[None if piece is None else comparable(piece) for piece in row] for row in cut.rows], numbers))
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


UNEVEN = (11, 9, 73, 10)  # 103 records: worker 2 of 3 has 73


def write_lines(folder: Path, sizes: tuple[int, ...]) -> str:
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
    pattern = write_lines(tmp_path / "data", (3, 4))
    (tmp_path / "2.bin.gz").write_bytes(gzip.compress(b"1\n2\n"))
    compressed = tdi.FileDataset(str(tmp_path / "2.*"), readers.fixed_length_records(2))
    for unknown in (lines(pattern), compressed):
        with pytest.raises(TypeError, match="not known before the"):
            len(tdi.DataLoader(unknown, batch_size=2))
        with pytest.raises(TypeError, match="not known before the"):
            len(tdi.Strategy().distribute_dataset(unknown, global_batch_size=2))
    counted = tdi.FileDataset(f"{tmp_path}/data/*", readers.fixed_length_records(4))
    skip = tdi.InputOptions(on_error="skip")
    with pytest.raises(TypeError, match=r"not known before the .* not with on_error='skip'"):
        len(tdi.DataLoader(counted, batch_size=2, options=skip))
    with pytest.raises(TypeError, match=r"not known before the .* not with on_error='skip'"):
        len(tdi.Strategy().distribute_dataset(counted, skip, global_batch_size=2))


# ---------------------------------------------------------------------------------------------------- sizes of files


def test_sizes_are_asked_for_where_no_folder_was_listed_and_no_file_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = write_lines(tmp_path, (2, 1))
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


DTYPES = ["f4", ">f4", "f2", "f8", "c8", ">c16", "i1", "i8", ">i4", "u1", "u2", "?", "g", "S3", "U2", "M8[s]", "i4,f4"]


def one_by_one(rows: list[Any]) -> Any:
    return default_collate(rows)


def batches(names: Sequence[Path], collate: Callable[[Any], Any], replicas: int, **options: Any) -> list[Any]:
    """The parts of each batch, and the exception in which the epoch ends."""
    dataset = FileDataset([str(name) for name in names], readers.npy_rows, **options)
    strategy = tdi.Strategy(["cpu"] * replicas)
    found: list[Any] = []
    try:
        for batch in strategy.distribute_dataset(DataLoader(dataset, 7, collate_fn=collate)):
            found.append(pieces(strategy, batch))
    except Exception as error:
        found.append((type(error), str(error)))
    return found


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for parts, others in zip(found, expected, strict=True):
        for part, other in zip(parts, others, strict=True):
            assert type(part) is type(other)
            if isinstance(part, torch.Tensor):
                assert (part.dtype, part.shape, part.stride()) == (other.dtype, other.shape, other.stride())
                assert part.untyped_storage().resizable() == other.untyped_storage().resizable()
                assert torch.equal(part.nan_to_num(), other.nan_to_num())
            else:
                assert part == other


def array_of(dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    return np.random.default_rng(len(shape)).integers(0, 99, shape).astype(dtype)


def arrays_written(folder: Path, arrays: Sequence[npt.NDArray[Any]]) -> list[Path]:
    for number, array in enumerate(arrays):
        (folder / str(number)).write_bytes(npy(array))
    return [folder / str(number) for number in range(len(arrays))]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_read_together_are_those_collated_one_by_one(dtype: str, replicas: int, tmp_path: Path) -> None:
    for inner in ((), (3,), (2, 0), (2, 1, 2)):
        names = arrays_written(tmp_path, [array_of(dtype, (size, *inner)) for size in (10, 1, 18)])
        for map_fn in (None, torch.from_numpy) if inner else (None,):
            expected = batches(names, one_by_one, replicas, map_fn=map_fn)
            assert_same(batches(names, default_collate, replicas, map_fn=map_fn), expected)


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ([(10, 3), (9, 4)], {}),
        ([(10, 3), (9, 3)], {"cycle_length": 2, "block_length": 5}),
        ([(10, 3), (9, 3)], {"shuffle_buffer": 4}),
    ],
)
def test_other_walks_over_rows_give_the_same(
    shapes: list[tuple[int, ...]], options: dict[str, Any], tmp_path: Path
) -> None:
    names = arrays_written(tmp_path, [array_of("f4", shape) for shape in shapes])
    expected = batches(names, one_by_one, 2, **options)
    assert_same(batches(names, default_collate, 2, **options), expected)
    assert ("expects each tensor to be equal size" in str(expected[-1])) == (len({inner for _, inner in shapes}) > 1)


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (("f4", 2), ("f8", 2), "rows: float64 of 1 dimension(s) here, rows: float32 of 1 dimension(s) there"),
        (("f4", 2), ("f4", 3), "rows: float32 of 2 dimension(s) here, rows: float32 of 1 dimension(s) there"),
        (("M8[s]", 1), ("M8[ms]", 1), "rows: datetime64[ms] of 0 dimension(s) here"),
        (("i4,f4", 1), ("i4,f8", 1), "rows: [f0: int32, f1: float64] of 0 dimension(s) here"),
        (("f4", 1), (">f4", 1), ""),
        (("U2", 1), ("U7", 1), ""),
    ],
)
def test_files_of_different_dtypes_are_refused(
    first: tuple[str, int], second: tuple[str, int], told: str, tmp_path: Path
) -> None:
    kinds = zip((0, 7, 7), (second, first, second), strict=True)  # one without rows may be anything
    names = arrays_written(tmp_path, [array_of(dtype, (size, *range(2, dims + 1))) for size, (dtype, dims) in kinds])
    data = DataLoader(FileDataset([*map(str, names)], readers.npy_rows), 7, collate_fn=list)
    _, error = steps_until_raised(tdi.Strategy(["cpu"]).distribute_dataset(data))
    assert (error is not None) == bool(told)
    if error is not None:
        assert f"2: its columns differ from those of {names[1]}: {told}" in error.message


def files(folder: Path, sizes: tuple[int, ...] = (7, 0, 12, 5), bad: tuple[int, int] | None = None) -> list[str]:
    for number, size in enumerate(sizes):
        lines = [f"{number}.{line} \u00e4".encode() for line in range(size)]
        if bad is not None and bad[0] == number:
            lines[bad[1]] = b"\xff"
        (folder / f"{number}").write_bytes(b"".join(line + b"\n" for line in lines))
    return [str(folder / f"{number}") for number in range(len(sizes))]


def as_it_is(samples: list[str]) -> list[str]:
    return samples


@pytest.mark.parametrize("partial_batch", ["keep", "pad"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_what_is_delivered_is_the_same(tmp_path: Path, partial_batch: Any, replicas: int) -> None:
    names = files(tmp_path, (7, 3, 12, 6))  # 28: the last batch of 4 leaves nothing for the third replica
    found = []
    for collate in (default_collate, as_it_is):  # the second one is no collate function that the library knows
        loader = DataLoader(tdi.FileDataset(names, tdi.readers.text_lines), 6, collate_fn=collate)
        options = tdi.InputOptions(partial_batch=partial_batch)
        with tdi.Strategy(["cpu"] * replicas).distribute_dataset(loader, options) as dataset:
            steps, states = [], []
            for element in dataset:
                parts = [element] if partial_batch == "keep" else element
                pieces = [[part] if replicas == 1 else list(part.values) for part in parts]
                steps.append(([list(piece) for piece in pieces[0]], [mask.tolist() for mask in chain(*pieces[1:])]))
                states.append(dataset.state_dict())
                pieces[0][0].append("more")  # it is the loop's own, and no other batch has a part of it
            found.append((steps, states, str(dataset.element_spec)))
    assert found[0] == found[1]
    assert len(found[0][0]) == 5
