"""Data that is read again on a resume: the elements that came must come again, else it is a ``StateMismatch``."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

import torchdistinput as tdi
from tests.data import Kept, Stream
from torchdistinput.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:the iterable .* is read again", "ignore:.*iterable that only it can")

COUNT, SIZE = 103, 10
Make = Callable[[], IterableDataset[Any]]


def shuffled(rng: random.Random) -> list[int]:
    order = list(range(COUNT))
    rng.shuffle(order)
    return order


def own_generator() -> Stream:
    rng = random.Random(0)
    return Stream(lambda: shuffled(rng))


def counting() -> Stream:
    epochs = itertools.count()
    return Stream(lambda: shuffled(random.Random(next(epochs))))


def global_random() -> Stream:
    return Stream(lambda: random.sample(range(COUNT), COUNT))


def global_numpy() -> Stream:
    return Stream(lambda: np.random.permutation(COUNT).tolist())


def global_torch() -> Stream:
    return Stream(lambda: torch.randperm(COUNT).tolist())


def inexact() -> Kept:
    """Its state does not hold its generator."""
    rng = random.Random(0)
    return Kept(COUNT, lambda _: rng.randrange(COUNT))


class Advised(IterableDataset[int]):
    """As the message says."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(shuffled(random.Random(self.epoch)))


def ready_of(data: Any) -> Stream:
    """Ready batches of other data."""

    def batches() -> Iterator[torch.Tensor]:
        numbers = list(data)
        return (torch.tensor(numbers[first : first + SIZE]) for first in range(0, COUNT, SIZE))

    return Stream(batches)


def rows(data: Any, options: tdi.InputOptions) -> Any:
    return tdi.Strategy(["cpu"]).distribute_dataset(data, options, global_batch_size=SIZE)


def ready(data: Any, options: tdi.InputOptions) -> Any:
    return tdi.Strategy(["cpu"]).distribute_dataset(ready_of(data), options)


def function(data: Any, options: tdi.InputOptions) -> Any:
    return tdi.Strategy(["cpu"]).distribute_datasets_from_function(lambda _: ready_of(data), options)


def drop_in(data: Any, options: tdi.InputOptions, **settings: Any) -> Any:
    return tdi.DataLoader(data, batch_size=SIZE, options=options, **settings)


def in_workers(data: Any, options: tdi.InputOptions) -> Any:
    return drop_in(data, options, num_workers=1)


def in_lasting_workers(data: Any, options: tdi.InputOptions) -> Any:
    return drop_in(data, options, num_workers=1, persistent_workers=True)


ALL = (rows, ready, function, drop_in, in_workers, in_lasting_workers)


def seed() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def resumed(
    make: Callable[[Any, tdi.InputOptions], Any], kind: Make, step: int = 4, own_state: Any = "auto", then: Any = None
) -> str:
    """In the middle of epoch 1 a new process goes on, with the script's own seeds. What came: a class, or exact."""
    options = tdi.InputOptions(own_state=own_state)
    seed()
    with make(kind(), options) as loader:
        list(loader)
        whole, state = [], {}
        for batch in loader:
            whole.append(batch.tolist())
            if len(whole) == step:
                state = loader.state_dict()
    seed()
    with make(kind(), tdi.InputOptions(own_state=then or own_state)) as loader:
        loader.load_state_dict(state)
        try:
            rest = batches(loader)
        except tdi.StateMismatch as error:
            return str(error)
    return "exact" if rest == whole[step:] else "others"


@pytest.mark.parametrize("step", [1, 3, 4, 10])
@pytest.mark.parametrize("kind", [own_generator, counting, global_random, global_numpy])
@pytest.mark.parametrize("make", [rows, ready, function, drop_in])
def test_an_order_that_no_state_holds_is_a_mismatch(make: Any, kind: Make, step: int) -> None:
    found = resumed(make, kind, step)
    assert "set_epoch(epoch)" in found
    assert 'own_state="use"' in found


@pytest.mark.parametrize("make", ALL)
def test_the_advice_of_the_message_is_exact(make: Any) -> None:
    assert resumed(make, Advised) == "exact"


def test_what_is_used_unchecked_comes_as_it_comes() -> None:
    assert resumed(rows, own_generator, then="use") == "others"


@pytest.mark.parametrize("kind", [own_generator, counting, global_random, global_numpy, global_torch])
def test_loader_workers_that_do_not_live_on_repeat_what_they_drew(kind: Make) -> None:
    assert resumed(in_workers, kind) == "exact"


@pytest.mark.parametrize("kind", [own_generator, counting, global_random, global_numpy, global_torch])
def test_loader_workers_that_lived_on_are_a_mismatch(kind: Make) -> None:
    with pytest.warns(UserWarning, match="persistent_workers"):
        assert "set_epoch(epoch)" in resumed(in_lasting_workers, kind)


@pytest.mark.parametrize("make", [rows, drop_in, in_lasting_workers])
def test_ignoring_an_own_state_reads_again_and_checks(make: Any) -> None:
    assert 'own_state="ignore"' in resumed(make, inexact)
    assert "read again" in resumed(make, inexact, then="ignore")


def on_two_ranks() -> list[str]:
    return [resumed(make, kind) for make in (rows, ready) for kind in (own_generator, global_torch, Advised)]


def test_every_rank_refuses_at_the_same_place() -> None:
    for mismatch, torch_mismatch, exact, *ready_ones in run_ranks(2, on_two_ranks):
        assert "ranks 0, 1 failed at step 4 of epoch 1" in mismatch
        assert "ranks 0, 1 failed at step 4 of epoch 1" in torch_mismatch
        assert exact == "exact"
        assert ["exact" if each == "exact" else "ranks 0, 1" in each for each in ready_ones] == [True, True, "exact"]


def test_what_is_checked_goes_on_to_the_last_batch_and_over_several_resumes() -> None:
    """One element of many was another one."""
    size, changed, states = 512, -1, list[Any]()
    data = Stream(lambda: (-1 if number == changed else number for number in range(10000)))
    for start in (0, 5, 9):
        with tdi.DataLoader(data, batch_size=size) as loader:
            if states:
                loader.load_state_dict(states[-1])
            for step, _ in enumerate(loader, start):
                if step == start + 3:
                    break
            states.append(loader.state_dict())
    for state in states:
        changed = state["step"] * size - 1
        with tdi.DataLoader(data, batch_size=size) as loader:
            loader.load_state_dict(state)
            with pytest.raises(tdi.StateMismatch, match="read again"):
                next(iter(loader))


def test_a_state_of_a_version_before_loads_unchecked() -> None:
    with rows(own_generator(), tdi.InputOptions()) as loader:
        state = None
        for _ in range(2):
            for step, _ in enumerate(loader):
                if step == 3:
                    state = loader.state_dict()
    assert state is not None
    (reader,) = state["position"][1][4]
    assert reader[0] == 4
    reader[1:] = [4, None, 0, 1 << 62]
    with rows(own_generator(), tdi.InputOptions()) as loader:
        loader.load_state_dict(state)
        assert len(batches(loader)) == 7


class WithLength(Advised):
    """Loader workers divide it, so that each has a short last batch."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter([*super().__iter__()] if info is None else [*super().__iter__()][info.id :: info.num_workers])

    def __len__(self) -> int:
        return COUNT


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_state_after_the_last_step_of_a_known_length_begins_the_next_epoch(workers: int) -> None:
    with tdi.DataLoader(WithLength(), batch_size=SIZE, num_workers=workers) as loader:
        whole, states = [], []
        for _ in range(3):
            for batch in loader:
                whole.append(batch.tolist())
                states.append(loader.state_dict())
    steps = len(whole) // 3
    assert steps == (11 if workers < 2 else 12)
    assert (states[steps - 1]["epoch"], states[steps - 1]["step"]) == ((1, 0) if workers < 2 else (0, 12))
    for step in (steps - 2, steps - 1, steps):
        with tdi.DataLoader(WithLength(), batch_size=SIZE, num_workers=workers) as loader:
            loader.load_state_dict(states[step])
            rest = [each for _ in range(2) for each in batches(loader)]
        assert rest == whole[step + 1 : step + 1 + len(rest)]
        assert len(rest) >= steps
