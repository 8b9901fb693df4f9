"""Batches that are made of samples here: what has an entry for each sample, the empty part, one structure for all."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset, default_collate

import torchdistinput as tdi
from tests.support.structures import Pair
from torchdistinput.batches.collated import structure_of_collated
from torchdistinput.batches.schema import Structure
from torchdistinput.testing import run_ranks

CHANNELS = 3


def image(number: int) -> torch.Tensor:
    return torch.full((CHANNELS, 4, 4), float(number))


def sample(number: int) -> Any:
    """An image, a sequence of its own length, and a text."""
    return {"image": image(number), "steps": torch.arange(number % 3 + 1.0), "text": f"row {number}", "id": number}


def images(samples: list[Any]) -> Any:
    return [each["image"] for each in samples]


def zipped(samples: list[Any]) -> Any:
    return tuple(zip(*[(each["image"], {"boxes": each["steps"]}) for each in samples], strict=True))


def identity(samples: list[Any]) -> Any:
    return [(each["image"], each["id"]) for each in samples]


def time_first(samples: list[Any]) -> Any:
    return pad_sequence([each["steps"] for each in samples]), torch.tensor([len(each["steps"]) for each in samples])


def named(samples: list[Any]) -> Any:
    return Pair(torch.stack(images(samples)), torch.tensor([each["id"] for each in samples]))


def arrays(samples: list[Any]) -> Any:
    numbers = np.array([each["id"] for each in samples])
    return {"x": numbers, "time": numbers.astype("datetime64[s]"), "name": numbers.astype("U3"), "none": None}


def stacked(samples: list[Any]) -> Any:
    return default_collate([{"image": each["image"], "text": each["text"]} for each in samples])


def changing(samples: list[Any]) -> Any:
    """Takes its samples apart."""
    return torch.tensor([each.pop("id") for each in samples])


def drawing(samples: list[Any]) -> Any:
    noise = torch.rand(len(samples)) + torch.tensor(np.random.rand(len(samples)))
    return torch.tensor([each["id"] for each in samples]), noise + random.random()


EMPTY: dict[Callable[[list[Any]], Any], Any] = {
    images: [],
    zipped: ((), ()),
    identity: [],
    time_first: (("float32", (1, 0)), ("int64", (0,))),
    named: (("float32", (0, CHANNELS, 4, 4)), ("int64", (0,))),
    arrays: {
        "x": ("numpy int64", (0,)),
        "time": ("numpy datetime64[s]", (0,)),
        "name": ("numpy <U3", (0,)),
        "none": None,
    },
    stacked: {"image": ("float32", (0, CHANNELS, 4, 4)), "text": []},
    changing: ("int64", (0,)),
    drawing: (("int64", (0,)), ("float64", (0,))),
}
"""What the part of a replica without a sample is."""


def counted(samples: list[Any]) -> Any:
    return {"image": torch.stack(images(samples)), "ntokens": len(samples)}


def packed(samples: list[Any]) -> Any:
    return {"tokens": torch.cat([torch.arange(each["id"] % 2 + 2) for each in samples])}


def masked(samples: list[Any]) -> Any:
    return np.ma.masked_equal([each["id"] for each in samples], 1)


def weights(samples: list[Any]) -> Any:
    return torch.stack(images(samples)), torch.ones(CHANNELS)


def nested(samples: list[Any]) -> Any:
    return torch.nested.nested_tensor([each["steps"] for each in samples], layout=torch.jagged)


def picky(samples: list[Any]) -> Any:
    if len(samples) == 2 and samples[0]["id"] == samples[1]["id"]:
        raise ValueError("the same twice")
    return torch.stack(images(samples))


class Boxed:
    """A batch that nobody can look into."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples


UNKNOWN: dict[Callable[[list[Any]], Any], str] = {
    counted: r"type dict without a sample.*\['ntokens'\] is of type int",
    Boxed: "an element of type Boxed without a sample",
    packed: r"\['tokens'\] is of type Tensor, of shape",
    masked: "it is of type MaskedArray, a class or dtype",
    weights: r"\[1\] is of type Tensor, of shape \(3,\) for one sample and \(3,\) for two",
    nested: "it is of type NestedTensor, and nested|it is of type Tensor, and nested",
    picky: "its function failed when it was asked: ValueError: the same twice",
}
"""Batches of which no empty part can be made."""


def plain(value: Any) -> Any:
    """A batch as plain values that show dtypes and shapes."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch."), tuple(value.shape)
    if isinstance(value, np.ndarray):
        return f"numpy {value.dtype}", value.shape
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return (
        type(value)(map(plain, value))
        if type(value) in (list, tuple)
        else tuple(map(plain, value))
        if isinstance(value, tuple)
        else value
    )


class Samples(torch.utils.data.Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return sample(index)


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return map(sample, range(self.count))


def as_sample(line: str) -> Any:
    return sample(int(line))


def of_kind(kind: str, count: int, folder: str) -> Any:
    if kind != "files":
        return Samples(count) if kind == "map-style" else Stream(count)
    return tdi.FileDataset([str(Path(folder) / f"{count}.txt")], tdi.readers.text_lines, map_fn=as_sample)


def write_files(folder: Path) -> None:
    for count in (2 * 2 + 1, 4 * CHANNELS + 1, 9):
        (folder / f"{count}.txt").write_text("".join(f"{number}\n" for number in range(count)))


CASES = [*itertools.product(EMPTY, ["map-style", "iterable", "files"], [0, 1])]


def last_elements(folder: str, cases: list[Any]) -> list[Any]:
    """One rank: what the last step of each case brings; the last batch has one sample."""
    found = []
    data_policy = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.DATA)
    strategy = tdi.Strategy(devices=["cpu"])
    for collate, kind, workers in cases:
        for size in (2, 2 * CHANNELS):
            data = of_kind(kind, 2 * size + 1, folder)
            loader: Any = DataLoader(data, size, collate_fn=collate, num_workers=workers)
            with strategy.distribute_dataset(loader, data_policy) as loader:
                steps = [(plain(batch), loader.step.local_sizes[0]) for batch in loader]
            found.append((steps[-1], [local for _, local in steps]))
    return found


@pytest.mark.parametrize("workers", [0, 1])
def test_the_part_without_a_sample_follows_from_the_collate_function_alone(tmp_path: Path, workers: int) -> None:
    write_files(tmp_path)
    cases = [case for case in CASES if case[2] == workers]
    with_sample, without = run_ranks(2, last_elements, str(tmp_path), cases, timeout_seconds=240)
    for place, (case, size) in enumerate(itertools.product(cases, (2, 2 * CHANNELS))):
        assert with_sample[place][1] == [size // 2, size // 2, 1], case
        assert without[place][1] == [size // 2, size // 2, 0], case
        expected = EMPTY[case[0]]
        found = without[place][0][0]
        if case[0] is time_first:
            assert found == (("float32", (found[0][1][0], 0)), ("int64", (0,)))
        else:
            assert found == expected, case


def refusals(cases: list[Any]) -> list[str]:
    found = []
    for collate in cases:
        for data in (Samples(3), Stream(3)):
            loader: Any = DataLoader(data, 2, collate_fn=collate)
            try:
                found.append(str([*tdi.Strategy(devices=["cpu"]).distribute_dataset(loader)]))
            except tdi.BatchingError as error:
                found.append(str(error))
    return found


def test_where_it_does_not_follow_the_first_step_says_so_on_all_ranks_and_names_the_leaf() -> None:
    for rank in run_ranks(2, refusals, [*UNKNOWN]):
        for (collate, expected), told in zip(
            itertools.chain.from_iterable([(each, why)] * 2 for each, why in UNKNOWN.items()), rank, strict=True
        ):
            with pytest.raises(AssertionError, match=expected):
                raise AssertionError(told)
            assert "step 0 of epoch 0" in told, collate
            assert "empty_fn=" in told


def given(loader: Any) -> list[Any]:
    return [plain(batch) for batch in loader]


def with_empty_fn() -> list[Any]:
    strategy = tdi.Strategy(devices=["cpu"])

    def empty() -> Any:
        return {"image": torch.zeros(0, CHANNELS, 4, 4), "ntokens": 0}

    options = tdi.InputOptions(empty_fn=empty)
    loader: Any = DataLoader(Samples(3), 2, collate_fn=counted)
    ready = [{"image": torch.zeros(n, CHANNELS, 4, 4), "ntokens": n} for n in (2, 1)]
    return [
        given(tdi.DataLoader(Samples(3), 2, collate_fn=counted, empty_fn=empty)),
        given(strategy.distribute_dataset(loader, options)),
        given(strategy.distribute_dataset(ready, options)),
        given(strategy.distribute_dataset(ready)),
    ]


def test_an_empty_fn_makes_it_and_a_ready_batch_is_cut_to_no_row_and_keeps_its_own_numbers() -> None:
    first, second = run_ranks(2, with_empty_fn)
    for one, other in zip(first[:3], second[:3], strict=True):
        assert [step["image"][1][0] for step in one] == [1, 1]
        assert [step["image"][1][0] for step in other] == [1, 0]
        assert other[1]["ntokens"] == 0
    assert [(step["image"][1][0], step["ntokens"]) for step in second[3]] == [(1, 2), (0, 1)]


def test_asking_leaves_the_random_states_and_the_samples_as_they_are() -> None:
    def run(replicas: int) -> Any:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        strategy = tdi.Strategy(devices=["cpu"] * replicas)
        loader: Any = DataLoader(Samples(4), 1, collate_fn=drawing)
        parts = [strategy.local_results(element) for element in strategy.distribute_dataset(loader)]
        return [[each.tolist() for each in part[0]] for part in parts]

    assert run(1) == run(2)


# One structure


# The rule


def test_containers_that_differ_and_values_of_the_whole_batch_are_unknown() -> None:
    one, two = torch.zeros(1, 2), torch.zeros(2, 2)
    pairs: list[Any] = [
        ({"a": one}, {"b": two}),
        ((one,), (two, two)),
        (one, [two]),
        (one, two.double()),
        (torch.zeros(1, 1), torch.zeros(2, 2)),
        (torch.tensor(1.0), torch.tensor(2.0)),
        ("a", "a"),
        (2.5, 2.5),
        ([], []),
        (copy, copy),
    ]
    for answers in pairs:
        found = structure_of_collated(*answers)
        kinds = [leaf.kind for leaf in found.leaves()]
        assert kinds in (["unknown"], ["rows"]), answers
        if kinds == ["unknown"]:
            with pytest.raises(tdi.BatchingError):
                found.empty()


def test_the_structure_of_collated_batches_can_be_told_to_another_rank() -> None:
    answers: list[Any] = [
        {
            "last": torch.zeros(2, 5, n, dtype=torch.int8),
            "array": np.zeros((3, n), dtype=">i2"),
            "list": ["a"] * n,
            "pair": Pair(torch.zeros(n), torch.zeros(n)),
        }
        for n in (1, 2)
    ]
    structure = structure_of_collated(*answers)
    told = Structure.from_json(structure.to_json())
    assert plain(told.empty()) == plain(structure.empty())
    assert plain(told.empty())["array"] == ("numpy >i2", (3, 0))
    assert plain(told.empty())["last"] == ("int8", (2, 5, 0))
    bad = structure_of_collated({"n": 1}, {"n": 2})
    assert Structure.from_json(bad.to_json()) == dataclasses.replace(bad)


def test_a_nested_tensor_of_several_replicas_in_a_process_comes_as_it_is() -> None:
    strategy = tdi.Strategy(devices=["cpu"] * 2)
    loader: Any = DataLoader(Samples(8), 4, collate_fn=nested)
    for element in strategy.distribute_dataset(loader):
        assert [part.shape[0] for part in strategy.local_results(element)] == [2, 2]
