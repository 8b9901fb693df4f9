"""The index beside each element, and ``gather_ordered``, in one process with several replicas."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

import torchdistinput as tdi
from tests.support import inputs
from tests.support.epochs import epoch, lists
from torchdistinput import PerReplica, readers

FILE = 2**40
ROWS = 2**20


def indexed(data: Any, *, replicas: int = 2, size: int | None = None, **options: Any) -> list[list[Any]]:
    """Steps of pieces ``(index, element)``, as lists."""
    strategy = tdi.Strategy(devices=["cpu"] * replicas)
    dataset = strategy.distribute_dataset(data, tdi.InputOptions(with_index=True, **options), global_batch_size=size)
    return epoch(strategy, dataset)


def flat(steps: list[list[Any]]) -> list[tuple[int, Any]]:
    return [pair for step in steps for index, rows in step for pair in zip(index, rows, strict=True)]


# What the index is


@pytest.mark.parametrize("workers", [0, 2])
def test_of_a_map_style_dataset_the_index_is_what_the_sampler_gave(workers: int) -> None:
    data: Any = DataLoader(
        range(100, 123),  # type: ignore[arg-type]
        batch_size=5,
        shuffle=True,
        generator=inputs.generator(),
        num_workers=workers,
    )
    pairs = flat(indexed(data))
    assert all(row == 100 + index for index, row in pairs)
    assert sorted(index for index, _ in pairs) == list(range(23))


class ByName(Dataset[torch.Tensor]):
    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.tensor(ord(name))


def test_where_the_sampler_gives_no_ints_the_index_is_the_position_in_the_epoch() -> None:
    data = DataLoader(ByName(), batch_size=3, sampler=list("badc"))
    assert flat(indexed(data)) == [(0, 98), (1, 97), (2, 100), (3, 99)]


class WholeBatches(Dataset[torch.Tensor]):
    """Item k is a batch of 3 rows."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, item: int) -> torch.Tensor:
        return torch.arange(3) + 10 * item


def test_where_an_item_is_a_whole_batch_its_rows_are_numbered_after_it() -> None:
    data = DataLoader(WholeBatches(), batch_size=None, sampler=[2, 0])
    assert flat(indexed(data)) == [(2 * ROWS + k, 20 + k) for k in range(3)] + [(k, k) for k in range(3)]


def test_lists_of_indices_from_the_sampler_are_indices() -> None:
    batches = BatchSampler(SequentialSampler(range(7)), 4, drop_last=False)
    data = DataLoader(inputs.BatchesByList(), batch_size=None, sampler=batches)
    assert flat(indexed(data)) == [(k, 10 * k) for k in range(7)]


@pytest.mark.parametrize("workers", [None, 0, 2])
@pytest.mark.parametrize("shuffled", [False, True])
def test_of_a_file_dataset_the_index_is_the_place_of_the_record(
    workers: int | None, shuffled: bool, tmp_path: Path
) -> None:
    inputs.write_numbers(tmp_path)
    names = [str(tmp_path / f"{name}.txt") for name in "dbca"]
    data: Any = tdi.FileDataset(
        names, readers.text_lines, map_fn=int, shuffle_files=shuffled, shuffle_buffer=3 * shuffled, cycle_length=2
    )
    size = 4 if workers is None else None
    if workers is not None:
        data = DataLoader(data, batch_size=4, num_workers=workers)
    expected = [(number, k) for number, start in ((0, 8), (2, 5), (3, 0)) for k, number in _records(number, start)]
    assert sorted(flat(indexed(data, size=size))) == sorted(expected)


def _records(file: int, start: int) -> list[tuple[int, int]]:
    count = {0: 4, 2: 3, 3: 5}[file]
    return [(start + record, file * FILE + record) for record in range(count)]


def test_where_a_record_is_a_whole_batch_its_rows_are_numbered_after_it(tmp_path: Path) -> None:
    inputs.write_numbers(tmp_path)
    data = tdi.FileDataset(
        [str(tmp_path / "b.txt"), str(tmp_path / "c.txt")],
        readers.text_lines,
        map_fn=lambda line: torch.arange(2) + 10 * int(line),
    )
    ready: Any = DataLoader(data, batch_size=None)
    assert flat(indexed(ready)) == [
        (FILE + record * ROWS + row, 10 * (5 + record) + row) for record in range(3) for row in range(2)
    ]


@pytest.mark.parametrize("workers", [None, 0, 2])
def test_of_an_iterable_the_index_is_the_position_in_the_epoch(workers: int | None) -> None:
    """Whose batches alternate between two loader workers: their order is that of the epoch, whoever read them."""
    data: Any = inputs.Count(13)
    size = 4 if workers is None else None
    if workers is not None:
        data = DataLoader(data, batch_size=4, num_workers=workers)
        expected = [
            row for batch in DataLoader(inputs.Count(13), batch_size=4, num_workers=workers) for row in batch.tolist()
        ]
    else:
        expected = list(range(13))
    assert flat(indexed(data, size=size)) == list(enumerate(expected))


def test_of_ready_batches_the_rows_are_numbered_through() -> None:
    for data in (inputs.PlainIterable(), inputs.ready_batches, DataLoader(inputs.ReadyBatches(), batch_size=None)):
        steps = indexed(data, replicas=3)
        assert [number for step in steps for index, _ in step for number in index] == list(range(10))
        assert all(index == piece["id"] for step in steps for index, piece in step)


def test_a_dataset_function_numbers_what_its_worker_reads() -> None:
    strategy = tdi.Strategy(devices=["cpu"] * 2)
    batches = [torch.arange(3), torch.arange(3, 5), torch.arange(5, 6)]
    options = tdi.InputOptions(with_index=True)
    dataset = strategy.distribute_datasets_from_function(lambda _: batches, options)
    assert epoch(strategy, dataset) == [
        [([0, 1, 2], [0, 1, 2]), ([3, 4], [3, 4])],
        [([5], [5]), ([], [])],
    ]


def test_every_epoch_has_the_same_indices() -> None:
    strategy = tdi.Strategy(devices=["cpu"])
    dataset = strategy.distribute_dataset(inputs.Count(5), tdi.InputOptions(with_index=True), global_batch_size=2)
    assert epoch(strategy, dataset) == epoch(strategy, dataset)


def test_a_batch_of_strings_keeps_its_shape_beside_the_index() -> None:
    data: Any = DataLoader(["a", "b", "c"], batch_size=2, collate_fn=list)  # type: ignore[arg-type]
    assert indexed(data, replicas=1) == [[([0, 1], ["a", "b"])], [([2], ["c"])]]


# Bad input of the index


def test_the_index_has_an_entry_for_each_sample_whatever_the_collate_function_makes_of_them() -> None:
    data: Any = DataLoader(range(6), batch_size=3, collate_fn=lambda rows: torch.tensor(rows[1:]))  # type: ignore[arg-type]
    strategy = tdi.Strategy(devices=["cpu"])
    steps = list(strategy.distribute_dataset(data, tdi.InputOptions(with_index=True)))
    assert [(index.tolist(), rows.tolist()) for index, rows in steps] == [([0, 1, 2], [1, 2]), ([3, 4, 5], [4, 5])]
    with pytest.raises(ValueError, match="the index has 6 entries"):
        strategy.gather_ordered(*map(torch.cat, zip(*steps, strict=True)))


def test_negative_indices_are_refused_as_minus_one_means_padding() -> None:
    data: Any = DataLoader(range(6), batch_size=3, sampler=[0, -1, 2])  # type: ignore[arg-type]
    with pytest.raises(tdi.BatchingError, match="the sampler gave the index -1"):
        indexed(data, replicas=1)


@pytest.mark.parametrize(("wrong", "error"), [({"with_index": 1}, TypeError), ({"partial_batch": "drop"}, ValueError)])
def test_options_of_other_values_are_refused(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{next(iter(wrong))} is"):
        tdi.InputOptions(**wrong)


# gather_ordered


class Pair(NamedTuple):
    score: torch.Tensor
    text: list[str]


@dataclasses.dataclass
class Found:
    pair: Pair
    past: None = None


def test_outputs_come_back_in_the_order_of_the_index_whatever_their_nesting() -> None:
    strategy = tdi.Strategy(devices=["cpu"] * 2)
    index = PerReplica([torch.tensor([7, 2, 4]), torch.tensor([9, 0])])
    outputs = Found(
        Pair(
            PerReplica([torch.tensor([[7.0], [2.0], [4.0]]), torch.tensor([[9.0], [0.0]])]),  # type: ignore[arg-type]
            PerReplica([["7", "2", "4"], ["9", "0"]]),  # type: ignore[arg-type]
        )
    )
    found = strategy.gather_ordered(index, outputs)
    assert isinstance(found, Found)
    assert isinstance(found.pair, Pair)
    assert lists(found) == {"pair": ([[0.0], [2.0], [4.0], [7.0], [9.0]], ["0", "2", "4", "7", "9"]), "past": None}


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
)
def test_tensors_of_any_dtype_keep_their_bits_and_lose_their_graph(dtype: torch.dtype) -> None:
    strategy = tdi.Strategy(devices=["cpu"])
    rows = torch.tensor([[1, 0], [0, 1], [1, 1]]).to(dtype)
    if dtype == torch.float64:
        rows.requires_grad_()
    found = strategy.gather_ordered(torch.tensor([2, 0, 1]), rows)
    assert found.dtype == dtype
    assert not found.requires_grad
    assert torch.equal(found, rows.detach()[[1, 2, 0]])


def test_padded_rows_are_left_out() -> None:
    strategy = tdi.Strategy(devices=["cpu"])
    outputs = {"x": torch.arange(4.0), "name": ["b", "a", "", ""]}
    found = strategy.gather_ordered(torch.tensor([1, 0, -1, -1]), outputs)
    assert lists(found) == {"x": [1.0, 0.0], "name": ["a", "b"]}
    assert strategy.gather_ordered(torch.tensor([-1, -1]), torch.ones(2, 3)).shape == (0, 3)


def test_lists_may_hold_what_json_holds_and_dicts_of_it() -> None:
    strategy = tdi.Strategy(devices=["cpu"])
    rows = [{"box": [1, 2.5], "label": "é"}, {"box": [], "label": None}, {"nan": float("nan")}]
    found = strategy.gather_ordered(torch.tensor([1, 2, 0]), {"rows": rows, "n": [1, None, "x"]})
    assert repr(found) == repr({"rows": [rows[2], rows[0], rows[1]], "n": ["x", 1, None]})


def test_no_rows_at_all_give_the_outputs_back() -> None:
    strategy = tdi.Strategy(devices=["cpu"])
    assert strategy.gather_ordered(torch.tensor([]), torch.zeros(0, 5)).shape == (0, 5)


BAD: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "an index that comes twice": (torch.tensor([3, 5, 3]), torch.ones(3), ValueError, r"1 index.* 3 \(replica 0\)"),
    "other lengths": (
        torch.tensor([0, 1]),
        {"a": {"b": torch.ones(3)}},
        ValueError,
        r"2 entries, and outputs\['a'\]\['b'\] has 3",
    ),
    "rows without an index": (
        torch.tensor([], dtype=torch.int64),
        torch.ones(3),
        ValueError,
        "0 entries, and outputs has 3",
    ),
    "a list of another length": (torch.tensor([0, 1]), ["a"], ValueError, "2 entries, and outputs has 1"),
    "a scalar": (torch.tensor([0]), torch.tensor(1.0), ValueError, "outputs is a scalar"),
    "nothing with rows": (torch.tensor([0]), 3.0, ValueError, "outputs is a float"),
    "an index of floats": (torch.tensor([0.0]), torch.ones(1), TypeError, "float32; ints are needed"),
    "an index with two dims": (torch.tensor([[0]]), torch.ones(1), ValueError, r"has shape \[1, 1\]"),
    "a list as index": ([0], torch.ones(1), TypeError, "the index is a list"),
    "an index below -1": (torch.tensor([-2]), torch.ones(1), ValueError, "has the entry -2"),
    "objects in a list": (torch.tensor([0]), [object()], TypeError, "travel as JSON"),
    "dicts with other keys": (torch.tensor([0]), [{1: 2}], TypeError, "travel as JSON"),
    "too many replicas": (PerReplica([torch.tensor([0])] * 2), torch.ones(1), ValueError, r"2 value\(s\) in index"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_gathered_in_order_is_refused(name: str) -> None:
    index, outputs, error, words = BAD[name]
    with pytest.raises(error, match=words):
        tdi.Strategy(devices=["cpu"]).gather_ordered(index, outputs)


def test_replicas_must_bring_the_same_structure_and_their_own_values() -> None:
    strategy = tdi.Strategy(devices=["cpu"] * 2)
    index = PerReplica([torch.tensor([0]), torch.tensor([1])])
    with pytest.raises(ValueError, match=r"replica 0: float32\[batch, 2\]; replica 1: float32\[batch, 3\]"):
        strategy.gather_ordered(index, PerReplica([torch.ones(1, 2), torch.ones(1, 3)]))
    scores: Any = PerReplica([torch.ones(1), torch.ones(1, dtype=torch.int64)])
    texts: Any = PerReplica([["a"], ["b"]])
    with pytest.raises(ValueError, match=r"replica 1: namedtuple\(score: int64\[batch\], text: list of rows\)"):
        strategy.gather_ordered(index, Pair(scores, texts))
    with pytest.raises(ValueError, match="a bare Tensor as outputs, and this process has 2 replicas"):
        strategy.gather_ordered(index, torch.ones(1))
    with pytest.raises(ValueError, match=r"the index of local replica 1 has 1 entries, and outputs has 2"):
        strategy.gather_ordered(index, PerReplica([torch.ones(1), torch.ones(2)]))
