"""Resuming in one process: what comes is what came without the interruption; and resumes that once went wrong."""

from __future__ import annotations

import gc
import json
import multiprocessing
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

import torchdistinput as tdi
from tests.data import Count, Numbers, Order, Stream
from tests.support import inputs
from tests.support.epochs import lists
from tests.support.resume import (
    EPOCHS,
    OTHER_SEED,
    SEED,
    Setting,
    iterables_may_be_skipped,
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


# ------------------------------------- what once went wrong: told epochs, shared generators, changed files, failures

NUMBERS: Any = range(20)


def drop_in(**arguments: Any) -> tdi.DataLoader[Any]:
    return tdi.DataLoader(NUMBERS, 5, **arguments)


def one_replica(data: Any, **options: Any) -> tdi.DistributedDataset:
    return tdi.Strategy(devices=["cpu"]).distribute_dataset(data, tdi.InputOptions(**options))


def epoch(loader: Any) -> list[Any]:
    return [lists(batch) for batch in loader]


def leave_after(loader: Any, count: int) -> list[Any]:
    """The first batches of an epoch that is then left."""
    found = []
    for batch in loader:
        found.append(lists(batch))
        if len(found) == count:
            break
    return found


def written(loader: Any) -> Any:
    """Its state, from disk."""
    return json.loads(json.dumps(loader.state_dict()))


def place_of(loader: Any) -> tuple[int, int]:
    state = loader.state_dict()
    return state["epoch"], state["step"]


# ------------------------------------------------------------------------------------------- samplers and epochs


class Counting(Sampler[int]):
    """Shuffles by an epoch that it counts itself, and can be told."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self.epoch).sample(range(20), 20)
        self.epoch += 1
        return iter(order)

    def set_epoch(self, number: int) -> None:
        self.epoch = number


@pytest.mark.parametrize("sampler", [lambda: tdi.ShuffleSampler(20, seed=1), Counting])
@pytest.mark.parametrize("told", [False, True])
def test_seeking_counts_no_epoch_twice_where_a_generator_is_replayed(
    sampler: Callable[[], Sampler[int]], told: bool
) -> None:
    """The generator of the DataLoader is taken through the epochs before; the sampler's epoch stays the sought one."""

    def make() -> tdi.DataLoader[Any]:
        return drop_in(sampler=sampler(), generator=inputs.generator())

    run, sought = make(), make()
    epochs = []
    for number in range(4):
        if told:
            run.set_epoch(number)
        epochs.append(epoch(run))
    if told:
        sought.set_epoch(0)
    sought.seek(3, 1)
    assert epoch(sought) == epochs[3][1:]


SHUFFLED: dict[str, Callable[[], dict[str, Any]]] = {
    "by its epoch": lambda: {"sampler": tdi.ShuffleSampler(20, seed=1)},
    "by the default random state": lambda: {"shuffle": True},
    "by a generator": lambda: {"shuffle": True, "generator": inputs.generator()},
}


@pytest.mark.parametrize("way", SHUFFLED)
@pytest.mark.parametrize("divide", [one_replica, lambda loader: loader], ids=["strategy", "drop-in"])
def test_a_resumed_epoch_that_was_left_unread_is_the_next_one(way: str, divide: Callable[..., Any]) -> None:
    """A state after two steps of an epoch that was left there; the resumed run reads the rest of it, and goes on."""
    kind: Any = DataLoader if divide is one_replica else tdi.DataLoader

    def make() -> Any:
        return divide(kind(NUMBERS, 5, **SHUFFLED[way]()))

    torch.manual_seed(SEED)
    run = make()
    whole, after = epoch(run), epoch(run)
    torch.manual_seed(SEED)
    left = make()
    leave_after(left, 2)
    state = written(left)
    torch.manual_seed(OTHER_SEED)
    resumed = make()
    resumed.load_state_dict(state)
    looked = iter(resumed)
    assert looked.has_next()
    looked.close()
    assert place_of(resumed) == (0, 2)
    assert [epoch(resumed), epoch(resumed)] == [whole[2:], after]


# ------------------------------------------------------------------------------------------------ random generators


def twenty_shuffled(cls: Any, **more: Any) -> Any:
    return cls(NUMBERS, 5, shuffle=True, generator=inputs.generator(), **more)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_loaders_that_share_a_generator_both_go_on(order: tuple[int, int]) -> None:
    """Training is saved in its second epoch, validation before its second one; they are loaded in either order."""

    def make() -> list[tdi.DataLoader[Any]]:
        generator = inputs.generator()
        return [drop_in(shuffle=True, generator=generator) for _ in range(2)]

    def rest(train: Any, validation: Any) -> list[Any]:
        return [epoch(train), epoch(validation), epoch(train), epoch(validation)]

    train, validation = make()
    epoch(train)
    epoch(validation)
    expected = rest(train, validation)

    train, validation = make()
    epoch(train)
    epoch(validation)
    leave_after(train, 2)
    states = [written(train), written(validation)]
    resumed = make()
    for which in order:
        resumed[which].load_state_dict(states[which])
    assert rest(*resumed) == [expected[0][2:], *expected[1:]]


@pytest.mark.parametrize("first", [0, 1])
def test_two_epochs_that_were_begun_and_dropped_unread_are_both_read_later(first: int) -> None:
    loader = twenty_shuffled(tdi.DataLoader)
    begun: list[Any] = [iter(loader), iter(loader)]
    assert all(each.has_next() for each in begun)
    begun[first] = None
    begun.clear()
    orders, numbers = [], []
    for _ in range(3):
        orders.append(str(epoch(loader)))
        numbers.append(loader.step.epoch)
    assert numbers == [0, 1, 2]  # whichever was dropped first
    assert len({*orders}) == 3


@pytest.mark.parametrize("looks", [False, True])
def test_an_iterator_that_was_not_read_begins_where_the_place_was_set_since(looks: bool) -> None:
    loader, plain = twenty_shuffled(tdi.DataLoader), twenty_shuffled(tdi.DataLoader)
    iterator = iter(loader)
    assert not looks or iterator.has_next()
    for each in (loader, plain):
        each.set_epoch(7)
    assert lists([*iterator]) == epoch(plain)
    assert loader.step == plain.step
    assert loader.step.epoch == 7


def test_an_epoch_after_one_that_was_left_early_is_sought_as_it_was() -> None:
    """Epoch 0 is left after two of four batches, so it drew less; then epoch 1 is sought, after it or after epoch 2."""
    loader = twenty_shuffled(tdi.DataLoader)
    leave_after(loader, 2)
    first, second = epoch(loader), epoch(loader)
    loader.seek(1, 0)
    assert epoch(loader) == first
    assert epoch(loader) == second


# ------------------------------------------------------------------------------------------------------------ files


def epoch_after(loader: Any, state: dict[str, Any], **how: Any) -> list[Any]:
    loader.load_state_dict(state, **how)
    return epoch(loader)


@pytest.mark.parametrize("kind", ["iterable", "files"])
@pytest.mark.parametrize("after", [1, 30])
def test_seeking_past_the_end_of_data_without_a_length_is_refused_at_the_first_step(
    kind: str, after: int, tmp_path: Path
) -> None:
    """The end itself may be sought: nothing is left there. A later step is none."""
    inputs.write_numbers(tmp_path)
    data = inputs.numbers_of(tmp_path) if kind == "files" else Count(12)
    loader = tdi.DataLoader(data, 4)
    with iterables_may_be_skipped():
        loader.seek(0, 3)
        assert epoch(loader) == []
        loader.seek(0, 3 + after)
        with pytest.raises(tdi.StateMismatch, match=f"{after} step"):
            epoch(loader)


# ------------------------------------------------------------------------------------------------ known differences


@pytest.mark.parametrize(("length", "size"), [(20, 8), (27, 4)])
def test_with_another_batch_size_or_more_data_a_state_is_taken_on_request_at_its_step(length: int, size: int) -> None:
    """Saved after two batches of 4; go on with batches of 8: two of those are passed over, in the same order."""

    def make(length: int, size: int) -> tdi.DataLoader[Any]:
        numbers: Any = range(length)
        return tdi.DataLoader(numbers, size, shuffle=True, generator=inputs.generator())

    run = make(20, 4)
    leave_after(run, 2)
    state = written(run)
    with pytest.raises(
        tdi.StateMismatch, match=f"(batch size: 4 in the state, {size}|length: 20 in the state, {length}) here"
    ):
        make(length, size).load_state_dict(state)
    assert epoch_after(make(length, size), state, strict=False) == epoch(make(length, size))[2:]


def test_a_step_that_was_edited_by_hand_shows_by_the_digest_of_the_samplers_draw() -> None:
    run = twenty_shuffled(tdi.DataLoader)
    leave_after(run, 2)
    edited = {**written(run), "step": 3, "samples": 15, "position": ["all", ["map", 3]]}
    for strict in (True, False):
        with pytest.raises(tdi.StateMismatch, match="the sampler drew other samples"):
            epoch_after(twenty_shuffled(tdi.DataLoader), edited, strict=strict)


def test_the_state_of_another_kind_of_input_is_refused_by_its_kind_alone(tmp_path: Path) -> None:
    inputs.write_numbers(tmp_path)
    run = twenty_shuffled(tdi.DataLoader)
    leave_after(run, 2)
    with pytest.raises(tdi.StateMismatch) as refused:
        tdi.DataLoader(inputs.numbers_of(tmp_path), 4).load_state_dict(written(run))
    told = str(refused.value)
    assert "kind: " in told
    for other in ("nothing", "drop_last", "file list", "batch size"):
        assert other not in told


# --------------------------------------------------------------------------------------------------- data that fails


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_that_fails_in_a_batch_that_would_be_dropped_fails(workers: int) -> None:
    """``drop_last=True`` drops a short batch, not the failure that made it short: at each place in its batch."""
    for at in (18, 19, 20, 25, 26) if workers else range(27):
        dataset = one_replica(DataLoader(Stream(partial(some, at)), 4, drop_last=True, num_workers=workers))
        delivered: list[Any] = []
        with pytest.raises(tdi.SourceError, match="cannot be read"):
            delivered.extend(batch.tolist() for batch in dataset)
        assert delivered == [list(range(4 * step, 4 * step + 4)) for step in range(at // 4)]
        dataset.close()


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_sampler_that_raises_ends_the_epoch_where_it_did_with_loader_workers_too(prefetch: int) -> None:
    """torch asks a sampler for batches ahead, as the workers start: what was drawn before it raised is delivered."""
    loader = DataLoader(NUMBERS, 3, sampler=Order(20, lambda _: some(11)), num_workers=2)
    dataset = one_replica(loader, prefetch=prefetch)
    delivered: list[Any] = []
    before = {*multiprocessing.active_children()}
    with pytest.raises(tdi.SourceError, match="cannot be read"):
        delivered.extend(batch.tolist() for batch in dataset)
    assert delivered == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert place_of(dataset) == (0, 3)
    assert {*multiprocessing.active_children()} <= before
