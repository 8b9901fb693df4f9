"""Resuming in one process: at every step of every epoch, what comes is what came without the interruption."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
)

import torchdistinput as tdi
from tests.data import Numbers, Order, Stream
from tests.support import inputs
from tests.support.resume import (
    EPOCHS,
    Setting,
    known,
    record,
    run_of,
    steps,
)

NO_WORKERS: dict[str, Any] = {}
LASTING: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}


def test_loader_workers_that_persist_or_not_give_the_rest_of_the_epoch(tmp_path: Path) -> None:
    """Later epochs are those of torch: it draws one number less from the generator where workers persist."""
    make = known("shuffled by a generator", tmp_path)
    for before, after in ((NO_WORKERS, LASTING), (LASTING, NO_WORKERS)):
        delivered, states = record(run_of(make, Setting(2, 0, before)))
        for saved in states[1:-1:5]:
            resumed = run_of(make, Setting(2, 2, after)).load(saved)
            epoch = saved.state["epoch"]
            rest = [each for each in delivered[saved.done :] if each[0] == epoch]
            assert list(steps(resumed, epochs=epoch + 1)) == rest
            resumed.loader.close()


# ------------------------------------------------------------------------------------------- where a run may be left


def shuffled_over(data: Any, cls: Any = DataLoader, **more: Any) -> Any:
    return cls(data, batch_size=4, shuffle=True, generator=inputs.generator(), **more)


shuffled = partial(shuffled_over, range(23))


@pytest.mark.parametrize("prefetch", [0, 3])
def test_after_a_break_the_state_is_that_of_the_last_step_until_the_next_epoch_delivers(prefetch: int) -> None:
    """The epoch after a break is drawn from where the generator then was; its states know."""
    run = run_of(shuffled, Setting(1, prefetch))
    left = list(steps(run, until=2))
    broken = run.save(2)
    assert (broken.state["epoch"], broken.state["step"], broken.state["samples"]) == (0, 2, 8)
    iterator = iter(run.loader)
    assert run.save(2).state == broken.state
    first = run.parts(next(iterator))
    begun = run.save(1)
    assert (begun.state["epoch"], begun.state["step"]) == (1, 1)
    second = [(1, index, run.parts(element)) for index, element in enumerate(iterator, 1)]
    third, states = record(run, epochs=1)
    assert first not in [element for *_, element in second]

    whole, _ = record(run_of(shuffled, Setting(1)), epochs=1)
    assert left + list(steps(run_of(shuffled, Setting(1)).load(broken), epochs=1)) == whole
    assert list(steps(run_of(shuffled, Setting(1)).load(begun))) == second + third
    for saved in states:
        assert list(steps(run_of(shuffled, Setting(0, 1)).load(saved))) == third[saved.done :]


def test_a_loaded_state_may_be_saved_again_and_loaded_over() -> None:
    delivered, states = record(run_of(shuffled, Setting()))
    run = run_of(shuffled, Setting())
    for saved in (states[9], states[3], states[-1], states[5]):
        run.load(saved)
        again = run.save(saved.done)
        assert again.state == saved.state
    assert list(steps(run)) == delivered[states[5].done :]
    assert run.save(0).state["epoch"] == EPOCHS


def shuffled_by(epoch: int) -> list[int]:
    """As torch's ``DistributedSampler``."""
    order: list[int] = torch.randperm(13, generator=inputs.generator(epoch)).tolist()
    return order


def test_a_sampler_that_was_told_its_epoch_is_told_again_and_a_loaded_state_may_be_replaced_by_an_epoch() -> None:
    def make() -> Any:
        return tdi.DataLoader(Numbers(13), batch_size=4, sampler=Order(13, shuffled_by))

    loader, found, states = make(), [], []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            found.append(batch.tolist())
            states.append(json.dumps(loader.state_dict()))
    for done, text in enumerate(states, 1):
        resumed, rest = make(), []
        state = json.loads(text)
        resumed.load_state_dict(state)
        for later in range(state["epoch"], EPOCHS):  # after the last step the next one
            if later > state["epoch"]:
                resumed.set_epoch(later)
            rest += [batch.tolist() for batch in resumed]
        assert rest == found[done:]
        resumed.load_state_dict(state)
        other = 1 if state["epoch"] != 1 else 2
        resumed.set_epoch(other)
        assert [batch.tolist() for batch in resumed] == found[4 * other : 4 * other + 4]


def breaks() -> None:
    raise ValueError("cannot be read")


def some(count: int) -> Iterator[int]:
    yield from range(count)
    breaks()


def cannot_be_collated(samples: list[int]) -> torch.Tensor:
    if 5 in samples:
        raise ValueError("cannot be read")
    return torch.tensor(samples)


BREAKS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "samples": lambda: (Numbers(8, {5: breaks}), {}),
    "elements": lambda: (Stream(partial(some, 5)), {}),
    "a sampler": lambda: (range(8), {"sampler": Order(8, lambda _: some(4))}),
    "a collate function": lambda: (range(8), {"collate_fn": cannot_be_collated}),
    "loader workers": lambda: (Numbers(8, {5: breaks}), {"num_workers": 1}),
}


@pytest.mark.parametrize("what", BREAKS)
@pytest.mark.parametrize("door", ["drop-in", "strategy"])
def test_after_a_failed_loop_a_state_is_loaded_at_once(door: str, what: str) -> None:
    """Not only after a garbage collection: the exception does not keep the iterator."""
    data, arguments = BREAKS[what]()
    kind: Any = tdi.DataLoader if door == "drop-in" else torch.utils.data.DataLoader
    loader = kind(data, 2, **arguments)
    if door == "strategy":
        loader = tdi.Strategy().distribute_dataset(loader)
    state = loader.state_dict()

    def fails() -> str:
        try:
            for _ in loader:
                pass
        except (ValueError, tdi.SourceError) as error:
            return str(error)
        return ""

    gc.disable()
    try:
        assert "cannot be read" in fails()
        loader.load_state_dict(state)
    finally:
        gc.enable()
    assert loader.state_dict() == state
