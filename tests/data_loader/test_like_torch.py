"""The drop-in in one process, held against torch's loader step by step: errors, empty batches, lengths, warnings."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
import tracemalloc
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

import torchdistinput as tdi
from tests.data import Count, Mapped, Numbers, Order, Sized, Stream, Together
from tests.support.beside_torch import Look, Ours, Torchs, as_torch, epochs, plain, seen
from tests.support.epochs import lists, raised
from tests.support.launched import Scenes, launched
from tests.support.waiting import wait_for_end
from torchdistinput.sources.torch_loader import loader_runs

WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}]


@pytest.fixture(autouse=True)
def no_loader_worker_is_left() -> Iterator[None]:
    yield
    wait_for_end(multiprocessing.active_children)


def fails(bad: tuple[int, ...], kind: type[BaseException], index: int) -> int:
    if index in bad:
        raise kind(f"no {index}")
    return index


def failing(*bad: int, kind: type[BaseException] = ValueError) -> Mapped:
    """Fails at some of its samples, each time with an exception of its own."""
    return Mapped(9, partial(fails, bad, kind))


def failing_at_once(*bad: int, kind: type[BaseException] = ValueError) -> Together:
    """Reads whole batches."""
    return Together(9, lambda indices: [fails(bad, kind, index) for index in indices])


class Resumable(IterableDataset[int]):
    """An iterable whose iterator goes on after an error."""

    def __init__(self, *bad: int, kind: type[BaseException] = ValueError, length: int = 10) -> None:
        self.bad, self.kind, self.length = bad, kind, length

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        self.number, self.by = (-1, 1) if info is None else (info.id - info.num_workers, info.num_workers)
        return self

    def __next__(self) -> int:
        self.number += self.by
        if self.number >= self.length:
            raise StopIteration
        if self.number in self.bad:
            raise self.kind(f"no {self.number}")
        return self.number


def ended(kind: type[BaseException] = ValueError) -> Stream:
    """A generator, which ends by its error."""

    def numbers() -> Iterator[int]:
        yield from range(5)
        raise kind("of the generator")

    return Stream(numbers)


class Indices:
    """A sampler, or batch sampler, whose iterator goes on after an error."""

    def __init__(self, *found: Any, kind: type[BaseException] = ValueError) -> None:
        self.found, self.kind = found, kind

    def __iter__(self) -> Iterator[Any]:
        self.rest = iter(self.found)
        return self

    def __next__(self) -> Any:
        found = next(self.rest)
        if found == "bad":
            raise self.kind("of the sampler")
        return found


def ending_sampler() -> Iterator[int]:
    yield from range(3)
    raise KeyError("of the sampler")


class EachTime:
    """A sampler that is a generator function."""

    def __iter__(self) -> Iterator[int]:
        return ending_sampler()


def collate_but_3(kind: type[BaseException], samples: Any) -> Any:
    if samples == 3 or (isinstance(samples, list) and 3 in samples):
        raise kind("no batch")
    return samples


failing_collate = partial(collate_but_3, KeyError)
interrupted_collate = partial(collate_but_3, KeyboardInterrupt)


class OwnError(Exception):
    """Cannot be made of a text alone."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


def raise_own_error(samples: list[int]) -> list[int]:
    if 3 in samples:
        raise OwnError(7, "no batch")
    return samples


Program = Callable[[], dict[str, Any]]


PROGRAMS: dict[str, Program] = {
    "samples": lambda: {"dataset": failing(2, 5), "batch_size": 2},
    "samples, shuffled": lambda: {"dataset": failing(2, 5), "batch_size": 2, "shuffle": True},
    "samples, the last short batch dropped": lambda: {"dataset": failing(8), "batch_size": 2, "drop_last": True},
    "samples, each by itself": lambda: {"dataset": failing(0, 2, 8), "batch_size": None},
    "every sample": lambda: {"dataset": failing(*range(9)), "batch_size": 2},
    "whole batches": lambda: {"dataset": failing_at_once(2, 5), "batch_size": 2},
    "an end of the data in the wrong place": lambda: {"dataset": failing(4, kind=StopIteration), "batch_size": 2},
    "tensors that are not there": lambda: {
        "dataset": TensorDataset(torch.arange(4)),
        "batch_sampler": [[0, 1], [2, 9], [3]],
    },
    "collate": lambda: {"dataset": range(8), "batch_size": 2, "collate_fn": failing_collate},
    "conversion": lambda: {"dataset": range(8), "batch_size": None, "collate_fn": failing_collate},
    "conversion of an iterable": lambda: {
        "dataset": Resumable(),
        "batch_size": None,
        "collate_fn": failing_collate,
    },
    "collate of an iterable": lambda: {"dataset": Resumable(), "batch_size": 3, "collate_fn": failing_collate},
    "an iterable that goes on": lambda: {"dataset": Resumable(2, 7), "batch_size": 3},
    "an iterable that goes on, at the ends of its batches": lambda: {"dataset": Resumable(0, 5, 9), "batch_size": 3},
    "an iterable that goes on, the last short batch dropped": lambda: {
        "dataset": Resumable(2, 7),
        "batch_size": 3,
        "drop_last": True,
    },
    "elements that go on": lambda: {"dataset": Resumable(0, 2, 3, 9), "batch_size": None},
    "an iterable that ended": lambda: {"dataset": ended(), "batch_size": 2},
    "elements that ended": lambda: {"dataset": ended(), "batch_size": None},
}

OF_THE_SAMPLER: dict[str, Program] = {
    "a sampler that ended": lambda: {"dataset": range(8), "sampler": EachTime(), "batch_size": 2},
    "a sampler of samples that ended": lambda: {"dataset": range(8), "sampler": EachTime(), "batch_size": None},
    "a sampler that would go on": lambda: {"dataset": range(8), "sampler": Indices(0, 1, "bad", 2), "batch_size": 2},
    "single indices that go on": lambda: {"dataset": range(8), "sampler": Indices(0, "bad", 2), "batch_size": None},
    "batches that go on": lambda: {"dataset": range(8), "batch_sampler": Indices([0, 1], "bad", "bad", [2], "bad")},
    "what is no batch": lambda: {"dataset": range(8), "batch_sampler": [[0, 1], 2, [3]]},
}

INTERRUPTED: dict[str, Program] = {
    "samples": lambda: {"dataset": failing(2, kind=KeyboardInterrupt), "batch_size": 2},
    "samples, each by itself": lambda: {"dataset": failing(2, kind=KeyboardInterrupt), "batch_size": None},
    "whole batches": lambda: {"dataset": failing_at_once(2, kind=KeyboardInterrupt), "batch_size": 2},
    "the interpreter's end": lambda: {"dataset": failing(2, kind=SystemExit), "batch_size": 2},
    "collate": lambda: {"dataset": range(8), "batch_size": 2, "collate_fn": interrupted_collate},
    "conversion": lambda: {"dataset": Resumable(), "batch_size": None, "collate_fn": interrupted_collate},
    "collate of an iterable": lambda: {
        "dataset": Resumable(),
        "batch_size": 3,
        "collate_fn": interrupted_collate,
    },
    "an iterable that goes on": lambda: {"dataset": Resumable(2, 7, kind=KeyboardInterrupt), "batch_size": 3},
    "an iterable that ended": lambda: {"dataset": ended(KeyboardInterrupt), "batch_size": 2},
    "batches that go on": lambda: {
        "dataset": range(8),
        "batch_sampler": Indices([0, 1], "bad", [2], kind=KeyboardInterrupt),
    },
}


def told(loader: Any, steps: int = 16, epochs: int = 2) -> list[Any]:
    """What each ``next`` of some epochs gives: the batch, the exception's type and text, or the end, and its end again.

    With loader workers torch's text has the worker's traceback in it; where ours is, the next test tells.
    """
    found: list[Any] = []
    for _ in range(epochs):
        iterator = iter(loader)
        for _ in range(steps):
            try:
                found.append(plain(next(iterator)))
            except BaseException as error:
                worker = "DataLoader worker process" in str(error)
                found.append(
                    (type(error), str(error).strip().splitlines()[-1].split(": ", 1)[1] if worker else error.args)
                )
                if loader.num_workers:
                    found[-1] = found[-1][0]
    return [*found, torch.rand(()).item()]


def both(program: Program, **more: Any) -> list[Any]:
    found = []
    for cls in (Torchs, Ours):
        torch.manual_seed(3)
        found.append(told(cls(**program(), **more)))
    return found


def kind_of(step: Any) -> type[BaseException] | None:
    """Of what was raised at a step, if that was an exception."""
    kind = step[0] if isinstance(step, tuple) else step
    return kind if isinstance(kind, type) and issubclass(kind, BaseException) else None


def ends_as_in_torch(torchs: list[Any], ours: list[Any]) -> bool:
    """Whether an epoch had an error. Up to it each epoch is torch's; there it ends, as the next call says."""
    steps, failed = len(torchs) // 2, False
    assert (len(torchs), torchs[-1]) == (len(ours), ours[-1])  # also the draw that comes next
    for first in (0, steps):
        theirs, own = (each[first : first + steps] for each in (torchs, ours))
        error = next((place for place, each in enumerate(theirs) if kind_of(each)), steps)
        assert own[: error + 1] == theirs[: error + 1]
        after = [*map(kind_of, own[error + 1 :])]
        if after[:1] == [tdi.InputError]:
            failed = True
            del after[0]
        else:
            assert own == theirs
        assert set(after) <= {StopIteration}
    return failed


def some(settings: list[dict[str, Any]], number: int, *, everything: bool) -> list[dict[str, Any]]:
    """The first setting, and one of the others, which rotate with the number; or all of them."""
    return settings if everything else [settings[0], settings[1 + number % (len(settings) - 1)]]


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_error_is_that_of_torch_and_ends_the_epoch(name: str, all_cells: bool) -> None:
    for workers in some(WORKERS, list(PROGRAMS).index(name), everything=all_cells):
        failed = ends_as_in_torch(*both(PROGRAMS[name], **workers))
        assert failed == ("the last short batch dropped" not in name or "iterable" in name)


@pytest.mark.parametrize("name", OF_THE_SAMPLER)
def test_an_error_of_the_sampler_is_that_of_torch_and_ends_the_epoch(name: str) -> None:
    assert ends_as_in_torch(*both(OF_THE_SAMPLER[name])) == (name != "a sampler that would go on")


@pytest.mark.parametrize("workers", WORKERS[1:], ids=str)
@pytest.mark.parametrize("name", OF_THE_SAMPLER)
def test_with_loader_workers_an_error_of_the_sampler_comes_in_its_place_and_no_batch_is_lost_as_by_torch(
    name: str, workers: dict[str, Any]
) -> None:
    here, there = (told(Ours(**OF_THE_SAMPLER[name](), **more), epochs=1)[:-1] for more in ({}, workers))
    assert there == [kind_of(each) or each for each in here]


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interruption_of_the_users_code_is_that_of_torch_and_ends_the_epoch(name: str) -> None:
    assert ends_as_in_torch(*both(INTERRUPTED[name]))


@pytest.mark.parametrize("name", ["samples", "collate", "an iterable that goes on", "an iterable that ended"])
def test_steps_that_are_read_ahead_are_not_lost_by_an_error_before_them(name: str, all_cells: bool) -> None:
    """Held against the loader that does not read ahead, which the tests above hold against torch's."""
    for workers in some(WORKERS, list(PROGRAMS).index(name), everything=all_cells)[1:]:
        found = []
        for more in ({}, {"options": tdi.InputOptions(prefetch=3)}):
            torch.manual_seed(3)
            found.append(told(Ours(**PROGRAMS[name](), **workers, **more)))
        assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["collate", "dataset"])
def test_what_fails_in_a_loader_worker_comes_as_itself_with_the_workers_traceback(kind: str) -> None:
    """Torch makes a new exception of the text, or a RuntimeError where that cannot be."""
    data, collate = (range(6), raise_own_error) if kind == "collate" else (failing(3, kind=KeyError), list)
    found = []
    for workers in (0, 1):
        iterator = iter(Ours(data, batch_size=2, collate_fn=collate, num_workers=workers))
        assert next(iterator) == [0, 1]
        with pytest.raises((OwnError, KeyError)) as caught:
            next(iterator)
        found.append((caught.type, caught.value.args, vars(caught.value)))
        assert workers == 0 or "Traceback (most recent call last)" in str(caught.value.__cause__)
    assert found[0] == found[1]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("data", [failing(*range(9)), Resumable(*range(9))])
def test_epochs_that_end_by_errors_keep_nothing(data: Any, workers: int) -> None:
    loader = Ours(data, batch_size=None, num_workers=workers)
    most = 200 if workers == 0 else 10
    gc.collect()
    gc.disable()  # a circle of an error and its traceback would wait for it
    tracemalloc.start()
    try:
        sizes = []
        for epoch in range(most):
            iterator = iter(loader)
            with pytest.raises(ValueError, match="no 0"):
                next(iterator)
            with pytest.raises(tdi.InputError, match="this epoch ended with the error above"):
                next(iterator)
            left = weakref.ref(iterator)
            del iterator
            assert left() is None  # nor are loader workers left
            if epoch in (most // 2, most - 1):
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
        gc.enable()
    assert sizes[1] - sizes[0] < 100_000


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


LATE = Numbers(6, {2: lambda: time.sleep(60)})


@pytest.fixture
def busy_workers_are_ended_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_runs, "_LEAVE_SECONDS", 0.5)


@pytest.mark.usefixtures("busy_workers_are_ended_soon")
@pytest.mark.parametrize("kind", ["dies", "is late"])
def test_a_loader_worker_that_died_or_is_late_ends_the_epoch(kind: str) -> None:
    iterator = iter(
        Ours(Numbers(6, {2: kill}), num_workers=1) if kind == "dies" else Ours(LATE, num_workers=1, timeout=2)
    )
    found: list[Any] = []
    for _ in range(6):
        try:
            found.append(next(iterator).item())
        except Exception as error:
            found.append((type(error), str(error)))
    numbers = [each for each in found if isinstance(each, int)]
    assert numbers == [*range(len(numbers))]
    first, second, *rest = found[len(numbers) :]
    assert first[0] is RuntimeError
    assert ("DataLoader worker" if kind == "dies" else "timed out after 2 seconds") in first[1]
    assert second[0] is tdi.InputError
    assert "this epoch ended with the error above" in second[1]
    assert {each for each, _ in rest} == {StopIteration}


@pytest.mark.usefixtures("busy_workers_are_ended_soon")
def test_an_interruption_that_comes_while_a_loader_worker_reads_ends_the_epoch() -> None:
    iterator = iter(Ours(LATE, num_workers=1))
    assert [next(iterator).item() for _ in range(2)] == [0, 1]
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    timer.join()
    with pytest.raises(tdi.InputError, match="interrupted while it read, after step 2"):
        next(iterator)
    assert next(iterator, "ended") == "ended"


def no_indices(_: int) -> Iterator[int]:
    raise OSError("no indices")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_batch_samplers_iter_comes_with_the_first_batch(workers: int) -> None:
    iterator = iter(Ours(range(4), batch_sampler=Order(4, no_indices), num_workers=workers))
    with pytest.raises(OSError, match="no indices"):
        next(iterator)
    with pytest.raises(tdi.InputError, match="this epoch ended with the error above"):
        next(iterator)
    assert next(iterator, "ended") == "ended"


@pytest.mark.parametrize("of", [failing, Resumable])
def test_a_state_taken_after_an_error_goes_on_with_the_batch_that_failed(of: Any) -> None:
    first = Ours(of(2), batch_size=2, collate_fn=list)
    iterator = iter(first)
    assert next(iterator) == [0, 1]
    with pytest.raises(ValueError, match="no 2"):
        next(iterator)
    again = Ours(of(), batch_size=2, collate_fn=list)
    again.load_state_dict(first.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the iterable is read again
        assert list(again)[:2] == [[2, 3], [4, 5]]


# -------------------------------------------------------------------------------------------------- empty batches


class Empty(Dataset[Any]):
    """Knows how to read no samples."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: Any) -> Any:
        return index

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [("of", len(indices)), *indices]


EMPTY: dict[str, Program] = {
    "lists": lambda: {"dataset": range(5), "batch_sampler": [[], [0, 1], [], [2], []], "collate_fn": list},
    "lists, collated": lambda: {"dataset": range(5), "batch_sampler": [[], [0, 1], [], [2], []]},
    "lists of tensors": lambda: {"dataset": torch.arange(5), "batch_sampler": [[], [0, 1], [], [2], []]},
    "lists, read at once": lambda: {"dataset": Empty(), "batch_sampler": [[], [0, 1], []], "collate_fn": list},
    "lists as single indices": lambda: {"dataset": Empty(), "sampler": [[], [0, 1]], "batch_size": None},
    "items": lambda: {"dataset": [torch.zeros(0), torch.ones(2), torch.zeros(0)], "batch_size": None},
    "items that are lists": lambda: {"dataset": [[], [1], []], "batch_size": None},
    "elements": lambda: {
        "dataset": Stream(lambda: ([], torch.zeros(0, 2), {}, torch.ones(1, 2), [], [])),
        "batch_size": None,
    },
    "a short last batch": lambda: {"dataset": range(5), "batch_size": 2},
    "a short last batch, dropped": lambda: {"dataset": range(5), "batch_size": 2, "drop_last": True},
    "fewer than a batch, dropped": lambda: {"dataset": range(5), "batch_size": 9, "drop_last": True},
    "fewer elements than a batch, dropped": lambda: {"dataset": Resumable(), "batch_size": 99, "drop_last": True},
    "a short last batch of elements, dropped": lambda: {"dataset": Resumable(), "batch_size": 4, "drop_last": True},
    "no data": lambda: {"dataset": [], "batch_size": 2},
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_batch_is_what_torch_makes_of_it(name: str, all_cells: bool) -> None:
    for workers in some(WORKERS, list(EMPTY).index(name), everything=all_cells):
        failed = ends_as_in_torch(*both(EMPTY[name], **workers))
        assert failed == (name in {"lists, collated", "lists of tensors"})


def test_an_empty_batch_is_a_step_without_samples() -> None:
    loader = Ours(range(5), batch_sampler=[[], [0, 1]], collate_fn=list)
    assert [(batch, loader.step.index, loader.step.global_size) for batch in loader] == [([], 0, 0), ([0, 1], 1, 2)]


# --------------------------------------------------------------------------------------------------- any order


def turns(read: Any) -> Numbers:
    """The first sample waits until another one has come."""
    return Numbers(4, {0: read.acquire})


def halves(read: Any) -> Stream:
    """The first loader worker waits until something has come from the other one."""

    def numbers() -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        if info.id == 0:
            read.acquire()
        yield from range(10 * info.id, 10 * info.id + 3)

    return Stream(numbers)


@pytest.mark.parametrize("kind", [turns, halves])
@pytest.mark.parametrize("lasting", [False, True])
def test_batches_that_need_no_order_come_as_they_are_ready(kind: Any, lasting: bool) -> None:
    for cls in (Torchs, Ours):
        read = multiprocessing.Semaphore(0)
        loader = cls(kind(read), batch_size=None, num_workers=2, in_order=False, persistent_workers=lasting)
        for _ in range(2):
            iterator = iter(loader)
            first = next(iterator)
            assert first in (1, 10)  # in order it would wait for ever
            read.release()
            assert sorted([first, *iterator]) == ([0, 1, 2, 3] if kind is turns else [0, 1, 2, 10, 11, 12])


def test_batches_in_any_order_have_a_state_at_the_ends_of_epochs_only() -> None:
    for data in (range(6), Resumable(length=6)):
        loader = Ours(data, num_workers=2, in_order=False)
        iterator = iter(loader)
        loader.state_dict()
        next(iterator)
        with pytest.raises(tdi.StateMismatch, match="in_order=False.*in_order=True"):
            loader.state_dict()
        assert len(list(iterator)) == 5
        assert loader.state_dict()["epoch"] == 1
    one = Ours(range(6), num_workers=1, in_order=False)
    next(iter(one))
    assert one.state_dict()["step"] == 1


def test_replicas_are_not_divided_in_any_order() -> None:
    loader = Ours(range(6), num_workers=2, in_order=False, strategy=tdi.Strategy(["cpu"] * 2))
    with pytest.raises(tdi.InputError, match="in_order=False"):
        next(iter(loader))


# --------------------------------------------------------------------------------------------------- DataPipes


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_a_data_pipe_is_an_iterable_like_any_other(workers: dict[str, Any]) -> None:
    found = [list(cls(IterableWrapper(range(7)), batch_size=None, **workers)) for cls in (Torchs, Ours)]
    assert found[0] == found[1]
    with Ours(IterableWrapper(range(40)).shuffle(), batch_size=None, shuffle=True, **workers) as shuffled:
        epochs = [list(shuffled) for _ in range(2)]
    repeats = max(1, workers.get("num_workers", 0))
    assert [sorted(epoch) for epoch in epochs] == [sorted([*range(40)] * repeats)] * 2
    assert epochs[0] != epochs[1]
    with pytest.raises(tdi.InputError, match="sharding_filter.*get_worker_info"):
        Ours(IterableWrapper(range(7)).sharding_filter().map(str), batch_size=None, **workers)


# ------------------------------------------------------------------------------------------------------------ on ranks

HINT = tdi.AutoShardPolicy.HINT


def fail() -> None:
    raise ValueError("no 6")


def until_the_end() -> list[Any]:
    """One rank: what each ``next`` gave to a loop that goes on after every error, until the end came twice."""
    found = []
    settings: list[dict[str, Any]] = [
        *({}, {"num_workers": 1}, {"options": tdi.InputOptions(prefetch=0)}),
        {"num_workers": 2, "options": tdi.InputOptions(prefetch=3)},
    ]
    for more in settings:
        iterator = iter(tdi.DataLoader(Numbers(12, {6: fail}), batch_size=4, **more))
        given: list[Any] = []
        while given.count("StopIteration") < 2:
            try:
                given.append(next(iterator).tolist())
            except StopIteration:
                given.append("StopIteration")
            except Exception as error:
                given.append((type(error).__name__, str(error)))
        found.append(given)
    return found


def test_an_error_ends_the_epoch_of_all_ranks_and_a_loop_that_goes_on_after_errors_comes_to_its_end(
    scenes: Scenes,
) -> None:
    for rank, found in enumerate(scenes(2, "errors")):
        for given in found:
            first, (error, told), (again, ended), *ends = given
            assert first == [2 * rank, 2 * rank + 1]
            assert error == "SourceError"
            assert "the input of rank 1 failed at step 1 of epoch 0" in told
            assert again == "InputError"
            assert "this epoch ended with the error above, after step 1, and cannot go on" in ended
            assert "no 6" in ended
            assert ends == ["StopIteration"] * 2


def empty_batches() -> list[Any]:
    data: Any = range(6)
    loader = tdi.DataLoader(data, batch_sampler=[[], [0, 1], [], [2, 3, 4], []])
    found = [(lists(batch), loader.step.index) for batch in loader]
    items: Any = [torch.zeros(0), torch.arange(3.0), torch.zeros(0)]
    return [found, [(lists(batch), loader.step.index) for batch in tdi.DataLoader(items, batch_size=None)]]


def test_a_batch_without_samples_is_passed_over_on_every_rank(scenes: Scenes) -> None:
    first, second = scenes(2, "empty batches")
    assert first[0] == [([0], 0), ([2, 3], 1)]
    assert second[0] == [([1], 0), ([4], 1)]
    assert [[batch for batch, _ in rank[1]] for rank in (first, second)] == [[[0.0, 1.0]], [[2.0]]]


def in_any_order() -> Any:
    data: Any = range(6)
    loader = tdi.DataLoader(data, batch_size=2, num_workers=2, in_order=False)
    return raised(lambda: next(iter(loader)))


def test_batches_in_any_order_are_refused_on_every_rank(scenes: Scenes) -> None:
    for refusal in scenes(2, "any order"):
        assert refusal.kind == "InputError"
        assert "in_order=False" in refusal.message
        assert "in_order=True" in refusal.message


def pipes() -> list[Any]:
    """One rank: two epochs of a DataPipe, and the refusal of another. Ranks have default random states of their own."""
    torch.manual_seed(dist.get_rank())
    loader = tdi.DataLoader(IterableWrapper(range(24)).shuffle(), batch_size=4, shuffle=True)
    divided = DataLoader(IterableWrapper(range(24)).sharding_filter(), batch_size=4)
    refusal = raised(lambda: tdi.Strategy(["cpu"]).distribute_dataset(divided))
    return [[[batch.tolist() for batch in loader] for _ in range(2)], refusal]


def test_a_data_pipe_is_read_once_by_all_ranks_together_and_its_filter_is_refused(scenes: Scenes) -> None:
    (first, refusal), (second, other) = scenes(2, "pipes")
    for of_first, of_second in zip(first, second, strict=True):
        assert sorted(sum([*of_first, *of_second], [])) == [*range(24)]  # noqa: RUF017 - a few
    assert first[0] != first[1]
    assert refusal.kind == other.kind == "InputError"
    assert "sharding_filter" in refusal.message


def scenes_of(_: int, __: Path) -> dict[str, Callable[[], Any]]:
    return {"errors": until_the_end, "empty batches": empty_batches, "any order": in_any_order, "pipes": pipes}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    return launched((2,), scenes_of, tmp_path_factory.mktemp("nothing"))


def lengths(arguments: dict[str, Any], cls: Any) -> list[Any]:
    """Of an iterator, before it is read and after."""
    found: list[Any] = []
    iterator = iter(cls(**arguments))
    for _ in range(2):
        try:
            found.append(len(iterator))
        except TypeError as error:
            found.append(str(error))
        next(iterator)
    return found


def nested(data: Any, workers: dict[str, Any], cls: Any) -> list[Any]:
    """Each loop has its own iterator; torch has one where loader workers live on."""
    loader = cls(data, batch_size=2, shuffle=None if isinstance(data, Count) else True, **workers)
    found: list[Any] = [(plain(outer), plain(inner)) for outer in loader for inner in loader]
    found.append(epochs(loader))
    first = iter(loader)
    found.append(plain(next(first)))
    again = iter(loader)
    found += [first is again, [plain(each) for each in again]]
    return found


LOOKS: dict[str, Look] = {
    **{
        f"length, {arguments}": partial(lengths, {"dataset": range(7), **arguments})
        for arguments in (
            {"batch_size": 2},
            {"batch_size": 2, "drop_last": True},
            {"batch_size": None},
            {"batch_sampler": [[1], [2]]},
        )
    },
    **{
        f"length of an iterable, {arguments}": partial(lengths, {"dataset": Sized(3), **arguments})
        for arguments in ({}, {"batch_size": None})
    },
    **{
        f"nested, {type(data).__name__}, {workers}": partial(nested, data, workers)
        for data in (range(4), Count(4), TensorDataset(torch.arange(4)))
        for workers in WORKERS[:2]
    },
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", LOOKS)
def test_what_is_seen_of_it_is_what_is_seen_of_torchs(name: str) -> None:
    as_torch(LOOKS[name])


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("data", [range(3), Resumable(length=3)], ids=["map-style", "iterable"])
def test_too_many_loader_workers_are_warned_of_as_often_as_by_torch(
    lasting: bool, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # which torch counts
    told = [
        seen(lambda cls: epochs(cls(data, num_workers=3, persistent_workers=lasting), 2), cls)[1]
        for cls in (Torchs, Ours)
    ]
    assert len(told[0]) == (2 if lasting else 3)
    assert told[0] == told[1]
