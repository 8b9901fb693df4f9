"""Batches that are passed over: what comes after is torch's, and so is every random state, at every step."""

from __future__ import annotations

import itertools
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import torchdistinput as tdi
from tests.data import Numbers
from torchdistinput.plan.batching import Cutter
from torchdistinput.plan.block_shuffle import BlockShuffle
from torchdistinput.plan.permutation import Permutation
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.kernel.index_array import IndexArray
from torchdistinput.sources.kernel.sample_index import SampleNumbers
from torchdistinput.sources.map_style.map_stream import SamplerDraws
from torchdistinput.sources.map_style.sampler_batches import Batches, SkippedBatches, batches_of, size_of
from torchdistinput.sources.map_style.samplers import ShuffleSampler
from torchdistinput.sources.rng import call_directly
from torchdistinput.testing import run_ranks


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
        numbers = [value.tolist() for value in row.numbers or ()]
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


def new_draws(batches: Iterable[Any], cut: Cutter, *, collate: bool, numbered: bool = True) -> SamplerDraws:
    numbers = SampleNumbers(cut.topology, sharded=False, shared=cut.shared) if numbered else None
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
    numbered = not kind.endswith("by themselves")  # samples of whole batches have no numbers
    whole = rows_of(new_draws(make(), cut, collate=collate, numbered=numbered))
    for rows in range(1, len(whole) + 1):
        draws = new_draws(make(), cut, collate=collate, numbered=numbered)
        draws.skip(rows, whole[rows - 1][0])
        assert rows_of(draws) == whole[rows:]


@pytest.mark.parametrize(("rows", "asked"), [(0, "ab"), (1, "ab"), (2, "ab"), (3, "b"), (4, "b"), (5, "b"), (6, "")])
def test_a_whole_batch_that_is_half_delivered_is_asked_for_once_by_its_first_row(rows: int, asked: str) -> None:
    draws = new_draws(["a", "b"], cutter(3, 1, None, shared=False), collate=False, numbered=False)
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
    whole = rows_of(new_draws(make(), cut, collate=collate, numbered=False))
    first, second = whole[0][0], whole[1][0]
    draws = new_draws(make(), cut, collate=collate, numbered=False)
    draws.skip(2, first)
    with pytest.raises(tdi.StateMismatch, match=rf"batch 2 of the epoch \(digest {second}\).*saved \(digest {first}\)"):
        raise failure_of(draws)
    assert draws.take_row() is None


class NumPySampler(Sampler[int]):
    """Draws from NumPy's global state, as many a script does."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(9).tolist())

    def __len__(self) -> int:
        return 9


class DriftingSampler(Sampler[int]):
    """The same on all ranks for two batches, another one afterwards."""

    def __iter__(self) -> Iterator[int]:
        return iter([*range(8), *(number + dist.get_rank() for number in range(8, 16))])


class ShorterSampler(Sampler[int]):
    """One batch less on rank 1."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(16 - 4 * dist.get_rank()))


def read(sampler: Any, prefetch: int, num_workers: int) -> tuple[int, str]:
    loader = DataLoader(Numbers(20), batch_size=4, sampler=sampler, num_workers=num_workers)
    dataset = tdi.Strategy(timeout_seconds=20).distribute_dataset(loader, tdi.InputOptions(prefetch=prefetch))
    steps = 0
    try:
        for _ in dataset:
            steps += 1
    except tdi.RankDisagreement as error:
        return steps, str(error)
    raise AssertionError("no difference was found")


def read_all(prefetch: int, num_workers: int) -> list[tuple[int, str]]:
    np.random.seed(dist.get_rank())
    return [read(sampler, prefetch, num_workers) for sampler in (NumPySampler(), DriftingSampler(), ShorterSampler())]


@pytest.mark.parametrize(("prefetch", "num_workers"), [(0, 0), (2, 0), (3, 2)])
def test_samplers_that_draw_differently_are_refused_at_the_step_where_they_do(prefetch: int, num_workers: int) -> None:
    for found in run_ranks(2, read_all, prefetch, num_workers):
        assert [steps for steps, _ in found] == [0, 2, 3]
        for (steps, message), ended in zip(found, (False, False, True), strict=True):
            assert f"differ at step {steps} of epoch 0" in message
            assert ("rank 1: ended" in message) == ended


def overlap() -> list[list[list[int]]]:
    loader = DataLoader(Numbers(20), batch_size=8, num_workers=2, persistent_workers=True)
    with tdi.Strategy().distribute_dataset(loader) as dataset:
        first = iter(dataset)
        begun = [next(first).tolist()]
        second = [batch.tolist() for batch in dataset]
        begun += [batch.tolist() for batch in first]
        return [begun, second, [batch.tolist() for batch in dataset]]


def test_two_iterators_of_a_loader_with_lasting_workers_do_not_disturb_each_other() -> None:
    whole = [batch.tolist() for batch in DataLoader(Numbers(20), batch_size=8)]
    parts = run_ranks(2, overlap)
    for epochs in zip(*parts, strict=True):
        assert [list(chain(*pieces)) for pieces in zip(*epochs, strict=True)] == whole


def test_two_iterators_of_shuffled_files_have_the_orders_of_their_own_epochs(tmp_path: Any) -> None:
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(f"{number}\n")
    files = tdi.FileDataset(str(tmp_path / "*.txt"), tdi.readers.text_lines, map_fn=int, shuffle_files=True)

    def epochs(num_workers: int) -> list[list[int]]:
        dataset = tdi.Strategy(devices=["cpu"]).distribute_dataset(
            DataLoader(files, batch_size=2, num_workers=num_workers)
        )
        return [torch.cat(list(dataset)).tolist() for _ in range(2)]

    expected = epochs(0)
    assert expected[0] != expected[1]
    for num_workers in (0, 2):
        dataset = tdi.Strategy(devices=["cpu"]).distribute_dataset(
            DataLoader(files, batch_size=2, num_workers=num_workers)
        )
        both = [iter(dataset), iter(dataset)]
        assert [torch.cat(list(each)).tolist() for each in both] == expected


@pytest.mark.parametrize("n", [0, 1, 10, 4096, 8192, 8193, 20_000])
def test_an_epoch_is_the_permutation_of_seed_and_epoch(n: int) -> None:
    sampler = ShuffleSampler(n, seed=-5)
    for epoch in range(3):
        order = list(sampler)
        assert order == Permutation(n, -5, epoch).block(0, n).tolist() == list(sampler.order(epoch))
        assert sorted(order) == list(range(n))
        assert {type(index) for index in order} <= {int}
    assert len(sampler) == n


def test_each_iter_is_the_next_epoch_from_what_was_set() -> None:
    sampler = ShuffleSampler(50, seed=1)
    orders = [list(sampler) for _ in range(4)]
    assert len(set(map(tuple, orders))) == 4
    assert sampler.epoch == 4
    sampler.set_epoch(2)
    assert sampler.epoch == 2
    assert [list(sampler), list(sampler)] == orders[2:]
    sampler.set_epoch(0)
    opened, later = iter(sampler), iter(sampler)
    sampler.set_epoch(9)
    assert [list(opened), list(later)] == orders[:2]


def test_in_a_torch_loader_each_epoch_has_every_sample_once_and_a_copy_goes_on_where_it_was() -> None:
    samples = TensorDataset(torch.arange(100))
    loader = DataLoader(samples, batch_size=8, sampler=ShuffleSampler(len(samples), seed=1))
    first, second = (torch.cat([batch for (batch,) in loader]).tolist() for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    assert list(pickle.loads(pickle.dumps(loader.sampler))) == list(ShuffleSampler(100, 1).order(2))


@pytest.mark.parametrize(("arguments", "name"), [((2.5,), "n"), ((True,), "n"), (("9",), "n"), ((9, None), "seed")])
def test_what_is_no_int_is_refused(arguments: tuple[Any, ...], name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be an int, got "):
        ShuffleSampler(*arguments)
    with pytest.raises(TypeError, match="^epoch must be an int, got 1.0"):
        ShuffleSampler(9).set_epoch(1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [-1, 2**45 + 1])
def test_a_length_out_of_range_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match=rf"n is {n}; a ShuffleSampler needs 0 <= n <= 2\*\*45"):
        ShuffleSampler(n)


def test_blocks_are_shuffled_by_the_law_of_the_block_shuffle() -> None:
    sampler = ShuffleSampler(1003, seed=4, block=10, window=3)
    assert [*sampler] == [*BlockShuffle(1003, 10, 3, 4, 0)]
    assert [*sampler] == [*BlockShuffle(1003, 10, 3, 4, 1)]
    assert [*ShuffleSampler(1003, seed=4, block=10)] == [*BlockShuffle(1003, 10, 16, 4, 0)]
    assert {ShuffleSampler(9, 4).key, sampler.key} == {4, "4, blocks of 10, 3 a window"}


def in_blocks(left: dict[str, Any] | None) -> tuple[list[list[int]], dict[str, Any]]:
    """One rank: an epoch, or the rest of one that was left, but for its last two steps; and the state there."""
    data = TensorDataset(torch.arange(103))
    loader = DataLoader(data, batch_size=10, sampler=ShuffleSampler(103, seed=3, block=8, window=2))
    dataset = tdi.Strategy(["cpu"]).distribute_dataset(loader)
    if left is not None:
        dataset.load_state_dict(left)
    iterator = iter(dataset)
    parts = [next(iterator)[0].tolist() for _ in range(4 if left is None else 7)]
    return parts, dataset.state_dict()


def test_an_epoch_in_blocks_goes_on_at_another_world_size() -> None:
    whole = [*ShuffleSampler(103, seed=3, block=8, window=2)]
    first = run_ranks(2, in_blocks, None)
    rest = run_ranks(3, in_blocks, first[0][1])
    read = [number for ranks in (first, rest) for step in zip(*(parts for parts, _ in ranks), strict=True)
            for part in step for number in part]  # fmt: skip
    assert read == whole


@pytest.mark.parametrize(
    ("arguments", "error"),
    [({"window": 3}, ValueError), ({"block": 0}, ValueError), ({"block": 2, "window": 0}, ValueError),
     ({"block": "a"}, TypeError)],
)  # fmt: skip
def test_wrong_blocks_are_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="block|window"):
        ShuffleSampler(10, **arguments)


def test_a_state_of_other_blocks_is_refused() -> None:
    def loader(window: int) -> tdi.DistributedDataset:
        sampler = ShuffleSampler(103, seed=3, block=8, window=window)
        data = DataLoader(TensorDataset(torch.arange(103)), batch_size=10, sampler=sampler)
        return tdi.Strategy(["cpu"]).distribute_dataset(data)

    saved = loader(2)
    next(iter(saved))
    with pytest.raises(tdi.StateMismatch, match="blocks of 8, 2 a window"):
        loader(3).load_state_dict(saved.state_dict())
