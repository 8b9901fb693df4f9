"""Data that fails is left out (``on_error="skip"``): the rest comes once, in its place; all ranks account alike."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable, Container, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.data import Mapped, Numbers, Repeated
from tests.support.cells import cells
from tests.support.epochs import epoch, lists, pieces, raised
from tests.support.formats import ERROR, SPOILED, tfrecord
from tests.support.launched import Scenes, launched
from torchdistinput import readers
from torchdistinput.plan.batching import split
from torchdistinput.sources.kernel.read_failures import CorruptRecord
from torchdistinput.testing import run_ranks


class BrokenError(Exception):
    """What the data raises."""


def with_broken(n: int, which: Container[int]) -> Numbers:
    """Numbers, some of which cannot be read."""

    def read(index: int) -> None:
        if index in which:
            raise BrokenError(f"number {index} is broken")

    return Numbers(n, each=read)


def all_but_one(index: int) -> torch.Tensor:
    """A batch of four, if it can be read."""
    if index == 1:
        raise BrokenError(f"batch {index} is broken")
    return torch.arange(4 * index, 4 * index + 4)


def skipping(**more: Any) -> tdi.InputOptions:
    return tdi.InputOptions(on_error="skip", **more)


def on(replicas: int) -> tdi.Strategy:
    return tdi.Strategy(devices=["cpu"] * replicas)


def law(order: list[int], size: int, broken: set[int], replicas: int, *, drop_last: bool = False) -> list[list[Any]]:
    """The batches of one process, cut by law B1, then without what is broken; a step without a sample is none."""
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    steps = []
    for batch in batches:
        if drop_last and len(batch) < size:
            continue
        cut = [batch[lo:hi] for lo, hi in (split(len(batch), replicas, k) for k in range(replicas))]
        steps.append([[number for number in piece if number not in broken] for piece in cut])
    return [step for step in steps if any(step)]


def delivered(strategy: tdi.Strategy, loader: tdi.DistributedDataset) -> list[list[Any]]:
    """The steps, whose account of themselves must be right."""
    steps = []
    for number, element in enumerate(loader):
        found = pieces(strategy, element)
        sizes = tuple(map(len, found))
        assert (loader.step.index, loader.step.local_sizes, loader.step.global_size) == (number, sizes, sum(sizes))
        steps.append(found)
    return steps


# Readers say where the next record starts, if that is certain


def told(reader: Any) -> list[Any]:
    """The records of a reader, with a word for those that are spoiled, and for an error."""
    found: list[Any] = []

    def read() -> None:
        while ready := reader.take_ready():
            found.extend(SPOILED if isinstance(each, CorruptRecord) else each for each in ready)

    error = raised(read)
    if error is not None:
        assert (error.kind, error.file is None) == ("SourceError", False)
        found.append(ERROR)
    return found


def test_a_plain_reader_cannot_be_entered_again_so_its_error_stays(tmp_path: Path) -> None:
    def plain(file: Any) -> Iterator[str]:
        yield from readers.text_lines(file)

    (tmp_path / "f").write_bytes(b"good\n\xff\nb\n")
    assert told(tdi.FileDataset(str(tmp_path / "f"), plain).reader([0], 0, skip=True)) == ["good", ERROR]


@readers.in_blocks
def digits(file: Any, offset: int) -> Iterator[Any]:
    """A reader of one's own, with a front that is read each time, and records of one byte each."""
    assert file.read(1) == b"#"
    offset = max(offset, 1)
    readers.skip_to(file, offset, 1)
    while byte := file.read(1):
        if not byte.isdigit():
            raise tdi.SourceError(f"no digit at {offset}", offset=offset, resume_at=offset + 1)
        yield offset, [int(byte)]
        offset += 1


@pytest.mark.parametrize("name", ["f", "f.gz"])
def test_a_reader_of_ones_own_may_say_where_to_go_on(name: str, tmp_path: Path) -> None:
    content = b"#12x4yz7"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    files = tdi.FileDataset(str(tmp_path / name), digits)
    assert told(files.reader([0], 0, skip=True)) == [1, 2, SPOILED, 4, SPOILED, SPOILED, 7]


@readers.in_blocks
def going_back(file: Any, offset: int) -> Iterator[Any]:
    """A reader that says nonsense: that the next record starts before the bad one."""
    yield offset, [offset]
    raise tdi.SourceError("bad", offset=offset + 1, resume_at=offset)


def test_a_reader_that_would_go_back_for_ever_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    assert told(tdi.FileDataset(str(tmp_path / "f"), going_back).reader([0], 0, skip=True)) == [0, ERROR]


# What spoiled records are written as


def line(number: int, *, good: bool) -> bytes:
    return f"{number}\n".encode() if good else b"\xff\n"


def json_line(number: int, *, good: bool) -> bytes:
    return f'"{number}"\n'.encode() if good else b"{\n"


def record(number: int, *, good: bool) -> bytes:
    return tfrecord(f"{number}".encode(), good=good)


FORMATS: dict[str, tuple[Any, Callable[..., bytes]]] = {
    "text": (readers.text_lines, line),
    "json": (readers.json_lines, json_line),
    "tfrecords": (readers.tfrecords, record),
}


def write(path: Path, kind: str, numbers: range, broken: set[int]) -> None:
    _, make = FORMATS[kind]
    path.write_bytes(b"".join(make(number, good=number not in broken) for number in numbers))


# Map-style data


def test_an_item_that_is_a_whole_batch_is_left_out_whole() -> None:
    strategy = on(2)
    data = DataLoader(Mapped(4, all_but_one), batch_size=None)
    steps = [pieces(strategy, e) for e in strategy.distribute_dataset(data, skipping())]
    assert steps == [[[4 * k, 4 * k + 1], [4 * k + 2, 4 * k + 3]] for k in (0, 2, 3)]
    with pytest.raises(tdi.BatchingError, match="with_index=True was given with an item that is a whole batch"):
        next(iter(strategy.distribute_dataset(data, tdi.InputOptions(with_index=True))))


def test_what_the_collate_function_raises_is_not_left_out() -> None:
    def collate(samples: list[int]) -> torch.Tensor:
        raise BrokenError(f"cannot collate {samples}")

    data = DataLoader(with_broken(8, {1}), batch_size=4, collate_fn=collate)
    error = raised(lambda: list(on(1).distribute_dataset(data, skipping())))
    assert error is not None
    assert "(samples 0, 1, 2, 3): tests.sources.test_skipping.BrokenError: cannot collate [0, 2, 3]" in error.message


def test_the_size_of_pieces_is_not_certain_where_samples_may_be_left_out() -> None:
    data = DataLoader(with_broken(8, set()), batch_size=4, drop_last=True)
    for options, size in ((tdi.InputOptions(), 4), (skipping(), None)):
        with on(1).distribute_dataset(data, options) as loader:
            assert loader.element_spec.shape == (size,)


# Files


FILES = (range(7), range(7, 9), range(9, 20))


def file_data(folder: Path, kind: str, broken: set[int], undecodable: set[int], **more: Any) -> tdi.FileDataset:
    for number, numbers in enumerate(FILES):
        write(folder / f"{kind}{number}", kind, numbers, broken)
    return tdi.FileDataset(
        str(folder / f"{kind}*"), FORMATS[kind][0], map_fn=partial(decode, kind, undecodable), **more
    )


def decode(kind: str, undecodable: set[int], value: Any) -> int:
    number = int(value)
    if number in undecodable:
        raise BrokenError(f"cannot decode {number}")
    return number


def test_the_rest_of_the_records_of_files_comes_once_in_its_place(tmp_path: Path, all_cells: bool) -> None:
    settings: dict[str, list[Any]] = {
        "replicas": [1, 2, 3],
        "num_workers": [0, 2],
        "prefetch": [0, 2],
        "drop_last": [False, True],
        "with_index": [False, True],
        "shuffle_buffer": [0, 3],
    }
    broken, undecodable = {0, 8, 10, 11, 12, 13, 19}, {1, 9, 17}
    for kind, setting in cells([*FORMATS] * 2, settings, everything=all_cells):
        strategy = on(setting["replicas"])
        files = file_data(tmp_path, kind, broken, undecodable, shuffle_buffer=setting["shuffle_buffer"])
        order = [FILES[file][0] + place for file, place in order_of(files)]
        data = DataLoader(files, batch_size=4, drop_last=setting["drop_last"], num_workers=setting["num_workers"])
        options = skipping(prefetch=setting["prefetch"], with_index=setting["with_index"])
        want = law(order, 4, broken | undecodable, setting["replicas"], drop_last=setting["drop_last"])
        with strategy.distribute_dataset(data, options) as loader:
            if setting["with_index"]:
                steps = [pieces(strategy, element) for element in loader]
                assert steps == [[([*map(index_of, piece)], piece) for piece in step] for step in want], (kind, setting)
            else:
                assert delivered(strategy, loader) == want, (kind, setting)


def order_of(files: tdi.FileDataset) -> Iterator[tuple[int, int]]:
    """The records, as file and record, in the order of epoch 0."""
    reader = files.reader(range(3), 0, skip=True)
    while reader.take(1):
        (place,) = reader.places(0, 1)
        yield place.file_number, place.record


def index_of(number: int) -> int:
    file = next(k for k, numbers in enumerate(FILES) if number in numbers)
    return file * 2**40 + number - FILES[file][0]


def test_a_record_that_is_a_ready_batch_is_left_out_whole(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"[1, 2]\n{\n[5, 6]\n[]x\n[7, 8]\n")
    strategy = on(2)
    files = tdi.FileDataset(str(tmp_path / "f"), readers.json_lines, map_fn=torch.tensor)
    ready: Any = DataLoader(files, batch_size=None)
    steps = [pieces(strategy, e) for e in strategy.distribute_dataset(ready, skipping())]
    assert steps == [[[1], [2]], [[5], [6]], [[7], [8]]]
    with pytest.raises(tdi.BatchingError, match="with_index=True was given with records that are whole batches"):
        strategy.distribute_dataset(ready, tdi.InputOptions(with_index=True))


def test_a_file_that_cannot_be_read_on_is_an_error_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(tfrecord(b"1") + tfrecord(b"2", good=False) + tfrecord(b"3")[:-1])
    files = tdi.FileDataset(str(tmp_path / "f"), readers.tfrecords, map_fn=int)
    loader = on(1).distribute_dataset(files, skipping(), global_batch_size=1)
    steps: list[Any] = []
    error = raised(lambda: steps.extend(map(lists, loader)))
    assert steps == [[1]]
    assert error is not None
    assert (error.file, error.offset) == (str(tmp_path / "f"), 34)
    assert "cut off" in error.message


# How many, and what is told


@pytest.mark.parametrize(("prefetch", "num_workers"), [(0, 0), (2, 0), (2, 1)])
def test_one_more_than_max_errors_is_an_error_at_its_step(prefetch: int, num_workers: int) -> None:
    broken = {1, 6, 9, 10, 13}
    for max_errors, steps_before in ((0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (5, 5)):
        data = DataLoader(with_broken(20, broken), batch_size=4, num_workers=num_workers)
        loader = on(2).distribute_dataset(data, skipping(prefetch=prefetch, max_errors=max_errors))
        steps: list[Any] = []
        if max_errors == len(broken):
            steps.extend(loader)
        else:
            with pytest.raises(tdi.SourceError) as caught:
                steps.extend(loader)
            up_to = len([number for number in broken if number < 4 * steps_before + 4])
            assert f"{up_to} samples could not be read up to step {steps_before} of epoch 0" in str(caught.value)
            assert f"max_errors={max_errors}" in str(caught.value)
            assert "\nsample 1: BrokenError: number 1 is broken" in str(caught.value)
            assert (caught.value.epoch, caught.value.step) == (0, steps_before)
        assert len(steps) == steps_before
        loader.close()


def test_the_first_ten_of_an_epoch_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    data = DataLoader(with_broken(40, set(range(5, 30))), batch_size=4, num_workers=1)
    with caplog.at_level(logging.WARNING, "torchdistinput"):
        list(on(2).distribute_dataset(data, skipping()))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 11
    for number, message in enumerate(messages[:10], 5):
        assert message.endswith(f"could not be read: sample {number}: BrokenError: number {number} is broken")
    assert "counted but not logged" in messages[10]


def test_records_are_logged_with_their_file_and_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = file_data(tmp_path, "text", {1}, {3})
    with caplog.at_level(logging.WARNING, "torchdistinput"):
        list(on(1).distribute_dataset(files, skipping(), global_batch_size=4))
    first, second = (record.getMessage() for record in caplog.records)
    assert f"{tmp_path}/text0, offset 2: the line at byte 2 is not UTF-8" in first
    assert f"{tmp_path}/text0, record 3: map_fn failed: BrokenError: cannot decode 3" in second


class WordlessError(Exception):
    """Nobody can print it."""

    def __str__(self) -> str:
        raise BrokenError("no words")


def test_an_error_without_words_and_one_with_too_many_are_left_out_too(caplog: pytest.LogCaptureFixture) -> None:
    def read(index: int) -> None:
        if index == 1:
            raise WordlessError
        if index == 2:
            raise BrokenError("many\n words" * 100_000)

    with caplog.at_level(logging.WARNING, "torchdistinput"):
        (element,) = on(1).distribute_dataset(DataLoader(Numbers(4, each=read), batch_size=4), skipping())
    assert element.tolist() == [0, 3]
    messages = [record.getMessage() for record in caplog.records]
    assert "sample 1: WordlessError" in messages[0]
    assert "sample 2: BrokenError: many words many" in messages[1].replace("wordsmany", "words many")
    assert all("\n" not in message and len(message) < 700 for message in messages)


# What has no positions


@pytest.mark.parametrize(
    "distribute",
    [
        lambda: on(1).distribute_dataset(DataLoader(Repeated(4), batch_size=2), skipping()),
        lambda: on(1).distribute_dataset(Repeated(4), skipping(), global_batch_size=2),
        lambda: on(1).distribute_dataset(lambda: iter([torch.zeros(2)]), skipping()),
        lambda: on(1).distribute_datasets_from_function(lambda _: [torch.zeros(2)], skipping()),
    ],
)
def test_opaque_iterables_cannot_leave_out_what_fails(distribute: Callable[[], Any]) -> None:
    with pytest.raises(tdi.InputError, match='on_error="skip".*catch the error in your own dataset'):
        distribute()


@pytest.mark.parametrize("replicas", [1, 2])
def test_seek_counts_a_batch_that_nobody_has_and_a_state_does_not(replicas: int) -> None:
    strategy, loader = on(replicas), DataLoader(with_broken(8, {2, 3}), batch_size=2)
    steps = law(list(range(8)), 2, {2, 3}, replicas)
    with strategy.distribute_dataset(loader, skipping(prefetch=0)) as dataset:
        iterator = iter(dataset)
        assert [pieces(strategy, next(iterator)) for _ in range(2)] == steps[:2]
        state = dataset.state_dict()
        iterator.close()
        assert state["step"] == 2
        dataset.seek(0, 2)
        assert epoch(strategy, dataset) == steps[1:]
        dataset.load_state_dict(state)
        assert epoch(strategy, dataset) == steps[2:]


BROKEN = {0, 4, 5, 6, 7, 13, 19}
UNDECODABLE = {2, 9}

Step = tuple[int, int | None, Any]


def steps_of(loader: tdi.DistributedDataset) -> list[Step]:
    return [(loader.step.index, loader.step.global_size, lists(element)) for element in loader]


def files_in(folder: Path) -> Any:
    return DataLoader(file_data(folder, "tfrecords", BROKEN, UNDECODABLE), batch_size=4)


POLICIES = ("DATA", "FILE")
"""The policies."""


# Too much of it


def until_too_many(max_errors: int, prefetch: int, workers: int) -> tuple[int, Any]:
    loader = tdi.Strategy(devices=["cpu"]).distribute_dataset(
        DataLoader(with_broken(32, {1, 2, 9, 10, 17, 22, 30}), batch_size=4, num_workers=workers),
        skipping(max_errors=max_errors, prefetch=prefetch),
    )
    steps: list[Any] = []
    error = raised(lambda: steps.extend(loader))
    return len(steps), error


def all_until_too_many() -> list[tuple[int, Any]]:
    settings = [(m, p, w) for m, p, w in zip([0, 1, 2, 3, 4, 5, 6, 7], [0, 2] * 4, [0, 0, 1, 1] * 2, strict=True)]
    return [until_too_many(*setting) for setting in settings]


def test_every_rank_stops_at_the_same_step_with_the_same_error(scenes: Scenes) -> None:
    first, second = scenes(2, "too many")
    assert first == second
    for max_errors, (steps, error) in enumerate(first):
        assert steps == (0, 0, 2, 2, 4, 5, 7, 8)[max_errors]
        if max_errors == 7:
            assert error is None
            continue
        assert error.kind == "SourceError"
        assert f"up to step {steps} of epoch 0, and max_errors={max_errors}" in error.message
        assert "\nrank 0: sample 1: BrokenError: number 1 is broken" in error.message
        assert "\nrank 1: sample 2: BrokenError: number 2 is broken" in error.message


def with_other_bounds() -> Any:
    options = skipping(max_errors=5 + dist.get_rank())
    data = DataLoader(with_broken(8, set()), batch_size=4)
    return raised(lambda: tdi.Strategy(devices=["cpu"]).distribute_dataset(data, options))


def test_ranks_that_allow_for_more_or_less_disagree(scenes: Scenes) -> None:
    for error in scenes(2, "other bounds"):
        assert error.kind == "RankDisagreement"
        assert "max_errors: rank 0: 5; rank 1: 6" in error.message


# One that is read by all counts once


def whole_records(folder: Path) -> tuple[list[Step], Any]:
    strategy = tdi.Strategy(devices=["cpu"])
    files = tdi.FileDataset(str(folder / "f"), readers.json_lines, map_fn=torch.tensor)
    data = DataLoader(files, batch_size=None)
    steps = steps_of(
        strategy.distribute_dataset(data, skipping(max_errors=1, auto_shard_policy=tdi.AutoShardPolicy.DATA))
    )
    refused = strategy.distribute_dataset(data, skipping(max_errors=0, auto_shard_policy=tdi.AutoShardPolicy.DATA))
    return steps, raised(lambda: list(refused))


def test_a_ready_batch_that_all_ranks_cut_is_left_out_once(scenes: Scenes) -> None:
    for rank, (steps, error) in enumerate(scenes(2, "whole records")):
        assert steps == [(0, 2, [1 + rank]), (1, 2, [5 + rank])]
        assert "1 samples could not be read" in error.message


def scenes_of(_: int, folder: Path) -> dict[str, Callable[[], Any]]:
    return {
        "too many": all_until_too_many,
        "other bounds": with_other_bounds,
        "whole records": partial(whole_records, folder),
        "files": partial(saved, str(folder)),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With files before ranks write the same ones again."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "f").write_bytes(b"[1, 2]\n{\n[5, 6]\n")
    files_in(folder)
    return folder


@pytest.fixture(scope="module")
def scenes(folder: Path) -> Scenes:
    return launched((2,), scenes_of, folder)


# Taken up again, at the same and at another number of ranks


def opened(folder: str, policy: str) -> tdi.DistributedDataset:
    options = skipping(auto_shard_policy=tdi.AutoShardPolicy[policy])
    return tdi.Strategy(devices=["cpu"]).distribute_dataset(files_in(Path(folder)), options)


def saved(folder: str) -> dict[str, tuple[list[Step], list[str]]]:
    found: dict[str, tuple[list[Step], list[str]]] = {}
    for policy in POLICIES:
        steps, states = found[policy] = [], []
        with opened(folder, policy) as loader:
            for element in loader:
                steps.append((loader.step.index, loader.step.global_size, lists(element)))
                states.append(json.dumps(loader.state_dict()))
    return found


def resumed(folder: str, states: dict[str, list[str]]) -> dict[str, list[list[Step]]]:
    found: dict[str, list[list[Step]]] = {policy: [] for policy in POLICIES}
    for policy in POLICIES:
        for state in states[policy]:
            with opened(folder, policy) as loader:
                loader.load_state_dict(json.loads(state))
                found[policy].append(steps_of(loader))
    return found


def test_a_run_goes_on_at_any_number_of_ranks_with_the_rest(folder: Path, scenes: Scenes) -> None:
    ranks = scenes(2, "files")
    states = {policy: ranks[0][policy][1][:-1] for policy in POLICIES}
    assert states == {policy: ranks[1][policy][1][:-1] for policy in POLICIES}
    again = run_ranks(2, resumed, str(folder), states)
    other = run_ranks(3, resumed, str(folder), states)
    for policy in POLICIES:
        for done in range(1, len(states[policy]) + 1):
            for whole, rests in zip(ranks, again, strict=True):
                assert rests[policy][done - 1] == whole[policy][0][done:], (policy, done)
            before = [number for whole in ranks for _, _, part in whole[policy][0][:done] for number in part]
            after = [number for rests in other for _, _, part in rests[policy][done - 1] for number in part]
            assert sorted(before + after) == sorted({*range(20)} - BROKEN - UNDECODABLE), (policy, done)
