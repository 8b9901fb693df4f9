"""Resuming in one process: at every step of every epoch, what comes is what came without the interruption."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import torchdistinput as tdi
from tests.data import Mapped, Numbers
from tests.support import inputs
from tests.support.cells import cells
from tests.support.resume import (
    EPOCHS,
    OTHER_SEED,
    SEED,
    Delivered,
    Setting,
    cut,
    iterables_may_be_skipped,
    known,
    one_process,
    record,
    run_of,
    steps,
)

SETTINGS = (
    Setting(),
    Setting(prefetch=2),
    Setting(replicas=1, prefetch=5),
    Setting(replicas=2, prefetch=0),
    Setting(replicas=3, prefetch=1),
)
PAIRS = [(first, second) for first in SETTINGS for second in SETTINGS if first is not second]


def check_every_state(make: Callable[..., Any], first: Setting, second: Setting, epochs: int = 2) -> None:
    """Takes each state of a run that ``first`` reads, and lets ``second`` go on from it."""
    torch.manual_seed(SEED)
    batches = one_process(make, first.more, epochs)
    torch.manual_seed(SEED)
    delivered, states = record(run_of(make, first), epochs)
    assert delivered == cut(batches, first.replicas)
    expected = cut(batches, second.replicas)
    for saved in states:
        torch.manual_seed(OTHER_SEED)
        resumed = run_of(make, second).load(saved)
        assert list(steps(resumed, epochs=epochs)) == expected[saved.done :], (saved, first, second)
        resumed.loader.close()


def drawn_from(sampler: Callable[[], Any]) -> Callable[..., Any]:
    return lambda cls, **more: cls(range(23), batch_size=4, sampler=sampler(), **more)


BY_DEFAULT_STATE: dict[str, Callable[..., Any]] = {
    "by default, subset": drawn_from(lambda: SubsetRandomSampler(range(3, 20))),
    "by default, weighted": drawn_from(lambda: WeightedRandomSampler([1.0, 2.0, 3.0] * 7, 15)),
    "by default, replacement": drawn_from(lambda: RandomSampler(range(23), replacement=True, num_samples=37)),
    "by default, batches of batches": lambda cls, **more: cls(
        inputs.BatchesByList(), batch_size=None, sampler=BatchSampler(RandomSampler(range(11)), 3, False), **more
    ),
}
"""These have no generator, and are drawn from torch's default random state."""


@pytest.mark.parametrize("name", [*inputs.LOADERS, *BY_DEFAULT_STATE])
def test_every_input_goes_on_exactly_from_every_state(name: str, all_cells: bool, tmp_path: Path) -> None:
    """All samplers and sources; other numbers of replicas, other read-ahead, strategy and drop-in."""
    inputs.write_numbers(tmp_path)
    start = [*inputs.LOADERS, *BY_DEFAULT_STATE].index(name)
    pairs = PAIRS if all_cells else [PAIRS[7 * start % len(PAIRS)]]
    make = BY_DEFAULT_STATE.get(name) or known(name, tmp_path)
    with iterables_may_be_skipped():
        for first, second in pairs:
            check_every_state(make, first, second, epochs=3 if all_cells else 2)


def drawn_at_once(cls: Any, **more: Any) -> Any:
    """Torch asks the batch sampler twice where it starts workers."""
    return cls(range(11), batch_sampler=inputs.BatchesDrawnAtOnce(11), **more)


NO_WORKERS: dict[str, Any] = {}
WORKERS: dict[str, Any] = {"num_workers": 2}
LASTING: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
FREE_OF_WORKERS = [
    "shuffled by a generator",
    "shuffled by torch.manual_seed only",
    "weighted",
    "own batch sampler of varying sizes",
    "sampler of batches",
    "files",
    "drawn at once",
]


def test_another_number_of_loader_workers_changes_nothing(all_cells: bool, tmp_path: Path) -> None:
    """The batches of the run that was interrupted, also in the epochs after; states from all over the run."""
    inputs.write_numbers(tmp_path)
    kinds = [(NO_WORKERS, WORKERS), (WORKERS, NO_WORKERS), (WORKERS, WORKERS), (LASTING, LASTING)]
    settings = {"kind": kinds, "replicas": (0, 2), "prefetch": (0, 2)}
    for name, setting in cells(FREE_OF_WORKERS, settings, everything=all_cells):
        make = drawn_at_once if name == "drawn at once" else known(name, tmp_path)
        before, after = setting["kind"]
        torch.manual_seed(SEED)
        delivered, states = record(run_of(make, Setting(setting["replicas"], 0, before)), epochs=2)
        for saved in states[1 :: 1 if all_cells else 6]:
            torch.manual_seed(OTHER_SEED)
            resumed = run_of(make, Setting(setting["replicas"], setting["prefetch"], after)).load(saved)
            assert list(steps(resumed, epochs=2)) == delivered[saved.done :], (name, setting, saved)
            resumed.loader.close()


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


def test_a_state_taken_with_read_ahead_is_that_of_what_was_delivered() -> None:
    whole, _ = record(run_of(shuffled, Setting(1)))
    run = run_of(shuffled, Setting(1, prefetch=5))
    assert run.loader.element_spec.dtype == torch.int64  # opens the epoch, and reads ahead
    opened = run.save(0)
    assert (opened.state["epoch"], opened.state["step"]) == (0, 0)
    run.loader.close()
    assert list(steps(run_of(shuffled, Setting(1, prefetch=1)).load(opened))) == whole


def test_a_loaded_state_may_be_saved_again_and_loaded_over() -> None:
    delivered, states = record(run_of(shuffled, Setting()))
    run = run_of(shuffled, Setting())
    for saved in (states[9], states[3], states[-1], states[5]):
        run.load(saved)
        again = run.save(saved.done)
        assert again.state == saved.state
    assert list(steps(run)) == delivered[states[5].done :]
    assert run.save(0).state["epoch"] == EPOCHS


class Told(torch.utils.data.Sampler[int]):
    """Shuffles by the epoch that it is told, as torch's ``DistributedSampler``."""

    epoch = 0

    def __len__(self) -> int:
        return 13

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(13, generator=inputs.generator(self.epoch)).tolist())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_a_sampler_that_was_told_its_epoch_is_told_again_and_a_loaded_state_may_be_replaced_by_an_epoch() -> None:
    def make() -> Any:
        return tdi.DataLoader(range(13), batch_size=4, sampler=Told())  # type: ignore[arg-type]

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


ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": dict,
    "shuffled": lambda: {"shuffle": True},
    "by a generator": lambda: {"shuffle": True, "generator": inputs.generator()},
    "by a seed": lambda: {"sampler": tdi.ShuffleSampler(13, seed=1)},
}


@pytest.mark.parametrize("order", ORDERS)
def test_samples_are_augmented_by_the_seeds_of_the_run_that_was_left(order: str) -> None:
    def make(cls: Any = DataLoader, **more: Any) -> Any:
        return cls(Mapped(13, lambda index: (index, tdi.sample_seed())), batch_size=4, **ORDERS[order](), **more)

    torch.manual_seed(SEED)
    delivered, states = record(run_of(make, Setting()))
    for saved in states:
        torch.manual_seed(OTHER_SEED if saved.done else SEED)  # before the first draw a state has no seed yet
        again = run_of(make, Setting(0, 2, WORKERS if saved.done == 5 else NO_WORKERS)).load(saved)
        assert list(steps(again)) == delivered[saved.done :], saved
        again.loader.close()


def fail() -> None:
    raise OSError("a bad sample")


@pytest.mark.parametrize("prefetch", [0, 3])
def test_after_a_failure_the_state_is_that_of_the_last_step_before_it(prefetch: int) -> None:
    whole, _ = record(run_of(partial(shuffled_over, Numbers(23)), Setting(1)))
    bad = whole[3][2][0][1]
    run = run_of(partial(shuffled_over, Numbers(23, {bad: fail})), Setting(1, prefetch))
    with pytest.raises(tdi.SourceError):
        list(steps(run))
    saved = run.save(3)
    assert (saved.state["epoch"], saved.state["step"]) == (0, 3)
    run.loader.close()
    mended = run_of(partial(shuffled_over, Numbers(23)), Setting(1, prefetch)).load(saved)
    assert list(steps(mended)) == whole[3:]


def samples_of(delivered: list[Delivered]) -> list[int]:
    return [*chain.from_iterable(part for _, _, parts in delivered for part in parts)]


@pytest.mark.parametrize("replicas", [0, 2])
def test_a_resume_and_a_seek_read_nothing_but_what_is_delivered(replicas: int) -> None:
    """To later epochs of a fresh loader and back: the generator is taken through the epochs in between."""
    delivered, states = record(run_of(partial(shuffled_over, Numbers(23)), Setting(replicas)))
    for saved in states:
        data = Numbers(23)
        rest = list(steps(run_of(partial(shuffled_over, data), Setting(replicas)).load(saved)))
        assert rest == delivered[saved.done :]
        assert data.asked == samples_of(rest)
    data = Numbers(23)
    run = run_of(partial(shuffled_over, data), Setting(replicas, prefetch=2))
    for epoch, step in ((2, 3), (0, 5), (1, 1), (1, 0), (0, 6), (2, 0)):
        del data.asked[:]
        run.loader.seek(epoch, step)
        expected = [each for each in delivered if each[0] == epoch and each[1] >= step]
        assert list(steps(run, epochs=epoch + 1)) == expected, (epoch, step)
        assert sorted(data.asked) == sorted(samples_of(expected))
    run.load(states[8]).loader.seek(1, 4)
    assert list(steps(run, until=1)) == delivered[10:11]
    saved = run.save(11)
    assert list(steps(run.load(saved))) == delivered[11:]


class Breaks(torch.utils.data.Dataset[int]):
    """Its sixth sample cannot be read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise ValueError("cannot be read")
        return index


class StreamBreaks(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        raise ValueError("cannot be read")


class SamplerBreaks(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(4)
        raise ValueError("cannot be read")


def cannot_be_collated(samples: list[int]) -> torch.Tensor:
    if 5 in samples:
        raise ValueError("cannot be read")
    return torch.tensor(samples)


BREAKS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "samples": lambda: (Breaks(), {}),
    "elements": lambda: (StreamBreaks(), {}),
    "a sampler": lambda: (range(8), {"sampler": SamplerBreaks()}),
    "a collate function": lambda: (range(8), {"collate_fn": cannot_be_collated}),
    "loader workers": lambda: (Breaks(), {"num_workers": 1}),
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
