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
from torchdistinput.coordination.batch_digests import digest_of_element
from torchdistinput.sources.iterable.element_batches import ElementReader
from torchdistinput.sources.iterable.user_state import StatefulObjects
from torchdistinput.sources.kernel.batcher import MarkedBatch
from torchdistinput.sources.kernel.read_failures import Failure
from torchdistinput.sources.kernel.ready_batches import Measure, ReadyFns
from torchdistinput.sources.kernel.row_stream import PositionLog

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


def log_of(most_behind: int) -> PositionLog[list[Any]]:
    return PositionLog(-3, [0], 0, most_behind, lambda found, told: [*found, *told])


def test_a_log_that_drops_old_notes_says_what_one_that_keeps_all_says() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        behind = rng.choice([0, 2, 7])
        short, whole = log_of(behind), log_of(10**9)
        before = 0  # the row before the batch that is read
        for batch in range(150):
            rows, told = rng.choice([1, 1, 3]), rng.choice([batch, None])
            short.add(rows, told)
            whole.add(rows, told)
            for row in {max(0, before - behind), before, before + rows}:
                assert short.at(row) == whole.at(row), (seed, batch)
                assert short.in_progress(row) == whole.in_progress(row), (seed, batch)
            before += rows
        assert len(short._notes) <= behind + 32
        with pytest.raises(AssertionError, match="are forgotten"):
            short.at(-4)


class Counting:
    """Numbers up to 400, with a state; some cannot be read."""

    def __init__(self, bad: tuple[int, ...]) -> None:
        self.number, self.bad = -1, bad

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> int:
        self.number += 1
        if self.number == 400:
            raise StopIteration
        if self.number in self.bad:
            raise ValueError(self.number)
        return self.number

    def state_dict(self) -> int:
        return self.number

    def load_state_dict(self, state: int) -> None:
        self.number = state


@pytest.mark.parametrize("size", [None, 1, 2])
def test_a_failure_after_elements_were_passed_over_names_its_element(size: int | None) -> None:
    data = Counting((7,))
    read = ElementReader(data, StatefulObjects(None, None, "auto"), size)
    assert read.skip(3, 3) is None
    (failure,) = [each for each in read.batches() if isinstance(each, Failure)]
    assert failure.where == "element 7"


@pytest.mark.parametrize(
    ("size", "passed", "compared"),
    [
        (None, 0, [0, 1, 3]),
        (1, 0, [[0], [1], [3]]),
        (2, 0, [[0, 1], [2, 3], [6, 7]]),
        (2, 4, [[8, 9], [10, 11], [14, 15]]),
    ],
)
def test_states_are_taken_and_batches_compared_side_by_side(size: int | None, passed: int, compared: list[Any]) -> None:
    data = Counting(())
    kept = StatefulObjects(None, data, "auto")
    read = ElementReader(data, kept, size, compares=True)
    assert read.skip(passed, 2 * passed) is None
    marked = [each for each in read.batches() if isinstance(each, MarkedBatch)]
    assert [each.batch for each in marked if each.compared][:3] == compared
    lasts = [each.batch if size is None else each.batch[-1] for each in marked]
    stated = [(last, each.mark) for last, each in zip(lasts, marked, strict=True) if each.mark is not None]
    assert [last for last, _ in stated][1:4] == [stated[0][0] + (size or 1) * batches for batches in (1, 3, 7)]
    assert all(mark.digest == digest_of_element(last) for last, mark in stated)
    texts = [(last, mark.text) for last, mark in stated if mark.text is not None]
    assert all(text == f'{{"iterator":{last - 1}}}' for last, text in texts)
