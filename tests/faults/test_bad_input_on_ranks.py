"""Bad input over real ranks: every rank raises, alike, at once, and the message names the ranks and values."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support import inputs, structures
from tests.support.epochs import Raised, raised
from torchdistinput import readers
from torchdistinput.testing import run_ranks

HANG_SECONDS = 20.0


def text_files(folder: Path, *sizes: int) -> None:
    for number, size in enumerate(sizes):
        (folder / f"{number}.txt").write_text("".join(f"{k}\n" for k in range(size)))


def my_rank() -> int:
    return dist.get_rank()


def on_rank(wanted: int, theirs: Any, others: Any) -> Any:
    return theirs if my_rank() == wanted else others


def number_range(n: int, batch_size: int, **arguments: Any) -> Any:
    return DataLoader(range(n), batch_size=batch_size, **arguments)  # type: ignore[arg-type]


def distribute(data: Any, global_batch_size: int | None = None, **options: Any) -> tdi.DistributedDataset:
    strategy = tdi.Strategy(devices=["cpu"])
    return strategy.distribute_dataset(data, tdi.InputOptions(**options), global_batch_size=global_batch_size)


def read_all(data: Any, global_batch_size: int | None = None, **options: Any) -> list[Any]:
    return list(distribute(data, global_batch_size, **options))


# What every rank refuses when the dataset is distributed. Each function is one rank's call.


def too_few_files(folder: Path) -> object:
    return distribute(tdi.FileDataset(str(folder / "few" / "*.txt"), readers.text_lines), 4)


def too_few_files_by_name(folder: Path) -> object:
    data = DataLoader(tdi.FileDataset([str(folder / "few" / "0.txt")], readers.text_lines), batch_size=4)
    return distribute(data, auto_shard_policy=tdi.AutoShardPolicy.FILE)


def file_policy_without_files(_: Path) -> object:
    return distribute(number_range(9, 4), auto_shard_policy=tdi.AutoShardPolicy.FILE)


def hint_without_shard(_: Path) -> object:
    return distribute(inputs.PlainIterable(), auto_shard_policy=tdi.AutoShardPolicy.HINT)


def batch_size_zero(_: Path) -> object:
    return distribute(range(9), 0)


def batch_size_negative_on_one_rank(_: Path) -> object:
    return distribute(range(9), on_rank(1, -3, 4))


def no_batch_size(_: Path) -> object:
    return distribute(inputs.Records())


def two_batch_sizes(_: Path) -> object:
    return distribute(number_range(9, 4), 8)


def out_of_order(_: Path) -> object:
    return distribute(number_range(9, 4, num_workers=1, in_order=False))


def not_data(_: Path) -> object:
    return distribute({"x": [1, 2]})


def not_data_on_one_rank(_: Path) -> object:
    return distribute(on_rank(1, nn.Linear(2, 2), number_range(9, 4)))


def a_class(_: Path) -> object:
    return distribute(inputs.Records, 4)


def a_class_in_a_loader_on_one_rank(_: Path) -> object:
    return distribute(DataLoader(on_rank(1, inputs.Records, inputs.Records()), batch_size=4))


def a_class_from_a_function_on_one_rank(_: Path) -> object:
    returned = on_rank(1, inputs.PlainIterable, inputs.PlainIterable())
    return tdi.Strategy(["cpu"]).distribute_datasets_from_function(lambda context: returned)


def other_lengths(_: Path) -> object:
    return distribute(number_range(on_rank(1, 17, 23), 4))


def other_batch_sizes(_: Path) -> object:
    return distribute(number_range(23, on_rank(1, 6, 4)))


def other_drop_last(_: Path) -> object:
    return distribute(number_range(23, 4, drop_last=my_rank() == 1))


def other_policies(_: Path) -> object:
    policy = on_rank(1, tdi.AutoShardPolicy.OFF, tdi.AutoShardPolicy.DATA)
    return distribute(number_range(23, 4), auto_shard_policy=policy)


def other_files(folder: Path) -> object:
    names = [str(folder / f"{k}.txt") for k in (0, 1, on_rank(1, 3, 2))]
    return distribute(tdi.FileDataset(names, readers.text_lines), 4)


def other_file_order(folder: Path) -> object:
    names = [str(folder / f"{k}.txt") for k in range(4)]
    return distribute(tdi.FileDataset(names[::-1] if my_rank() == 1 else names, readers.text_lines), 4)


def other_file_seeds(folder: Path) -> object:
    data = tdi.FileDataset(str(folder / "*.txt"), readers.text_lines, shuffle_files=True, seed=40 + my_rank())
    return distribute(data, 4, auto_shard_policy=tdi.AutoShardPolicy.DATA)


def other_kinds(_: Path) -> object:
    return distribute(on_rank(1, inputs.PlainIterable(), number_range(9, 4)))


def other_prefetch(_: Path) -> object:
    return distribute(number_range(9, 4), prefetch=on_rank(1, 3, 2))


def other_generators(_: Path) -> object:
    data = number_range(23, 4, shuffle=True, generator=torch.Generator().manual_seed(my_rank()))
    return next(iter(distribute(data)))


def other_epochs(_: Path) -> object:
    dataset = distribute(number_range(23, 4))
    dataset.set_epoch(on_rank(1, 5, 2))
    return next(iter(dataset))


REFUSED: list[tuple[Callable[[Path], object], str, list[str]]] = [
    (too_few_files, "ShardingError", ["2 file", "3 ranks", "DATA"]),
    (too_few_files_by_name, "ShardingError", ["1 file", "3 ranks", "DATA"]),
    (file_policy_without_files, "ShardingError", ["FILE", "DATA"]),
    (hint_without_shard, "ShardingError", ["HINT", "shard"]),
    (batch_size_zero, "BatchingError", ["0"]),
    (batch_size_negative_on_one_rank, "BatchingError", ["-3", "rank 1"]),
    (no_batch_size, "BatchingError", ["global_batch_size"]),
    (two_batch_sizes, "BatchingError", ["global_batch_size", "4"]),
    (out_of_order, "InputError", ["in_order"]),
    (not_data, "InputError", ["dict"]),
    (not_data_on_one_rank, "InputError", ["Linear", "rank 1"]),
    (a_class, "InputError", ["the class Records", "Give Records(...)"]),
    (a_class_in_a_loader_on_one_rank, "InputError", ["the class Records", "rank 1"]),
    (a_class_from_a_function_on_one_rank, "InputError", ["the class PlainIterable", "rank 1"]),
    (other_lengths, "RankDisagreement", ["23", "17", "1"]),
    (other_batch_sizes, "RankDisagreement", ["4", "6", "1"]),
    (other_drop_last, "RankDisagreement", ["drop_last", "1"]),
    (other_policies, "RankDisagreement", ["DATA", "OFF", "1"]),
    (other_files, "RankDisagreement", ["file"]),
    (other_file_order, "RankDisagreement", ["file"]),
    (other_file_seeds, "RankDisagreement", ["seed", "40", "41"]),
    (other_kinds, "RankDisagreement", ["1"]),
    (other_prefetch, "RankDisagreement", ["prefetch", "2", "3"]),
    (other_generators, "RankDisagreement", ["generator"]),
    (other_epochs, "RankDisagreement", ["epoch", "2", "5"]),
]


def refusals(folder: str) -> dict[str, tuple[Raised | None, float]]:
    """One rank: the error of every call in turn. Were one rank not to raise, the next call would tell."""
    found = {}
    for call, _, _ in REFUSED:
        started = time.monotonic()
        error = raised(lambda call=call: call(Path(folder)))  # type: ignore[misc]
        found[call.__name__] = (error, time.monotonic() - started)
    return found


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[Raised | None, float]]]:
    folder = tmp_path_factory.mktemp("refused")
    text_files(folder, 5, 4, 3, 2)
    (folder / "few").mkdir()
    text_files(folder / "few", 5, 4)
    return run_ranks(3, refusals, str(folder), timeout_seconds=120)


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED, ids=[call.__name__ for call, _, _ in REFUSED])
def test_every_rank_refuses_alike_and_says_why(
    refused: list[dict[str, tuple[Raised | None, float]]],
    call: Callable[[Path], object],
    kind: str,
    words: list[str],
) -> None:
    for rank, found in enumerate(refused):
        error, waited = found[call.__name__]
        assert error is not None
        assert error.kind == kind
        own = f"rank {rank}"  # a rank need not be told its own name
        missing = [word for word in words if word not in error.message and word != own]
        assert not missing, error.message
        assert waited < HANG_SECONDS


# What fails while the data is read. Each function is one rank's call; the error is raised on every rank.


def no_match(folder: Path) -> object:
    return read_all(lambda: tdi.FileDataset(str(folder / "nothing-*.txt"), readers.text_lines), 4)


def missing_file(folder: Path) -> object:
    names = [str(folder / name) for name in ("0.txt", "gone.txt", "1.txt")]
    return read_all(tdi.FileDataset(names, readers.text_lines), 4)


def unreadable_file(folder: Path) -> object:
    names = [str(folder / name) for name in ("0.txt", "1.txt", "more")]
    return read_all(tdi.FileDataset(names, readers.text_lines), 4)


def broken_record(folder: Path) -> object:
    return read_all(tdi.FileDataset(str(folder / "json" / "*.jsonl"), readers.json_lines), 2)


def truncated_record(folder: Path) -> object:
    return read_all(tdi.FileDataset(str(folder / "bin" / "*.bin"), readers.fixed_length_records(4)), 2)


def unequal_leaves(_: Path) -> object:
    return read_all(lambda: [{"x": torch.zeros(6), "y": torch.zeros(5)}])


def from_function(batches: Any) -> object:
    return list(tdi.Strategy(devices=["cpu"]).distribute_datasets_from_function(lambda context: batches))


def unequal_leaves_on_one_rank(_: Path) -> object:
    good, bad = structures.mapping(2), {"x": torch.zeros(6, 5, dtype=torch.float64), "y": torch.zeros(5).int()}
    return from_function([good, on_rank(1, bad, good)])


def changing_dtype(_: Path) -> object:
    return read_all(lambda: [torch.zeros(6), torch.zeros(6, dtype=torch.int64)])


def changing_structure_on_one_rank(_: Path) -> object:
    good = structures.mapping(2)
    return from_function([good, on_rank(2, {"x": good["x"]}, good)])


def other_structures(_: Path) -> object:
    return from_function([on_rank(1, torch.zeros(2, dtype=torch.int64), torch.zeros(2))])


def generator_twice(_: Path) -> object:
    dataset = distribute(inputs.ready_batches())
    assert len(list(dataset)) == 4
    return list(dataset)


def generator_used_up(_: Path) -> object:
    data = inputs.ready_batches()
    list(data)
    return read_all(data)


def ends_in_error(_: Path) -> object:
    def data() -> Iterator[torch.Tensor]:
        yield torch.zeros(3)
        if my_rank() == 2:
            raise OSError("the disk of rank two is gone")
        yield torch.zeros(3)

    return read_all(data)


WHILE_READING: list[tuple[Callable[[Path], object], list[str], list[str]]] = [
    (no_match, ["InputError", "SourceError"], ["nothing-*.txt"]),
    (missing_file, ["SourceError", "InputError"], ["gone.txt"]),
    (unreadable_file, ["SourceError", "InputError"], ["more"]),
    (broken_record, ["SourceError"], ["1.jsonl", "9", "rank 1"]),
    (truncated_record, ["SourceError"], ["2.bin", "8", "rank 2"]),
    (unequal_leaves, ["BatchingError"], ["'x'", "6", "'y'", "5"]),
    (unequal_leaves_on_one_rank, ["BatchingError"], ["'x'", "6", "'y'", "5", "rank 1"]),
    (changing_dtype, ["BatchingError"], ["float32", "int64"]),
    (changing_structure_on_one_rank, ["BatchingError"], ["rank 2"]),
    (other_structures, ["BatchingError", "RankDisagreement"], ["float32", "int64"]),
    (generator_twice, ["InputError", "SourceError"], ["generator"]),
    (generator_used_up, ["InputError", "SourceError"], ["generator"]),
    (ends_in_error, ["SourceError"], ["OSError", "the disk of rank two is gone", "rank 2"]),
]


def reading_errors(folder: str) -> dict[str, tuple[Raised | None, float]]:
    found = {}
    for call, _, _ in WHILE_READING:
        started = time.monotonic()
        error = raised(lambda call=call: call(Path(folder)))  # type: ignore[misc]
        found[call.__name__] = (error, time.monotonic() - started)
    return found


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[Raised | None, float]]]:
    folder = tmp_path_factory.mktemp("failed")
    text_files(folder, 5, 4)
    for name in ("more", "json", "bin"):
        (folder / name).mkdir()
    for number in range(3):
        middle = '{"a":' if number == 1 else '{"a": 2}'
        (folder / "json" / f"{number}.jsonl").write_text(f'{{"a": 1}}\n{middle}\n{{"a": 3}}\n')
        (folder / "bin" / f"{number}.bin").write_bytes(bytes(10 if number == 2 else 12))
    return run_ranks(3, reading_errors, str(folder), timeout_seconds=120)


@pytest.mark.parametrize(("call", "kinds", "words"), WHILE_READING, ids=[call.__name__ for call, _, _ in WHILE_READING])
def test_a_failure_while_reading_is_raised_on_every_rank(
    failed: list[dict[str, tuple[Raised | None, float]]],
    call: Callable[[Path], object],
    kinds: list[str],
    words: list[str],
) -> None:
    for found in failed:
        error, waited = found[call.__name__]
        assert error is not None
        assert error.is_input_error
        assert error.kind in kinds
        missing = [word for word in words if word not in error.message]
        assert not missing, error.message
        assert waited < HANG_SECONDS


def test_the_file_and_offset_of_a_broken_record_are_known_on_every_rank(
    failed: list[dict[str, tuple[Raised | None, float]]],
) -> None:
    for found in failed:
        error, _ = found["broken_record"]
        assert error is not None
        assert error.file is not None
        assert error.file.endswith("1.jsonl")
        assert error.offset == 9
