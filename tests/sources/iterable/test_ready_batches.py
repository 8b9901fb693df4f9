"""Batches that come ready, of any structure: each is cut as it is, and another structure is refused in its place."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import torchdistinput as tdi
from tests.support.epochs import cut_by_s, lists
from tests.support.structures import KINDS
from torchdistinput.sources.kernel.ready_batches import Measure, ReadyFns

OTHERS: list[Callable[[int], Any]] = [
    lambda n: {"x": torch.zeros(n, 5, dtype=torch.float64), "y": torch.zeros(n)},  # another dtype
    lambda n: {"x": torch.zeros(n, 5, 1, dtype=torch.float64), "y": torch.zeros(n, dtype=torch.int32)},
    lambda n: (torch.zeros(n), torch.zeros(n + 1)),  # leaves of two sizes
    lambda _: torch.tensor(3),
]
ALIKE: list[Callable[[int], Any]] = [
    lambda n: {"y": torch.zeros(n, dtype=torch.int32), "x": torch.zeros(n, 5, dtype=torch.float64)},  # another order
    lambda n: {"x": torch.zeros(n, 6, dtype=torch.float64), "y": torch.zeros(n, dtype=torch.int32)},  # wider
    lambda n: {"x": np.zeros((n, 5)), "y": torch.zeros(n, dtype=torch.int32)},
]


def distributed(batches: Any, replicas: int, **options: Any) -> Any:
    return tdi.Strategy(["cpu"] * replicas).distribute_dataset(lambda: iter(batches), tdi.InputOptions(**options))


def read(batches: list[Any], replicas: int, prefetch: int) -> tuple[list[list[Any]], bool]:
    """The parts of each step, and whether an error came after them."""
    strategy = tdi.Strategy(["cpu"] * replicas)
    dataset, found = distributed(batches, replicas, prefetch=prefetch), list[list[Any]]()
    try:
        found.extend([*map(lists, strategy.local_results(element))] for element in dataset)
    except tdi.BatchingError:
        return found, True
    return found, False


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_each_batch_is_cut_and_one_of_another_structure_is_refused_in_its_place(kind: str, replicas: int) -> None:
    """Sizes that repeat and change, and none: what a reader knows of the batch before is true of this one, or not."""
    for seed in range(6):
        rng = random.Random(f"{kind} {seed}")
        sizes = [size for _ in range(8) for size in [rng.choice([0, 1, 2, 3, 5, 5])] * rng.choice([1, 1, 3])]
        batches = [KINDS[kind](size) for size in sizes]
        other = [make for name, make in KINDS.items() if name != kind and make(2) is not None]
        bad = rng.choice([None, *OTHERS, *other]) if seed else None
        place = rng.randrange(1, len(batches))
        if bad is not None:
            batches.insert(place, bad(2))
        steps = [batch for batch, size in zip(batches[: place if bad else None], sizes, strict=False) if size]
        found, failed = read(batches, replicas, seed % 3)
        assert failed == (bad is not None), (seed, bad)
        assert found == [cut_by_s(batch, replicas) for batch in steps], seed


def retyped(batch: Any) -> Any:
    """The same shapes, of which the last is of another dtype."""
    if isinstance(batch, torch.Tensor):
        return batch.to(torch.complex64)
    if isinstance(batch, dict):
        return {**batch, "y": retyped(batch["y"])}
    return (*batch[:-1], retyped(batch[-1]))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", ["bare", "halves", "flags", "mapping"])
def test_another_dtype_is_refused_where_all_shapes_are_those_of_the_batch_before(kind: str, replicas: int) -> None:
    good = KINDS[kind](4)
    found, failed = read([good] * 3 + [retyped(good), good], replicas, 1)
    assert failed
    assert found == [cut_by_s(good, replicas)] * 3


def test_keys_in_another_order_are_told_apart_where_all_shapes_are_alike() -> None:
    batch = {"a": torch.arange(4), "b": torch.arange(4) + 10}
    other = {"b": batch["b"] + 100, "a": batch["a"] + 100}
    for replicas in (1, 2):
        found, failed = read([batch, batch, other, other, batch], replicas, 1)
        assert not failed
        assert found == [cut_by_s(each, replicas) for each in (batch, batch, other, other, batch)]
    assert [[*element] for element in distributed([batch, other], 1)] == [["a", "b"], ["b", "a"]]


@pytest.mark.parametrize("replicas", [1, 2])
def test_keys_in_another_order_wider_rows_and_arrays_are_the_same_structure(replicas: int) -> None:
    batches = [KINDS["mapping"](2)] * 3
    for make in ALIKE:
        batches += [make(2)] * 4 + [KINDS["mapping"](2)] * 3
    found, failed = read(batches, replicas, 2)
    assert not failed
    tensors = [{key: torch.as_tensor(value) for key, value in batch.items()} for batch in batches]
    assert found == [cut_by_s(batch, replicas) for batch in tensors]


class Asked:
    """An iterator without ``__iter__``, which counts what it is asked for and fails where it is told to."""

    def __init__(self, fails: BaseException | None) -> None:
        self.asked, self._fails = 0, fails

    def __next__(self) -> torch.Tensor:
        self.asked += 1
        if self.asked > 5:
            raise self._fails or StopIteration
        return torch.full((2,), self.asked)


class Opened:
    def __init__(self, iterator: Any) -> None:
        self.iterator, self.opened = iterator, 0

    def __iter__(self) -> Any:
        self.opened += 1
        return self.iterator


@pytest.mark.parametrize("fails", [None, KeyError("oh"), KeyboardInterrupt()])
@pytest.mark.parametrize("batched", [False, True])
def test_a_loop_over_any_iterator_gives_what_it_gives_and_asks_once_at_its_end(
    fails: BaseException | None, batched: bool
) -> None:
    iterator = Asked(fails)
    data = Opened(iterator)
    options = tdi.InputOptions(prefetch=0)
    loader = tdi.Strategy(["cpu"]).distribute_dataset(data, options, global_batch_size=1 if batched else None)
    assert data.opened == 0
    found = list[int]()
    told: BaseException | None = None
    try:
        found.extend(int(element.flatten()[0]) for element in loader)
    except BaseException as error:
        told = error
    assert found == [1, 2, 3, 4, 5]
    assert (iterator.asked, data.opened) == (6, 1)
    assert type(told) is {KeyError: tdi.SourceError, KeyboardInterrupt: KeyboardInterrupt}.get(type(fails), type(None))  # type: ignore[arg-type]
    assert isinstance(fails, KeyError) == ("element 5" in str(told))


def test_batches_of_a_dataset_function_have_tensors_in_the_place_of_arrays_with_and_without_samples() -> None:
    measure = Measure(ReadyFns())
    for size in (2, 0, 2):
        (batch,), sizes, _ = measure.each([{"x": np.zeros((size, 3)), "n": 1}])
        assert (type(batch["x"]), batch["x"].shape, sizes) == (torch.Tensor, (size, 3), (size,))
