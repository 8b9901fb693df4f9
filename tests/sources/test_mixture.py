"""``Mixture``: the same order at every world size and number of loader workers, resumed anywhere; what it refuses."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from tests.support.resume import check_worlds

A, B, C = range(300), range(1000, 1200), range(5000, 5050)


def mixture(**more: Any) -> tdi.Mixture:
    return tdi.Mixture({"a": A, "b": B, "c": C}, {"a": 5, "b": 3, "c": 1}, seed=4, **{"stop": "all", **more})


def test_each_sample_comes_once_in_shares_that_hold() -> None:
    mixed = mixture()
    found = mixed.__getitems__(range(len(mixed)))
    assert sorted(found) == [*A, *B, *C]
    counts = Counter("a" if each < 1000 else "b" if each < 5000 else "c" for each in found[:256])
    assert abs(counts["a"] - 256 * 5 / 9) < 1
    assert abs(counts["b"] - 256 * 3 / 9) < 1
    assert found[256:] != sorted(found[256:])


def test_epochs_have_the_same_sources_and_other_samples() -> None:
    mixed = mixture(with_source=True, stop="first")
    sampler = mixed.sampler()
    first, second = (mixed.__getitems__(list(sampler)) for _ in range(2))
    assert [name for name, _ in first] == [name for name, _ in second]
    assert first != second
    assert len({sample for _, sample in second}) == len(second)
    assert mixed.locate(3) == (first[3][0], mixed.locate(3)[1])
    sampler.set_epoch(0)
    assert mixed.__getitems__(list(sampler)) == first


def test_sources_that_repeat_come_in_whole_epochs() -> None:
    mixed = tdi.Mixture({"a": range(10), "b": range(100, 103)}, {"a": 1, "b": 1}, stop="repeat", num_samples=2000)
    small = [each for each in mixed.__getitems__(range(2000)) if each >= 100]
    rounds = [sorted(small[start : start + 3]) for start in range(0, 900, 3)]
    assert all(each == [100, 101, 102] for each in rounds)
    in_order = tdi.Mixture({"a": range(5)}, {"a": 1}, shuffle=False)
    assert list(in_order) == [*range(5)]  # one epoch, though later positions are there, too
    assert [in_order[place] for place in range(5)] == [0, 1, 2, 3, 4]


def test_a_mixture_of_mixtures_keeps_both_shares_and_the_epochs_of_the_inner_one() -> None:
    inner = tdi.Mixture({"x": range(100), "y": range(200, 300)}, {"x": 1, "y": 1}, with_source=True)
    sources, size = {"in": inner, "out": range(1000, 1100)}, 3 * len(inner)
    outer = tdi.Mixture(sources, {"in": 2, "out": 1}, stop="repeat", num_samples=size, with_source=True)
    inside = [sample for name, sample in outer.__getitems__(range(size)) if name == "in"]
    assert len(inside) > 1.9 * len(inner)
    assert inside == inner.__getitems__(range(len(inside)))


def test_weights_change_at_a_position_and_temperature_evens_them_out() -> None:
    plan = [(0, {"a": 1, "b": 0}), (200, {"a": 0, "b": 1})]
    mixed = tdi.Mixture({"a": range(500), "b": range(1000, 1500)}, plan)
    assert {each >= 1000 for each in mixed.__getitems__(range(200))} == {False}
    assert {each >= 1000 for each in mixed.__getitems__(range(200, 700))} == {True}
    even = tdi.Mixture({"a": A, "b": B}, {"a": 100, "b": 1}, temperature=2, stop="repeat", num_samples=256)
    assert sum(each >= 1000 for each in even.__getitems__(range(256))) == 23  # 1/11 of 256


def make_loader(num_workers: int, with_sampler: bool) -> DataLoader[Any]:
    mixed = mixture()
    return DataLoader(mixed, 20, sampler=mixed.sampler() if with_sampler else None, num_workers=num_workers)


@pytest.mark.parametrize("with_sampler", [True, False])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_order_is_that_of_one_process_at_every_world_size_and_after_every_resume(
    num_workers: int, with_sampler: bool
) -> None:
    mixed = mixture()
    order = mixed.__getitems__(range(len(mixed)))
    batches = [order[start : start + 20] for start in range(0, len(order), 20)]
    check_worlds(make_loader, (num_workers, with_sampler), batches, [(2, 7), (3, 9), (1, 100)])


def test_without_its_sampler_each_epoch_has_the_order_of_the_first() -> None:
    dataset = tdi.Strategy(["cpu"]).distribute_dataset(make_loader(0, with_sampler=False))
    first, second = ([batch.tolist() for batch in dataset] for _ in range(2))
    assert first == second


def test_a_batched_source_is_asked_for_many_samples_at_once() -> None:
    asked = []

    class Source(TensorDataset):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            asked.append(len(indices))
            return [self[index] for index in indices]

    data = Source(torch.arange(100))
    mixed = tdi.Mixture({"x": data, "y": np.arange(1000, 1100)}, {"x": 1, "y": 1})
    mixed.__getitems__(range(60))
    assert sum(asked) < 60
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("arguments", "more", "error", "told"),
    [
        (({"a": A}, {"b": 1}), {}, ValueError, "there is a weight for 'b'; the sources are 'a'"),
        (({"a": A, "b": B}, {"a": 1}), {}, ValueError, "there is no weight for 'b'; give each source one, or 0"),
        (({"a": A}, {"a": -1}), {}, ValueError, "weight 0 is -1"),
        (({"a": A}, {"a": 0}), {}, ValueError, "all weights are 0"),
        (({"a": A, "e": []}, {"a": 1, "e": 1}), {}, ValueError, "the source 'e' is empty"),
        (({"a": A}, {"a": 1}), {"stop": "repeat"}, ValueError, "needs a number of samples"),
        (({"a": A}, {"a": 1}), {"stop": "never"}, ValueError, "stop is 'never'"),
        (({"a": iter(A)}, {"a": 1}), {}, TypeError, "the source 'a' is a range_iterator"),
    ],
)
def test_bad_mixtures_are_told(arguments: Any, more: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        tdi.Mixture(*arguments, **more)
