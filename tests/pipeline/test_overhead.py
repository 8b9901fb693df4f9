"""What a ready step costs: the short ways say what the long ones do, and the work of a step does not grow."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from tests.data import Numbers


def ready(steps: int, rows: int, **options: Any) -> tdi.DistributedIterator:
    batches = [(torch.zeros(rows, 4), torch.zeros(rows))] * steps
    strategy = tdi.Strategy(devices=["cpu"])
    return iter(strategy.distribute_dataset(lambda: iter(batches), tdi.InputOptions(prefetch=0, **options)))


def calls_of(work: Callable[[], Any]) -> list[str]:
    """The Python functions of ours that it calls."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "torchdistinput" in frame.f_code.co_filename:
            found.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return found


def steady_calls(iterator: Iterator[Any], warm: int) -> list[str]:
    for _ in range(warm):
        next(iterator)
    return calls_of(lambda: next(iterator))


def test_the_work_of_a_step_does_not_grow_with_the_batch_the_epoch_or_the_steps_before() -> None:
    first = steady_calls(ready(50, 8), 19)
    assert steady_calls(ready(5000, 8), 19) == first
    assert steady_calls(ready(5000, 4096), 19) == first
    assert steady_calls(ready(5000, 8), 3019) == first
    measured = steady_calls(ready(50, 8, log_every=1000), 19)
    assert len(measured) <= len(first) + 30
    assert steady_calls(ready(5000, 4096, log_every=1000), 419) == measured


def interrupted_once() -> Numbers:
    """Its fourth sample is read when somebody presses Ctrl-C, the first time."""

    def press() -> None:
        del data.at[3]
        raise KeyboardInterrupt

    data = Numbers(6, {3: press})
    return data


@pytest.mark.parametrize("prefetch", [0, None])
def test_after_an_interruption_an_iterator_refuses_to_go_on_and_a_new_one_misses_nothing(prefetch: int | None) -> None:
    dataset = tdi.Strategy(devices=["cpu"]).distribute_dataset(
        DataLoader(interrupted_once(), batch_size=1), tdi.InputOptions(prefetch=prefetch)
    )
    iterator = iter(dataset)
    assert [next(iterator).item() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    with pytest.raises(tdi.InputError, match=r"interrupted while it read, after step 3"):
        next(iterator)
    assert [next(iterator, "ended") for _ in range(2)] == ["ended"] * 2  # of the iteration, but not of the epoch:
    assert dataset.step.index == 2
    state = dataset.state_dict()
    assert (state["step"], state["samples"]) == (3, 3)
    dataset.load_state_dict(state)
    assert [element.item() for element in dataset] == [3, 4, 5]


@pytest.mark.filterwarnings("ignore:the iterable list is read again")
def test_wherever_a_ready_step_is_interrupted_its_samples_count_with_it_or_not_at_all() -> None:
    for moment in count():
        dataset = tdi.Strategy(devices=["cpu"]).distribute_dataset(
            [torch.full((2,), step) for step in range(10)], tdi.InputOptions(prefetch=0)
        )
        iterator = iter(dataset)
        found = [next(iterator)[0].item() for _ in range(7)]
        moments = count()

        def press(frame: FrameType, event: str, _: Any, moment: int = moment, moments: Iterator[int] = moments) -> None:
            """Presses Ctrl-C where Python looks whether somebody did."""
            comes = event in {"call", "c_return"} and "torchdistinput" in frame.f_code.co_filename
            if comes and next(moments) == moment:
                sys.setprofile(None)
                raise KeyboardInterrupt

        sys.setprofile(press)
        try:
            found.append(next(iterator)[0].item())
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        state = dataset.state_dict()
        assert (state["step"], state["samples"]) == (len(found), 2 * len(found)), moment
        assert dataset.stats()["steps"] == iterator.step.index + 1 == len(found), moment
        iterator.close()
        dataset.load_state_dict(state)
        assert [*found, *(batch[0].item() for batch in dataset)] == list(range(10)), moment
        if len(found) == 8:
            assert moment > 10  # it was not interrupted any more
            return


def test_the_order_of_an_epoch_is_let_go_of_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[weakref.ref[Any]] = []

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        memory = randperm(*args, **kwargs).numpy().copy()
        orders.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    randperm = torch.randperm
    monkeypatch.setattr(torch, "randperm", noted)
    dataset = tdi.Strategy(devices=["cpu"]).distribute_dataset(
        DataLoader(TensorDataset(torch.arange(40)), 8, shuffle=True)
    )
    iterator = iter(dataset)
    assert len(list(iterator)) == 5
    gc.collect()
    assert orders
    assert [order() for order in orders] == [None] * len(orders)
    assert dataset.state_dict()["step"] == 0  # of the next epoch
