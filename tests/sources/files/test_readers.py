"""Every reader gives back what was written, and names the place at which a file is damaged."""

from __future__ import annotations

import bz2
import csv
import functools
import gzip
import io
import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from tests.sources.files.test_webdataset import tar
from tests.support.formats import npy, tfrecord
from torchdistinput.errors import InputError, SourceError
from torchdistinput.sources.formats import readers, tfrecords
from torchdistinput.sources.formats.reader_api import grouped
from torchdistinput.sources.formats.tfrecords import masked_crc32c
from torchdistinput.sources.storage import io as filesystem

Reader = Callable[[BinaryIO], Iterable[Any]]


def read(reader: Reader, content: bytes) -> list[Any]:
    return list(reader(io.BytesIO(content)))


def failing(reader: Reader, content: bytes) -> tuple[list[Any], SourceError]:
    """The records in front of the failure, and the failure."""
    records: list[Any] = []
    with pytest.raises(SourceError) as caught:
        records.extend(_one_by_one(reader(io.BytesIO(content)), records))
    assert caught.value.file is None
    return records, caught.value


def _one_by_one(source: Iterable[Any], into: list[Any]) -> Iterator[Any]:
    for record in source:
        into.append(record)
    yield from ()


def same_rows(rows: list[Any], array: np.ndarray[Any, Any]) -> bool:
    return len(rows) == len(array) and all(np.array_equal(one, other) for one, other in zip(rows, array, strict=True))


# Text


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"a\r\nb\r\n\r\n", ["a", "b", ""]),
        (b"a\rb\r", ["a\rb\r"]),
        (b"a\r\r\n", ["a\r"]),
        ("\ufeffä\u2028b\x0b\x1cc\n\ufeff".encode(), ["ä\u2028b\x0b\x1cc", "\ufeff"]),
    ],
)
def test_lines_end_in_one_of_two_ways(content: bytes, lines: list[str]) -> None:
    assert read(readers.text_lines, content) == lines


def test_lines_are_those_of_python_wherever_the_chunks_end() -> None:
    rng = np.random.default_rng(0)
    for longest in (3, 200, 100_000, 300_000):
        lines = [*("é" * int(length) for length in rng.integers(0, longest, 2_000_000 // longest + 3)), "last"]
        for end in ("\n", "\r\n"):
            content = end.join(lines).encode()
            assert read(readers.text_lines, content) == lines
            assert read(readers.text_lines, content + end.encode()) == lines


@pytest.mark.parametrize("padding", [0, 10, 70_000])
def test_a_line_that_is_not_utf8_is_named_after_the_lines_before_it(padding: int) -> None:
    good = b"x" * padding + b"\r\nok\n"
    records, error = failing(readers.text_lines, good + b"ab\xffc\nlater\n")
    assert records == ["x" * padding, "ok"]
    assert error.offset == len(good)
    assert f"the line at byte {len(good)} is not UTF-8: byte {len(good) + 2} is 0xff" in str(error)


# JSON


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
    parsed = 0

    def counted(parse: Any) -> Any:
        def call(text: str) -> Any:
            nonlocal parsed
            parsed += 1
            return parse(text)

        return call

    monkeypatch.setattr(json, "loads", counted(json.loads))
    content = "".join(f"[{n}]{end}" for n in range(20_000)) + "[20000]" + end.removesuffix("\n")
    assert list(readers.json_lines(io.BytesIO(content.encode()))) == [[n] for n in range(20_001)]
    assert parsed == 20_001


@pytest.mark.parametrize(
    "bad", [b'{"a": 1', b"{} {}", b"[1]\x0b", b"[1]\r\r2", b"nothing", b"\xff", b"[" * 100_000, b'"\xed\xa0\x80"']
)
def test_a_line_that_is_not_json_is_named_after_the_values_before_it(bad: bytes) -> None:
    records, error = failing(readers.json_lines, b"1\n\n2\n" + bad + b"\n3\n")
    assert records == [1, 2]
    assert error.offset == 5
    assert "the line at byte 5 is not" in str(error)


# CSV


def test_rows_are_dicts_by_the_header_as_pythons_own_reader_gives_them() -> None:
    rows = [
        {"id": "1", "text": "plain"},
        {"id": "", "text": 'quoted "word", comma'},
        {"id": "3", "text": "two\nlines\r\nor three"},
        {"id": "ü", "text": ""},
        {"id": "\ufeff5", "text": "no mark of the file"},
    ]
    for end in ("\n", "\r\n"):
        stream = io.StringIO(newline="")
        writer = csv.DictWriter(stream, ["id", "text"], lineterminator=end)
        writer.writeheader()
        writer.writerows(rows)
        content = stream.getvalue().encode()
        assert read(readers.csv_rows, content) == rows
        assert read(readers.csv_rows, b"\xef\xbb\xbf" + content) == rows
        assert read(readers.csv_rows, content.replace(b"id,text", b"\n\nid,text\n")) == rows
        assert read(readers.csv_rows, content.rstrip()) == rows
    tabs = functools.partial(readers.csv_rows, delimiter="\t")
    assert read(tabs, b"a\tb\n1,2\t3\n") == [{"a": "1,2", "b": "3"}]
    assert read(readers.csv_rows, b"") == read(readers.csv_rows, b"a,b\n") == []


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"1\n", "has 1 fields, the header has 2"),
        (b"1,2,3\n", "has 3 fields, the header has 2"),
        (b'"1,2\n', "unexpected end of data"),
        (b'"1"x,2\n', "expected after"),
        (b"1,\xff\n", "utf-8"),
        (b'"1\n\xff",2\n', "utf-8"),
    ],
)
def test_a_row_that_does_not_fit_is_named_after_the_rows_before_it(bad: bytes, reason: str) -> None:
    good = b'a,b\n"x\ny",2\n\n'
    records, error = failing(readers.csv_rows, good + bad)
    assert records == [{"a": "x\ny", "b": "2"}]
    assert re.search(r"line [56] ", str(error))
    assert reason in str(error)


# NumPy


ARRAYS = {
    "float32 matrix": np.arange(12, dtype=np.float32).reshape(4, 3),
    "big endian": np.arange(8, dtype=">i2").reshape(4, 2),
    "vector": np.arange(5, dtype=np.int8),
    "big endian vector": np.arange(5, dtype=">f8"),
    "bool": np.array([[True], [False]]),
    "strings": np.array(["ab", "c", ""]),
    "bytes": np.array([b"ab", b"c"]),
    "dates": np.arange(3).astype("M8[s]"),
    "complex": np.ones((2, 2), dtype=np.complex64),
    "records": np.array([(1, 2.5), (3, 4.5)], dtype=[("a", ">i4"), ("b", "f8")]),
    "no rows": np.zeros((0, 4)),
    "rows larger than a block": np.random.default_rng(0).random((3, 200_000)),
    "many blocks": np.random.default_rng(0).random((70_000, 5)),
    "many blocks of scalars": np.arange(300_000),
}


VERSIONS = (None, (1, 0), (2, 0))
LARGE = 10**6  # bytes; the version says how the header is written


@pytest.mark.parametrize(
    ("name", "version"),
    [(name, version) for name, array in ARRAYS.items() for version in VERSIONS[: 1 if array.nbytes > LARGE else None]],
)
def test_rows_of_an_array_come_back_in_every_version_of_the_format(name: str, version: tuple[int, int] | None) -> None:
    array = ARRAYS[name]
    rows = read(readers.npy_rows, npy(array, version))
    assert same_rows(rows, array)
    assert all(row.dtype.isnative and row.dtype.kind == array.dtype.kind for row in rows)


def test_rows_can_be_written_to_and_share_no_memory() -> None:
    array = np.arange(12.0).reshape(4, 3)
    rows = read(readers.npy_rows, npy(array))
    rows[0][:] = -1
    assert same_rows(rows[1:], array[1:])
    assert all(row.base is None and row.flags.c_contiguous for row in rows)


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (np.asfortranarray(np.arange(6).reshape(3, 2)), "in Fortran order, so that its rows are spread over the file"),
        (np.zeros((3, 0)), r"an array of shape \(3, 0\) and dtype <f8 has no rows to read"),
        (np.array([[(1,)]], dtype=[("中", "i4")]), "version 3.0 of the format is not known"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_arrays_that_are_not_read_are_refused_by_what_they_are(array: Any, told: str) -> None:
    records, error = failing(readers.npy_rows, npy(array))
    assert (records, error.offset) == ([], 0)
    assert re.search(told, str(error))


def test_pickled_objects_are_refused() -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return print, ("unpickled",)

    for array in (np.array([Bomb()], dtype=object), np.array([(1, None)], dtype=[("a", "i4"), ("b", "O")])):
        records, error = failing(readers.npy_rows, npy(array))
        assert records == []
        assert "Python objects" in str(error)


def test_an_array_cut_off_anywhere_gives_its_whole_rows_and_an_error() -> None:
    array = np.arange(15, dtype=np.int32).reshape(5, 3)
    content = npy(array)
    start = len(content) - array.nbytes
    for cut in range(len(content)):
        records, error = failing(readers.npy_rows, content[:cut])
        whole = max(0, cut - start) // 12
        assert same_rows(records, array[:whole])
        if cut < start:
            assert error.offset == 0
        else:
            assert error.offset == start + 12 * whole
            assert "cut off" in str(error)


def test_an_array_followed_by_something_is_an_error() -> None:
    content = npy(np.arange(3))
    records, error = failing(readers.npy_rows, content + content)
    assert records == [0, 1, 2]
    assert error.offset == len(content)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_a_damaged_header_is_an_error_or_another_array_but_nothing_else(version: tuple[int, int]) -> None:
    array = np.arange(6, dtype=np.float32).reshape(3, 2)
    content = npy(array, version)
    start = len(content) - array.nbytes
    errors = 0
    for position in range(start):
        for value in range(0, 256, 15):
            damaged = content[:position] + bytes([value]) + content[position + 1 :]
            try:
                rows = read(readers.npy_rows, damaged)
            except SourceError:
                errors += 1
            else:
                assert sum(row.nbytes for row in rows) == array.nbytes
    assert errors > 17 * 40


# TFRecord


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
        blocks = readers.tfrecords.blocks(io.BytesIO(content), offset)
        records = list(next(blocks, (0, []))[1]) if whole else []
        assert records == [b"0123456789"] * whole
        with pytest.raises(SourceError) as raised:
            next(blocks)
        found.append((raised.value.offset, raised.value.resume_at))
        offset = raised.value.resume_at or 0
    assert found == [(26, 52), (104, 130), (130, None)]


def test_records_cut_off_anywhere_give_the_whole_ones_and_an_error() -> None:
    payloads = [b"first", b"", b"the third"]
    ends = [0, *np.cumsum([16 + len(payload) for payload in payloads]).tolist()]
    content = b"".join(map(tfrecord, payloads))
    for cut in range(len(content)):
        whole = max(number for number, end in enumerate(ends) if end <= cut)
        if cut in ends:
            assert read(readers.tfrecords, content[:cut]) == payloads[:whole]
            continue
        records, error = failing(readers.tfrecords, content[:cut])
        assert records == payloads[:whole]
        assert error.offset == ends[whole]
        assert "cut off" in str(error)


def test_a_record_damaged_in_any_bit_is_an_error_at_its_place() -> None:
    payloads = [b"first", b"", b"the third"]
    ends = np.cumsum([16 + len(payload) for payload in payloads]).tolist()
    content = b"".join(map(tfrecord, payloads))
    for position in range(len(content)):
        broken = next(number for number, end in enumerate(ends) if position < end)
        for bit in range(8):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            records, error = failing(readers.tfrecords, bytes(damaged))
            assert records == payloads[:broken]
            assert error.offset == ([0, *ends][broken])
            assert "is corrupt" in str(error)


def test_a_compressed_file_read_as_it_is_says_so() -> None:
    error = failing(readers.tfrecords, gzip.compress(tfrecord(b"payload")))[1]
    assert error.offset == 0
    assert "compression" in str(error)


# Fixed length


@pytest.mark.parametrize("size", [1, 3, 1000, 65_535, 65_536, 65_537, 3_000_000])
def test_fixed_length_records_come_back(size: int) -> None:
    content = np.random.default_rng(0).bytes(size * 3 if size > 1000 else size * 500)
    records = read(readers.fixed_length_records(size), content)
    assert {len(record) for record in records} == {size}
    assert b"".join(records) == content


def test_a_short_tail_is_an_error_after_the_whole_records() -> None:
    for size, whole in ((4, 0), (4, 5), (4, 16_384), (4, 20_000)):
        content = bytes(size * whole)
        for tail in range(1, size):
            records, error = failing(readers.fixed_length_records(size), content + bytes(tail))
            assert len(records) == whole
            assert error.offset == len(content)
            assert f"needs 4 bytes, {tail} are left" in str(error)
    assert read(readers.fixed_length_records(4), b"") == []


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_a_length_that_cannot_be_is_refused(size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="num_bytes must be"):
        readers.fixed_length_records(size)


# All


EXAMPLES: dict[str, tuple[Reader, bytes, list[Any]]] = {
    "text_lines": (readers.text_lines, "ä\nb\n".encode(), ["ä", "b"]),
    "json_lines": (readers.json_lines, b'{"a": 1}\n[]\n', [{"a": 1}, []]),
    "csv_rows": (readers.csv_rows, b'a\n"1\n2"\n', [{"a": "1\n2"}]),
    "npy_rows": (readers.npy_rows, npy(np.arange(3)), [0, 1, 2]),
    "tfrecords": (readers.tfrecords, tfrecord(b"a") + tfrecord(b"b"), [b"a", b"b"]),
    "fixed_length_records": (readers.fixed_length_records(2), b"aabb", [b"aa", b"bb"]),
    "webdataset": (readers.webdataset(), tar([("a.cls", b"1")]), [{"__key__": "a", "cls": b"1"}]),
}


@pytest.mark.parametrize("name", list(EXAMPLES))
@pytest.mark.parametrize(("ending", "compress"), [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress)])
def test_every_reader_reads_from_local_compressed_and_remote_files(
    name: str, ending: str, compress: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    reader, content, records = EXAMPLES[name]
    local = tmp_path / f"file{ending}"
    local.write_bytes(compress(content))
    for place in (str(local), f"simplecache::file://{local}"):
        opened = filesystem.open_file(place, "infer")
        assert list(reader(opened.stream)) == records
        opened.close()


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_every_reader_reads_a_stream_that_gives_few_bytes_at_a_time(name: str) -> None:
    class Trickle(io.RawIOBase):
        def __init__(self, content: bytes) -> None:
            self._content = io.BytesIO(content)

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any, /) -> int:
            return self._content.readinto(memoryview(buffer)[:3])

    reader, content, records = EXAMPLES[name]
    with io.BufferedReader(Trickle(content), 16) as stream:
        assert list(reader(stream)) == records


def test_public_readers_are_the_promised_ones() -> None:
    assert sorted(readers.__all__) == sorted([*EXAMPLES, "Layout", "in_blocks", "parquet", "skip_to"])
    assert all(name in vars(readers) for name in readers.__all__)
