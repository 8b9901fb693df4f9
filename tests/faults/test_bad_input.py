"""Bad input: the class of the error, that its message has what was found, and on ranks that every rank raises alike.

What ranks were given that differs, and is good by itself, is in ``test_desync.py``.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from tests.support import inputs, structures
from tests.support.epochs import Raised, raised
from torchdistinput import readers
from torchdistinput.testing import run_ranks

FILE = tdi.AutoShardPolicy.FILE
HINT = tdi.AutoShardPolicy.HINT
EIGHT: Any = range(8)
NINE: Any = range(9)


def distribute(data: Any, size: int | None = None, replicas: int = 1, **options: Any) -> tdi.DistributedDataset:
    strategy = tdi.Strategy(devices=["cpu"] * replicas)
    return strategy.distribute_dataset(data, tdi.InputOptions(**options), global_batch_size=size)


def read_all(data: Any, size: int | None = None, replicas: int = 1, **options: Any) -> list[Any]:
    return list(distribute(data, size, replicas, **options))


def from_function(dataset: Any) -> list[Any]:
    return list(tdi.Strategy(["cpu"]).distribute_datasets_from_function(lambda context: dataset))


def loader(data: Any = NINE, size: int | None = 4, **arguments: Any) -> Any:
    return DataLoader(data, batch_size=size, **arguments)


def lines(files: Any, **arguments: Any) -> tdi.FileDataset:
    return tdi.FileDataset(files, readers.text_lines, **arguments)


def write_files(folder: Path) -> None:
    """Text files of 5, 4, 3 and 2 numbers, folders of files that are broken, and one of two files."""
    for number, size in enumerate((5, 4, 3, 2)):
        (folder / f"{number}.txt").write_text("".join(f"{k}\n" for k in range(size)))
    for name in ("few", "folder", "json", "bin"):
        (folder / name).mkdir()
    for number in range(3):
        (folder / "few" / f"{number % 2}.txt").write_text("1\n")
        middle = '{"a":' if number == 1 else '{"a": 2}'
        (folder / "json" / f"{number}.jsonl").write_text(f'{{"a": 1}}\n{middle}\n{{"a": 3}}\n')
        (folder / "bin" / f"{number}.bin").write_bytes(bytes(10 if number == 2 else 12))


# ---------------------------------------------------------------------------------- what is refused, in any number


def generator_twice() -> object:
    dataset = distribute(inputs.ready_batches())
    assert len(list(dataset)) == 4
    return list(dataset)


def generator_used_up() -> object:
    data = inputs.ready_batches()
    assert len(read_all(data)) == 4
    return read_all(data)


Case = tuple[Callable[[Path], object], str, list[str]]
"""The call, the class of the error, and words of its message."""
UNEVEN = {"x": torch.zeros(6, 2), "y": torch.zeros(5)}
ALIKE: dict[str, Case] = {
    "FILE without files": (lambda _: distribute(loader(), auto_shard_policy=FILE), "ShardingError", ["FILE", "DATA"]),
    "FILE, an iterable": (
        lambda _: distribute(inputs.PlainIterable(), auto_shard_policy=FILE),
        "ShardingError",
        ["FILE", "DATA"],
    ),
    "FILE, a generator function": (
        lambda _: distribute(inputs.ready_batches, auto_shard_policy=FILE),
        "ShardingError",
        ["FILE", "DATA"],
    ),
    "HINT without shard": (
        lambda _: distribute(inputs.PlainIterable(), auto_shard_policy=HINT),
        "ShardingError",
        ["HINT", "shard"],
    ),
    **{
        f"batch size {size!r} of {type(data).__name__}": (
            lambda _, data=data, size=size: distribute(data, size),  # type: ignore[misc]
            "BatchingError",
            [repr(size)],
        )
        for data in (NINE, inputs.samples)
        for size in (0, -4, 2.5, "4", True)
    },
    "no batch size": (lambda _: distribute(inputs.Records()), "BatchingError", ["global_batch_size"]),
    "no batch size of files": (
        lambda folder: distribute(lines(str(folder / "*.txt"))),
        "BatchingError",
        ["global_batch_size=", "batch_size=None"],
    ),
    "two batch sizes": (lambda _: distribute(loader(), 8), "BatchingError", ["global_batch_size", "4"]),
    "out of order": (lambda _: distribute(loader(num_workers=1, in_order=False)), "InputError", ["in_order"]),
    **{
        f"{type(data).__name__} for data": (lambda _, data=data: distribute(data), "InputError", [type(data).__name__])  # type: ignore[misc]
        for data in (5, 2.5, None, "a text", b"bytes", {"x": [1, 2]}, nn.Linear(2, 2), torch.float32)
    },
    "a function of nothing": (lambda _: read_all(lambda: None), "InputError", ["None"]),
    "a dataset function of nothing": (lambda _: from_function(None), "InputError", ["None"]),
    "PER_REPLICA": (
        lambda _: distribute(loader(), replication_mode=tdi.InputReplicationMode.PER_REPLICA),
        "InputError or ValueError",
        ["PER_REPLICA"],
    ),
    # While it is read:
    "a pattern without files": (
        lambda folder: read_all(lines(str(folder / "nothing-*.txt")), 2),
        "SourceError",
        ["nothing-"],
    ),
    "a list without files": (
        lambda folder: tdi.list_files(str(folder / "nothing-*.txt")),
        "SourceError",
        ["nothing-"],
    ),
    "a missing file": (
        lambda folder: read_all(lines([str(folder / name) for name in ("0.txt", "gone.txt", "1.txt")]), 4),
        "InputError or SourceError",
        ["gone.txt"],
    ),
    "an unreadable file": (
        lambda folder: read_all(lines([str(folder / name) for name in ("0.txt", "1.txt", "folder")]), 4),
        "InputError or SourceError",
        ["folder"],
    ),
    "leaves of two sizes": (lambda _: read_all(lambda: [UNEVEN]), "BatchingError", ["'x'", "6", "'y'", "5"]),
    **{
        f"a batch that is {element!r}": (
            lambda _, element=element: read_all(lambda: iter([element])),  # type: ignore[misc]
            "BatchingError",
            ["batch"],
        )
        for element in (torch.tensor(3), 5, None, "text")
    },
    "a generator twice": (lambda _: generator_twice(), "InputError", ["generator"]),
    "a generator that was used up": (lambda _: generator_used_up(), "InputError", ["generator"]),
}
CHANGES: dict[str, tuple[Any, Any]] = {
    "another dtype": (torch.zeros(6), torch.zeros(6, dtype=torch.int64)),
    "another key": ({"x": torch.zeros(6)}, {"y": torch.zeros(6)}),
    "one more key": ({"x": torch.zeros(6)}, {"x": torch.zeros(6), "y": torch.zeros(6)}),
    "a tuple for a list": ((torch.zeros(6), torch.zeros(6)), [torch.zeros(6), torch.zeros(6)]),
    "a tensor for a dict": ({"x": torch.zeros(6)}, torch.zeros(6)),
    "strings for a tensor": ({"x": torch.zeros(6)}, {"x": ["a", "b"] * 3}),
    "one more dimension": (torch.zeros(6), torch.zeros(6, 1)),
}
ALIKE |= {
    name: (lambda _, batches=batches: read_all(lambda: list(batches)), "BatchingError", ["structure|dtype"])  # type: ignore[misc]
    for name, batches in CHANGES.items()
}


def refusal(case: Case, folder: Path) -> Raised | None:
    """What a call raises."""
    return raised(lambda: case[0](folder))


def check(case: Case, error: Raised | None, rank: int = -1) -> None:
    _, kind, words = case
    assert error is not None
    assert error.kind in kind.split(" or "), error
    words = [word for word in words if word != f"rank {rank}"]  # a rank need not be told its own name
    assert all(re.search(word, error.message) for word in words), error.message


@pytest.mark.parametrize("name", ALIKE)
def test_bad_input_is_refused_in_one_process(name: str, tmp_path: Path) -> None:
    write_files(tmp_path)
    check(ALIKE[name], refusal(ALIKE[name], tmp_path))


# ------------------------------------------------------------------------------------------- on ranks, or on some


def one(theirs: Any, others: Any, rank: int = 1) -> Any:
    """What one rank gives, and what the others do."""
    return theirs if dist.get_rank() == rank else others


def ends_in_error() -> Iterator[torch.Tensor]:
    yield torch.zeros(3)
    if dist.get_rank() == 2:
        raise OSError("the disk of rank two is gone")
    yield torch.zeros(3)


GOOD = structures.mapping(2)
ON_RANKS: dict[str, Case] = {
    "too few files": (
        lambda folder: distribute(lines(str(folder / "few" / "*.txt")), 4),
        "ShardingError",
        ["2 file", "3 ranks", "DATA"],
    ),
    "too few files in a loader": (
        lambda folder: distribute(loader(lines([str(folder / "few" / "0.txt")])), auto_shard_policy=FILE),
        "ShardingError",
        ["1 file", "3 ranks", "DATA"],
    ),
    "one batch size": (lambda _: distribute(NINE, one(-3, 4)), "BatchingError", ["-3", "rank 1"]),
    "no data on one": (lambda _: distribute(one(nn.Linear(2, 2), loader())), "InputError", ["Linear", "rank 1"]),
    "a class in a loader on one": (
        lambda _: distribute(loader(one(inputs.Records, inputs.Records()))),
        "InputError",
        ["the class Records", "rank 1"],
    ),
    "a class from a function on one": (
        lambda _: from_function(one(inputs.PlainIterable, inputs.PlainIterable())),
        "InputError",
        ["the class PlainIterable", "rank 1"],
    ),
    # While it is read:
    "a broken record": (
        lambda folder: read_all(tdi.FileDataset(str(folder / "json" / "*.jsonl"), readers.json_lines), 2),
        "SourceError",
        ["1.jsonl", "9", "rank 1"],
    ),
    "a truncated record": (
        lambda folder: read_all(tdi.FileDataset(str(folder / "bin" / "*.bin"), readers.fixed_length_records(4)), 2),
        "SourceError",
        ["2.bin", "8", "rank 2"],
    ),
    "leaves of two sizes on one": (
        lambda _: from_function([GOOD, one({**GOOD, "y": torch.zeros(5).int()}, GOOD)]),
        "BatchingError",
        ["'x'", "2", "'y'", "5", "rank 1"],
    ),
    "another structure on one": (
        lambda _: from_function([GOOD, one({"x": GOOD["x"]}, GOOD, 2)]),
        "BatchingError",
        ["rank 2"],
    ),
    "two structures": (
        lambda _: from_function([one(torch.zeros(2, dtype=torch.int64), torch.zeros(2))]),
        "BatchingError or RankDisagreement",
        ["float32", "int64"],
    ),
    "an end in an error": (
        lambda _: read_all(ends_in_error),
        "SourceError",
        ["OSError", "the disk of rank two is gone", "rank 2"],
    ),
}
WRONG_ON_ONE: dict[str, tuple[Callable[[Any], object], list[Any]]] = {
    "timeout_seconds": (
        lambda value: tdi.Strategy(timeout_seconds=one(value, 60)),
        ["60", None, [], True, torch.tensor(60.0), float("inf"), 10**30],
    ),
    "process_group": (lambda value: tdi.Strategy(process_group=one(value, None)), ["x", 5, [1]]),
    "mesh": (lambda value: tdi.Strategy(mesh=one(value, None)), ["x", 5, [1]]),
    "module": (lambda value: tdi.Strategy().mirror(one(value, nn.Linear(2, 2))), [None, "x", torch.ones(2)]),
    "device": (lambda value: next(iter(tdi.DataLoader(EIGHT, 4, device=one(value, "cpu")))), ["nonsense", -1, 3.0]),
}
ON_RANKS |= {
    f"{name}, {value!r} on one": (lambda _, call=call, value=value: call(value), "TypeError or ValueError", ["rank 1"])  # type: ignore[misc]
    for name, (call, values) in WRONG_ON_ONE.items()
    for value in values
}
ALL = {**ALIKE, **ON_RANKS}


def refusals(folder: str) -> dict[str, Raised | None]:
    """One rank: the error of every call in turn. Were one rank not to raise, the next call would tell."""
    return {name: refusal(case, Path(folder)) for name, case in ALL.items()}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Raised | None]]:
    folder = tmp_path_factory.mktemp("refused")
    write_files(folder)
    return run_ranks(3, refusals, str(folder), timeout_seconds=180)


@pytest.mark.parametrize("name", ALL)
def test_every_rank_refuses_alike_and_says_why(refused: list[dict[str, Raised | None]], name: str) -> None:
    for rank, found in enumerate(refused):
        check(ALL[name], found[name], rank)
    assert len({error.kind for found in refused if (error := found[name])}) == 1
    if name == "a broken record":
        assert {(Path(str(error.file)).name, error.offset) for found in refused if (error := found[name])} == {
            ("1.jsonl", 9)
        }


# ---------------------------------------------------------------------------------- what is data, and what is not


@pytest.mark.parametrize("data", [inputs.Records, inputs.PlainIterable, tdi.FileDataset, list, int])
def test_a_class_in_place_of_its_instance_is_refused_before_anything_is_read(data: Any) -> None:
    needed = rf"found the class {data.__name__} as .*; an instance of it is needed\. Give {data.__name__}\(\.\.\.\)"
    for given, size in ((data, None), (data, 2), (lambda: data, 2), (DataLoader(data, 2), None)):
        with pytest.raises(tdi.InputError, match=needed):
            distribute(given, size)
    for returned in (data, DataLoader(data, 2)):
        with pytest.raises(tdi.InputError, match=needed):
            from_function(returned)
    with pytest.raises(tdi.InputError, match=needed):
        tdi.DataLoader(data, 2)


class Squares(type):
    """Of classes that are data: what an Enum's is, with numbers in place of names."""

    def __len__(cls) -> int:
        return 5

    def __getitem__(cls, index: int) -> int:
        if index >= 5:
            raise IndexError(index)
        return index * index


class Five(metaclass=Squares):
    def __call__(self) -> None:
        raise AssertionError("called for the data")


class Colour(enum.Enum):
    RED = 0
    BLUE = 1


def test_a_class_that_is_data_itself_is_read_as_torch_does() -> None:
    five: Any = Five
    batches = [batch.tolist() for batch in DataLoader(five, 2)]
    assert batches == [[0, 1], [4, 9], [16]]
    assert [batch.tolist() for batch in tdi.DataLoader(five, 2)] == batches
    assert [batch.tolist() for batch in read_all(DataLoader(five, 2))] == batches
    assert [batch.tolist() for batch in read_all(five, 2)] == batches
    colour: Any = Colour
    by_name: dict[str, Any] = {"batch_size": 2, "sampler": ["BLUE", "RED"], "collate_fn": tuple}
    assert [*tdi.DataLoader(colour, **by_name)] == [*DataLoader(colour, **by_name)] == [(Colour.BLUE, Colour.RED)]
    with pytest.raises(KeyError) as ours, closing(tdi.DataLoader(colour, 2)) as drop_in:
        next(iter(drop_in))
    with pytest.raises(KeyError) as torchs:
        next(iter(DataLoader(colour, 2)))
    assert ours.value.args == torchs.value.args
    with pytest.raises(tdi.InputError, match="returned a Squares; a DataLoader or another iterable of batches"):
        from_function(five)


def test_map_style_data_that_can_be_called_is_data_and_no_function() -> None:
    class Called(inputs.BatchesByList):  # type: ignore[misc]
        def __call__(self) -> None:
            raise AssertionError("called for the data")

        def __getitem__(self, index: Any) -> Any:
            return torch.tensor(index)

    assert [batch.tolist() for batch in read_all(Called(), 8)] == [[*range(8)], [8, 9, 10]]


def test_data_that_was_divided_is_not_divided_again() -> None:
    divided = distribute([torch.zeros(4)])
    drop_in = tdi.DataLoader(TensorDataset(torch.zeros(4)), 2, strategy=tdi.Strategy(["cpu"] * 2))
    for data in (divided, iter(divided), iter(drop_in)):
        for call in (partial(distribute, data), partial(distribute, lambda: data), partial(from_function, data)):  # noqa: B023
            with pytest.raises(
                tdi.InputError, match=f"found a {type(data).__name__} .*is divided among the ranks already"
            ):
                call()


def test_an_epoch_of_the_drop_in_in_one_process_is_whole_and_may_be_divided() -> None:
    whole = tdi.DataLoader(TensorDataset(torch.arange(4)), 2)
    two = read_all(iter(whole), replicas=2)
    assert [[part.tolist() for part in batch.values] for (batch,) in two] == [[[0], [1]], [[2], [3]]]
    assert [batch.tolist() for (batch,) in from_function(iter(whole))] == [[0, 1], [2, 3]]


def test_what_the_users_data_raises_is_the_cause_and_comes_after_the_steps_before_it_at_any_prefetch() -> None:
    def fails() -> Iterator[Any]:
        yield from (structures.mapping(2), structures.mapping(1))
        raise KeyError("lost")

    def unequal() -> Iterator[Any]:
        yield from (structures.mapping(2), structures.mapping(1))
        yield {"x": torch.zeros(2, 5), "y": torch.zeros(1)}

    for prefetch in (0, 1, 2, 5):
        for data in (fails, unequal):
            dataset = distribute(data, replicas=2, prefetch=prefetch)
            seen: list[int] = []
            with pytest.raises(tdi.InputError) as caught:
                seen.extend(dataset.step.index for _ in dataset)
            assert seen == [0, 1]
            assert isinstance(caught.value, tdi.SourceError if data is fails else tdi.BatchingError)
            assert isinstance(caught.value.__cause__, KeyError) or data is unequal
            assert "lost" in str(caught.value) or data is unequal


def test_a_stop_iteration_from_the_users_code_is_not_the_end() -> None:
    def collate(rows: list[int]) -> torch.Tensor:
        if 4 in rows:
            next(iter(()))
        return torch.tensor(rows)

    with pytest.raises(tdi.SourceError, match="StopIteration"):
        read_all(loader(EIGHT, 2, collate_fn=collate))


def test_inner_dims_may_change() -> None:
    found = read_all(lambda: [torch.zeros(2, 3), torch.zeros(2, 5), torch.zeros(1, 0)])
    assert [tuple(element.shape) for element in found] == [(2, 3), (2, 5), (1, 0)]


# ------------------------------------------------------------------------------------------------- places and options


CONTEXT = tdi.InputContext(1, 0, 2)
WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception], list[Any]]] = {
    "devices": (lambda value: tdi.Strategy(devices=[value]), ValueError, ["cuda:97", "nonsense", "cpu:3"]),
    "prefetch": (lambda value: tdi.InputOptions(prefetch=value), Exception, [-1, 1.5, "2"]),
    "coordination": (lambda value: tdi.InputOptions(coordination=value), ValueError, ["sometimes"]),
    "auto_shard_policy": (lambda value: tdi.InputOptions(auto_shard_policy=value), Exception, ["FILES"]),
    "timeout_seconds": (lambda value: tdi.InputOptions(timeout_seconds=value), ValueError, [0, -3, float("nan")]),
    "timeout_seconds is .*is needed": (
        lambda value: tdi.InputOptions(timeout_seconds=value),
        TypeError,
        ["60", [], True, torch.tensor(3)],
    ),
    "fetch_to_device": (lambda value: tdi.InputOptions(fetch_to_device=value), TypeError, ["no", 0, None]),
    "with_index": (lambda value: tdi.InputOptions(with_index=value), TypeError, ["no", 0, None]),
    "global_batch_size": (CONTEXT.get_per_replica_batch_size, TypeError, [None, "8", 8.0, True]),
    "generator": (lambda value: distribute(loader(generator=value)), TypeError, ["x", 7, torch.tensor(3)]),
    "compression": (lambda value: lines(["a"], compression=value), TypeError, [[], 7]),
    "average_loss": (lambda value: tdi.average_loss(torch.ones(3), value), TypeError, [None, 3, (0, 1)]),
    "strategy is a str": (lambda value: tdi.DataLoader(EIGHT, 4, strategy=value), TypeError, ["ddp"]),
    "dataset_fn is a list; a function of an InputContext is needed": (
        tdi.Strategy(["cpu"]).distribute_datasets_from_function,
        TypeError,
        [[torch.zeros(4)]],
    ),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_value_that_has_no_meaning_is_refused_by_its_name(words: str) -> None:
    make, kind, values = WRONG[words]
    for value in values:
        with pytest.raises(kind, match=value if words == "devices" else words) as caught:
            make(value)
        assert isinstance(caught.value, TypeError | ValueError)


def test_numbers_of_numpy_are_batch_sizes_of_replicas_and_records_need_no_batch() -> None:
    assert CONTEXT.get_per_replica_batch_size(np.int64(8)) == 4
    assert len(list(distribute(lambda: [torch.zeros(8)] * 6, 4))) == 2


def test_a_generator_that_is_none_is_torchs_type_error_in_the_drop_in_too() -> None:
    wrong: Any = "x"
    for kind in (DataLoader, tdi.DataLoader):
        with pytest.raises(TypeError):
            next(iter(kind(EIGHT, 4, generator=wrong)))
