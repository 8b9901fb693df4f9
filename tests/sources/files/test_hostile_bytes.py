"""Bytes made to harm: memory stays bounded by what a file really has, errors are clear, and nothing of it is run."""

from __future__ import annotations

import ast
import gzip
import io
import os
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

import torchdistinput as tdi
from torchdistinput import readers
from torchdistinput.errors import SourceError
from torchdistinput.sources.formats.tfrecords import masked_crc32c
from torchdistinput.sources.storage import glob
from torchdistinput.sources.storage import io as filesystem
from torchdistinput.sources.storage.retry import one_line, reason

PACKAGE = Path(tdi.__file__).parent
MEGABYTE = 1 << 20

Reader = Callable[[BinaryIO], Iterable[Any]]


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


def tfrecord(length: int, *, good: bool) -> bytes:
    head = struct.pack("<Q", length)
    return head + struct.pack("<I", masked_crc32c(head) ^ (not good)) + bytes(32)


def npy(shape: str, descr: str = "'<f8'", *, fortran: bool = False, version: int = 1) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n".encode()
    return (
        b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text)) + text + bytes(64)
    )


@pytest.mark.parametrize("length", [MEGABYTE, 1 << 31, 1 << 40, 1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize("good", [True, False])
def test_an_absurd_length_of_a_tfrecord_is_not_believed(length: int, good: bool) -> None:
    count, failure, peak = outcome(readers.tfrecords, io.BytesIO(tfrecord(length, good=good)))
    assert count == 0
    assert failure is not None
    assert failure.offset == 0
    assert str(length if not good else length + 16) in str(failure)
    assert peak < MEGABYTE


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("fortran", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        "(1000000000000, 1000000000)",
        "(9223372036854775807,)",
        "(9223372036854775807, 3)",
        f"({10**40},)",
        f"(0, {2**62})",
        "(5, 1000000)",
        "(-1,)",
        "(" + "1," * 100 + ")",
        "(" * 3000,
    ],
    ids=range(9),
)
def test_an_absurd_shape_of_an_array_is_not_believed(shape: str, fortran: bool, version: int) -> None:
    content = npy(shape, fortran=fortran, version=version)
    count, failure, peak = outcome(readers.npy_rows, io.BytesIO(content))
    assert count <= 8  # the 64 bytes that are there
    assert failure is not None
    assert peak < 4 * MEGABYTE
    assert len(str(failure)) < 1000


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize(
    "descr",
    ["'<S99999999999'", "'|V2147483647'", "[('a', '<f8', (100000, 100000))]", "'O'", "__import__('os')", "[" * 3000],
    ids=range(6),
)
def test_an_absurd_dtype_of_an_array_is_not_believed(descr: str, version: int) -> None:
    count, failure, peak = outcome(readers.npy_rows, io.BytesIO(npy("(3,)", descr, version=version)))
    assert (count, failure is None) == (0, False)
    assert peak < 4 * MEGABYTE


@pytest.mark.parametrize("num_bytes", [1 << 31, 1 << 40, 1 << 70])
def test_absurdly_long_records_cost_what_the_file_has(num_bytes: int) -> None:
    count, failure, peak = outcome(readers.fixed_length_records(num_bytes), io.BytesIO(bytes(100)))
    assert count == 0
    assert f"needs {num_bytes} bytes, 100 are left" in str(failure)
    assert peak < MEGABYTE


def test_a_line_is_held_whole_and_not_many_times() -> None:
    size = 16 * MEGABYTE
    count, failure, peak = outcome(readers.text_lines, endless(b"", b"x", size))
    assert (count, failure) == (1, None)
    assert peak < 5 * size
    count, failure, peak = outcome(readers.json_lines, endless(b"", b"[", size))
    assert "is not JSON" in str(failure)
    assert peak < 6 * size


@pytest.mark.parametrize("line", [b"[" * 10**5, b'{"a":' * 10**5, b"9" * 10**5, b"\0", b"NaN" * 10**5])
def test_a_json_bomb_is_an_error_with_its_offset(line: bytes) -> None:
    count, failure, peak = outcome(readers.json_lines, io.BytesIO(b"1\n" + line + b"\n2\n"))
    assert count == 1
    assert failure is not None
    assert failure.offset == 2
    assert len(str(failure)) < 1000
    assert peak < 32 * MEGABYTE


@pytest.mark.parametrize("shape", [f"({2**62}, 0)", f"({2**62}, 3, 0)"])
def test_rows_without_bytes_are_not_believed_in_any_number(shape: str) -> None:
    count, failure, _ = outcome(readers.npy_rows, io.BytesIO(npy(shape)[:-64]))
    assert (count, failure is None) == (0, False)
    assert "has no rows to read" in str(failure)


def test_an_endless_quoted_field_is_an_error_soon() -> None:
    count, failure, peak = outcome(readers.csv_rows, endless(b'a,b\n1,"', b"x\n"))
    assert (count, failure is None) == (0, False)
    assert failure is not None
    assert "line 65539 is not CSV" in str(failure)
    assert peak < 4 * MEGABYTE  # lines end; without an end a line is held whole


@pytest.mark.parametrize("reader", ["fixed", "tfrecords", "npy", "csv"])
def test_a_decompression_bomb_is_streamed(reader: str, tmp_path: Path) -> None:
    squeeze = zlib.compressobj(9, zlib.DEFLATED, 31)
    front = b"a,b\n1,2\n" if reader == "csv" else b""
    line = b"1,2\n" if reader == "csv" else b"\0"
    pieces = [squeeze.compress(front), *(squeeze.compress(line * (MEGABYTE // len(line))) for _ in range(32))]
    (tmp_path / "bomb.gz").write_bytes(b"".join(pieces) + squeeze.flush())
    readings: dict[str, Reader] = {
        "fixed": readers.fixed_length_records(1 << 16),
        "tfrecords": readers.tfrecords,
        "npy": readers.npy_rows,
        "csv": lambda file: (row for number, row in zip(range(1000), readers.csv_rows(file), strict=False) if number),
    }
    opened = filesystem.open_file(f"{tmp_path}/bomb.gz", "infer")
    count, failure, peak = outcome(readings[reader], opened.stream)
    opened.close()
    assert count == {"fixed": 512, "csv": 999}.get(reader, 0)
    assert (failure is None) == (reader in {"fixed", "csv"})
    assert peak < 8 * MEGABYTE


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
