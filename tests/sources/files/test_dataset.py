"""A dataset of files yields each record once, in an order that follows from its arguments and the epoch alone."""

from __future__ import annotations

import contextlib
import gc
import gzip
import itertools
import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import fsspec
import numpy as np
import pytest
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem
from torch.utils.data import DataLoader, IterableDataset, default_collate

import torchdistinput as tdi
from tests.support.epochs import Raised, raised
from tests.support.formats import records_of
from torchdistinput import readers
from torchdistinput.errors import SourceError, StateMismatch
from torchdistinput.plan.file_resharding import FileCursor, ReaderCursor
from torchdistinput.plan.options import InputOptions
from torchdistinput.plan.topology import AutoShardPolicy, Topology
from torchdistinput.sources.datasets.fragment_dataset import FileDataset, list_files
from torchdistinput.sources.datasets.record_source import RecordSource
from torchdistinput.sources.kernel.read_failures import RecordPlace
from torchdistinput.sources.readers.interleave import Interleave
from torchdistinput.sources.storage.glob import FileNames
from torchdistinput.step_types import Start
from torchdistinput.testing import run_ranks


def write(folder: Path, *sizes: int) -> list[str]:
    """Files a.txt, b.txt, … of so many lines ``a0, a1, …``."""
    names = []
    for letter, size in zip("abcdefghij", sizes, strict=False):
        path = folder / f"{letter}.txt"
        path.write_text("".join(f"{letter}{number}\n" for number in range(size)))
        names.append(str(path))
    return names


def text(names: FileNames, **arguments: Any) -> FileDataset:
    return FileDataset(names, readers.text_lines, **arguments)


def whole_walk(dataset: FileDataset, epoch: int = 0) -> list[str]:
    return records_of(dataset.reader(dataset.file_order(epoch), epoch))


def open_files(folder: Path) -> int:
    files = {(status.st_dev, status.st_ino) for status in map(os.stat, folder.rglob("*"))}
    found = 0
    for number in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # that of the listing is closed by now
            status = os.fstat(int(number))
            found += (status.st_dev, status.st_ino) in files
    return found


# Listing


def test_a_list_of_files_is_sorted_and_shuffled_by_a_seed(tmp_path: Path) -> None:
    names = write(tmp_path, *[1] * 10)
    assert list_files(f"{tmp_path}/*.txt") == names
    assert list_files(list(reversed(names))) == names[::-1]
    mixed = list_files(f"{tmp_path}/*.txt", shuffle=True, seed=4)
    assert mixed == list_files(tmp_path / "*.txt", shuffle=True, seed=4)
    assert "".join(Path(name).stem for name in mixed) == "jedfaghibc"
    assert mixed != list_files(f"{tmp_path}/*.txt", shuffle=True, seed=5)
    assert sorted(mixed) == names


def test_shuffling_a_list_without_a_seed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every rank would shuffle differently"):
        list_files(write(tmp_path, 1), shuffle=True)
    with pytest.raises(TypeError, match="seed must be an int, got 0.5"):
        list_files(write(tmp_path, 1), shuffle=True, seed=0.5)  # type: ignore[arg-type]


# The order


def test_files_are_read_one_after_the_other_in_the_order_of_the_list(tmp_path: Path) -> None:
    a, b, c = write(tmp_path, 2, 0, 3)
    assert whole_walk(text([c, b, a])) == ["c0", "c1", "c2", "a0", "a1"]
    assert whole_walk(text([a, c, a])) == ["a0", "a1", "c0", "c1", "c2", "a0", "a1"]
    assert records_of(text(f"{tmp_path}/*.txt").reader([2, 0], 0)) == ["c0", "c1", "c2", "a0", "a1"]
    assert records_of(text([a]).reader([], 0)) == []


def tensorflows_interleave(inputs: list[list[str]], cycle_length: int, block_length: int) -> Iterator[str]:
    """TensorFlow's sequential interleave, as a machine of positions."""
    waiting, slots, slot, position = list(inputs), [None] * cycle_length, 0, 0  # type: list[list[str]], Any, int, int
    while waiting or any(each is not None for each in slots):
        if slots[slot] is None:
            if waiting:
                slots[slot] = iter(waiting.pop(0))
                continue
            slot, position = (slot + 1) % cycle_length, 0
            continue
        record = next(slots[slot], None)
        if record is None:
            slots[slot] = None
            slot, position = (slot + 1) % cycle_length, 0
            continue
        yield record
        position += 1
        if position == block_length:
            slot, position = (slot + 1) % cycle_length, 0


SIZES = [(4,), (0, 0), (3, 1, 2), (5, 0, 3, 4), (2, 2, 2, 2, 2), (1, 7, 0, 0, 4, 2)]
COMBINATIONS = list(itertools.product(SIZES, (1, 2, 3, 10), (1, 2, 5), (0, 1, 3, 100)))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_combination_yields_each_record_once_in_tensorflows_interleaving(
    sizes: tuple[int, ...], tmp_path: Path
) -> None:
    names = write(tmp_path, *sizes)
    every = sorted(line for name in names for line in Path(name).read_text().split())
    for _, cycle, block, buffer in (each for each in COMBINATIONS if each[0] == sizes):
        dataset = text(names, cycle_length=cycle, block_length=block, shuffle_buffer=buffer, shuffle_files=True, seed=3)
        for epoch in (0, 1):
            found = whole_walk(dataset, epoch)
            assert sorted(found) == every
            lanes = [whole_lane(dataset, index, epoch) for index in dataset.file_order(epoch)]
            assert found == list(tensorflows_interleave(lanes, cycle, block))


def whole_lane(dataset: FileDataset, index: int, epoch: int) -> list[str]:
    return records_of(dataset.reader([index], epoch))


def test_shuffled_orders_are_a_promise(tmp_path: Path) -> None:
    """Literal orders: saved states and recorded runs depend on them."""
    dataset = text(write(tmp_path, 5, 3, 4), shuffle_files=True, shuffle_buffer=3, cycle_length=2, seed=1)
    assert [dataset.file_order(epoch) for epoch in range(4)] == [[2, 1, 0], [2, 0, 1], [2, 1, 0], [1, 2, 0]]
    assert " ".join(whole_walk(dataset, 0)) == "c0 b1 c1 b2 c2 b0 c3 a0 a2 a1 a4 a3"
    assert " ".join(whole_walk(dataset, 1)) == "c0 a1 c2 a0 c1 a2 c3 a3 a4 b2 b0 b1"


# The place


# Decoding


def test_map_fn_is_called_for_the_records_that_are_decoded_only(tmp_path: Path) -> None:
    seen: list[str] = []

    def decode(record: str) -> int:
        seen.append(record)
        return int(record[1:])

    dataset = text(write(tmp_path, 3), map_fn=decode)
    assert records_of(dataset.reader([0], 0)) == ["a0", "a1", "a2"]
    assert seen == []
    assert dataset.decode(["a7"], list, 0) == ([7], {})
    assert list(dataset) == [0, 1, 2]
    assert text(write(tmp_path, 1)).decode(["x"], list, 0) == (["x"], {})


def test_a_record_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    a, b = write(tmp_path, 2, 5)
    dataset = text([a, b], map_fn=lambda record: 1 // (record != "b3"), shuffle_buffer=4)
    with pytest.raises(SourceError, match=r"map_fn failed on record 3: ZeroDivisionError") as caught:
        list(dataset)
    assert (caught.value.file, type(caught.value.__cause__)) == (b, ZeroDivisionError)
    with pytest.raises(SourceError, match="record 17") as caught:
        dataset.decode(["3", "b3"], lambda: [RecordPlace(b, 16, 1), RecordPlace(b, 17, 1)], 0)
    assert (caught.value.file, type(caught.value.__cause__)) == (b, ZeroDivisionError)


# Failures


def test_a_missing_file_is_named_after_the_records_before_it(tmp_path: Path) -> None:
    (a,) = write(tmp_path, 2)
    reader = text([a, f"{tmp_path}/missing.txt"]).reader([0, 1], 0)
    assert (reader.take(2), open_files(tmp_path)) == (["a0", "a1"], 1)
    with pytest.raises(SourceError, match=r"missing\.txt: cannot be opened: FileNotFoundError") as caught:
        reader.take(1)
    assert caught.value.file == f"{tmp_path}/missing.txt"
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert (reader.take(1), open_files(tmp_path)) == ([], 0)


def test_an_exception_of_a_reader_names_the_file_and_where_it_was(tmp_path: Path) -> None:
    def reader(file: BinaryIO) -> Iterator[bytes]:
        yield file.read(3)
        raise KeyError("why")

    for buffer in (0, 5):
        dataset = FileDataset(write(tmp_path, 5), reader, shuffle_buffer=buffer)
        with pytest.raises(SourceError, match=r"a\.txt: reading failed near byte 3, .*KeyError: 'why'") as caught:
            list(dataset)
        assert (caught.value.file, caught.value.offset) == (str(tmp_path / "a.txt"), 3)
        assert isinstance(caught.value.__cause__, KeyError)
    assert open_files(tmp_path) == 0


# Files are closed


def test_a_dropped_walk_closes_its_files_without_the_garbage_collector(tmp_path: Path) -> None:
    dataset = text(write(tmp_path, 30, 30), cycle_length=2, shuffle_buffer=3)
    gc.disable()
    try:
        reader: Interleave | None = dataset.reader([0, 1], 0)
        assert reader is not None
        reader.take(2)
        assert open_files(tmp_path) == 2
        reader = None
        assert open_files(tmp_path) == 0
        loop = iter(dataset)
        next(loop)
        del loop
        assert open_files(tmp_path) == 0
    finally:
        gc.enable()


class Record:
    """A record that counts how many of its kind are alive."""

    alive = 0

    def __init__(self) -> None:
        Record.alive += 1

    def __del__(self) -> None:
        Record.alive -= 1


@pytest.mark.parametrize("cycle", [1, 3])
def test_at_most_a_window_of_records_is_held_for_each_open_file(cycle: int, tmp_path: Path) -> None:
    def reader(_: BinaryIO) -> Iterator[Record]:
        return (Record() for _ in range(50))

    dataset = FileDataset(write(tmp_path, 1, 1, 1, 1), reader, cycle_length=cycle, shuffle_buffer=8)
    most, number = 0, 0
    records = dataset.reader(range(4), 0)
    while taken := len(records.take(1)):
        most, number = max(most, Record.alive), number + taken
    assert number == 200
    assert most <= 8 * cycle + 2
    assert Record.alive == 0


# In plain torch


def test_it_is_an_iterable_dataset_whose_every_iter_is_the_next_epoch(tmp_path: Path) -> None:
    dataset = text(write(tmp_path, 20, 20), shuffle_buffer=10, seed=2)
    assert isinstance(dataset, IterableDataset)
    epochs = [whole_walk(dataset, epoch) for epoch in range(12)]
    assert [list(dataset), list(dataset)] == epochs[:2]
    dataset.set_epoch(7)
    assert [list(dataset), list(dataset)] == epochs[7:9]
    dataset.set_epoch(7)
    dataset.set_epoch(3)
    one, other = iter(dataset), iter(dataset)
    assert (list(other), list(one)) == (epochs[4], epochs[3])


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_in_a_loader_record_j_comes_from_worker_j_modulo_the_workers(workers: int, tmp_path: Path) -> None:
    dataset = text(write(tmp_path, 7, 0, 6, 2), cycle_length=2, shuffle_buffer=4, shuffle_files=True)
    records = whole_walk(dataset)
    batches = list(DataLoader(dataset, batch_size=4, num_workers=workers))
    assert sorted(record for batch in batches for record in batch) == sorted(records)
    shares = [records[worker :: workers or 1] for worker in range(workers or 1)]
    for worker, share in enumerate(shares):
        mine = [batch for batch in batches if batch[0] in share]
        assert [record for batch in mine for record in batch] == share, worker


def epochs_of(loader: Iterable[Any], number: int) -> list[list[str]]:
    return [[record for batch in loader for record in batch] for _ in range(number)]


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_persistent_loader_workers_count_on_and_hear_of_a_new_epoch(context: str, tmp_path: Path) -> None:
    dataset = text(write(tmp_path, 20), shuffle_buffer=20)
    epochs = [whole_walk(dataset, epoch) for epoch in range(10)]
    loader = DataLoader(dataset, batch_size=5, num_workers=1, persistent_workers=True, multiprocessing_context=context)
    assert epochs_of(loader, 2) == epochs[:2]
    dataset.set_epoch(7)
    assert epochs_of(loader, 2) == epochs[7:9]
    dataset.set_epoch(0)
    assert epochs_of(loader, 1) == epochs[:1]


# Where files are


def test_compressed_and_remote_files_are_read_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a0\na1\n"))
    (tmp_path / "b.txt").write_bytes(b"b0\n")
    try:
        for name, content in (("c.txt", b"c0\n"), ("d.txt.gz", gzip.compress(b"d0\nd1\n"))):
            with fsspec.open(f"memory://folder/{name}", "wb") as file:
                file.write(content)
        dataset = text([f"{tmp_path}/*", "memory://folder/*"], cycle_length=4, shuffle_files=True)
        assert [Path(name).name for name in dataset.files] == ["a.txt.gz", "b.txt", "c.txt", "d.txt.gz"]
        assert sorted(dataset) == ["a0", "a1", "b0", "c0", "d0", "d1"]
        twice = text(["memory://folder/d.txt.gz"] * 2, cycle_length=2)
        assert list(twice) == ["d0", "d0", "d1", "d1"]
    finally:
        MemoryFileSystem.store.clear()


def test_compression_and_storage_options_are_passed_on(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(gzip.compress(b"a0\n"))
    options = {"path": str(tmp_path), "target_protocol": "file"}
    dataset = text("dir://*.bin", compression="gzip", storage_options=options)
    assert dataset.files == ("dir://a.bin",)
    assert list(pickle.loads(pickle.dumps(dataset))) == ["a0"]
    (tmp_path / "b.gz").write_bytes(b"b0\n")
    assert list(text([f"{tmp_path}/b.gz"], compression=None)) == ["b0"]


# Files that changed


def lanes(*sizes: int) -> list[FileCursor]:
    return [FileCursor(file, size=size) for file, size in enumerate(sizes)]


def test_a_file_that_changed_its_size_or_is_gone_is_named(tmp_path: Path) -> None:
    dataset = text(write(tmp_path, 2, 2, 2))
    with pytest.raises(StateMismatch, match=r"b\.txt: the file has 6 bytes, but had 7 when the state was saved"):
        dataset.check_places([ReaderCursor(waiting=tuple(lanes(6, 7, 6)))])
    (tmp_path / "c.txt").unlink()
    dataset.check_places([ReaderCursor(waiting=tuple(lanes(6, 6)))])
    for size in (6, -1):
        with pytest.raises(StateMismatch, match=r"c\.txt: the file is gone"):
            dataset.check_places([ReaderCursor(waiting=tuple(lanes(6, 6, size)))])
    with pytest.raises(StateMismatch, match="the saved state is in file 3, but the dataset has 3 files"):
        dataset.check_places([ReaderCursor(waiting=tuple(lanes(6, 6, 6, 6)))])


def test_a_file_of_equal_size_that_has_changed_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "z.gz").write_bytes(gzip.compress(b"z0\nz1\n", mtime=0))
    name = "memory://folder/m.txt"
    try:
        with fsspec.open(name, "wb") as file:
            file.write(b"m0\nm1\n")
        dataset = text([*write(tmp_path, 2), f"{tmp_path}/z.gz", name], cycle_length=3)
        reader = dataset.reader(range(3), 0)
        reader.take(3)
        places = reader.position().cursors
        assert ReaderCursor.from_json(json.loads(reader.position().to_text())) == reader.position()
        os.utime(tmp_path / "a.txt", (1, 1))  # as a copy on another machine
        dataset.check_places([ReaderCursor(waiting=tuple(places))])
        (tmp_path / "a.txt").write_bytes(b"a0\nb1\n")
        (tmp_path / "z.gz").write_bytes(gzip.compress(b"z0\nz2\n", mtime=0))
        with fsspec.open(name, "wb") as file:
            file.write(b"m0\nm2\n")
        for place in places:
            with pytest.raises(StateMismatch, match="the file has other content than it had when the state was saved"):
                dataset.check_places([ReaderCursor(waiting=(place,))])
        assert not caplog.records
        dataset.check_places(
            [ReaderCursor(waiting=tuple([place._replace(mark="") for place in places]))]
        )  # of a state of version 0.2
        assert "2 other(s) of the files in progress are compared by size only" in caplog.text
    finally:
        MemoryFileSystem.store.clear()


# Arguments


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"shuffle_buffer": -1}, ValueError, "shuffle_buffer must be at least 0, got -1"),
        ({"cycle_length": 0}, ValueError, "cycle_length must be at least 1, got 0"),
        ({"block_length": 0}, ValueError, "block_length must be at least 1, got 0"),
        ({"cycle_length": 2.0}, TypeError, "cycle_length must be an int, got 2.0"),
        ({"shuffle_buffer": True}, TypeError, "shuffle_buffer must be an int, got True"),
        ({"seed": None}, TypeError, "seed must be an int, got None"),
        ({"shuffle_files": 1}, TypeError, "shuffle_files must be True or False, got 1"),
        ({"map_fn": "upper"}, TypeError, "map_fn must be a function, got str"),
        ({"read": "text_lines"}, TypeError, "read must be a function, got str"),
        ({"compression": "gz"}, ValueError, "compression must be 'infer'"),
        ({"storage_options": "anon"}, TypeError, "storage_options must be a mapping"),
        ({"files": 3}, TypeError, "files must be a name"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_right_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"files": write(tmp_path, 1), "read": readers.text_lines, **arguments}
    make: Callable[..., FileDataset] = FileDataset
    with pytest.raises(error, match=message):
        make(**given)


def test_lists_of_lines_are_vouched_for_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("[1]\n[2]\n")

    alone = Topology(num_workers=1, replicas_per_worker=1, worker=0)

    def vouched(read: Any = readers.text_lines, collate: Any = None, **options: Any) -> bool:
        dataset = FileDataset(str(tmp_path / "a"), read, **options)
        source = RecordSource(DataLoader(dataset, 2, collate_fn=collate), AutoShardPolicy.FILE, alone, InputOptions())
        return source.open(0, lambda call: call(), Start()).structure is not None

    assert vouched()
    assert vouched(collate=default_collate)
    assert vouched(shuffle_buffer=2)
    assert not vouched(collate=lambda lines: [list(lines)])
    assert not vouched(map_fn=str.encode)
    for read in (readers.json_lines, readers.csv_rows, readers.fixed_length_records(2), iter):
        assert not vouched(read)


FILES, LINES = 3, 100
MIXED = {"shuffle_files": True, "shuffle_buffer": 16, "cycle_length": 2}


class Case(NamedTuple):
    """What one rank has otherwise, and what all ranks are told; nothing where the difference does no harm."""

    words: tuple[str, ...]
    change: Callable[[str], None] = lambda _: None
    settings: dict[str, Any] = {}  # noqa: RUF012 - never changed
    policy: str = "DATA"
    workers: int = 0
    later: Callable[[str], None] = lambda _: None
    """Changes what the rank has, once the epoch has begun."""
    read: Any = readers.text_lines
    pattern: str = "*.txt"
    of: Callable[[tdi.FileDataset], Any] = lambda files: files
    """Makes the data of the files."""
    steps: int | None = None
    """After how many steps it is noticed, where that is not before the first."""


def numbered(folder: str, number: int, lines: range) -> None:
    Path(f"{folder}/{number}.txt").write_text("".join(f"{number}:{line:03}\n" for line in lines))


def shorter(folder: str) -> None:
    numbered(folder, 1, range(LINES - 5))


def other_start(folder: str) -> None:
    numbered(folder, 1, range(1, LINES + 1))


def zipped(folder: str) -> None:
    Path(f"{folder}/0.gz").write_bytes(gzip.compress(b"1\n" * (90 if folder.endswith("1") else 95)))


def array(folder: str) -> None:
    np.save(f"{folder}/0.npy", np.arange(90 if folder.endswith("1") else 95))


def twice_here(line: str) -> list[str]:
    return [line] * (1 + (line == "1:050" and dist.get_rank() == 1))


def mixed(files: tdi.FileDataset) -> tdi.Mixture:
    both = {"files": files, "numbers": [*map(str, range(50))]}
    return tdi.Mixture(both, {"files": 3, "numbers": 1}, stop="repeat", num_samples=800)


CASES = {
    "fewer lines": Case(("content of the files", "1.txt: 570 bytes", "1.txt: 600 bytes"), shorter),
    "fewer lines, mixed": Case(("content of the files", "570 bytes", "600 bytes"), shorter, MIXED),
    "fewer lines, in parts": Case(("file list, first in entry 4", "1.txt[0:142]", "1.txt[0:150]"), shorter)._replace(
        settings={"fragment_bytes": 150}
    ),
    "equal size": Case(
        ("content of the files, first in entry 1", "1.txt: 600 bytes, first and last block"), other_start
    ),
    "a file is missing": Case(("2.txt: is not there",), lambda at: os.unlink(f"{at}/2.txt"))._replace(
        pattern="{0..2}.txt"
    ),
    "a name more": Case(("file list, first in entry 3", "3.txt", "(none)"), lambda at: numbered(at, 3, range(5))),
    "another name": Case(("file list, first in entry 1", "1.txt", "11.txt"))._replace(
        change=lambda at: os.rename(f"{at}/1.txt", f"{at}/11.txt")
    ),
    "compressed": Case(("0.gz: ",), pattern="*.gz"),
    "arrays": Case(("0.npy: 888 bytes", "0.npy: 848 bytes"), pattern="*.npy", read=readers.npy_rows),
    "appended meanwhile": Case(("1.txt has 100 records", "more records"))._replace(
        later=lambda at: numbered(at, 1, range(LINES + 30)), steps=25
    ),
    "cut meanwhile, at a batch": Case(("2.txt has 100 records", "no more records"))._replace(
        later=lambda at: numbered(at, 2, range(LINES - 4)), steps=37
    ),
    "cut meanwhile, mixed": Case(("2.txt has 50 records", "more records"))._replace(
        later=lambda at: numbered(at, 2, range(50)), settings={"cycle_length": 2, "block_length": 4}
    ),
    "more samples of a record": Case(("1.txt has 100 records", "1.txt has 101 records"))._replace(
        settings={"flat_map_fn": twice_here}, steps=25
    ),
    "more samples, in loader workers": Case(("1.txt has 100 records", "1.txt has 101 records"))._replace(
        settings={"flat_map_fn": twice_here, **MIXED}, workers=2
    ),
    "a mixture": Case(("content of the files, first in entry 1", "570 bytes", "600 bytes"), shorter, of=mixed),
    "a mixture, cut meanwhile": Case(("read different data at step 32",), of=mixed)._replace(
        later=lambda at: numbered(at, 2, range(50)), steps=32
    ),
    "under FILE": Case((), shorter, policy="FILE"),
}


def every_case(folder: str) -> dict[str, tuple[Raised | None, int]]:
    """One rank with files of its own: what each case raises, and after how many steps."""
    found = {}
    strategy = tdi.Strategy(["cpu"], timeout_seconds=60)
    rank = dist.get_rank()
    for name, case in CASES.items():
        own = f"{folder}/{name}/{rank}"
        os.makedirs(own)
        for number in range(FILES):
            numbered(own, number, range(LINES))
        zipped(own)
        array(own)
        os.chdir(own)
        if rank == 1:
            case.change(own)
        steps = 0

        def run(case: Case = case, own: str = own) -> None:
            nonlocal steps
            files = tdi.FileDataset(case.pattern, case.read, **case.settings)
            loader = DataLoader(case.of(files), batch_size=8, num_workers=case.workers)
            options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy[case.policy], prefetch=2)
            with strategy.distribute_dataset(loader, options) as distributed:
                for step, _ in enumerate(distributed):
                    if not step and rank == 1:
                        case.later(own)
                    steps = step + 1

        found[name] = (raised(run), steps)
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[Raised | None, int]]]:
    return run_ranks(2, every_case, str(tmp_path_factory.mktemp("differ")), timeout_seconds=120)


@pytest.mark.parametrize("name", CASES)
def test_ranks_are_told_the_first_file_that_differs(
    told: list[dict[str, tuple[Raised | None, int]]], name: str
) -> None:
    case = CASES[name]
    (one, steps), (other, steps_there) = (each[name] for each in told)
    assert one == other
    assert steps == steps_there
    if not case.words:
        assert one is None
        return
    assert one is not None
    assert one.kind == "RankDisagreement"
    assert len(one.message) < 500
    assert all(word in one.message for word in case.words), one.message
    assert "rank 0" in one.message
    assert "rank 1" in one.message
    assert case.steps is None or steps == case.steps
