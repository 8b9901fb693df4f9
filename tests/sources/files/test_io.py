"""Patterns and braces become names that can be opened again; files that cannot be opened are named."""

from __future__ import annotations

import bz2
import errno
import ftplib
import gzip
import http.client
import http.server
import io
import logging
import lzma
import os
import pickle
import random
import re
import subprocess
import threading
import uuid
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import torchdistinput as tdi
from tests.support import failing_filesystem
from tests.support.cells import cells
from tests.support.formats import FORMATS, same, until_failure
from torchdistinput import FileDataset, list_files, readers
from torchdistinput.errors import SourceError
from torchdistinput.sources.storage import glob
from torchdistinput.sources.storage import io as filesystem
from torchdistinput.sources.storage.glob import MOST_NAMES, expand_braces
from torchdistinput.sources.storage.retry import is_transient


@pytest.fixture
def memory() -> Iterator[str]:
    """A folder of its own in the memory filesystem, as a url."""
    name = f"memory://{uuid.uuid4().hex}"
    yield name
    MemoryFileSystem.store.clear()


def put(name: str, content: bytes = b"x\n") -> str:
    with fsspec.open(name, "wb") as file:
        file.write(content)
    return name


def put_all(folder: str | Path, *names: str) -> list[str]:
    return [put(f"{folder}/{name}", name.encode()) for name in names]


def read(name: str, compression: str | None = "infer", **options: Any) -> bytes:
    opened = filesystem.open_file(name, compression, options or None)
    try:
        return opened.stream.read()
    finally:
        opened.close()


def test_a_pattern_gives_its_files_sorted_and_without_folders(tmp_path: Path) -> None:
    put_all(tmp_path, "b.txt", "a.txt", "c.csv", "B.txt")
    (tmp_path / "d.txt").mkdir()
    assert glob.expand(f"{tmp_path}/*.txt") == [f"{tmp_path}/{name}" for name in ("B.txt", "a.txt", "b.txt")]
    assert glob.expand(tmp_path / "[ac].*") == [f"{tmp_path}/a.txt", f"{tmp_path}/c.csv"]
    assert glob.expand(f"{tmp_path}/[ab].txt") == [f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"]
    assert glob.expand(f"{tmp_path}//[a].txt") == [f"{tmp_path}/a.txt"]


def test_names_are_as_the_user_wrote_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    put_all(tmp_path, "data/a.txt", "data/b.txt")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "now[1]").mkdir()
    monkeypatch.chdir(tmp_path / "now[1]")
    put_all(tmp_path / "now[1]", "c.txt")
    assert glob.expand("*.txt") == ["c.txt"]
    monkeypatch.chdir(tmp_path)
    assert glob.expand("data/*.txt") == ["data/a.txt", "data/b.txt"]
    assert glob.expand("./data/*.txt") == ["./data/a.txt", "./data/b.txt"]
    assert glob.expand("*/a.txt") == ["data/a.txt"]
    assert glob.expand(f"../{tmp_path.name}/data/a*") == [f"../{tmp_path.name}/data/a.txt"]
    assert glob.expand("~/data/a*") == [f"{tmp_path}/data/a.txt"]
    assert glob.expand(f"file://{tmp_path}/data/a*") == [f"{tmp_path}/data/a.txt"]
    assert glob.expand(f"local://{tmp_path}/data/a*") == [f"local://{tmp_path}/data/a.txt"]
    assert glob.expand(f"file://{tmp_path}/data/a.txt") == [f"{tmp_path}/data/a.txt"]
    assert read("data/b.txt") == b"data/b.txt"


def test_a_list_keeps_its_order_and_its_repetitions(tmp_path: Path) -> None:
    a, b, c = put_all(tmp_path, "a.txt", "b.txt", "c.txt")
    assert glob.expand([c, a, c]) == [c, a, c]
    assert glob.expand((c, Path(a), f"{tmp_path}/[ab].txt")) == [c, a, a, b]


def test_a_wildcard_in_the_name_of_a_real_file_is_a_character(tmp_path: Path) -> None:
    put_all(tmp_path, "a[1].txt", "a1.txt")
    assert glob.expand(f"{tmp_path}/a[1].txt") == [f"{tmp_path}/a[1].txt"]
    assert read(f"{tmp_path}/a[1].txt") == b"a[1].txt"
    assert glob.expand(f"{tmp_path}/a[12].txt") == [f"{tmp_path}/a1.txt"]


def test_other_filesystems_keep_their_protocol(memory: str) -> None:
    names = put_all(memory, "b.txt", "a.txt", "x/c.txt")
    assert glob.expand(f"{memory}/*.txt") == [names[1], names[0]]
    assert glob.expand(f"{memory}/**/*.txt") == [names[1], names[0], names[2]]
    assert glob.expand(f"{memory.replace('memory://', 'memory:///')}/*/c*") == [
        names[2].replace("memory://", "memory:///")
    ]
    assert [read(name) for name in names] == [b"b.txt", b"a.txt", b"x/c.txt"]


def test_chained_urls_are_expanded_in_the_link_with_the_pattern(memory: str, tmp_path: Path) -> None:
    put_all(memory, "a.txt", "b.txt")
    cached = glob.expand(f"simplecache::{memory}/*.txt", {"simplecache": {"cache_storage": str(tmp_path / "c")}})
    assert cached == [f"simplecache::{memory}/a.txt", f"simplecache::{memory}/b.txt"]
    assert read(cached[1], simplecache={"cache_storage": str(tmp_path / "c")}) == b"b.txt"
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for name in ("in/a.txt", "in/b.txt", "c.txt"):
            archive.writestr(name, name)
    members = glob.expand(f"zip://in/*.txt::{tmp_path}/all.zip")
    assert members == [f"zip://in/a.txt::{tmp_path}/all.zip", f"zip://in/b.txt::{tmp_path}/all.zip"]
    assert [read(name) for name in members] == [b"in/a.txt", b"in/b.txt"]


@pytest.mark.parametrize("pattern", ["*.txt", "**/*.nothing", "x/*"])
def test_a_pattern_that_matches_nothing_is_named(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="matches no file") as caught:
        glob.expand(["a", f"{tmp_path}/{pattern}"])
    assert caught.value.file == f"{tmp_path}/{pattern}"
    assert f"{tmp_path}/{pattern}" in str(caught.value)


def test_only_of_a_relative_pattern_the_folder_is_told_in_which_it_was_looked_for(memory: str, tmp_path: Path) -> None:
    here = os.getcwd()
    for pattern in (f"{memory}/*.txt", f"simplecache::{memory}/*.txt", f"{tmp_path}/*.txt"):
        with pytest.raises(SourceError, match="matches no file") as caught:
            glob.expand(pattern)
        assert "seen from" not in str(caught.value)
        assert here not in str(caught.value)
    with pytest.raises(SourceError, match=re.escape(f"matches no file (seen from {here!r})")):
        glob.expand("no-such-folder/*.txt")


def test_the_files_of_a_pattern_come_with_the_sizes_that_were_listed(memory: str, tmp_path: Path) -> None:
    put_all(tmp_path, "a.txt", "folder/bb.txt")
    found = [("a.txt", 5), ("folder/bb.txt", 13)]
    assert glob.listed(f"{tmp_path}/**/*.txt") == [(f"{tmp_path}/{name}", (size, "")) for name, size in found]
    assert glob.listed([f"{tmp_path}/a.txt"]) == [(f"{tmp_path}/a.txt", (None, ""))]  # which is not looked up
    with filesystem.filesystem_of(memory, {})[0].open(f"{memory}/c.txt", "wb") as file:
        file.write(b"123")
    assert glob.listed(f"{memory}/*.txt") == [(f"{memory}/c.txt", (3, ""))]  # each process makes its own: no time


@pytest.mark.parametrize(
    ("about", "mark"),
    [
        ({"size": 3, "ETag": '"a"', "mtime": 5.0}, 'ETag "a"'),
        ({"size": 3, "md5Hash": "q==", "updated": "2026"}, "md5Hash q=="),
        ({"size": 3, "Last-Modified": "Thu"}, "Last-Modified Thu"),  # of a web server
        ({"size": 3, "blob_id": "ab", "last_commit": None, "lfs": {"size": 3}}, "blob_id ab"),  # of hf://
        ({"size": 3, "sha": "cd", "mode": "100644"}, "sha cd"),  # of github://
        ({"size": 3, "modify": "20260101"}, "modify 20260101"),  # of ftp://
        ({"size": 3, "modificationTime": 17, "accessTime": 18}, "modificationTime 17"),  # of webhdfs://
        ({"size": 3, "CRC": 77, "date_time": (2026, 1, 1)}, "CRC 77"),  # of zip://
        ({"size": 3, "type": "file", "ETag": ""}, ""),
    ],
)
def test_the_mark_of_a_file_is_found_by_whatever_name_its_filesystem_has_for_it(
    about: dict[str, Any], mark: str
) -> None:
    assert filesystem.mark_in(about) == mark


def test_patterns_follow_links_to_folders_and_end_in_a_circle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("data/monday", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    put_all(tmp_path, "data/monday/a.txt", "elsewhere/b.txt")
    (tmp_path / "data/tuesday").symlink_to(tmp_path / "elsewhere")
    wanted = [f"{tmp_path}/data/{name}" for name in ("monday/a.txt", "tuesday/b.txt")]
    assert glob.expand(f"{tmp_path}/data/*/*.txt") == wanted
    (tmp_path / "data/up").symlink_to(tmp_path)
    (tmp_path / "data/monday/again").symlink_to(tmp_path / "data")
    assert glob.expand(f"{tmp_path}/data/**/*.txt") == wanted
    assert "up: a link to a folder that it is in is passed over" in caplog.text
    (tmp_path / "data/x").symlink_to("nowhere")
    assert glob.expand(f"{tmp_path}/data/*") == [f"{tmp_path}/data/x"]  # which cannot be read, and is told of then


def test_a_name_that_was_listed_is_that_file(tmp_path: Path, memory: str) -> None:
    odd = [f"{tmp_path}/{name}" for name in ("c[1].txt", "d{1,2}.txt", "e*.txt", "k::l.txt", "q{0..2}.txt")]
    for name in odd:
        Path(name).write_text(Path(name).name)
    put_all(tmp_path, "c1.txt", "d1.txt", "d2.txt", "e2.txt")
    found = list_files(f"{tmp_path}/*.txt")
    assert len(found) == 9
    assert list_files(found) == list_files([str(name) for name in found]) == found
    assert [read(name).decode() for name in found] == [Path(name).name for name in found]
    assert list_files(odd) == odd
    far = list_files(f"{put_all(memory, 'f{1,2}.txt')[0][:-10]}*")
    assert far == list_files(pickle.loads(pickle.dumps(far))) == [f"{memory}/f{{1,2}}.txt"]
    assert list_files(f"{tmp_path}/d{{2,1}}.txt") == [f"{tmp_path}/d2.txt", f"{tmp_path}/d1.txt"]


def test_a_pattern_of_an_unknown_protocol_is_named() -> None:
    with pytest.raises(SourceError, match=r"^nowhere://x/\*: .*nowhere") as caught:
        glob.expand("nowhere://x/*")
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("files", [b"a.txt", 3, None, {"a.txt"}, iter(["a.txt"]), {"a": 1}.keys(), [b"a.txt"], [None]])
def test_what_is_not_a_name_or_a_list_of_names_is_refused(files: Any) -> None:
    with pytest.raises(TypeError, match=r"must be a"):
        glob.expand(files)


def test_an_empty_list_and_an_empty_name_are_refused() -> None:
    with pytest.raises(ValueError, match="empty list"):
        glob.expand([])
    with pytest.raises(ValueError, match="file 1 of the list is an empty string"):
        glob.expand(["a", ""])


@pytest.mark.parametrize(
    ("ending", "compress"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress), ("txt", bytes)]
)
def test_compression_is_inferred_from_the_end_of_the_name(
    ending: str, compress: Any, tmp_path: Path, memory: str
) -> None:
    content = b"".join(b"line %d\n" % number for number in range(50_000))
    stored = compress(content)  # once: gzip notes the time
    for folder in (str(tmp_path), memory):
        name = put(f"{folder}/a.{ending}", stored)
        assert read(name) == content
        assert read(name, None) == stored
        assert filesystem.stat_facts(name).size == len(stored)
        other = put(f"{folder}/b.bin", gzip.compress(content))
        assert read(other, "gzip") == content


@pytest.mark.parametrize("name", ["/no/such/file.txt", "memory://no-such/file.txt", "nowhere://x"])
def test_a_missing_file_is_named(name: str) -> None:
    for ask in (lambda: read(name), lambda: filesystem.stat_facts(name)):
        with pytest.raises(SourceError) as caught:
            ask()
        assert caught.value.file == name
        assert str(caught.value).startswith(f"{name}: ")
        assert caught.value.__cause__ is not None


def test_a_folder_and_a_file_that_may_not_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceError, match="IsADirectoryError") as caught:
        read(str(tmp_path))
    assert caught.value.file == str(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    # The tests may run as root, whom permissions do not stop.
    monkeypatch.setattr("torchdistinput.sources.storage.io._opened_by", refuse)
    with pytest.raises(SourceError, match="PermissionError") as caught:
        read(str(tmp_path / "secret.txt"))
    assert caught.value.file == str(tmp_path / "secret.txt")


# Each pattern without spaces, and what bash makes of it.
SHELL = (
    "data-{000..012}.tar {3..1} {-2..2} {-02..2} {08..10} {1..010} {00..1} {5..5} {2..-2} a{b,c}{x,} {a} {} x{}y{1,2} "
    "{a,b}{1..3}/{c,d} x{,}y {1..2,3} }{a,b}{ {a..b}x {1..b} {,} {1...3} {1..2}..3} {a,b}}"
)


def test_names_are_those_that_a_shell_makes() -> None:
    for pattern in SHELL.split():
        if pattern == "{a..b}x":  # letters stay
            assert expand_braces(pattern) == [pattern]
            continue
        said = subprocess.run(["bash", "-c", f"printf '%s\\n' {pattern}"], capture_output=True, text=True, check=True)
        # A shell leaves out an empty word, as of {,}
        assert [name for name in expand_braces(pattern) if name] == said.stdout.split(), pattern


def test_a_name_with_braces_is_a_file_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "a{1,2}.txt").write_text("x\n")
    assert list_files(f"{tmp_path}/a{{1,2}}.txt") == [f"{tmp_path}/a{{1,2}}.txt"]


@pytest.mark.parametrize("pattern", ["a{b,c{1..2}}", "{{1..3},{a,b}}", "{a{b,c}", "{a{1..2}}"])
def test_braces_in_braces_are_refused(pattern: str) -> None:
    if pattern == "{a{b,c}":  # the first one has no end
        assert expand_braces(pattern) == ["{ab", "{ac"]
        return
    with pytest.raises(ValueError, match="has braces in braces; write the names"):
        expand_braces(pattern)


def test_braces_name_files_without_a_look_up_and_patterns_in_their_order(tmp_path: Path) -> None:
    assert list_files("s3://nobody/{01..03}-{a,b}.tar") == [
        f"s3://nobody/{number}-{letter}.tar" for number in ("01", "02", "03") for letter in "ab"
    ]
    assert list_files(["x.tar", "simplecache::gs://b/{2..1}.tar"])[1:] == [
        f"simplecache::gs://b/{n}.tar" for n in (2, 1)
    ]
    for name in ("b/2.txt", "b/1.txt", "a/3.txt", "c/4.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    data = FileDataset(f"{tmp_path}/{{b,a}}/*.txt", readers.text_lines)
    assert list(data) == ["b/1.txt", "b/2.txt", "a/3.txt"]
    try:
        for number in range(3):
            with fsspec.open(f"memory://braces/{number:03}.txt", "wt") as file:
                file.write(f"{number}\n")
        assert list(FileDataset("memory://braces/{000..002}.txt", readers.text_lines)) == ["0", "1", "2"]
    finally:
        MemoryFileSystem.store.clear()


def test_each_pattern_and_name_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x\n")
    with pytest.raises(SourceError, match=re.escape(f"{tmp_path}/c*: the pattern matches no file")):
        list_files(f"{tmp_path}/{{a,c}}*")
    with pytest.raises(SourceError, match=r"b\.txt: cannot be opened"):
        list(FileDataset(f"{tmp_path}/{{a,b}}.txt", readers.text_lines))
    with pytest.raises(ValueError, match="a brace pattern stands for an empty name"):
        list_files("{,a}")


@pytest.mark.parametrize("pattern", ["{0..999999999}", "{0..9999}{0..9999}", "{1,2}" * 25])
def test_braces_that_stand_for_too_many_names_are_refused_at_once(pattern: str) -> None:
    with pytest.raises(ValueError, match=rf"stand for \d+ names or more; {MOST_NAMES} is the most"):
        expand_braces(pattern)


def test_braces_without_an_end_or_a_beginning_stay() -> None:
    assert expand_braces("{" * 300) == ["{" * 300]
    assert expand_braces("}" * 3000) == ["}" * 3000]


FLAVOURS = ("buffered", "bare", "stream")


@pytest.fixture(autouse=True)
def flicker() -> Iterator[None]:
    failing_filesystem.register()
    failing_filesystem.FlickeringFileSystem.clear_instance_cache()
    yield
    failing_filesystem.FlickeringFileSystem.clear_instance_cache()


class Waits:
    """What would have been waited, in seconds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Nobody waits between tries, in forked loader workers too."""
    found = Waits()
    monkeypatch.setattr("torchdistinput.sources.storage.retry.sleep", found.seconds.append)
    return found


def options(script: str = "", flavour: str = "buffered") -> dict[str, Any]:
    return {"script": script, "flavour": flavour}


def content_of(size: int = 300_000) -> bytes:
    return np.random.default_rng(size).bytes(size)


def stored(folder: Path, content: bytes, name: str = "a.bin") -> str:
    (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return f"flicker://{folder}/{name}"


def read_all(name: str, given: dict[str, Any], count: int = 50_000) -> bytes:
    opened = filesystem.open_file(name, "infer", given)
    try:
        return b"".join(iter(partial(opened.stream.read, count), b""))
    finally:
        opened.close()


def test_every_reader_gives_each_record_once_whatever_fails_in_passing(
    tmp_path: Path, waits: Waits, all_cells: bool
) -> None:
    settings = {"flavour": FLAVOURS, "ending": ("", ".gz"), "seed": (0, 1)}
    for kind, setting in cells([*FORMATS, *FORMATS], settings, everything=all_cells):
        read, content = FORMATS[kind].read, FORMATS[kind].large()[:300_000]
        name = stored(tmp_path, content, f"{kind}.bin{setting['ending']}")
        given = options(failing_filesystem.random_script(setting["seed"], setting["flavour"]), setting["flavour"])
        opened = filesystem.open_file(name, "infer", given)
        found, error = until_failure(read(opened.stream))
        opened.close()
        if kind == "parquet" and setting["flavour"] == "stream" and not setting["ending"]:
            assert "does not tell where the file ends" in str(error)  # where its footer is
            continue
        expected, cut_off = until_failure(read(io.BytesIO(content)))  # most end in the middle of a record
        assert str(error) == str(cut_off)
        assert same(found, expected), (kind, setting)
        assert failing_filesystem.instance(given).failed["read"] > 0
        assert failing_filesystem.instance(given).open_files == 0
        failing_filesystem.FlickeringFileSystem.clear_instance_cache()
    assert waits.seconds


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_seeking_goes_to_the_byte_whatever_fails(flavour: str, ending: str, tmp_path: Path) -> None:
    content = content_of()
    name = stored(tmp_path, content, f"a{ending}")
    given = options(failing_filesystem.random_script(5, flavour), flavour)
    opened = filesystem.open_file(name, "infer", given)
    rng = random.Random(5)
    for _ in range(12):
        offset, count = rng.randrange(len(content) + 10), rng.randrange(1, 50_000)
        assert opened.stream.seek(offset) == offset or ending  # a decompressor stops at the end
        assert opened.stream.read(count) == content[offset : offset + count]
    opened.close()
    assert failing_filesystem.instance(given).open_files == 0


def test_the_end_is_where_the_filesystem_says_it_is(tmp_path: Path) -> None:
    name = stored(tmp_path, b"0123456789")
    for flavour in ("buffered", "bare"):
        opened = filesystem.open_file(name, "infer", options("info=R", flavour))
        assert opened.stream.seek(-3, io.SEEK_END) == 7
        assert opened.stream.read() == b"789"
        assert opened.size == 10
        opened.close()
    opened = filesystem.open_file(name, "infer", options("", "stream"))
    with pytest.raises(io.UnsupportedOperation, match="does not tell where the file ends"):
        opened.stream.seek(-3, io.SEEK_END)
    assert opened.stream.read() == b"0123456789"
    opened.close()


def test_each_try_is_logged_once_with_file_byte_and_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = stored(tmp_path, content_of(300_000))
    with caplog.at_level(logging.WARNING, "torchdistinput"):
        read_all(name, options("open=T,read=.R", "bare"))
    assert [record.getMessage() for record in caplog.records] == [
        f"{name}: cannot be opened (try 1 of 5, the next one in 0.1 s): TimeoutError: no answer",
        f"{name}: reading failed at byte 65536 of what is stored (try 1 of 5, the next one in 0.1 s): "
        "ConnectionResetError: [Errno 104] Connection reset by peer",
    ]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_file_that_fails_for_good_is_named_with_byte_and_tries(
    flavour: str, ending: str, tmp_path: Path, waits: Waits
) -> None:
    name = stored(tmp_path, content_of(), f"a{ending}")
    given = options("read=.." + "R" * 100, flavour)
    opened = filesystem.open_file(name, "infer", given)
    with pytest.raises(
        SourceError, match=r"reading failed at byte \d+ of what is stored, tried 5 times: Conn"
    ) as caught:
        opened.stream.read()
    opened.close()
    assert caught.value.file == name
    assert isinstance(caught.value.__cause__, ConnectionResetError)
    if ending:
        assert caught.value.offset is None  # bytes of the content are others
    else:
        assert f"at byte {caught.value.offset} of" in str(caught.value)
    assert waits.seconds == [0.1, 0.2, 0.4, 0.8]
    assert failing_filesystem.instance(given).open_files == 0


@pytest.mark.parametrize("letter", ["P", "N", "V"])
def test_what_lasts_is_not_tried_again(letter: str, tmp_path: Path, waits: Waits) -> None:
    name = stored(tmp_path, b"abc")
    kind = type(failing_filesystem.FAULTS[letter]())
    asked: dict[str, Callable[[dict[str, Any]], object]] = {
        "open": lambda given: read_all(name, given),
        "read": lambda given: read_all(name, given),
        "info": lambda given: filesystem.stat_facts(name, given),
    }
    for call, ask in asked.items():
        with pytest.raises(SourceError) as caught:
            ask(options(f"{call}={letter}"))
        assert caught.value.file == name
        assert isinstance(caught.value.__cause__, kind)
        assert "times:" not in str(caught.value)
    assert not waits.seconds


@pytest.mark.parametrize("flavour", ["buffered", "bare"])
def test_a_file_that_is_shorter_than_it_says_is_no_end(
    flavour: str, tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = stored(tmp_path, content_of(200_000))
    assert len(read_all(name, options("read=SS.SS", flavour))) == 200_000
    assert waits.seconds
    real = failing_filesystem.FlickeringFileSystem._about
    monkeypatch.setattr(
        failing_filesystem.FlickeringFileSystem, "_about", lambda self, path: {**real(self, path), "size": 200_005}
    )
    with pytest.raises(SourceError, match=r"byte 200000 .* 5 times: EOFError: .* at byte 200000, but has 200005 bytes"):
        read_all(name, options("", flavour))


def test_a_file_that_was_replaced_is_not_read_on(tmp_path: Path) -> None:
    name = stored(tmp_path, content_of(300_000))
    opened = filesystem.open_file(name, "infer", options("read=.R"))
    opened.stream.read(1)
    (tmp_path / "a.bin").write_bytes(content_of(300_001))
    with pytest.raises(SourceError, match="had 300000 bytes, and has 300001 now") as caught:
        opened.stream.read()
    assert caught.value.file == name
    opened.close()


@pytest.mark.parametrize("script", ["ls=R", "ls=.T", "ls=..B", "ls=...F", "info=RR,ls=.R.T"])
def test_a_folder_that_cannot_be_listed_at_once_leaves_no_file_out(script: str, tmp_path: Path, waits: Waits) -> None:
    names = ["a.txt", "x/b.txt", "x/y/c.txt", "z/d.txt"]
    for each in names:
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).touch()
    given = options(script)
    found = glob.expand(f"flicker://{tmp_path}/**/*.txt", given)
    assert found == [f"flicker://{tmp_path}/{each}" for each in names]
    assert sum(failing_filesystem.instance(given).failed.values()) == len(waits.seconds) > 0


def test_a_pattern_that_cannot_be_expanded_is_named_with_the_tries(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored(tmp_path, b"")
    pattern = f"flicker://{tmp_path}/*.bin"
    with pytest.raises(SourceError, match="the pattern cannot be expanded, tried 5 times: Connection") as caught:
        glob.expand(pattern, options("ls=" + "R" * 9))
    assert caught.value.file == pattern
    caplog.clear()
    (tmp_path / "x").mkdir()
    stored(tmp_path / "x", b"")
    found = glob.expand(f"flicker://{tmp_path}/**", options("ls=...P"))  # the root's two, then x's
    assert found == [f"flicker://{tmp_path}/a.bin", f"flicker://{tmp_path}/x/a.bin"]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [f"{tmp_path}/x"]


def _class(path: str, base: type[Exception] = Exception) -> type[Exception]:
    module, _, name = path.rpartition(".")
    return type(name, (base,), {"__module__": module})


def _with_status(name: str, status: int, base: type[Exception] = Exception) -> Exception:
    error = base("answer")
    setattr(error, name, status)
    return error


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionRefusedError(), True),
        (BrokenPipeError(), True),
        (TimeoutError(), True),
        (OSError("of a store, translated"), True),
        (OSError("Forbidden: https://storage.googleapis.com/b/data/o/x\nno access"), False),  # as gcsfs tells of 403
        (OSError(errno.EIO, "io"), True),
        (http.client.IncompleteRead(b""), True),
        (ftplib.error_temp("421"), True),
        (zipfile.BadZipFile(), True),  # an archive of which bytes are missing
        (ValueError("of a client"), False),
        (OSError(errno.ENAMETOOLONG, "name"), False),
        (OSError(errno.ENOSPC, "full"), False),
        (IsADirectoryError(), False),
        (NotADirectoryError(), False),
        (io.UnsupportedOperation("seek"), False),
        (RuntimeError("a bug"), False),
        (_class("aiohttp.client_exceptions.ClientPayloadError")(), True),
        (type("CutOff", (_class("aiohttp.http_exceptions.BadHttpMessage"),), {"code": 400})(), True),
        (_class("somewhere.Refused", ValueError)(), False),
        (_with_status("status", 503), True),
        (_with_status("status", 404), False),
        (_with_status("code", 429), True),
        (_with_status("code", 403, OSError), False),
        (_with_status("status_code", 500, OSError), True),
        (_with_status("code", 7, OSError), True),
        (_caused(FileNotFoundError("x"), _with_status("status", 503)), True),  # as fsspec tells of a web server
        (_caused(FileNotFoundError("x"), _caused(ValueError(), _with_status("code", 429))), True),
        (_caused(FileNotFoundError("x"), _with_status("status", 404)), False),
        (_caused(FileNotFoundError("x"), OSError("a cause without a status")), False),
    ],
)
def test_which_failures_pass(error: Exception, passes: bool) -> None:
    assert is_transient(error) == passes


class Busy(http.server.BaseHTTPRequestHandler):
    """Says that it is busy, at the first requests of each file."""

    asked: ClassVar[Counter[str]] = Counter()

    def do_GET(self) -> None:
        self.asked[self.path] += 1
        status = 200 if self.asked[self.path] > 6 else int(self.path[1:4])
        content = b"" if status != 200 or self.command == "HEAD" else b"a\nb\n"
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_HEAD = do_GET  # noqa: N815 - the name that the class looks for

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.mark.parametrize("status", [503, 429, 500])
def test_a_web_server_that_is_busy_is_asked_again(status: int, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("aiohttp")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert [*tdi.FileDataset([f"{url}/{status}.txt"], readers.text_lines)] == ["a", "b"]
        assert f"(try 1 of 5, the next one in 0.1 s): ClientResponseError: {status}" in caplog.text
        with pytest.raises(SourceError, match="cannot be opened: .*404"):
            [*tdi.FileDataset([f"{url}/404.txt"], readers.text_lines)]
        server.shutdown()


# Datasets
