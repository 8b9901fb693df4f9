"""Batches that are ``TensorDict``s or tensorclasses, with the real package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support.platforms import package
from torchdistinput.batches.schema import Structure, structure_of
from torchdistinput.testing import run_ranks

tensordict, classes_of_tensors = package("tensordict"), package("tests.support.tensor_class")


def batches() -> list[Any]:
    def dicts(size: int) -> Any:
        nested = tensordict.TensorDict({"b": torch.zeros(size, 5)}, batch_size=[size, 5])
        return tensordict.TensorDict({"a": torch.arange(size), "nested": nested}, batch_size=[size])

    def classes(size: int) -> Any:
        return classes_of_tensors.Sample(image=torch.zeros(size, 2, 2), label=torch.arange(size), batch_size=[size])

    return [[make(size) for size in (4, 1)] for make in (dicts, classes)]


def parts() -> list[Any]:
    strategy = tdi.Strategy(devices=["cpu"])
    found: list[Any] = []
    for data in batches():
        loader = strategy.distribute_dataset(data)
        for batch in loader:
            numbers = batch["a"] if isinstance(batch, tensordict.TensorDict) else batch.label
            shapes = [tuple(batch.batch_size)]
            if isinstance(batch, tensordict.TensorDict):
                shapes.append(tuple(batch["nested"].batch_size))
            found.append((type(batch).__name__, shapes, numbers.tolist(), loader.step.global_size))
    return found


def test_pieces_have_the_right_batch_size_also_nested_and_empty_ones(all_cells: bool) -> None:
    for world in (1, 2, 3) if all_cells else (1, 3):
        check_pieces(world)


def check_pieces(world: int) -> None:
    results = run_ranks(world, parts)
    for step, (size, kind) in enumerate([(4, "TensorDict"), (1, "TensorDict"), (4, "Sample"), (1, "Sample")]):
        found = [result[step] for result in results]
        assert sum((numbers for _, _, numbers, _ in found), []) == [*range(size)]  # noqa: RUF017 - a few
        for name, shapes, numbers, global_size in found:
            assert (name, global_size) == (kind, size)
            assert shapes == [(len(numbers),), (len(numbers), 5)][: 2 if kind == "TensorDict" else 1]


def test_a_rank_that_never_saw_one_makes_an_empty_one_by_what_the_others_tell() -> None:
    for whole, _ in batches():
        structure = structure_of(whole)
        empty = Structure.from_json(structure.to_json()).empty()
        assert type(empty) is type(whole)
        assert tuple(empty.batch_size) == (0,)
        assert structure_of(empty).signature() == structure.signature()


def test_no_empty_one_has_a_value_of_another_batch() -> None:
    rows = {"a": torch.arange(3), "in": {"texts": tensordict.NonTensorStack("a", "b", "c")}}
    empty = structure_of(tensordict.TensorDict(rows, batch_size=[3])).empty()
    assert [*empty["in", "texts"]] == []
    rows["in"] = {"name": "train"}
    with pytest.raises(tdi.BatchingError, match=r"\['in'\]\['name'\] is of type str"):
        structure_of(tensordict.TensorDict(rows, batch_size=[3])).empty()


def as_it_is(samples: Any) -> Any:
    return samples


def whole() -> Any:
    return tensordict.TensorDict({"a": torch.arange(23), "n": {"b": torch.zeros(23, 2)}}, batch_size=[23])


def is_collated() -> bool:
    """Whether torch collates samples; tensordict before 0.15 does not teach it that."""
    try:
        list(DataLoader(whole(), batch_size=10))
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=str(error)):
            list(tdi.DataLoader(whole(), batch_size=10))
        return False
    return True


def test_one_as_the_dataset_gives_torchs_batches() -> None:
    settings: list[dict[str, Any]] = [{"collate_fn": as_it_is}, {"collate_fn": as_it_is, "num_workers": 1}]
    settings += [{}] if is_collated() else []
    for more in settings:
        theirs = list(DataLoader(whole(), batch_size=10, **more))
        strategy = tdi.Strategy(devices=["cpu"])
        both = [tdi.DataLoader(whole(), batch_size=10, **more)]
        if "num_workers" not in more:
            both += [strategy.distribute_dataset(whole(), global_batch_size=10, **more)]  # type: ignore[list-item]
        for loader in both:
            for ours, expected in zip(loader, theirs, strict=True):
                assert type(ours) is type(expected)
                assert ours.batch_size == expected.batch_size
                assert torch.equal(ours["a"], expected["a"])
    with pytest.raises(tdi.BatchingError, match=r"map-style dataset \(TensorDict\) yields single samples"):
        tdi.Strategy(devices=["cpu"]).distribute_dataset(whole())


def stacked(samples: list[int]) -> Any:
    return tensordict.TensorDict({"ids": torch.tensor(samples)}, batch_size=[len(samples)])


def collated_parts() -> list[Any]:
    found: list[Any] = []
    rows = whole()[:21]  # imports the package, also on a rank that sees no batch
    strategy = tdi.Strategy(devices=["cpu"])
    for samples, size, workers in ((5, 1, 2), (21, 10, 0), (13, 2, 1)):
        loader: Any = DataLoader(range(samples), size, collate_fn=stacked, num_workers=workers)  # type: ignore[arg-type]
        parts = [(batch["ids"].tolist(), batch.batch_size[0]) for batch in strategy.distribute_dataset(loader)]
        assert all(len(ids) == size for ids, size in parts)
        found.append([ids for ids, _ in parts])
    loader = tdi.DataLoader(rows, batch_size=10, collate_fn=as_it_is)
    return [*found, [batch["a"].tolist() for batch in loader]]


def test_collated_ones_may_be_empty_also_where_the_read_ahead_weighs_them() -> None:
    first, second = run_ranks(2, collated_parts)
    for samples, size, one, other in zip((5, 21, 13, 21), (1, 10, 2, 10), first, second, strict=True):
        put_together = [[*own, *more] for own, more in zip(one, other, strict=True)]
        assert put_together == [[*range(at, min(at + size, samples))] for at in range(0, samples, size)]
        assert other[-1] == []
