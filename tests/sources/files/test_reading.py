"""A reader that was left after any record is entered again, and yields exactly the rest."""

from __future__ import annotations

import gzip
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from tests.support.cells import cells
from tests.support.formats import FORMATS
from tests.support.records import records_of
from torchdistinput.errors import SourceError, StateMismatch
from torchdistinput.plan.file_resharding import FileCursor, ReaderCursor
from torchdistinput.sources.datasets.fragment_dataset import FileDataset
from torchdistinput.sources.formats import readers
from torchdistinput.sources.formats.reader_api import Block
from torchdistinput.sources.kernel.read_failures import RecordPlace


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


def places_of(dataset: FileDataset, records: list[str]) -> list[RecordPlace]:
    """By their text: "b3" is record 3 of the second file."""
    numbers = [ord(record[0]) - ord("a") for record in records]
    return [
        RecordPlace(dataset.files[file], int(record[1:]), file) for file, record in zip(numbers, records, strict=True)
    ]


def written_down(place: ReaderCursor) -> ReaderCursor:
    return ReaderCursor.from_json(json.loads(json.dumps(place.to_json())))


def check_every_place(dataset: FileDataset, order: list[int], epoch: int) -> None:
    """Leaves a reader after every record; what goes on from there is left again, and that goes on to the end."""
    whole = records_of(dataset.reader(order, epoch))
    reader = dataset.reader(order, epoch)
    for taken in range(len(whole) + 1):
        place = written_down(reader.position())
        again = dataset.reader(order, epoch, place)
        assert again.position() == place
        part = again.take(1 + taken % 4)
        assert part == whole[taken : taken + 1 + taken % 4]
        assert again.places(0, len(part)) == places_of(dataset, part)
        later = dataset.reader(order, epoch, written_down(again.position()))
        assert records_of(later) == whole[taken + len(part) :]
        again.close()
        assert reader.take(1) == whole[taken : taken + 1]
    assert records_of(dataset.reader(order, epoch, written_down(reader.position()))) == []


SIZES = [(5,), (0, 0), (3, 1, 2), (5, 0, 3, 4), (2, 2, 2, 2, 2), (1, 8, 0, 0, 4, 2)]
READS: tuple[Callable[[BinaryIO], Iterable[Any]], ...] = (small_blocks, plain)
WALKS = list(itertools.product((1, 2, 3, 10), (1, 2, 3), (0, 2, 3, 7), READS))


def test_a_walk_left_after_any_record_goes_on_with_exactly_the_rest(all_cells: bool, tmp_path: Path) -> None:
    settings = {"sizes": SIZES, "ending": ("txt", "gz")}
    for (cycle, block, buffer, read), setting in cells(WALKS, settings, everything=all_cells):
        names = write(tmp_path, setting["sizes"], setting["ending"])
        dataset = FileDataset(
            names, read, cycle_length=cycle, block_length=block, shuffle_buffer=buffer, shuffle_files=True, seed=3
        )
        check_every_place(dataset, dataset.file_order(1), 1)


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
