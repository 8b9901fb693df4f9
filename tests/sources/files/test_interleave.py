"""Records that are taken together from an interleaved reader are those that are taken one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from torchdistinput import FileDataset, readers
from torchdistinput.plan.file_resharding import ReaderCursor
from torchdistinput.sources.formats.reader_api import Block
from torchdistinput.sources.kernel.read_failures import RecordPlace
from torchdistinput.sources.readers.interleave import Interleave


@readers.in_blocks
def small_blocks(file: BinaryIO, offset: int) -> Iterator[Block[bytes]]:
    """Lines, a few in each block: as many as its first one says."""
    readers.skip_to(file, offset)
    while block := file.readlines(5 + offset % 23):
        yield offset, block
        offset += sum(map(len, block))


def plain(file: BinaryIO) -> Iterator[bytes]:
    """Lines, from the front only."""
    yield from file


def dataset_of(folder: Path, rng: random.Random) -> FileDataset:
    names = []
    for number in range(rng.randrange(1, 6)):
        lines = [f"{number}-{record}\n" for record in range(rng.choice([0, 1, 7, 30, 61]))]
        (folder / str(number)).write_text("".join(lines))
        names.append(str(folder / str(number)))
    read: Any = rng.choice([small_blocks, readers.text_lines, plain])
    return FileDataset(
        names,
        read,
        cycle_length=rng.randrange(1, 5),
        block_length=rng.choice([1, 2, 3, 5]),
        shuffle_buffer=rng.choice([0, 0, 4]),
    )


def one_by_one(dataset: FileDataset) -> tuple[list[Any], list[RecordPlace], list[ReaderCursor]]:
    """Every record, where it comes from, and where the reader stood before each and after all."""
    reader = dataset.reader(range(len(dataset.files)), 0)
    records: list[Any] = []
    places, stood = [], [reader.position()]
    while taken := reader.take(1):
        records += taken
        places += reader.places(0, 1)
        stood.append(reader.position())
    return records, places, stood


def entered(dataset: FileDataset, stood: list[ReaderCursor], start: int) -> Interleave:
    return dataset.reader(range(len(dataset.files)), 0, stood[start])


@pytest.mark.parametrize("seed", range(40))
def test_records_taken_together_are_those_taken_one_by_one(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    dataset = dataset_of(tmp_path, rng)
    records, places, stood = one_by_one(dataset)
    for start in (0, rng.randrange(len(records) + 1)):
        reader, at = entered(dataset, stood, start), start
        while taken := reader.take(size := rng.randrange(1, 40)):
            assert taken == records[at : at + size]
            assert reader.places(0, len(taken)) == places[at : at + size]
            at += len(taken)
            assert at == len(records) or reader.position() == stood[at]
            for _ in range(rng.choice([0, 0, 1, 2])):
                if at < len(records):
                    assert reader.take(1) == records[at : at + 1]
                    at += 1
        assert at == len(records)


@pytest.mark.parametrize("seed", range(20))
def test_reserved_and_ready_records_are_the_same(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    dataset = dataset_of(tmp_path, rng)
    records, places, stood = one_by_one(dataset)
    reader, at = entered(dataset, stood, 0), 0
    while len(reserved := reader.reserve(size := rng.randrange(1, 40))):
        assert len(reserved) == len(records[at : at + size])
        lo, hi = sorted((rng.randrange(size + 1), rng.randrange(size + 1)))
        assert reserved[lo:hi] == records[at : at + size][lo:hi]
        assert reader.places(lo, hi) == places[at : at + size][lo:hi]
        at += len(reserved)
        assert at == len(records) or reader.position() == stood[at]
    found: list[Any] = []
    reader = entered(dataset, stood, 0)
    while ready := reader.take_ready():
        found += ready
    assert (at, found) == (len(records), records)
    assert list(dataset) == records


def test_a_reader_whose_making_was_interrupted_has_nothing_to_close() -> None:
    object.__new__(Interleave).close()
