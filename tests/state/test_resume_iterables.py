"""Opaque iterables and dataset functions, left after any step and entered again; what a state of their own may hold."""

from __future__ import annotations

import base64
import gc
import itertools
import json
import random
import tracemalloc
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, get_worker_info

import torchdistinput as tdi
from tests.data import Numbers, Stream
from tests.support import inputs
from tests.support.epochs import pieces
from tests.support.resume import OTHER_SEED, SEED, Run, Saved, iterables_may_be_skipped, record, steps

AGAIN = "ignore:the iterable .* is read again:UserWarning"


class Plain(IterableDataset[Any]):
    """Numbers of this loader worker, of which the first has the most."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.given: list[int] = []

    def numbers(self) -> list[int]:
        info = get_worker_info()
        if info is None:
            return [*range(self.count)]
        return [1000 * info.id + number for number in range(max(0, self.count - 5 * info.id))]

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers():
            self.given.append(number)
            yield number


class Kept(Plain):
    """What a function makes of these and of a sum; its own state says that sum beside how many were read."""

    def __init__(self, count: int, of: Callable[[int], Any] = int) -> None:
        super().__init__(count)
        self.of, self.state = of, {"next": 0, "sum": 0}
        self.taken: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        return self.read_on(self.numbers()[self.state["next"] :])  # where it begins is read now

    def read_on(self, numbers: list[int]) -> Iterator[Any]:
        for number in numbers:
            self.given.append(number)
            self.state = {"next": self.state["next"] + 1, "sum": self.state["sum"] + number}
            yield self.of(number + 10**6 * self.state["sum"])
        self.state = {"next": 0, "sum": 0}

    def state_dict(self) -> Any:
        self.taken.append(self.state["next"])
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


class KeptByIterator(Plain):
    """The state is that of the iterator."""

    def __iter__(self) -> Iterator[int]:
        return Counter(self)


class Counter(Iterator[int]):
    def __init__(self, data: Plain) -> None:
        self.data = data
        self.numbers = data.numbers()
        self.place = 0

    def __next__(self) -> int:
        if self.place == len(self.numbers):
            raise StopIteration
        self.place += 1
        self.data.given.append(self.numbers[self.place - 1])
        return self.numbers[self.place - 1]

    def state_dict(self) -> list[int]:
        return [self.place]

    def load_state_dict(self, state: list[int]) -> None:
        (self.place,) = state


def batch(number: int) -> torch.Tensor:
    """Ready batches of several sizes."""
    return torch.arange(number % 3 + 3) + 10 * number


def drawn(count: int) -> Stream:
    """Numbers of the default random state of whoever reads."""
    return Stream(lambda: (torch.randint(1000, ()) for _ in range(count)))


def loader(data: Any, size: int | None, workers: int = 0, **more: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=size, num_workers=workers, **more)


def shuffled(count: int, size: int | None, seed: int | None, workers: int = 0, **more: Any) -> DataLoader[Any]:
    generator = None if seed is None else inputs.generator(seed)
    return loader(Numbers(count), size, workers, shuffle=True, generator=generator, **more)


def over(data: Any, size: int | None = None, replicas: int = 1, **options: Any) -> Run:
    strategy = tdi.Strategy(devices=["cpu"] * replicas)
    dataset = strategy.distribute_dataset(data, tdi.InputOptions(**options), global_batch_size=size)
    return Run(dataset, lambda element: pieces(strategy, element))


def by_function(make: Callable[[], Any], replicas: int = 1, **options: Any) -> Run:
    strategy = tdi.Strategy(devices=["cpu"] * replicas)
    dataset = strategy.distribute_datasets_from_function(lambda _: make(), tdi.InputOptions(**options))
    return Run(dataset, lambda element: pieces(strategy, element))


def by_sampler(sampler: Callable[[torch.Generator], Any], **more: Any) -> Any:
    generator = inputs.generator()
    return DataLoader(Numbers(14), batch_sampler=sampler(generator), generator=generator, **more)


def batches_of(generator: torch.Generator) -> BatchSampler:
    return BatchSampler(RandomSampler(range(14), generator=generator), 3, drop_last=False)


def drawn_at_once(generator: torch.Generator) -> Any:
    return inputs.BatchesDrawnAtOnce(14, generator)


LASTING = {"workers": 2, "persistent_workers": True}
Make = Callable[..., Run]
ITERABLES: dict[str, Make] = {
    "samples": lambda **how: over(Plain(23), 4, 2, **how),
    "samples with a state": lambda **how: over(Kept(23), 4, **how),
    "samples with a state of the iterator": lambda **how: over(KeptByIterator(24), 4, 2, **how),
    "a function of samples": lambda **how: over(lambda: Plain(15), 4, **how),
    "ready batches": lambda **how: over(Kept(7, batch), None, 2, **how),
    "loader in process": lambda **how: over(loader(Kept(17), 4, drop_last=True), None, 2, **how),
    "loader of one worker": lambda **how: over(loader(Plain(14), 4, 1), **how),
    "loader": lambda **how: over(loader(Plain(14), 3, 3, drop_last=True), **how),
    "loader with a state": lambda **how: over(loader(Kept(16), 3, 2), None, 2, **how),
    "loader with a state of the iterator": lambda **how: over(loader(KeptByIterator(16), 3, 2), **how),
    "loader of ready batches": lambda **how: over(loader(Kept(8, batch), None, 2), **how),
    "loader of random numbers": lambda **how: over(loader(drawn(7), 2, 2, generator=inputs.generator()), **how),
    "loader whose workers persist": lambda **how: over(loader(Kept(14), 3, **LASTING), **how),
}
FUNCTIONS: dict[str, Make] = {
    "function, shuffled": lambda **how: by_function(lambda: shuffled(23, 3, 7), **how),
    "function, shuffled by the default state": lambda **how: by_function(lambda: shuffled(20, 4, None), **how),
    "function, shuffled in workers": lambda **how: by_function(lambda: shuffled(23, 2, 7, 2), 3, **how),
    "function, workers that persist": lambda **how: by_function(lambda: shuffled(14, 3, 7, **LASTING), **how),
    "function, each replica": lambda **how: by_function(
        lambda: shuffled(11, 3, 8), 2, replication_mode=tdi.InputReplicationMode.PER_REPLICA, **how
    ),
    "function, no batches": lambda **how: by_function(
        lambda: loader([torch.full((3,), n) for n in range(9)], None, shuffle=True, generator=inputs.generator(3)),
        **how,
    ),
    "function, ShuffleSampler": lambda **how: by_function(
        lambda: loader(Numbers(20), 4, sampler=tdi.ShuffleSampler(20, seed=1), generator=inputs.generator()), **how
    ),
    "function, batch sampler": lambda **how: by_function(lambda: by_sampler(batches_of), **how),
    "function, batch sampler that draws at once": lambda **how: by_function(lambda: by_sampler(drawn_at_once), **how),
    "function, batches": lambda **how: by_function(lambda: Kept(9, batch), 2, **how),
    "function, loader over an iterable": lambda **how: by_function(lambda: loader(Plain(13), 3, 2), **how),
    "function, loader over a state": lambda **how: by_function(lambda: loader(Kept(23), 4), **how),
}
MAKES = {**ITERABLES, **FUNCTIONS}
NEVER_ALIKE = {"function, workers that persist"}
"""A seek from an epoch whose workers live on starts them once more."""


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_rest_from_any_step_is_that_of_the_uninterrupted_run(name: str) -> None:
    """Twice, and by seeking; the positions are those of a run that reads ahead."""
    make = MAKES[name]
    torch.manual_seed(SEED)
    with (run := make(prefetch=0)).loader:
        delivered, states = record(run)
    count = len([each for each in delivered if each[0] == 0])
    assert count > 3
    torch.manual_seed(SEED)
    with (run := make(prefetch=5)).loader:
        assert record(run) == (delivered, states)
    slow = "worker" in name or ("loader" in name and "in process" not in name)
    for saved in [states[2], states[count], states[-4]] if slow else states:
        torch.manual_seed(OTHER_SEED)
        with (run := make(prefetch=2).load(saved)).loader:
            half = list(steps(run, until=2))
            later = run.save(saved.done + len(half))
        torch.manual_seed(OTHER_SEED)
        with (run := make(prefetch=0).load(later)).loader:
            assert half + list(steps(run)) == delivered[saved.done :], saved
    if name in NEVER_ALIKE or "by the default state" in name:
        return
    for epoch, step in ((0, count - 1), (2, 1)):
        with (run := make()).loader:
            run.loader.seek(epoch, step)
            rest = [each for each in delivered if each[0] == epoch and each[1] >= step]
            assert list(steps(run, epochs=epoch + 1)) == rest


# ------------------------------------------------------------------------------------------------ what is read again


@pytest.mark.parametrize("kind", [Kept, KeptByIterator])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_iterable_with_a_state_of_its_own_makes_only_what_is_missing(kind: Any, prefetch: int) -> None:
    delivered, states = record(over(kind(17), 3, prefetch=prefetch))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is skipped that was worth a warning
        for saved in states:
            data = kind(17)
            rest = list(steps(over(data, 3, prefetch=0).load(saved)))
            assert rest == delivered[saved.done :]
            replayed = len(data.given) - sum(len(part) for _, _, parts in rest for part in parts)
            # A state is taken before the last element of a batch, which is read again to be compared.
            step = saved.state["step"]
            since = step - max(batch for batch in (0, 1, 2, 4) if batch <= step)
            assert 0 <= replayed <= 3 * since + 1, (saved, replayed)


def test_a_snapshot_is_taken_in_batches_that_lie_further_and_further_apart() -> None:
    data = Kept(200)
    for _ in over(data, 4).loader:
        pass
    assert data.taken == [4 * batch - 1 for batch in (1, 2, 4, 8, 16, 32, 48)]  # before the last element of a batch


def saved_after(run: Run, count: int) -> Saved:
    with run.loader:
        list(steps(run, until=count))
        return run.save(count)


def told_by(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in told]


def test_reading_again_is_said_once_with_what_it_costs() -> None:
    for count in range(6):
        saved = saved_after(over(Plain(23), 4), count)
        told = told_by(lambda: list(steps(over(Plain(23), 4).load(saved), epochs=1)))  # noqa: B023
        assert [text.partition(". ")[0] for text in told] == [
            f"the iterable Plain is read again from its front, to go on after {count} steps: {4 * count} element(s)"
        ] * (count > 0)


def test_positions_that_nobody_asks_for_are_not_kept() -> None:
    dataset = tdi.Strategy(["cpu"]).distribute_dataset(lambda: iter(itertools.repeat(torch.zeros(2), 4000)))
    sizes = []
    gc.collect()
    tracemalloc.start()
    try:
        for step, _ in enumerate(dataset):
            if step in (1000, 3999):
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert sizes[1] - sizes[0] < 50_000


def test_a_loader_over_map_style_data_of_a_function_is_entered_without_reading() -> None:
    whole, _ = record(by_function(lambda: shuffled(40, 4, 7)), 1)
    saved = saved_after(by_function(lambda: shuffled(40, 4, 7)), 8)
    ways: list[Callable[[Run], Any]] = [lambda run: run.load(saved), lambda run: run.loader.seek(0, 8)]
    for go in ways:
        data = shuffled(40, 4, 7)
        run = by_function(lambda: data, prefetch=0)  # noqa: B023
        go(run)
        assert list(steps(run, epochs=1)) == whole[8:]
        assert len(data.dataset.asked) == 8  # type: ignore[attr-defined]


@pytest.mark.parametrize("batched", [True, False])
def test_files_of_a_function_are_entered_where_the_state_was_saved(tmp_path: Path, batched: bool) -> None:
    (tmp_path / "numbers.txt").write_text("".join(f"{number}\n" for number in range(300)))
    decoded: list[int] = []

    def number_of(line: str) -> Any:
        decoded.append(int(line))
        return torch.tensor(int(line) if batched else [int(line)])

    def make() -> Any:
        files = tdi.FileDataset(f"{tmp_path}/*.txt", tdi.readers.text_lines, map_fn=number_of)
        return loader(files, 5) if batched else files

    whole, _ = record(by_function(make), 1)
    saved = saved_after(by_function(make), 40)
    run = by_function(make, prefetch=0).load(saved)
    decoded.clear()
    assert next(steps(run, epochs=1)) == whole[40]
    assert len(decoded) == (5 if batched else 1)


# ------------------------------------------------------------------------------------------------------- what is told


def fails(at: int, number: int) -> int:
    """Fails at one element."""
    if number % 10**6 == at:
        raise OSError("disk")
    return number


MISMATCHES: dict[str, tuple[Callable[[], Run], Callable[[], Run], int, type[Exception], str]] = {
    "data that became shorter": (
        lambda: over(Plain(23), 4),
        lambda: over(Plain(12), 4),
        4,
        tdi.StateMismatch,
        r"ended after 12 element\(s\), but the state says that 16 or more",
    ),
    "fewer batches of a function": (
        lambda: by_function(lambda: shuffled(20, 4, 7)),
        lambda: by_function(lambda: shuffled(9, 4, 7)),
        4,
        tdi.StateMismatch,
        "batch",
    ),
    "a failure while passing over": (
        lambda: over(Kept(23), 4, own_state="ignore"),
        lambda: over(Kept(23, partial(fails, 6)), 4, own_state="ignore"),
        3,
        tdi.SourceError,
        "element 6",
    ),
    "a failure after a state": (
        lambda: over(Kept(23), 4),
        lambda: over(Kept(23, partial(fails, 18)), 4),
        3,
        tdi.SourceError,
        "element 18",
    ),
    "a state of data that has none now": (
        lambda: over(Kept(23), 4),
        lambda: over(Plain(23), 4),
        3,
        tdi.StateMismatch,
        "Kept.*Plain",
    ),
    **{
        f"{before} loader workers, then {after}": (
            lambda kind=kind, before=before: over(loader(kind(17), 3, before)),  # type: ignore[misc]
            lambda kind=kind, after=after: over(loader(kind(17), 3, after)),  # type: ignore[misc]
            2,
            tdi.StateMismatch,
            rf"(?s)num_workers.*\b{before}\b.*\b{after}\b",
        )
        for kind, before, after in ((Plain, 2, 1), (Kept, 2, 0), (Kept, 0, 1))
    },
}


@pytest.mark.parametrize("case", MISMATCHES)
@pytest.mark.filterwarnings(AGAIN)
def test_a_state_that_does_not_fit_is_refused(case: str) -> None:
    before, after, count, kind, words = MISMATCHES[case]
    saved = saved_after(before(), count)
    with (run := after()).loader, pytest.raises(kind, match=words):
        list(steps(run.load(saved)))


class Holding(Plain):
    """Holds any state."""

    def __init__(self, state: Any, count: int = 9) -> None:
        super().__init__(count)
        self.state = state

    def state_dict(self) -> Any:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("workers", [None, 2])
def test_a_state_that_is_not_plain_is_refused_if_it_must_be_used_and_else_read_again_with_one_warning(
    workers: int | None,
) -> None:
    def make(own_state: Any) -> Run:
        data = Holding({"shards": [{"rng": {1}}]}, 23)
        return over(data, 4, own_state=own_state) if workers is None else over(loader(data, 4, 2), own_state=own_state)

    with make("use").loader as used:
        iterator = iter(used)
        next(iterator)
        with pytest.raises(tdi.StateMismatch, match=r'Holding.state_dict\(\)\["shards"\]\[0\]\["rng"\] is of type set'):
            used.state_dict()
        assert len([*iterator]) > 4
    found: list[Any] = []
    with (run := make("auto")).loader:
        told = told_by(lambda: found.extend(record(run, 1)))
    delivered, states = found
    with iterables_may_be_skipped(), (run := make("auto").load(states[3])).loader:
        assert list(steps(run, epochs=1)) == delivered[3:]
    assert len([text for text in told if text.startswith("the data's own state cannot be saved, so")]) == 1, told


def test_a_function_whose_batches_come_in_any_order_has_no_place() -> None:
    with by_function(lambda: loader(Numbers(20), 4, 2, in_order=False)).loader as dataset:
        next(iter(dataset))
        with pytest.raises(tdi.StateMismatch, match="in_order=True"):
            dataset.state_dict()


# --------------------------------------------------------------------------------------------- what a state may hold


PLAIN = [
    *(None, 0, -(2**70), True, 1.5, float("inf"), "", "a\ud800\u00e9", b"\x00\xff", [], {}),
    *({"": [None, {"a": [1, 2.5, "x", False]}]}, [0.1, 1e308, -0.0], (1, (2, [3]), ()), {"$": "tuple", "of": [1]}),
    *({1: "a", None: 2, ("x", 3): {"$": "tuple"}}, np.int64(7), np.float32(0.1), random.Random(3).getstate()),
    np.random.default_rng(3).bit_generator.state,
]
ARRAYS: list[Any] = [
    *(torch.arange(6).reshape(2, 3), torch.tensor(2.5, dtype=torch.bfloat16), torch.zeros(0, 3)),
    *(torch.arange(12).reshape(3, 4).T, torch.get_rng_state(), torch.tensor([1 + 2j]).conj()),
    *(np.arange(6, dtype=">i2").reshape(2, 3), np.zeros((0, 2))),
]


def held_after(state: Any) -> Any:
    """What data is given that held a state when it was saved, through JSON."""
    saved = saved_after(over(Holding(state), 2, own_state="use"), 1)
    data = Holding("nothing")
    run = over(data, 2, own_state="use").load(saved)
    with run.loader:
        next(iter(run.loader))
    return data.state


@pytest.mark.parametrize("number", range(len(PLAIN)))
def test_a_plain_state_comes_back_as_it_was(number: int) -> None:
    assert repr(held_after(PLAIN[number])) == repr(PLAIN[number])


@pytest.mark.parametrize("number", range(len(ARRAYS)))
def test_tensors_and_arrays_come_back_as_they_were(number: int) -> None:
    value: Any = ARRAYS[number]
    back = held_after({"x": [value]})["x"][0]
    assert (type(back), back.dtype, back.shape) == (type(value), value.dtype, value.shape)
    assert (back == value).all()


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
REFUSED = [
    ({"shards": [0, {"rng": {1}}]}, r'Holding.state_dict\(\)\["shards"\]\[1\]\["rng"\] is of type set'),
    ({1: (object(),)}, r"Holding.state_dict\(\)\[1\]\[0\] is of type object"),
    (np.array(["x"]), r"Holding.state_dict\(\) is of type numpy.ndarray"),
    (OSError("gone"), r"Holding.state_dict\(\) failed: OSError: gone"),
    (CYCLE, "RecursionError"),
    ({"a": torch.zeros(2**18 + 1)}, "at most 1,048,576"),
    (["x" * 2**20], "at most 1,048,576"),
    ([b"x" * (2**20 + 1)], "at most 1,048,576"),
]


@pytest.mark.parametrize(("state", "words"), REFUSED, ids=range(len(REFUSED)))
def test_anything_else_is_refused_by_the_path_of_its_key(state: Any, words: str) -> None:
    with pytest.raises(tdi.StateMismatch, match=words):
        held_after(state)


BOMB = json.dumps({"dataset": {"$": "bytes", "of": base64.b64encode(zlib.compress(bytes(2**21))).decode()}})


@pytest.mark.parametrize(
    "text", ['{"a": [', "[]", '{"other":1}', '{"dataset":{"$":"no","of":1}}', '{"dataset":{"$":1}}', BOMB]
)
def test_an_own_state_that_was_cut_or_grows_without_bound_is_a_mismatch(text: str) -> None:
    state = saved_after(over(Holding(1), 2), 1).state
    state["position"][1][4][0][2] = text

    def go_on() -> None:
        here.load_state_dict(state, strict=False)
        next(iter(here))

    with over(Holding(1), 2).loader as here, pytest.raises(tdi.StateMismatch, match="own state in the state is"):
        go_on()


def test_a_state_is_not_asked_for_where_it_takes_arguments() -> None:
    class Wants(Plain):
        def state_dict(self, num_samples: int, batch_size: int = 1) -> Any:
            raise AssertionError

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    saved = saved_after(over(Wants(9), 4), 1)
    told = told_by(lambda: list(steps(over(Wants(9), 4).load(saved), epochs=1)))
    assert any("Wants.state_dict() needs arguments (num_samples)" in text for text in told), told


class OwnIterator(IterableDataset[int]):
    """Its own iterator: at its end after an epoch, until a state is loaded."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == 6:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("begun", [False, True], ids=["before iter", "before the first step"])
def test_a_state_of_the_front_brings_data_back_that_is_its_own_iterator(begun: bool) -> None:
    loader = tdi.DataLoader(OwnIterator(), batch_size=2)
    iterator = iter(loader) if begun else None
    state = loader.state_dict()
    whole = [batch.tolist() for batch in (loader if iterator is None else iterator)]
    assert whole == [[0, 1], [2, 3], [4, 5]]
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == whole
    fresh = tdi.DataLoader(OwnIterator(), batch_size=2)
    fresh.load_state_dict(state)
    assert [batch.tolist() for batch in fresh] == whole
