"""Every format gives back what was written, is entered at each block, and names the place where a file is damaged."""

from __future__ import annotations

import ast
import bz2
import contextlib
import copy
import functools
import gzip
import inspect
import io
import itertools
import json
import os
import pickle
import random
import struct
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pytest
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support.formats import ERROR, FORMATS, SPOILED, npy, same, tfrecord, until_failure
from torchdistinput import readers
from torchdistinput.errors import InputError, SourceError
from torchdistinput.sources.formats import fixed_length, reader_api, text, tfrecords
from torchdistinput.sources.formats import npy as npy_reader
from torchdistinput.sources.formats.reader_api import facts_of, grouped
from torchdistinput.sources.formats.tfrecords import masked_crc32c
from torchdistinput.sources.kernel.read_failures import CorruptRecord
from torchdistinput.sources.storage import glob
from torchdistinput.sources.storage import io as filesystem
from torchdistinput.sources.storage.retry import one_line, reason

Reader = Callable[[BinaryIO], Iterable[Any]]


def read(reader: Reader, content: bytes) -> list[Any]:
    return list(reader(io.BytesIO(content)))


# --------------------------------------------------------------------------------------------------- ways to a file


class Stream(io.RawIOBase):
    """Goes forward only, a few bytes at a time; as those of web servers, it may say that it can seek."""

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
        return self._content.readinto(memoryview(buffer)[:3])


def decompressor(content: bytes) -> BinaryIO:
    stream: Any = gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(content)))
    return io.BufferedReader(stream, 8)


OPENERS: dict[str, Callable[[bytes], BinaryIO]] = {
    "seekable": io.BytesIO,
    "compressed": decompressor,
    "unseekable": lambda content: io.BufferedReader(Stream(content, honest=True), 8),
    "unseekable, unsaid": lambda content: io.BufferedReader(Stream(content, honest=False), 8),
}


def openers_of(name: str) -> list[str]:
    """The ways to a file of this format. The end of a file of Parquet says what is in it."""
    return [opener for opener in OPENERS if name != "parquet" or "unseekable" not in opener]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the blocks of all readers small."""
    for module in (reader_api, fixed_length, text):
        monkeypatch.setattr(module, "BLOCK_BYTES", 16)
    monkeypatch.setattr(npy_reader, "_BLOCK_BYTES", 16)


@readers.in_blocks
def pairs(file: BinaryIO, offset: int, *, upper: bool = False) -> Iterator[tuple[int, list[bytes]]]:
    """Two lines at a time."""
    readers.skip_to(file, offset)
    while lines := list(itertools.islice(file, 2)):
        yield offset, [line.upper() if upper else line for line in lines]
        offset += sum(map(len, lines))


OWN: dict[str, tuple[Reader, list[tuple[bytes, list[Any]]]]] = {
    "one's own": (pairs, [(b"a\nb\nc\nd\ne", [b"a\n", b"b\n", b"c\n", b"d\n", b"e"])]),
    "one's own, with an option": (functools.partial(pairs, upper=True), [(b"a\nb\nc", [b"A\n", b"B\n", b"C"])]),
}
WRITTEN = {name: (each.read, each.written) for name, each in FORMATS.items() if each.written} | OWN


@pytest.mark.parametrize("name", WRITTEN)
def test_what_was_written_comes_back_from_everywhere_and_by_a_copy_of_the_reader(name: str, tmp_path: Path) -> None:
    reader, contents = WRITTEN[name]
    for content, records in contents:
        for other in (reader, pickle.loads(pickle.dumps(reader)), copy.deepcopy(reader)):
            assert same(read(other, content), records), content[:100]
        if len(content) > 100_000:
            continue
        for opener in openers_of(name):
            assert same(list(reader(OPENERS[opener](content))), records), content[:100]
    content, records = contents[0]
    for ending, compress in (("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress)):
        (tmp_path / f"file{ending}").write_bytes(compress(content))
        for place in (f"{tmp_path}/file{ending}", f"simplecache::file://{tmp_path}/file{ending}"):
            opened = filesystem.open_file(place, "infer")
            assert same(list(reader(opened.stream)), records)
            opened.close()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("name", "opener"), [(name, way) for name in WRITTEN for way in openers_of(name) if name != "csv"]
)
def test_a_reader_is_entered_at_each_of_its_blocks(name: str, opener: str) -> None:
    reader, contents = WRITTEN[name]
    enter, most = facts_of(reader).blocks, 0
    assert enter is not None
    for content, every in contents:
        if len(content) > 300_000:
            continue
        number, offsets = 0, []
        for offset, records in enter(io.BytesIO(content), 0):
            rest = [*enter(OPENERS[opener](content), offset)]
            assert same([record for _, block in rest for record in block], every[number:])
            assert not rest or rest[0][0] >= offset
            offsets.append(offset)
            number += len(records)
            assert len(list(records)) == len(records)
        assert number == len(every)
        assert offsets == sorted(set(offsets))
        most = max(most, len(offsets))
    assert most > 1


# ---------------------------------------------------------------------------------------------------------- damage

BAD = [(name, number) for name, each in FORMATS.items() for number in range(len(each.bad))]


@pytest.mark.parametrize(("name", "number"), BAD)
def test_what_cannot_be_read_is_named_or_left_out_where_it_is_certain_how_to_go_on(
    name: str, number: int, tmp_path: Path
) -> None:
    reader, (content, found, offset, said) = FORMATS[name].read, FORMATS[name].bad[number]
    marks = [place for place, each in enumerate(found) if each is SPOILED or each is ERROR]
    records, error = until_failure(reader(io.BytesIO(content)))
    assert same(records, found[: marks[0]])
    assert isinstance(error, SourceError)
    assert (error.file, error.offset) == (None, error.offset if offset is None else offset)
    with pytest.raises(SourceError, match=f"(?s){said}"):
        raise error
    path = tmp_path / "file"
    path.write_bytes(content)
    for opened, skip in ((tdi.FileDataset(str(path), reader), False), (tdi.FileDataset([str(path)], reader), True)):
        walk = opened.reader([0], 0, skip=skip)
        records, error = until_failure(record for taken in iter(walk.take_ready, []) for record in taken)
        wanted = found if skip else [*found[: marks[0]], ERROR]
        records = [SPOILED if isinstance(each, CorruptRecord) else each for each in records]
        assert same(records, [each for each in wanted if each is not ERROR])
        assert isinstance(error, SourceError) == (wanted[-1] is ERROR)
        if isinstance(error, SourceError):
            assert error.file == str(path)
            told = skip or offset is None or name in ("npy", "parquet")  # whose types are compared when it is opened
            assert told or (error.offset == offset and str(offset) in str(error))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["text", "json", "tfrecords", "fixed"])
def test_an_error_behind_the_place_of_entry_has_its_offset_in_the_file(name: str) -> None:
    good, bad = {
        "text": (b"a line of the text\n" * 3, b"x\xffy\n"),
        "json": (b'"a line of the text"\n' * 3, b"{\n"),
        "tfrecords": (tfrecord(b"a payload") * 3, b"short"),
        "fixed": (bytes(63), b"short"),
    }[name]
    enter = facts_of(FORMATS[name].read).blocks
    assert enter is not None
    found, error = until_failure(enter(io.BytesIO(good + bad), 0))
    assert isinstance(error, SourceError)
    assert error.offset == len(good)
    place, last = found[-1]
    assert place > 0
    rest, again = until_failure(enter(io.BytesIO(good + bad), place))
    assert isinstance(again, SourceError)
    assert rest == [(place, last)]
    assert (str(again), again.offset) == (str(error), len(good))


def flipped(content: bytes) -> Iterator[bytes]:
    for position, bit in itertools.product(range(len(content)), range(8)):
        yield content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name, each in FORMATS.items() if each.tried])
def test_a_file_cut_off_anywhere_or_with_any_bit_flipped_gives_what_is_whole_and_an_error(name: str) -> None:
    """Where no law tells what is whole, such as in a damaged header, it is other records or an error."""
    reader, law, unsure = FORMATS[name].read, FORMATS[name].law, 0
    for content in FORMATS[name].tried:
        cut = (content[:length] for length in range(len(content)))
        for damaged in (*cut, *([] if name == "tar" else flipped(content))):
            records, error = until_failure(reader(io.BytesIO(damaged)))
            assert error is None or isinstance(error, SourceError), damaged
            told = law(damaged) if law is not None else None
            if told is None:
                unsure += 1
                assert error is not None or sum(len(bytes(each)) for each in records if name == "npy") in (0, 42)
            else:
                assert same(records, told[0]), damaged
                assert (error is not None) == told[1], damaged
    assert (unsure > 0) == (name in ("npy", "tar"))


# ------------------------------------------------------------------------------------------------------------ text


def test_lines_are_those_of_python_wherever_the_chunks_end() -> None:
    rng = np.random.default_rng(0)
    for longest in (3, 200, 100_000, 300_000):
        lines = [*("é" * int(length) for length in rng.integers(0, longest, 2_000_000 // longest + 3)), "last"]
        for end in ("\n", "\r\n"):
            content = end.join(lines).encode()
            assert read(readers.text_lines, content) == lines
            assert read(readers.text_lines, content + end.encode()) == lines


# ------------------------------------------------------------------------------------------------------------ JSON


@pytest.mark.parametrize("seed", range(12))
def test_values_and_blocks_of_json_are_those_of_the_lines_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    odd = [[], ["", " "], ["  [1, 2] ", "7\r"], [json.dumps("x" * 150_000)]][seed % 4]
    lines = [rng.choice([json.dumps({"id": n, "text": "é" * rng.randrange(40)}), str(n), *odd]) for n in range(5_000)]
    end = "\r\n" if seed % 5 < 2 else "\n"
    content = ("\ufeff" * (seed % 3 == 0) + end.join(["0", *lines][: 200 if "x" * 9 in str(odd) else None])).encode()
    content += b"\n" * (seed % 2)

    def one_by_one(block: bytes, end: int) -> Iterator[tuple[int, Any]]:
        for line in block.split(b"\n"):
            end = min(end + len(line) + 1, len(content))
            if line.strip():
                yield end, json.loads(line.decode("utf-8-sig"))

    expected, start = [], 0
    read_up_to = [*range(1 << 16, len(content), 1 << 16), len(content)]
    for cut in (*(content.rfind(b"\n", 0, at) + 1 for at in read_up_to), len(content)):
        expected += list(grouped(one_by_one(content[start:cut], start), start))
        start = max(start, cut)
    assert list(readers.json_lines.blocks(io.BytesIO(content), 0)) == expected


@pytest.mark.parametrize("end", ["\n", "\r\n", " \t\n"])
def test_each_line_of_json_is_parsed_once_whatever_its_end(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, loads = [], json.loads

    def counted(text: str) -> Any:
        parsed.append(text)
        return loads(text)

    monkeypatch.setattr(json, "loads", counted)
    content = "".join(f"[{n}]{end}" for n in range(20_000)) + "[20000]" + end.removesuffix("\n")
    assert read(readers.json_lines, content.encode()) == [[n] for n in range(20_001)]
    assert len(parsed) == 20_001


def test_a_delimiter_of_ones_own() -> None:
    tabs = functools.partial(readers.csv_rows, delimiter="\t")
    assert read(tabs, b"a\tb\n1,2\t3\n") == [{"a": "1,2", "b": "3"}]


# ----------------------------------------------------------------------------------------------------------- NumPy


def test_rows_can_be_written_to_and_share_no_memory() -> None:
    array = np.arange(12.0).reshape(4, 3)
    rows = read(readers.npy_rows, npy(array))
    rows[0][:] = -1
    assert same(rows[1:], [*array[1:]])
    assert all(row.base is None and row.flags.c_contiguous for row in rows)


# -------------------------------------------------------------------------------------------------------- TFRecord


def test_a_checksum_is_masked_as_tfrecord_has_it() -> None:
    assert masked_crc32c(b"123456789") == (((0xE3069283 >> 15) | (0xE3069283 << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def test_without_the_package_of_the_checksum_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    tfrecords._crc32c.cache_clear()
    with pytest.raises(InputError, match=r"readers.tfrecords needs google-crc32c.*torchdistinput\[tfrecord\]"):
        read(readers.tfrecords, bytes(32))


@pytest.mark.parametrize("most", [10, 700, 90_000])
def test_records_and_blocks_come_wherever_the_pieces_end_in_which_the_file_is_read(most: int) -> None:
    rng = random.Random(most)
    payloads = [rng.randbytes(rng.randrange(most)) for _ in range(max(12, 100_000 // (most // 2 + 16)))]
    ends = list(itertools.accumulate(16 + len(payload) for payload in payloads))
    blocks: list[tuple[int, list[bytes]]] = [(0, [])]
    for payload, end in zip(payloads, ends, strict=True):
        blocks[-1][1].append(payload)
        if end - blocks[-1][0] >= 1 << 16:
            blocks.append((end, []))
    content = b"".join(map(tfrecord, payloads))
    assert list(readers.tfrecords.blocks(io.BytesIO(content), 0)) == [block for block in blocks if block[1]]
    entered = readers.tfrecords.blocks(io.BytesIO(content), blocks[1][0])
    assert [record for _, records in entered for record in records] == payloads[len(blocks[0][1]) :]


def test_the_first_of_several_damages_is_told_first() -> None:
    content = bytearray(b"".join(map(tfrecord, [b"0123456789"] * 6))[:-1])  # cut off, too
    for record in (1, 4):
        content[26 * record + 15] ^= 1
    offset, found = 0, []
    for whole in (1, 2, 0):
        blocks, error = until_failure(readers.tfrecords.blocks(io.BytesIO(content), offset))
        assert [record for _, records in blocks for record in records] == [b"0123456789"] * whole
        assert isinstance(error, SourceError)
        found.append((error.offset, error.resume_at))
        offset = error.resume_at or 0
    assert found == [(26, 52), (104, 130), (130, None)]


# ---------------------------------------------------------------------------------------------------- fixed length


@pytest.mark.parametrize("size", [1, 3, 1000, 65_535, 65_536, 65_537, 3_000_000])
def test_fixed_length_records_come_back(size: int) -> None:
    content = np.random.default_rng(0).bytes(size * 3 if size > 1000 else size * 500)
    records = read(readers.fixed_length_records(size), content)
    assert {len(record) for record in records} == {size}
    assert b"".join(records) == content


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_a_length_that_cannot_be_is_refused(size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="num_bytes must be"):
        readers.fixed_length_records(size)


# ---------------------------------------------------------------------------------------------- readers of one's own


def test_public_readers_are_the_promised_ones() -> None:
    names = ["text_lines", "json_lines", "csv_rows", "npy_rows", "tfrecords", "fixed_length_records", "webdataset"]
    assert sorted(readers.__all__) == sorted([*names, "Layout", "in_blocks", "parquet", "skip_to"])
    assert all(name in vars(readers) for name in readers.__all__)
    for name in names[:5]:  # unpickled also from the module that lists it
        assert pickle.loads(f"ctorchdistinput.sources.formats.readers\n{name}\n.".encode()) is getattr(readers, name)


def test_a_reader_with_blocks_has_the_name_the_text_and_the_arguments_of_a_reader() -> None:
    assert (readers.json_lines.__name__, readers.json_lines.__module__) == (
        "json_lines",
        "torchdistinput.sources.formats.text",
    )
    assert "JSON Lines" in (readers.json_lines.__doc__ or "")
    assert list(inspect.signature(readers.json_lines).parameters) == ["file"]
    assert repr(readers.json_lines) == "<reader torchdistinput.sources.formats.text.json_lines>"
    assert pickle.loads(pickle.dumps(pairs)) is pairs


def test_functions_and_what_hides_a_reader_have_no_blocks() -> None:
    def plain(file: BinaryIO) -> Iterator[bytes]:
        yield from file

    def wrapped(file: BinaryIO) -> Iterable[Any]:
        return readers.text_lines(file)

    for each in (plain, wrapped, functools.partial(plain), functools.partial(readers.text_lines, io.BytesIO())):
        assert facts_of(each).blocks is None


def test_records_are_gathered_to_blocks_and_come_before_a_failure() -> None:
    def records(failing: int) -> Iterator[tuple[int, int]]:
        for number in range(10):
            if number == failing:
                raise KeyError(number)
            yield 100 + (number + 1) * 30_000, number

    assert list(grouped(records(99), 100)) == [
        (100, [0, 1, 2]),
        (90_100, [3, 4, 5]),
        (180_100, [6, 7, 8]),
        (270_100, [9]),
    ]
    for failing in range(10):
        found, error = until_failure(grouped(records(failing), 100))
        assert [record for _, block in found for record in block] == list(range(failing))
        assert isinstance(error, KeyError)
    assert list(grouped(iter(()), 0)) == []


@pytest.mark.parametrize("opener", OPENERS)
def test_a_file_goes_forward_to_any_place(opener: str) -> None:
    content = bytes(range(250))
    for at, offset in itertools.combinations_with_replacement((0, 1, 9, 100, 250), 2):
        stream = OPENERS[opener](content)
        assert len(stream.read(at)) == at
        filesystem.skip_to(stream, offset, at)
        assert stream.read() == content[offset:]
    if opener != "seekable":
        with pytest.raises(SourceError, match="the content ends at byte 5, but is to be read from byte 7") as caught:
            filesystem.skip_to(OPENERS[opener](b"12345"), 7)
        assert caught.value.offset == 5


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


PACKAGE = Path(tdi.__file__).parent
MEGABYTE = 1 << 20


def outcome(read: Reader, file: BinaryIO) -> tuple[int, SourceError | None, int]:
    """How many records came, what failed, and the peak of the memory in bytes."""
    count, failure = 0, None
    tracemalloc.start()
    try:
        for _ in read(file):
            count += 1
    except SourceError as error:
        failure = error
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return count, failure, peak


class _Endless(io.RawIOBase):
    """A piece over and over, after a front; never held at once."""

    def __init__(self, front: bytes, piece: bytes, size: int) -> None:
        self._front, self._piece, self._left = front, piece * (MEGABYTE // len(piece)), size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        wanted = min(len(buffer), self._left)
        data = (self._front or self._piece)[:wanted]
        self._front = self._front[wanted:]
        self._left -= len(data)
        buffer[: len(data)] = data
        return len(data)


def endless(front: bytes, piece: bytes, size: int = 32 * MEGABYTE) -> BinaryIO:
    return io.BufferedReader(_Endless(front, piece, size))


def absurd_record(length: int, *, good: bool) -> bytes:
    head = struct.pack("<Q", length)
    return head + struct.pack("<I", masked_crc32c(head) ^ (not good)) + bytes(32)


def absurd_array(shape: str, descr: str = "'<f8'", *, fortran: bool = False, version: int = 1) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n".encode()
    size = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + size + text + bytes(64)


def bomb(folder: Path, front: bytes, piece: bytes) -> filesystem.OpenedFile:
    """32 MB in a small compressed file."""
    squeeze = zlib.compressobj(9, zlib.DEFLATED, 31)
    pieces = [squeeze.compress(front), *(squeeze.compress(piece * (MEGABYTE // len(piece))) for _ in range(32))]
    (folder / "bomb.gz").write_bytes(b"".join(pieces) + squeeze.flush())
    return filesystem.open_file(f"{folder}/bomb.gz", "infer")


def some_rows(file: BinaryIO) -> Iterator[Any]:
    return itertools.islice(readers.csv_rows(file), 999)


class Hostile(NamedTuple):
    """Bytes made to harm.

    Args:
      read: the reader.
      content: the bytes, or what opens a file of them in a folder.
      said: by the error; ``None`` where there is none.
      counts: how many records may come.
      megabytes: that are never needed.
      offset: of the error, where that is known.
    """

    read: Reader
    content: bytes | Callable[[Path], Any]
    said: str | None = ""
    counts: Container[int] = (0,)
    megabytes: int = 4
    offset: int | None = None


SHAPES = [
    *("(1000000000000, 1000000000)", "(9223372036854775807,)", "(9223372036854775807, 3)", f"({10**40},)"),
    *(f"(0, {2**62})", "(5, 1000000)", "(-1,)", "(" + "1," * 100 + ")", "(" * 3000),
]
DESCRS = [
    *("'<S99999999999'", "'|V2147483647'", "[('a', '<f8', (100000, 100000))]", "'O'", "__import__('os')", "[" * 3000),
]
HOSTILE: dict[str, list[Hostile]] = {
    "length of a TFRecord": [
        Hostile(readers.tfrecords, absurd_record(length, good=good), str(length + 16 * good), megabytes=1, offset=0)
        for length in (MEGABYTE, 1 << 31, 1 << 40, 1 << 63, (1 << 64) - 1)
        for good in (True, False)
    ],
    "shape of an array": [
        Hostile(readers.npy_rows, absurd_array(*case[:1], fortran=case[1], version=case[2]), counts=range(9))
        for case in itertools.product(SHAPES, (False, True), (1, 2, 3))
    ],
    "dtype of an array": [
        Hostile(readers.npy_rows, absurd_array("(3,)", descr, version=version))
        for descr in DESCRS
        for version in (1, 3)
    ],
    "rows without bytes": [
        Hostile(readers.npy_rows, absurd_array(shape)[:-64], "has no rows to read")
        for shape in (f"({2**62}, 0)", f"({2**62}, 3, 0)")
    ],
    "long records": [
        Hostile(readers.fixed_length_records(size), bytes(100), f"needs {size} bytes, 100 are left", megabytes=1)
        for size in (1 << 31, 1 << 40, 1 << 70)
    ],
    "a line is held whole, and not many times": [
        Hostile(readers.text_lines, lambda _: endless(b"", b"x", 16 * MEGABYTE), None, (1,), 80),
        Hostile(readers.json_lines, lambda _: endless(b"", b"[", 16 * MEGABYTE), "is not JSON", megabytes=96),
    ],
    "values of JSON": [
        Hostile(readers.json_lines, b"1\n" + line + b"\n2\n", "", (1,), 32, 2)
        for line in (b"[" * 10**5, b'{"a":' * 10**5, b"9" * 10**5, b"\0", b"NaN" * 10**5)
    ],
    "an endless quoted field": [  # whose lines end; without an end a line is held whole
        Hostile(readers.csv_rows, lambda _: endless(b'a,b\n1,"', b"x\n"), "line 65539 is not CSV")
    ],
    "a small file of many bytes": [
        Hostile(readers.fixed_length_records(1 << 16), lambda folder: bomb(folder, b"", b"\0"), None, (512,), 8),
        Hostile(readers.tfrecords, lambda folder: bomb(folder, b"", b"\0"), megabytes=8),
        Hostile(readers.npy_rows, lambda folder: bomb(folder, b"", b"\0"), megabytes=8),
        Hostile(some_rows, lambda folder: bomb(folder, b"a,b\n1,2\n", b"1,2\n"), None, (999,), 8),
    ],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_bytes_claim_is_not_believed_and_memory_is_bounded_by_what_there_is(name: str, tmp_path: Path) -> None:
    for each in HOSTILE[name]:
        opened = io.BytesIO(each.content) if isinstance(each.content, bytes) else each.content(tmp_path)
        with contextlib.closing(opened):
            count, failure, peak = outcome(each.read, getattr(opened, "stream", opened))
        assert count in each.counts
        assert peak < each.megabytes * MEGABYTE
        assert (failure is None) == (each.said is None)
        if failure is not None:
            assert each.said in str(failure)  # type: ignore[operator] # it is a text
            assert len(str(failure)) < 1000
            assert each.offset in (None, failure.offset)


# Names


ODD_NAMES = ["a\nb.txt", "a\x1b[31mb.txt", "tab\tb.txt", "quo'te\".txt", "\u202eevil.txt", os.fsdecode(b"\xff\xfe.txt")]


def is_one_plain_line(text: str) -> bool:
    text.encode()  # no lone surrogates
    return text.isprintable()


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_of_files_are_read_and_shown_in_one_line(name: str, tmp_path: Path) -> None:
    path = f"{tmp_path}/{name}"
    Path(path).write_bytes(b"content\n")
    assert glob.expand(f"{tmp_path}/*.txt") == [path]
    assert list(tdi.FileDataset(f"{tmp_path}/*.txt", readers.text_lines)) == ["content"]
    assert is_one_plain_line(one_line(path))
    for ask in (
        lambda: filesystem.open_file(f"{path}.gone", None),
        lambda: filesystem.stat_facts(f"{path}.gone"),
        lambda: glob.expand(f"{path}.gone*"),
    ):
        with pytest.raises(SourceError) as caught:
            ask()
        assert is_one_plain_line(str(caught.value))
        assert caught.value.file is not None
        assert caught.value.file.startswith(path)


def test_names_in_a_list_do_not_run_together() -> None:
    lists = [["a\nb", "c"], ["a", "b\nc"], ['a", "b', "c"], ["a", 'b", "c']]
    assert len({tdi.FileDataset(names, readers.text_lines).fingerprint()["file list"] for names in lists}) == 4


def test_what_an_error_says_is_one_line_of_bounded_length() -> None:
    assert reason(OSError("a\n\x1b[2Jb" + "x" * 10**6 + "\udcff")).isprintable()
    assert len(reason(OSError("x" * 10**6))) < 600
    assert reason(OSError()) == "OSError"


# Code


RUNS_CODE = {
    *("eval", "exec", "compile", "__import__"),
    *("pickle.loads", "pickle.load", "pickle.Unpickler", "marshal.loads", "marshal.load", "shelve.open"),
    *("torch.load", "np.load", "numpy.load", "importlib.import_module", "yaml.load", "cloudpickle.loads"),
}

# Where an exception is copied inside the process that raised it, to see whether it survives the way out of a worker;
# what a loader worker sends to the process that forked it, as torch's loader sends it; and the launcher of tests,
# between a process and its own children.
REASONED = {
    "batches/schema_check.py": {"pickle.loads"},
    "sources/torch_loader/shared_memory/transport.py": {"pickle.loads"},
    "sources/kernel/read_failures.py": {"pickle.loads"},
    "testing/ranks.py": {"pickle.loads"},
    "testing/sources.py": {"pickle.loads"},
}

MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def calls(tree: ast.AST) -> Iterator[str]:
    """What is used of what could run code: plain names, and ``module.name``; also imported by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            # Under another name it would not be found.
            yield from (f"{alias.name} as {alias.asname}" for alias in node.names if alias.asname)


@pytest.mark.parametrize("module", MODULES)
def test_nothing_that_comes_from_elsewhere_is_run(module: str) -> None:
    used = set(calls(ast.parse((PACKAGE / module).read_text())))
    assert used & RUNS_CODE == REASONED.get(module, set())
    renamed = {each.partition(" as ")[0] for each in used if " as " in each}
    assert not renamed & {name.partition(".")[0] for name in RUNS_CODE if "." in name} - {"torch", "numpy"}


@pytest.mark.parametrize("compression", ["infer", None])
def test_a_file_that_is_not_what_its_name_says_is_an_error(compression: str | None, tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(b"\x1f\x8b" + bytes(100))
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"x\n" * 10_000)[:-9])
    for name in ("a.gz", "b.gz"):
        dataset = tdi.FileDataset(f"{tmp_path}/{name}", readers.text_lines, compression=compression)
        with pytest.raises(SourceError, match=name) as caught:
            list(dataset)
        assert caught.value.file == f"{tmp_path}/{name}"
