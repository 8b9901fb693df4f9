"""Copies of remote files: one download for all processes, changed files, and processes that are killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pytest

import torchdistinput as tdi
from tests.support.object_store import ObjectStore, object_store
from torchdistinput import readers
from torchdistinput.sources.storage import file_cache
from torchdistinput.sources.storage.io import open_file
from torchdistinput.testing import run_ranks

SIZE = 1000


@pytest.fixture
def remote() -> Iterator[Any]:
    """Five files of 1,000 bytes that are not on this machine's disks."""
    files = fsspec.filesystem("memory")
    files.mkdirs("/far", exist_ok=True)
    for number in range(5):
        files.pipe(f"/far/{number}.txt", f"{number}\n".encode() * (SIZE // 2))
    yield files
    files.rm("/far", recursive=True)


def read(folder: Path, number: int) -> bytes:
    cache = file_cache.FileCache(folder)
    with closing(open_file(f"memory://far/{number}.txt", "infer", cache=cache)) as opened:
        assert opened.size == SIZE
        return opened.stream.read()


def content(number: int) -> bytes:
    return f"{number}\n".encode() * (SIZE // 2)


def copies(folder: Path) -> list[int]:
    """The numbers of the files whose copies are there."""
    assert not [*folder.glob("*.part")]
    return sorted(int(path.read_bytes()[:1]) for path in folder.glob("*.data"))


def test_a_file_is_read_from_its_copy(remote: Any, tmp_path: Path) -> None:
    for _ in range(2):
        assert read(tmp_path, 3) == content(3)
    (copy,) = tmp_path.glob("*.data")
    copy.write_bytes(b"x" * SIZE)
    assert read(tmp_path, 3) == b"x" * SIZE


def test_a_changed_file_is_copied_anew(remote: Any, tmp_path: Path) -> None:
    assert read(tmp_path, 1) == content(1)
    time.sleep(0.01)
    remote.pipe("/far/1.txt", content(4))
    assert read(tmp_path, 1) == content(4)
    assert copies(tmp_path) == [1, 4]


@pytest.mark.parametrize("size", [0, SIZE - 10, SIZE + 10])
def test_a_copy_of_another_size_is_made_anew(remote: Any, tmp_path: Path, size: int) -> None:
    read(tmp_path, 3)
    (copy,) = tmp_path.glob("*.data")
    os.truncate(copy, size)
    assert read(tmp_path, 3) == content(3)
    assert copy.stat().st_size == SIZE


def test_a_download_that_fails_leaves_nothing_and_is_named(
    remote: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = file_cache.FileCache(tmp_path)
    remote.store["/far/1.txt"].truncate(10)
    about = {**remote.info("/far/1.txt"), "size": SIZE}
    monkeypatch.setattr(type(remote), "info", lambda *_, **__: about)
    with pytest.raises(tdi.SourceError, match=r"far/1\.txt: no copy .* ends 990"):
        open_file("memory://far/1.txt", "infer", cache=cache)
    assert copies(tmp_path) == []


def test_a_process_waits_for_the_download_of_another(remote: Any, tmp_path: Path) -> None:
    read(tmp_path, 2)
    (copy,) = tmp_path.glob("*.data")
    hidden = copy.rename(tmp_path / "hidden")
    with copy.with_suffix(".lock").open("ab") as lock, ThreadPoolExecutor(1) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as one that downloads
        reading = pool.submit(read, tmp_path, 2)
        hidden.write_bytes(b"x" * SIZE)
        hidden.rename(copy)
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert reading.result(60) == b"x" * SIZE


def test_the_folder_may_be_emptied(remote: Any, tmp_path: Path) -> None:
    cache = file_cache.FileCache(tmp_path / "copies")
    with closing(open_file("memory://far/1.txt", "infer", cache=cache)) as opened:
        shutil.rmtree(tmp_path / "copies")
        assert opened.stream.read() == content(1)
    assert read(tmp_path / "copies", 1) == content(1)


def test_files_of_this_machine_are_not_copied(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1\n2\n")
    folder = tmp_path / "cache"
    assert [*tdi.FileDataset(str(tmp_path / "*.txt"), readers.text_lines, cache=folder)] == ["1", "2"]
    assert not folder.exists()


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cache must be the path"):
        tdi.FileDataset("memory://x", readers.text_lines, cache=3)  # type: ignore[arg-type] # that is the test


# --------------------------------------------------------------------------------------------- with many processes


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as made:
        files = made.filesystem()
        for number in range(6):
            files.pipe(f"data/{number}.txt", "".join(f"{number * 100 + each}\n" for each in range(100)).encode() * 50)
        yield made


def lines(options: dict[str, Any], folder: str, *, epochs: int) -> list[list[int]]:
    """One rank: the lines of each epoch."""
    files = tdi.FileDataset("s3://data/*.txt", readers.text_lines, storage_options=options, cache=folder)
    chosen = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.DATA)
    loader = tdi.Strategy(["cpu"]).distribute_dataset(files, chosen, global_batch_size=500)
    return [[int(line) for batch in loader for line in batch] for _ in range(epochs)]


def two_epochs(options: dict[str, Any], folder: str) -> list[list[int]]:
    return lines(options, folder, epochs=2)


def test_each_file_is_downloaded_once_for_all_ranks_and_epochs(store: ObjectStore, tmp_path: Path) -> None:
    store.requests.clear()
    ranks = run_ranks(3, two_epochs, store.options(), str(tmp_path))
    for epoch in range(2):
        assert sorted(line for rank in ranks for line in rank[epoch]) == sorted([*range(600)] * 50)
    got = [path for method, path, _ in store.requests if method == "GET" and path.endswith(".txt")]
    assert sorted(got) == [f"/data/{number}.txt" for number in range(6)]


def killed(options: dict[str, Any], folder: str, number: int) -> None:
    """A process that ends itself in the middle of a download."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: os.kill(os.getpid(), signal.SIGKILL))
        open_file(f"s3://data/{number}.txt", None, options, cache=file_cache.FileCache(folder))


def test_a_process_that_is_killed_in_a_download_leaves_a_folder_that_serves(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="rank 0"):
        run_ranks(1, killed, store.options(), str(tmp_path), 2)
    assert len([*tmp_path.glob("*.part")]) == 1
    (epoch,) = lines(store.options(), str(tmp_path), epochs=1)
    assert sorted(epoch) == sorted([*range(600)] * 50)
    assert len([*tmp_path.glob("*.data")]) == 6
    assert not [*tmp_path.glob("*.part")]
