"""A reader that yields blocks can be entered at each of them, and is otherwise the reader that it always was."""

from __future__ import annotations

import copy
import functools
import gzip
import inspect
import io
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.sources.files.test_webdataset import tar
from tests.support.formats import npy, tfrecord
from torchdistinput.errors import SourceError
from torchdistinput.sources.formats import fixed_length, reader_api, readers, text
from torchdistinput.sources.formats import npy as npy_reader
from torchdistinput.sources.storage import io as filesystem

Reader = Callable[[BinaryIO], Iterable[Any]]


@readers.in_blocks
def pairs(file: BinaryIO, offset: int, *, upper: bool = False) -> Iterator[tuple[int, list[bytes]]]:
    """Two lines at a time."""
    readers.skip_to(file, offset)
    while lines := list(itertools.islice(file, 2)):
        yield offset, [line.upper() if upper else line for line in lines]
        offset += sum(map(len, lines))


def plain(file: BinaryIO) -> Iterator[bytes]:
    yield from file


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the blocks of all readers small."""
    for module in (reader_api, fixed_length, text):
        monkeypatch.setattr(module, "BLOCK_BYTES", 16)
    monkeypatch.setattr(npy_reader, "_BLOCK_BYTES", 16)


TEXT = "\ufeffone\n\nthree is a longer line than a block\r\nfo\u00fcr\n5\n6\n7\n8\n9\n\u2028\nlast".encode()
ROWS = b'\n\na,b\n1,2\n"3\n\n3",4\n\n5,"a field, as long as two blocks"\n7,8\n9,0\n1,1\n\n\n2,2\n'
CONTENTS: dict[str, tuple[Reader, bytes]] = {
    "text_lines": (readers.text_lines, TEXT),
    "text_lines, ended": (readers.text_lines, TEXT + b"\n"),
    "json_lines": (
        readers.json_lines,
        b"\xef\xbb\xbf" + b'{"a": 1}\n\n[]\n"a line as long as two blocks"\n \n3\n4\n5\n\n6',
    ),
    "npy_rows": (readers.npy_rows, npy(np.arange(21, dtype=np.int16).reshape(7, 3))),
    "npy_rows of bytes": (readers.npy_rows, npy(np.arange(50, dtype=np.int8))),
    "npy_rows, large": (readers.npy_rows, npy(np.arange(60.0).reshape(5, 12))),
    "tfrecords": (readers.tfrecords, b"".join(map(tfrecord, (b"", b"a", b"bb" * 20, b"c", b"d")))),
    "fixed_length_records": (readers.fixed_length_records(3), bytes(range(99))),
    "fixed_length_records, large": (readers.fixed_length_records(33), bytes(range(99))),
    "webdataset": (readers.webdataset(), tar([(f"{n}.{end}", bytes(n)) for n in range(5) for end in ("a", "b")])),
    "webdataset, one extension": (
        readers.webdataset(keys=["b"]),
        tar([(f"{n}.{end}", bytes(n * size)) for n in range(5) for end, size in (("a", 700), ("b", 1), ("c", 900))]),
    ),
    "one's own": (pairs, b"a\nb\nc\nd\ne"),
    "one's own, with an option": (functools.partial(pairs, upper=True), b"a\nb\nc\nd\ne"),
}


def until_failure(source: Iterator[Any]) -> tuple[list[Any], Exception]:
    """What an iterator yields, and what it raises then."""
    found: list[Any] = []
    try:
        for each in source:
            found.append(each)
    except Exception as error:
        return found, error
    raise AssertionError("nothing was raised")


class Unseekable(io.RawIOBase):
    """A stream that goes forward only; as those of web servers, it may say that it can seek."""

    def __init__(self, content: bytes, *, honest: bool) -> None:
        self._content = io.BytesIO(content)
        self._honest = honest

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return not self._honest

    def seek(self, offset: int, whence: int = 0, /) -> int:
        raise ValueError("Cannot seek streaming HTTP file")

    def tell(self) -> int:
        raise io.UnsupportedOperation("tell")

    def readinto(self, buffer: Any, /) -> int:
        return self._content.readinto(buffer)


def decompressor(content: bytes) -> BinaryIO:
    stream: Any = gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(content)))
    return io.BufferedReader(stream, 8)


OPENERS: dict[str, Callable[[bytes], BinaryIO]] = {
    "seekable": io.BytesIO,
    "compressed": decompressor,
    "unseekable": lambda content: io.BufferedReader(Unseekable(content, honest=True), 8),
    "unseekable, unsaid": lambda content: io.BufferedReader(Unseekable(content, honest=False), 8),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", list(CONTENTS))
@pytest.mark.parametrize("opener", list(OPENERS))
def test_a_reader_is_entered_at_each_of_its_blocks(name: str, opener: str) -> None:
    read, content = CONTENTS[name]
    enter = reader_api.facts_of(read).blocks
    assert enter is not None
    every = [str(record) for record in read(io.BytesIO(content))]
    assert every
    number, offsets = 0, []
    for offset, records in enter(io.BytesIO(content), 0):
        rest = [(where, list(map(str, block))) for where, block in enter(OPENERS[opener](content), offset)]
        assert [record for _, block in rest for record in block] == every[number:]
        assert not rest or rest[0][0] >= offset
        offsets.append(offset)
        number += len(records)
        assert len(list(records)) == len(records)
    assert number == len(every)
    assert offsets == sorted(set(offsets))
    assert len(offsets) > 1


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("read", "good", "bad"),
    [
        (readers.text_lines, b"a line of the text\n" * 3, b"x\xffy\n"),
        (readers.json_lines, b'"a line of the text"\n' * 3, b"{\n"),
        (readers.tfrecords, tfrecord(b"a payload") * 3, b"short"),
        (readers.fixed_length_records(20), bytes(60), b"short"),
    ],
)
def test_an_error_behind_the_place_of_entry_has_its_offset_in_the_file(read: Reader, good: bytes, bad: bytes) -> None:
    enter = reader_api.facts_of(read).blocks
    assert enter is not None
    found, error = until_failure(enter(io.BytesIO(good + bad), 0))
    assert isinstance(error, SourceError)
    assert (sum(len(records) for _, records in found), error.offset) == (3, len(good))
    place, last = found[-1]
    assert place > 0
    rest, again = until_failure(enter(io.BytesIO(good + bad), place))
    assert isinstance(again, SourceError)
    assert rest == [(place, last)]
    assert (str(again), again.offset) == (str(error), len(good))


@pytest.mark.parametrize("name", list(CONTENTS))
def test_a_reader_with_blocks_pickles_and_copies(name: str) -> None:
    read, content = CONTENTS[name]
    every = [str(record) for record in read(io.BytesIO(content))]
    for other in (pickle.loads(pickle.dumps(read)), copy.deepcopy(read)):
        assert [str(record) for record in other(io.BytesIO(content))] == every
        assert reader_api.facts_of(other).blocks is not None
    assert pickle.loads(pickle.dumps(pairs)) is pairs


def test_a_reader_with_blocks_has_the_name_the_text_and_the_arguments_of_a_reader() -> None:
    assert (readers.json_lines.__name__, readers.json_lines.__module__) == (
        "json_lines",
        "torchdistinput.sources.formats.json_lines",
    )
    assert "JSON Lines" in (readers.json_lines.__doc__ or "")
    assert list(inspect.signature(readers.json_lines).parameters) == ["file"]
    assert repr(readers.json_lines) == "<reader torchdistinput.sources.formats.json_lines.json_lines>"


@pytest.mark.parametrize("name", ["csv_rows", "json_lines", "npy_rows", "text_lines", "tfrecords"])
def test_a_reader_is_unpickled_also_from_the_module_that_lists_it(name: str) -> None:
    pickled = f"ctorchdistinput.sources.formats.readers\n{name}\n.".encode()
    assert pickle.loads(pickled) is getattr(readers, name)


def test_functions_and_what_hides_a_reader_have_no_blocks() -> None:
    def wrapped(file: BinaryIO) -> Iterable[Any]:
        return readers.text_lines(file)

    for read in (plain, wrapped, functools.partial(plain), functools.partial(readers.text_lines, io.BytesIO())):
        assert reader_api.facts_of(read).blocks is None


def test_records_are_gathered_to_blocks_and_come_before_a_failure() -> None:
    def records(failing: int) -> Iterator[tuple[int, int]]:
        for number in range(10):
            if number == failing:
                raise KeyError(number)
            yield 100 + (number + 1) * 30_000, number

    assert list(reader_api.grouped(records(99), 100)) == [
        (100, [0, 1, 2]),
        (90_100, [3, 4, 5]),
        (180_100, [6, 7, 8]),
        (270_100, [9]),
    ]
    for failing in range(10):
        found, error = until_failure(reader_api.grouped(records(failing), 100))
        assert [record for _, block in found for record in block] == list(range(failing))
        assert isinstance(error, KeyError)
    assert list(reader_api.grouped(iter(()), 0)) == []


# Going to a place


@pytest.mark.parametrize("opener", list(OPENERS))
def test_a_file_goes_forward_to_any_place(opener: str) -> None:
    content = bytes(range(250))
    for at, offset in itertools.combinations_with_replacement((0, 1, 9, 100, 250), 2):
        stream = OPENERS[opener](content)
        assert len(stream.read(at)) == at
        filesystem.skip_to(stream, offset, at)
        assert stream.read() == content[offset:]


@pytest.mark.parametrize("opener", ["compressed", "unseekable", "unseekable, unsaid"])
def test_content_that_ends_before_the_place_is_an_error(opener: str) -> None:
    with pytest.raises(SourceError, match="the content ends at byte 5, but is to be read from byte 7 on") as caught:
        filesystem.skip_to(OPENERS[opener](b"12345"), 7)
    assert caught.value.offset == 5


# The stored size


def layout_of_words(file: BinaryIO, size: int) -> readers.Layout | None:
    return None if size % 4 else readers.Layout(size // 4, lambda record: 4 * record, words_between)


def words_between(file: BinaryIO, lo: int, hi: int) -> list[bytes]:
    file.seek(4 * lo)
    content = file.read(4 * (hi - lo))
    return [content[start : start + 4] for start in range(0, len(content), 4)]


@readers.in_blocks(layout=layout_of_words)
def words(file: BinaryIO, offset: int) -> Iterator[tuple[int, list[bytes]]]:
    assert offset < 0, "nobody reads all of it"
    yield offset, file.readlines()


def test_a_reader_of_ones_own_that_has_a_layout_reads_the_part_of_each_loader_worker_only(tmp_path: Path) -> None:
    (tmp_path / "words").write_bytes(b"".join(b"%04d" % number for number in range(20)))
    data: Any = tdi.FileDataset(str(tmp_path / "words"), words, map_fn=int)
    loader = DataLoader(data, batch_size=6, num_workers=2, collate_fn=list)
    found = list(tdi.Strategy(["cpu"]).distribute_dataset(loader))
    assert [sample for batch in found for sample in batch] == list(range(20))
