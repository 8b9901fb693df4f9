"""Resuming in one process: at every step of every epoch, what comes is what came without the interruption."""

from __future__ import annotations

import json
import warnings
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
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import torchdistinput as tdi
from tests.support import inputs
from tests.support.cells import cells
from tests.support.resume import (
    EPOCHS,
    OTHER_SEED,
    SEED,
    Run,
    Setting,
    cut,
    iterables_may_be_skipped,
    known,
    one_process,
    record,
    run_of,
    steps,
)

DropIn: Any = tdi.DataLoader  # torch's types ask for a Dataset; lists and ranges will do

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


# ------------------------------------------------------------------------------------------------------ every step


@pytest.mark.parametrize("name", inputs.LOADERS)
def test_every_input_goes_on_exactly_from_every_state(name: str, all_cells: bool, tmp_path: Path) -> None:
    """All samplers and sources; other numbers of replicas, other read-ahead, strategy and drop-in."""
    inputs.write_numbers(tmp_path)
    start = list(inputs.LOADERS).index(name)
    pairs = PAIRS if all_cells else [PAIRS[7 * start % len(PAIRS)]]
    with iterables_may_be_skipped():
        for first, second in pairs:
            check_every_state(known(name, tmp_path), first, second, epochs=3 if all_cells else 2)


FREE_OF_WORKERS = [
    "sequential",
    "shuffled by a generator",
    "shuffled by torch.manual_seed only",
    "weighted",
    "own batch sampler of varying sizes",
    "sampler of batches",
    "files",
]
NO_WORKERS: dict[str, Any] = {}
WORKERS: dict[str, Any] = {"num_workers": 2}
LASTING: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}


def test_another_number_of_loader_workers_changes_nothing(all_cells: bool, tmp_path: Path) -> None:
    """The batches of the run that was interrupted, also in the epochs after; states from all over the run."""
    inputs.write_numbers(tmp_path)
    kinds = [(NO_WORKERS, WORKERS), (WORKERS, NO_WORKERS), (WORKERS, WORKERS), (LASTING, LASTING)]
    settings = {"kind": kinds, "replicas": (0, 2), "prefetch": (0, 2)}
    for name, setting in cells(FREE_OF_WORKERS, settings, everything=all_cells):
        make = known(name, tmp_path)
        before, after = setting["kind"]
        reference = {} if name == "files" else before  # torch deals the records of files out to its workers
        torch.manual_seed(SEED)
        batches = one_process(make, reference, epochs=2)
        torch.manual_seed(SEED)
        delivered, states = record(run_of(make, Setting(setting["replicas"], 0, before)), epochs=2)
        assert delivered == cut(batches, setting["replicas"]), (name, setting)
        for saved in states[:: 1 if all_cells else 8]:
            torch.manual_seed(OTHER_SEED)
            resumed = run_of(make, Setting(setting["replicas"], setting["prefetch"], after)).load(saved)
            assert list(steps(resumed, epochs=2)) == delivered[saved.done :], (name, setting, saved)
            resumed.loader.close()


@pytest.mark.parametrize(("before", "after"), [(NO_WORKERS, WORKERS), (WORKERS, NO_WORKERS), (LASTING, LASTING)])
def test_a_batch_sampler_that_draws_as_soon_as_it_is_asked_goes_on_with_other_loader_workers_too(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    """Torch asks it twice where it starts workers; the resumed run as often as the one that was interrupted."""

    def make(cls: Any, **more: Any) -> Any:
        sampler = inputs.BatchesDrawnAtOnce(11)
        return cls(range(11), batch_sampler=sampler, **more)

    torch.manual_seed(SEED)
    delivered, states = record(run_of(make, Setting(more=before)))
    for saved in states[1:-1:4]:
        torch.manual_seed(OTHER_SEED)
        resumed = run_of(make, Setting(prefetch=2, more=after)).load(saved)
        assert list(steps(resumed)) == delivered[saved.done :]
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


def shuffled(cls: Any = DataLoader, **more: Any) -> Any:
    return shuffled_over(range(23), cls, **more)


BY_DEFAULT_STATE: dict[str, Callable[..., Any]] = {
    "random": lambda cls, **more: cls(range(23), batch_size=4, shuffle=True, **more),
    "subset": lambda cls, **more: cls(range(23), batch_size=4, sampler=SubsetRandomSampler(range(3, 20)), **more),
    "weighted": lambda cls, **more: cls(
        range(23), batch_size=4, sampler=WeightedRandomSampler([1.0, 2.0, 3.0] * 7, 15), **more
    ),
    "replacement": lambda cls, **more: cls(
        range(23), batch_size=4, sampler=RandomSampler(range(23), replacement=True, num_samples=37), **more
    ),
    "batches of batches": lambda cls, **more: cls(
        inputs.BatchesByList(),
        batch_size=None,
        sampler=BatchSampler(RandomSampler(range(11)), 3, drop_last=False),
        **more,
    ),
}


@pytest.mark.parametrize("kind", BY_DEFAULT_STATE)
def test_samplers_without_a_generator_go_on_from_the_saved_random_state(kind: str) -> None:
    check_every_state(BY_DEFAULT_STATE[kind], Setting(replicas=2, prefetch=2), Setting())
    check_every_state(BY_DEFAULT_STATE[kind], Setting(prefetch=1), Setting(replicas=3, prefetch=0))


@pytest.mark.parametrize("replicas", [0, 2])
def test_a_second_and_a_third_resume_are_as_exact_as_the_first(replicas: int, tmp_path: Path) -> None:
    inputs.write_numbers(tmp_path)
    for name in ("shuffled by a generator", "shuffled by torch.manual_seed only", "files"):
        make = known(name, tmp_path)
        torch.manual_seed(SEED)
        delivered, _ = record(run_of(make, Setting(replicas)))
        torch.manual_seed(SEED)
        run, found = run_of(make, Setting(replicas)), []
        for length in (2, 1, 4, 0, 3, 1, None):
            found += list(steps(run, until=length))
            saved = run.save(len(found))
            run.loader.close()
            torch.manual_seed(OTHER_SEED)
            run = run_of(make, Setting(replicas, prefetch=2)).load(saved)
        assert found == delivered, name


@pytest.mark.parametrize("prefetch", [0, 3])
def test_after_a_break_the_state_is_that_of_the_last_step_until_the_next_epoch_begins(prefetch: int) -> None:
    run = run_of(shuffled, Setting(1, prefetch))
    left = list(steps(run, until=2))
    broken = run.save(2)
    assert (broken.state["epoch"], broken.state["step"], broken.state["samples"]) == (0, 2, 8)
    iterator = iter(run.loader)
    opened = run.save(2)
    assert (opened.state["epoch"], opened.state["step"]) == (1, 0)
    second = [(1, index, run.parts(element)) for index, element in enumerate(iterator)]

    whole, _ = record(run_of(shuffled, Setting(1)), epochs=1)
    assert left + list(steps(run_of(shuffled, Setting(1)).load(broken), epochs=1)) == whole
    assert list(steps(run_of(shuffled, Setting(1)).load(opened), epochs=2)) == second


def test_a_run_that_goes_on_after_a_break_is_resumed_as_it_was_not_as_it_would_have_been() -> None:
    """The epoch after a break is drawn from where the generator then was; its states know."""
    run = run_of(shuffled, Setting(2, 2))
    list(steps(run, until=3))
    delivered, states = record(run, epochs=2)
    assert [each[0] for each in delivered] == [1] * 6 + [2] * 6
    for saved in states[1:]:  # the first is that of the epoch that was left
        resumed = run_of(shuffled, Setting(0, 1)).load(saved)
        assert list(steps(resumed)) == [
            (epoch, step, [[*chain(*both)]]) for epoch, step, both in delivered[saved.done :]
        ]


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


def test_a_loaded_state_may_be_replaced_by_an_epoch_of_ones_own() -> None:
    delivered, states = record(run_of(known_by_seed, Setting()))
    run = run_of(known_by_seed, Setting()).load(states[4])
    run.loader.set_epoch(1)
    assert list(steps(run, epochs=2)) == [each for each in delivered if each[0] == 1]


def known_by_seed(cls: Any = DataLoader, **more: Any) -> Any:
    return cls(range(23), batch_size=4, sampler=tdi.ShuffleSampler(23, seed=3), **more)


def test_the_sampler_of_any_length_goes_on_too() -> None:
    check_every_state(known_by_seed, Setting(2, 2), Setting())
    check_every_state(known_by_seed, Setting(0, 0, WORKERS), Setting(3, 1))


class Told(torch.utils.data.Sampler[int]):
    """Shuffles by the epoch that it is told, as torch's ``DistributedSampler``."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 13

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(13, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_a_sampler_that_was_told_its_epoch_is_told_again() -> None:
    def make() -> Any:
        return DropIn(range(13), batch_size=4, sampler=Told())

    loader, found, states = make(), [], []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            found.append(batch.tolist())
            states.append(json.dumps(loader.state_dict()))
    for done, text in enumerate(states, 1):
        resumed, rest = make(), []
        state = json.loads(text)
        epoch = state["epoch"]  # after the last step the next one
        resumed.load_state_dict(state)
        for later in range(epoch, EPOCHS):
            if later > epoch:
                resumed.set_epoch(later)
            rest += [batch.tolist() for batch in resumed]
        assert rest == found[done:]


class Augmented(Dataset[tuple[int, int]]):
    """Each sample with its seed for random augmentation."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, tdi.sample_seed()


ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": dict,
    "shuffled": lambda: {"shuffle": True},
    "by a generator": lambda: {"shuffle": True, "generator": inputs.generator()},
    "by a seed": lambda: {"sampler": tdi.ShuffleSampler(13, seed=1)},
}


@pytest.mark.parametrize("order", ORDERS)
def test_samples_are_augmented_by_the_seeds_of_the_run_that_was_left(order: str) -> None:
    def make(cls: Any = DataLoader, **more: Any) -> Any:
        return cls(Augmented(), batch_size=4, **ORDERS[order](), **more)

    torch.manual_seed(SEED)
    delivered, states = record(run_of(make, Setting()))
    for saved in states:
        torch.manual_seed(OTHER_SEED if saved.done else SEED)  # before the first draw a state has no seed yet
        again = run_of(make, Setting(0, 2, WORKERS if saved.done == 5 else NO_WORKERS)).load(saved)
        assert list(steps(again)) == delivered[saved.done :], saved
        again.loader.close()


@pytest.mark.parametrize("name", ["shuffled by a generator", "sampler of batches", "iterable", "files"])
@pytest.mark.parametrize("more", [{}, {"partial_batch": "pad"}])
def test_indices_and_masks_go_on_too(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    inputs.write_numbers(tmp_path)
    if more and name == "sampler of batches":
        name = "drop last"  # ready batches have no size to pad to
    options = {"with_index": True, **more}
    with iterables_may_be_skipped():
        delivered, states = record(run_of(known(name, tmp_path), Setting(2, 2), options), epochs=2)
        for saved in states:
            resumed = run_of(known(name, tmp_path), Setting(2, 0), options).load(saved)
            assert list(steps(resumed, epochs=2)) == delivered[saved.done :]


class Failing(Dataset[int]):
    """Fails for one sample, until that is mended."""

    def __init__(self, bad: int | None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        if index == self.bad:
            raise OSError("a bad sample")
        return index


@pytest.mark.parametrize("prefetch", [0, 3])
def test_after_a_failure_the_state_is_that_of_the_last_step_before_it(prefetch: int) -> None:
    whole, _ = record(run_of(shuffled, Setting(1)))
    bad = whole[3][2][0][1]
    run = run_of(partial(shuffled_over, Failing(bad)), Setting(1, prefetch))
    with pytest.raises(tdi.SourceError):
        list(steps(run))
    saved = run.save(3)
    assert (saved.state["epoch"], saved.state["step"]) == (0, 3)
    run.loader.close()
    mended = run_of(partial(shuffled_over, Failing(None)), Setting(1, prefetch)).load(saved)
    assert list(steps(mended)) == whole[3:]


# ------------------------------------------------------------------------------------- files, and what is not read


class Counted(Dataset[int]):
    """Knows how often it was asked."""

    def __init__(self, length: int = 23) -> None:
        self.length = length
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        return index


def counted(data: Counted) -> Callable[..., Any]:
    return partial(shuffled_over, data)


@pytest.mark.parametrize("replicas", [0, 2])
def test_a_resume_reads_nothing_that_was_delivered(replicas: int) -> None:
    delivered, states = record(run_of(counted(Counted()), Setting(replicas)))
    for saved in states:
        data = Counted()
        rest = list(steps(run_of(counted(data), Setting(replicas)).load(saved)))
        assert rest == delivered[saved.done :]
        assert data.asked == [sample for _, _, parts in rest for part in parts for sample in part]


@pytest.mark.parametrize("replicas", [0, 2])
def test_seeking_gives_the_batches_from_there_on_and_reads_nothing_else(replicas: int) -> None:
    delivered, _ = record(run_of(counted(Counted()), Setting(replicas)))

    def go(run: Run, epoch: int, step: int) -> None:
        if replicas:
            run.loader.seek(epoch, step)
        else:
            run.loader.set_epoch(epoch)
            run.loader.skip_to(step)

    for epoch, step in ((0, 4), (0, 0), (0, 6)):
        data = Counted()
        run = run_of(counted(data), Setting(replicas))
        go(run, epoch, step)
        rest = list(steps(run, epochs=1))
        assert rest == [each for each in delivered if each[0] == epoch and each[1] >= step]
        assert data.asked == [sample for _, _, parts in rest for part in parts for sample in part]


def test_seeking_goes_to_later_epochs_of_a_fresh_loader_and_back() -> None:
    """The generator is taken through the epochs in between, without a sample being read."""
    delivered, _ = record(run_of(counted(Counted()), Setting(2)))
    data = Counted()
    run = run_of(counted(data), Setting(2, prefetch=2))
    for epoch, step in ((2, 3), (0, 5), (1, 1), (1, 0), (2, 0)):
        del data.asked[:]
        run.loader.seek(epoch, step)
        expected = [each for each in delivered if each[0] == epoch and each[1] >= step]
        assert list(steps(run, epochs=epoch + 1)) == expected, (epoch, step)
        assert sorted(data.asked) == sorted(sample for _, _, parts in expected for part in parts for sample in part)


def test_seeking_after_a_resume_and_saving_after_seeking() -> None:
    delivered, states = record(run_of(shuffled, Setting(2)))
    run = run_of(shuffled, Setting(2)).load(states[8])
    run.loader.seek(1, 4)
    assert list(steps(run, until=1)) == delivered[10:11]
    saved = run.save(11)
    run.loader.close()
    assert list(steps(run_of(shuffled, Setting(2)).load(saved))) == delivered[11:]


def test_seeking_in_files_gives_the_records_from_there_on(tmp_path: Path) -> None:
    inputs.write_numbers(tmp_path)
    make = known("files", tmp_path)
    delivered, _ = record(run_of(make, Setting(2)))
    run = run_of(make, Setting(2, prefetch=1))
    for epoch, step in ((0, 2), (1, 1), (0, 0)):
        run.loader.seek(epoch, step)
        expected = [each for each in delivered if each[0] == epoch and each[1] >= step]
        assert list(steps(run, epochs=epoch + 1)) == expected


# --------------------------------------------------------------------------------------------------- iterables


class Plain(IterableDataset[int]):
    """0 .. n-1; counts what it made."""

    def __init__(self, n: int = 17) -> None:
        self.n = n
        self.made = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        start, stride = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(start, self.n, stride):
            self.made += 1
            yield number


class OwnState(IterableDataset[int]):
    """Has a state of its own, and goes on from the one that it was given."""

    def __init__(self, n: int = 17) -> None:
        self.n = n
        self.made = 0
        self._next = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        start, stride = (0, 1) if info is None else (info.id, info.num_workers)
        while start + stride * self._next < self.n:
            self._next += 1
            self.made += 1
            yield start + stride * (self._next - 1)
        self._next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


class OwnIterator(Iterator[int]):
    """An iterator with a state of its own."""

    def __init__(self, data: IteratorState) -> None:
        self._data = data
        self._next = 0

    def __next__(self) -> int:
        if self._next == self._data.n:
            raise StopIteration
        self._next += 1
        self._data.made += 1
        return self._next - 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


class IteratorState(IterableDataset[int]):
    """Its iterators have states."""

    def __init__(self, n: int = 17) -> None:
        self.n = n
        self.made = 0

    def __iter__(self) -> Iterator[int]:
        return OwnIterator(self)


def iterated(data: Any, batch_size: int = 3) -> Callable[..., Any]:
    return lambda cls, **more: cls(data, batch_size=batch_size, **more)


@pytest.mark.parametrize("kind", [OwnState, IteratorState])
@pytest.mark.parametrize(("every", "prefetch"), [(1, 0), (1, 3), (4, 0), (4, 3)])
def test_an_iterable_with_a_state_of_its_own_is_restored_and_makes_only_what_is_missing(
    kind: Any, every: int, prefetch: int
) -> None:
    options = {"snapshot_every": every}
    delivered, states = record(run_of(iterated(kind()), Setting(2, prefetch), options))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is skipped that was worth a warning
        for saved in states:
            data = kind()
            resumed = run_of(iterated(data), Setting(2, 0), options).load(saved)
            rest = list(steps(resumed))
            assert rest == delivered[saved.done :]
            replayed = data.made - sum(len(part) for _, _, parts in rest for part in parts)
            # A state is taken before the last element of a batch, which is read again to be compared.
            # A short last batch has no snapshot: that it is the last one is known when the data has started anew.
            short = 2 if saved.state["step"] == 6 else 0
            assert 0 <= replayed <= 3 * (every - 1) + 1 + short, (saved, replayed)


@pytest.mark.parametrize("kind", [Plain, OwnState])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 0), (0, 1), (1, 2)])
def test_another_number_of_loader_workers_is_refused_for_iterables(kind: Any, before: int, after: int) -> None:
    run = run_of(iterated(kind()), Setting(0, 0, {"num_workers": before}))
    list(steps(run, until=2))
    saved = run.save(2)
    run.loader.close()
    with pytest.raises(tdi.StateMismatch, match=rf"(?s)num_workers.*\b{before}\b.*\b{after}\b"):
        run_of(iterated(kind()), Setting(0, 0, {"num_workers": after})).load(saved)
