"""The formats of files: bytes as each has them, what was written, and what must be found in bytes that are damaged."""

from __future__ import annotations

import csv
import io
import json
import struct
import tarfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from torchdistinput import readers
from torchdistinput.sources.formats.tfrecords import masked_crc32c
from torchdistinput.sources.readers.interleave import Interleave

Member = tuple[str, bytes]


def tfrecord(*payloads: bytes, good: bool = True, good_length: bool = True) -> bytes:
    """Records of TFRecord; their checksums fit, if they are to be good."""
    whole = b""
    for payload in payloads:
        length = struct.pack("<Q", len(payload))
        whole += length + struct.pack("<I", masked_crc32c(length) ^ (not good_length))
        whole += payload + struct.pack("<I", masked_crc32c(payload) ^ (not good))
    return whole


def npy(array: np.ndarray[Any, Any], version: tuple[int, int] | None = None) -> bytes:
    """A file of NumPy."""
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # versions 2 and 3 are announced
        np.lib.format.write_array(stream, array, version=version)
    return stream.getvalue()


def tar(members: Sequence[Member | tarfile.TarInfo], form: int = tarfile.USTAR_FORMAT) -> bytes:
    """An archive as ``tarfile`` writes it."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as archive:
        for each in members:
            if isinstance(each, tarfile.TarInfo):
                archive.addfile(each)
            else:
                about = tarfile.TarInfo(each[0])
                about.size = len(each[1])
                archive.addfile(about, io.BytesIO(each[1]))
    return stream.getvalue()


def parquet(count: int, group: int = 5) -> bytes:
    """A file of Parquet with the records 0, 1, ... in groups of rows."""
    stream = io.BytesIO()
    pa, pq = import_module("pyarrow"), import_module("pyarrow.parquet")
    columns = {"x": pa.array(range(count), pa.int64()), "text": pa.array(map(str, range(count)), pa.string())}
    pq.write_table(pa.table(columns), stream, row_group_size=group, use_dictionary=False)
    return stream.getvalue()


def until_failure(source: Iterable[Any]) -> tuple[list[Any], Exception | None]:
    """What an iterable yields, and what it raises then."""
    found: list[Any] = []
    try:
        for each in source:
            found.append(each)
    except Exception as error:
        return found, error
    return found, None


def same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether records are equal, arrays in dtype too."""
    return len(found) == len(expected) and all(map(_equal, found, expected))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(other, np.ndarray | np.generic):
        return bool(one.dtype == other.dtype.newbyteorder("=") and np.array_equal(one, other))
    return type(one) is type(other) and bool(one == other)


# ------------------------------------------------------------------------------------- what any bytes must be read as

SPOILED = "a record that is spoiled, behind which reading goes on"
ERROR = "an error that ends the file"

Law = Callable[[bytes], "tuple[list[Any], bool] | None"]
"""The records in front of the first failure, and whether there is one; ``None`` where that is not sure."""


def _text_law(content: bytes, parse: Callable[[str], Any] = str, blank: Any = False) -> tuple[list[Any], bool]:
    lines = content.removeprefix("\ufeff".encode()).split(b"\n")
    ended, last = lines[:-1], lines[-1:] if lines[-1] else []
    found: list[Any] = []
    for line in [*(each.removesuffix(b"\r") for each in ended), *last]:
        if not (blank and not line.strip(b" \t\r\n")):
            try:
                found.append(parse(line.decode()))
            except ValueError:
                return found, True
    return found, False


def _csv_law(content: bytes) -> tuple[list[Any], bool]:
    text = content.removeprefix("\ufeff".encode()).decode(errors="surrogateescape")
    rows, found, header = csv.reader(io.StringIO(text, newline=""), strict=True), [], None
    try:
        for row in filter(None, rows):
            "".join(row).encode()
            if header is None and len({*row}) < len(row):
                return [], True
            if header is not None and len(row) != len(header):
                return found, True
            if header is not None:
                found.append(dict(zip(header, row, strict=True)))
            header = header or row
    except (csv.Error, UnicodeEncodeError):
        return found, True
    return found, False


def _fixed_law(size: int, content: bytes) -> tuple[list[Any], bool]:
    whole = len(content) // size * size
    return [content[at : at + size] for at in range(0, whole, size)], whole < len(content)


def _tfrecord_law(content: bytes) -> tuple[list[Any], bool]:
    found: list[Any] = []
    while content:
        if len(content) < 16:
            return found, True
        size = struct.unpack("<Q", content[:8])[0]
        payload = content[12 : 12 + size]
        if content[: 16 + size] != tfrecord(payload) or len(payload) < size:
            return found, True
        found.append(payload)
        content = content[16 + size :]
    return found, False


def _npy_law(whole: bytes, content: bytes) -> tuple[list[Any], bool] | None:
    array = np.load(io.BytesIO(whole))
    start = len(whole) - array.nbytes
    if content[:start] != whole[:start]:
        return None
    row = array[:1].nbytes
    rows = min(len(array), (len(content) - start) // row)
    read = np.frombuffer(content, array.dtype, rows * array[0].size, start)
    return list(read.reshape(rows, *array.shape[1:])), len(content) != len(whole)


# ----------------------------------------------------------------------------------------------------------- the table


class Bad(NamedTuple):
    """Bytes that cannot all be read.

    Args:
      content: these bytes.
      found: the records, with ``SPOILED`` and ``ERROR`` in their places, where bad ones are left out.
      offset: of the first bad record; ``None`` where the format knows lines only.
      said: a pattern of what the error says.
    """

    content: bytes
    found: list[Any]
    offset: int | None
    said: str


class Format(NamedTuple):
    """A format, with what each harness reads of it.

    Args:
      read: the reader.
      written: bytes, and what was written; the records are blocks of 16 bytes or larger, at times.
      files: contents of files of several lengths, with what the format has of the unusual.
      bad: what is damaged.
      law: what must be found in any bytes; none for tar.
      large: a large content.
      tried: a content of which each byte is cut off and each bit flipped.
    """

    read: Callable[[BinaryIO], Iterable[Any]]
    written: Sequence[tuple[bytes, list[Any]]]
    files: Sequence[bytes]
    bad: Sequence[Bad]
    law: Law | None
    large: Callable[[], bytes]
    tried: Sequence[bytes]


def _ended(content: str, records: list[Any]) -> list[tuple[bytes, list[Any]]]:
    """The same with either end of a line, and without an end, and with a mark."""
    ways = [content, content.replace("\n", "\r\n"), content.removesuffix("\n"), f"\ufeff{content}"]
    return [(way.encode(), records) for way in ways]


_LINES = ["one", "", "three is a longer line than a block", "fo\u00fcr", *"56789", "\u2028", "\ufeff", "last"]
_VALUES = [{"a": 1}, [], "a line as long as two blocks", 3, 4, 5, None]
_ROWS = [("1", "2"), ("3\n\n3", "4"), ("", 'a "field", as long as two blocks'), ("\ufeff5", "\u00fc"), ("0", "")]
_CSV = 'a,b\n1,2\n"3\n\n3",4\n,"a ""field"", as long as two blocks"\n\ufeff5,\u00fc\n0,\n'
_WORDS = [b"", b"a", b"bb" * 20, b"c", b"d"]
_INTS = np.arange(21, dtype=np.int16).reshape(7, 3)
ARRAYS = [
    np.arange(12, dtype=np.float32).reshape(4, 3),
    np.arange(8, dtype=">i2").reshape(4, 2),
    np.arange(50, dtype=np.int8),
    np.arange(5, dtype=">f8"),
    np.array([[True], [False]]),
    np.array(["ab", "c", ""]),
    np.array([b"ab", b"c"]),
    np.arange(3).astype("M8[s]"),
    np.ones((2, 2), dtype=np.complex64),
    np.array([(1, 2.5), (3, 4.5)], dtype=[("a", ">i4"), ("b", "f8")]),
    np.zeros((0, 4)),
    np.arange(60.0).reshape(5, 12),
    _INTS,
]
MANY = [np.random.default_rng(0).random((3, 200_000)), np.arange(300_000).reshape(-1, 15)]


def _samples(count: int, size: int) -> tuple[bytes, list[Any]]:
    members = [(f"{n}.{end}", bytes(n * long)) for n in range(count) for end, long in (("a", size), ("b", 1))]
    return tar(members), [{"__key__": f"{n}", "a": bytes(n * size), "b": bytes(n)} for n in range(count)]


def _numbered(piece: Callable[[int], bytes], count: int) -> bytes:
    return b"".join(map(piece, range(count)))


FORMATS: dict[str, Format] = {
    "text": Format(
        readers.text_lines,
        [
            *_ended("".join(f"{line}\n" for line in _LINES), _LINES),
            *[(b"", []), (b"\n", [""]), (b"a", ["a"]), (b"a\rb\r", ["a\rb\r"]), (b"a\r\r\n", ["a\r"])],
            ("\ufeff\u00e4\u2028b\x0b\x1cc\n\ufeff".encode(), ["\u00e4\u2028b\x0b\x1cc", "\ufeff"]),
        ],
        ["\ufeffa\nb\r\n\nd".encode(), b"", b"x\n" * 9, "\u00e9\n\n\n\ufeff".encode()],
        [
            *[
                Bad(b"x" * pad + b"\r\nok\nab\xffc\nlater", ["x" * pad, "ok", SPOILED, "later"], pad + 5,
                    f"the line at byte {pad + 5} is not UTF-8: byte {pad + 7} is 0xff")
                for pad in (0, 10, 70_000)
            ],
            Bad(b"\xff\r\nb\r\nc", [SPOILED, "b", "c"], 0, "not UTF-8"),
            Bad(b"a\n\xffx", ["a", SPOILED], 2, "not UTF-8"),
            Bad(b"\xff\n\xff\nb\n", [SPOILED, SPOILED, "b"], 0, "not UTF-8"),
        ],
        _text_law,
        lambda: _numbered(lambda n: b"line number %d \xc3\xbc\n" % n, 100_000),
        ["\ufeffa\n\u00fc\r\n\nd\n".encode()],
    ),
    "json": Format(
        readers.json_lines,
        _ended("".join(f"{json.dumps(value)}\n \n" for value in _VALUES), _VALUES),
        [b"\xef\xbb\xbf1\n\n[2]\n  \n3", b"", b'{"a": 4}\n' * 9, b"\n \n"],
        [
            *[
                Bad(b"1\n\n2\n" + bad + b"\n3\n", [1, 2, SPOILED, 3], 5, "the line at byte 5 is not")
                for bad in (
                    *(b'{"a": 1', b"{} {}", b"[1]\x0b", b"[1]\r\r2", b"nothing", b"\xff", b"[" * 100_000),
                    b'"\xed\xa0\x80"',
                )
            ],
            Bad(b"1\n{", [1, SPOILED], 2, "not JSON"),
        ],
        partial(_text_law, parse=json.loads, blank=True),
        lambda: _numbered(lambda n: b'{"a": "%99d"}\n' % n, 40_000),
        [b'\xef\xbb\xbf{"a": 1}\n\n[2, 3]\n  \n"\xc3\xbc"'],
    ),
    "csv": Format(
        readers.csv_rows,
        [
            *[(content, [{"a": a, "b": b} for a, b in _ROWS]) for content in (
                _CSV.encode(), f"\ufeff{_CSV}".encode(), f"\n\n{_CSV}".encode(), _CSV.rstrip().encode(),
            )],
            (_CSV.replace("\n", "\r\n").encode(), [{"a": a.replace("\n", "\r\n"), "b": b} for a, b in _ROWS]),
            *[(b"", []), (b"a,b\n", [])],
        ],
        [],
        [
            *[
                Bad(b'a,b\n"x\ny",2\n\n' + bad, [{"a": "x\ny", "b": "2"}, ERROR], None, f"line [56] .*{said}")
                for bad, said in (
                    (b"1\n", "has 1 fields, the header has 2"),
                    (b"1,2,3\n", "has 3 fields, the header has 2"),
                    (b'"1,2\n', "unexpected end of data"),
                    (b'"1"x,2\n', "expected after"),
                    (b"1,\xff\n", "utf-8"),
                    (b'"1\n\xff",2\n', "utf-8"),
                )
            ],
            Bad(b"a,a\n1,2\n", [ERROR], None, "a"),
            Bad(b"\xff,b\n1,2\n", [ERROR], None, "utf-8"),
        ],
        _csv_law,
        lambda: b"a,b\n" + _numbered(lambda n: b'%d,"x\n%d"\n' % (n, n), 30_000),
        ['\ufeffa,b\n1,2\n\n"3\n\u00fc""",4\n'.encode()],
    ),
    "npy": Format(
        readers.npy_rows,
        [(npy(array, version), list(array)) for array in ARRAYS for version in (None, (1, 0), (2, 0))]
        + [(npy(array), list(array)) for array in MANY],
        [npy(np.arange(n * 3).reshape(n, 3)) for n in (5, 13, 1)],
        [
            Bad(npy(_INTS)[:-7], [*_INTS[:5], ERROR], len(npy(_INTS)) - 12, "cut off"),
            Bad(npy(_INTS) + b"more", [*_INTS, ERROR], len(npy(_INTS)), ""),
            Bad(b"not an array, but long enough to be read", [ERROR], 0, "not a .npy file"),
            Bad(npy(np.asfortranarray(_INTS)), [ERROR], 0, "in Fortran order, so that its rows are spread"),
            Bad(npy(np.zeros((3, 0))), [ERROR], 0, r"an array of shape \(3, 0\) and dtype <f8 has no rows to read"),
            Bad(npy(np.array([[(1,)]], dtype=[("\u4e2d", "i4")])), [ERROR], 0, "version 3.0 of the format is not kn"),
            Bad(npy(np.array([{}], dtype=object)), [ERROR], 0, "Python objects"),
            Bad(npy(np.array([(1, None)], dtype=[("a", "i4"), ("b", "O")])), [ERROR], 0, "Python objects"),
        ],
        lambda content: _npy_law(npy(_INTS, (2, 0) if content[6:7] == b"\2" else (1, 0)), content),
        lambda: npy(np.arange(1_000_000, dtype=np.int64).reshape(-1, 100)),
        [npy(_INTS, (1, 0)), npy(_INTS, (2, 0))],
    ),
    "npy of numbers": Format(
        readers.npy_rows, [], [npy(np.arange(n)) for n in (5, 13, 0, 1)], [], None, lambda: npy(np.arange(500_000)), []
    ),
    "tfrecords": Format(
        readers.tfrecords,
        [(tfrecord(*_WORDS), _WORDS), (b"", [])],
        [tfrecord(*(b"a" * k for k in range(n))) for n in (5, 0, 9)],
        [
            Bad(tfrecord(b"b", good=False) + tfrecord(b"c"), [SPOILED, b"c"], 0, "is corrupt"),
            Bad(tfrecord(b"a") + tfrecord(b"b", good_length=False), [b"a", ERROR], 17, "is corrupt"),
            Bad(tfrecord(b"a") + tfrecord(b"bcd")[:-5], [b"a", ERROR], 17, "cut off"),
            Bad(tfrecord(b"a") + tfrecord(b"bcd")[:5], [b"a", ERROR], 17, "cut off"),
            Bad(b"\x1f\x8b" + bytes(30), [ERROR], 0, "compression"),
        ],
        _tfrecord_law,
        lambda: _numbered(lambda n: tfrecord(b"%990d" % n), 3_000),
        [tfrecord(b"first", b"", b"the third")],
    ),
    "fixed": Format(
        readers.fixed_length_records(7),
        [(bytes(range(98)), [bytes(range(at, at + 7)) for at in range(0, 98, 7)]), (b"", [])],
        [b"", b"abcdefg" * 5, bytes(range(7 * 13)), b"1234567"],
        [
            Bad(bytes(7 * whole + tail), [*[bytes(7)] * whole, ERROR], 7 * whole, f"needs 7 bytes, {tail} are left")
            for whole in (0, 5, 16_384)
            for tail in range(1, 7)
        ],
        partial(_fixed_law, 7),
        lambda: np.random.default_rng(0).bytes(7 * 500_000),
        [bytes(range(21))],
    ),
    "fixed, large": Format(
        readers.fixed_length_records(100_000),
        [(bytes(300_000), [bytes(100_000)] * 3)],
        [], [], None, lambda: np.random.default_rng(0).bytes(4_000_000), [],
    ),
    "tar": Format(
        readers.webdataset(),
        [_samples(5, 1), _samples(5, 700), _samples(1, 0)],
        [tar([(f"{k}.{end}", b"%d" % k) for k in range(n) for end in ("txt", "cls")]) for n in (5, 0, 9)],
        [],
        None,
        lambda: _samples(40, 5_000)[0],
        [_samples(3, 1)[0][:5_000]],
    ),
}  # fmt: skip


if find_spec("pyarrow") is not None:
    _ROWS_OF_PARQUET = [{"x": number, "text": str(number)} for number in range(13)]
    _PARQUET = parquet(13)
    _NO_PARQUET = "this is not a Parquet file"
    FORMATS["parquet"] = Format(
        readers.parquet(),
        [(_PARQUET, _ROWS_OF_PARQUET), (parquet(13, 3), _ROWS_OF_PARQUET), (parquet(0), [])],
        [parquet(5), parquet(0), parquet(13), parquet(1)],
        [
            # The front of the first group of rows, which is one record that cannot be read.
            Bad(
                _PARQUET[:4] + bytes(20) + _PARQUET[24:], [SPOILED, *_ROWS_OF_PARQUET[5:]], None, "row group 0 .record"
            ),
            *[Bad(content, [ERROR], 0, _NO_PARQUET) for content in (b"", _PARQUET[:-3], b"x,y\n1,2\n" * 9)],
        ],
        None,
        lambda: parquet(100_000, 5_000),
        [],
    )


def records_of(reader: Interleave) -> list[Any]:
    """All records up to the end, as they become ready."""
    return [*chain.from_iterable(iter(reader.take_ready, []))]
