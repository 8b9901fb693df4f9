"""Batches that are passed over: what comes after is torch's, and so is every random state, at every step."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import torchdistinput as tdi
from torchdistinput.plan.batching import Cutter
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.kernel.index_array import IndexArray
from torchdistinput.sources.kernel.sample_index import SampleNumbers
from torchdistinput.sources.map_style.map_stream import SamplerDraws
from torchdistinput.sources.map_style.sampler_batches import Batches, SkippedBatches, batches_of, size_of
from torchdistinput.sources.map_style.samplers import ShuffleSampler
from torchdistinput.sources.rng import call_directly


class Drifting(Sampler[int]):
    """Draws from the default random state for each index."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(11):
            yield int(torch.randint(100, ()).item())


class Reversed(SequentialSampler):
    """A subclass, of which nothing is known."""

    def __iter__(self) -> Iterator[int]:
        return reversed(range(len(self.data_source)))


class Buckets(BatchSampler):
    """A batch sampler of its own making: batches of many sizes."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0], [1, 2, 3], [4, 5], [6], [7, 8, 9])


def random_sampler(
    n: int, num_samples: int | None, *, replacement: bool
) -> Callable[[torch.Generator | None], RandomSampler]:
    return lambda generator: RandomSampler(range(n), replacement, num_samples, generator)


SAMPLERS: dict[str, Callable[[torch.Generator | None], Iterable[Any]]] = {
    "sequential": lambda _: SequentialSampler(range(11)),
    "sequential, none": lambda _: SequentialSampler(range(0)),
    "random": random_sampler(11, None, replacement=False),
    "random, of 12": random_sampler(12, None, replacement=False),
    "random, 29 of 12": random_sampler(12, 29, replacement=False),
    "random, 24 of 12": random_sampler(12, 24, replacement=False),
    "random, 5 of 12": random_sampler(12, 5, replacement=False),
    "replacement": random_sampler(11, None, replacement=True),
    "replacement, 32 of 11": random_sampler(11, 32, replacement=True),
    "replacement, 77 of 11": random_sampler(11, 77, replacement=True),
    "replacement, 96 of 2**40": random_sampler(2**40, 96, replacement=True),
    "subset": lambda generator: SubsetRandomSampler(range(3, 14), generator),
    "weighted": lambda generator: WeightedRandomSampler([0.5, 1.0, 2.0], 11, generator=generator),
    "drifting": lambda _: Drifting(),
    "subclass": lambda _: Reversed(range(11)),
    "a list": lambda _: list("abcdefghijk"),
    "in batches": lambda _: BatchSampler(SequentialSampler(range(11)), 2, drop_last=False),
}

CUTS: dict[str, Callable[[Any], Iterable[Any]]] = {
    "3": lambda sampler: BatchSampler(sampler, 3, drop_last=False),
    "4, full": lambda sampler: BatchSampler(sampler, 4, drop_last=True),
    "33": lambda sampler: BatchSampler(sampler, 33, drop_last=False),
    "1": lambda sampler: BatchSampler(sampler, 1, drop_last=False),
    "by themselves": lambda sampler: sampler,
    "own": lambda sampler: Buckets(sampler, 2, drop_last=False),
}

States = list[torch.Tensor]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def states(generator: torch.Generator | None) -> States:
    return [torch.get_rng_state(), *([] if generator is None else [generator.get_state()])]


def epoch_of_torch(sampler: str, cut: str, generator: torch.Generator | None) -> tuple[list[Any], list[States]]:
    """The batches of an epoch, and the states before the first, after each, after the end and asked once more."""
    torch.manual_seed(3)
    batches = iter(CUTS[cut](SAMPLERS[sampler](generator)))
    found, seen = [], [states(generator)]
    while (batch := next(batches, None)) is not None:
        found.append(batch)
        seen.append(states(generator))
    return found, [*seen, states(generator)]


def drawn(batches: Batches) -> Any:
    """The next batch, as torch yields it; ``None`` at the end."""
    try:
        batch = batches.draw()
    except StopIteration:
        return None
    return batch.tolist() if isinstance(batch, IndexArray) else batch


def rest_of(batches: Batches) -> list[Any]:
    return list(iter(lambda: drawn(batches), None))


def types_of(batch: Any) -> list[type]:
    return [type(batch), *map(type, batch if isinstance(batch, list) else [])]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("own", [True, False], ids=["generator", "default"])
def test_after_any_number_of_batches_the_rest_and_all_random_states_are_torchs(
    sampler: str, cut: str, own: bool
) -> None:
    expected, seen = epoch_of_torch(sampler, cut, seeded() if own else None)
    samples = [0, *itertools.accumulate(map(size_of, expected))]
    middle = len(expected) // 2
    for start, again in [(0, 1), (1, 0), (3, 2), (middle, 5), (len(expected), 1), (sys.maxsize, 1)]:
        generator = seeded() if own else None
        torch.manual_seed(3)
        batches = batches_of(CUTS[cut](SAMPLERS[sampler](generator)))
        place = min(start, len(expected))
        assert batches.skip(start) == SkippedBatches(place, samples[place])
        if start > len(expected):
            assert all(map(torch.equal, states(generator), seen[-1]))
        elif place:
            assert all(map(torch.equal, states(generator), seen[place]))
        if (batch := drawn(batches)) is not None:  # taking and passing over may alternate
            assert (batch, types_of(batch)) == (expected[place], types_of(expected[place]))
            place += 1
            passed = batches.skip(again).batches
            assert passed == min(again, len(expected) - place)
            place += passed
        for batch, after in zip(expected[place:], seen[place + 1 :], strict=False):
            assert drawn(batches) == batch
            assert all(map(torch.equal, states(generator), after))
        assert batches.skip(0) == SkippedBatches(0, 0)
        for _ in range(2):  # asked again after the end, nothing moves
            assert drawn(batches) is None
            assert all(map(torch.equal, states(generator), seen[-1]))


def test_large_permutations_are_torchs() -> None:
    for n, num_samples in ((16_384, None), (40_001, None), (40_001, 57_003), (20_000, 9)):
        theirs, ours = (RandomSampler(range(n), num_samples=num_samples, generator=seeded()) for _ in range(2))
        for _ in range(2):  # the second epoch goes on with the generator of the first
            expected, batches = (
                list(BatchSampler(theirs, 1000, drop_last=False)),
                batches_of(BatchSampler(ours, 1000, drop_last=False)),
            )
            assert rest_of(batches) == expected
            assert torch.equal(theirs.generator.get_state(), ours.generator.get_state())


def test_a_shuffle_sampler_is_passed_over_without_being_asked_for_its_indices() -> None:
    n = 10**12
    order = ShuffleSampler(n, seed=5).order(0)
    for batch_size in (4, 10_000):
        sampler = ShuffleSampler(n, seed=5)
        batches = batches_of(BatchSampler(sampler, batch_size, drop_last=False), len)
        assert sampler.epoch == 1  # the order is that of the epoch which begins here, whoever reads first
        assert drawn(batches) == order.block(0, batch_size).tolist()
        assert batches.skip(n // batch_size - 3).batches == n // batch_size - 3
        assert drawn(batches) == order.block(n - 2 * batch_size, n - batch_size).tolist()
        assert drawn(batches) == order.block(n - batch_size, n).tolist()
        assert drawn(batches) is None
        assert sampler.epoch == 1
    singles = batches_of(ShuffleSampler(n, seed=5), len)
    assert singles.skip(n - 1) == SkippedBatches(n - 1, n - 1)
    assert drawn(singles) == order.block(n - 1, n).item()


def test_after_an_error_of_the_sampler_nothing_comes_as_with_torchs_generators() -> None:
    class Failing:
        """Goes on after it failed, which a generator cannot."""

        def __init__(self) -> None:
            self.number = 0

        def __iter__(self) -> Failing:
            return self

        def __next__(self) -> int:
            self.number += 1
            if self.number == 5:
                raise OSError("no index")
            return self.number

    batches = batches_of(CUTS["3"](Failing()), len)
    assert drawn(batches) == [1, 2, 3]
    with pytest.raises(OSError, match="no index"):
        drawn(batches)
    assert drawn(batches) is None
    with pytest.raises(OSError, match="no index"):
        batches_of(CUTS["3"](Failing()), len).skip(2)


def cutter(num_workers: int, worker: int, batch_size: int | None, *, shared: bool) -> Cutter:
    topology = Topology(num_workers=num_workers, replicas_per_worker=1, worker=worker)
    return Cutter(topology, shared or num_workers == 1, batch_size)


def asked_by(draws: SamplerDraws) -> Any:
    """The index or indices of the next request, as a dataset of the user's is asked for them."""
    request = draws.take_request()
    assert request is not None
    indices = request[1]
    return indices.tolist() if isinstance(indices, IndexArray) else indices


def failure_of(draws: SamplerDraws) -> BaseException:
    """What the next row has in the place of a batch."""
    row = draws.take_row()
    assert row is not None
    assert row.failure is not None
    assert draws.take_request() is None
    return row.failure


def rows_of(draws: SamplerDraws) -> list[tuple[Any, ...]]:
    """Each row: its digest, its numbers, and what is requested for it; of a whole batch, which one and which row."""
    found: list[tuple[Any, ...]] = []
    item = None
    while (row := draws.take_row()) is not None:
        numbers = [value if isinstance(value, int) else value.tolist() for value in row.numbers or ()]
        requests = [asked_by(draws) for wanted in row.pieces if wanted]
        digest = row.digest if isinstance(row.digest, int) else row.digest()
        assert row.wanted == len(requests)
        if row.row_of_whole is None:
            found.append((digest, numbers, row.pieces, requests))
        else:
            item = requests[0] if requests else item
            found.append((digest, numbers, row.row_of_whole, item))
    with pytest.raises(StopIteration):
        draws.take_request()
    return found


def new_draws(batches: Iterable[Any], cut: Cutter, *, collate: bool) -> SamplerDraws:
    numbers = SampleNumbers(cut.topology, sharded=False, shared=cut.shared)
    return SamplerDraws(batches, cut, collate=collate, lead=0, draw=call_directly, numbers=numbers)


WORLDS = [(1, 0), (2, 0), (2, 1), (3, 2)]
DRAWN: dict[str, tuple[Callable[[], Iterable[Any]], int | None, bool]] = {
    "ints": (lambda: CUTS["3"](SAMPLERS["random"](seeded())), 3, True),
    "strings": (lambda: CUTS["3"](SAMPLERS["a list"](None)), 3, True),
    "full": (lambda: CUTS["4, full"](SAMPLERS["random"](seeded())), 4, True),
    "even": (lambda: CUTS["3"](SAMPLERS["random, of 12"](seeded())), 3, True),
    "own": (lambda: CUTS["own"](SAMPLERS["sequential"](None)), None, True),
    "lists": (lambda: [(0, 1), [2, 3, 4], [5]], None, False),
    "strings by themselves": (lambda: list("abcde"), None, False),
    "ints by themselves": (lambda: SAMPLERS["random"](seeded()), None, False),
}


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "apart"])
@pytest.mark.parametrize(("num_workers", "worker"), WORLDS)
def test_rows_that_are_passed_over_leave_the_rest_as_it_was(
    num_workers: int, worker: int, shared: bool, kind: str
) -> None:
    make, batch_size, collate = DRAWN[kind]
    cut = cutter(num_workers, worker, batch_size, shared=shared)
    whole = rows_of(new_draws(make(), cut, collate=collate))
    for rows in range(1, len(whole) + 1):
        draws = new_draws(make(), cut, collate=collate)
        draws.skip(rows, whole[rows - 1][0])
        assert rows_of(draws) == whole[rows:]


@pytest.mark.parametrize(("rows", "asked"), [(0, "ab"), (1, "ab"), (2, "ab"), (3, "b"), (4, "b"), (5, "b"), (6, "")])
def test_a_whole_batch_that_is_half_delivered_is_asked_for_once_by_its_first_row(rows: int, asked: str) -> None:
    draws = new_draws(["a", "b"], cutter(3, 1, None, shared=False), collate=False)
    draws.skip(rows)
    taken = list(iter(draws.take_row, None))
    assert [row.row_of_whole for row in taken] == [0, 1, 2, 0, 1, 2][rows:]
    assert [row.pieces for row in taken] == [(place in {rows, 3},) for place in range(rows, 6)]
    assert [draws.take_request() for _ in asked] == [(False, each, 0) for each in asked]
    with pytest.raises(StopIteration):
        draws.take_request()


@pytest.mark.parametrize("name", ["3", "4, full", "own"])
def test_a_sampler_with_fewer_batches_than_were_passed_over_is_refused(name: str) -> None:
    there = len(list(CUTS[name](SAMPLERS["sequential"](None))))
    for more in (1, 2, 1000):
        draws = new_draws(CUTS[name](SAMPLERS["sequential"](None)), cutter(2, 0, None, shared=True), collate=True)
        draws.skip(there + more)
        with pytest.raises(tdi.StateMismatch, match=rf"ended after {there} batch\(es\).*after step {there + more}, "):
            raise failure_of(draws)
        assert draws.take_row() is None


@pytest.mark.parametrize("kind", ["ints", "strings", "own", "lists", "strings by themselves", "ints by themselves"])
def test_a_sampler_that_draws_other_samples_than_before_is_refused_naming_both_digests(kind: str) -> None:
    make, batch_size, collate = DRAWN[kind]
    cut = cutter(2, 0, batch_size, shared=True)
    whole = rows_of(new_draws(make(), cut, collate=collate))
    first, second = whole[0][0], whole[1][0]
    draws = new_draws(make(), cut, collate=collate)
    draws.skip(2, first)
    with pytest.raises(tdi.StateMismatch, match=rf"batch 2 of the epoch \(digest {second}\).*saved \(digest {first}\)"):
        raise failure_of(draws)
    assert draws.take_row() is None
