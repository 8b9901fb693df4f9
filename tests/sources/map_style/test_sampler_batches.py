"""Samplers of which batches are passed over, beside what ``test_in_memory.py`` says; and the ``ShuffleSampler``."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

import torchdistinput as tdi
from tests.data import Order
from torchdistinput.plan.batching import Cutter
from torchdistinput.plan.block_shuffle import BlockShuffle
from torchdistinput.plan.permutation import Permutation
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.map_style.map_stream import SamplerDraws
from torchdistinput.sources.map_style.sampler_batches import SkippedBatches, batches_of
from torchdistinput.sources.map_style.samplers import ShuffleSampler
from torchdistinput.sources.rng import call_directly

RANGE: Any = range  # of which torch's types know nothing


def test_large_permutations_are_torchs() -> None:
    for n, num_samples in ((16_384, None), (40_001, None), (40_001, 57_003), (20_000, 9)):
        epochs = []
        for cls in (DataLoader, tdi.DataLoader):
            generator = torch.Generator().manual_seed(7)
            order = RandomSampler(RANGE(n), num_samples=num_samples, generator=generator)
            loader = cls(RANGE(n), 1000, sampler=order, collate_fn=list)
            epochs.append([[*loader], [*loader], generator.get_state().tolist()])
        assert epochs[0] == epochs[1]


@pytest.mark.parametrize("size", [4, 10_000])
def test_a_shuffle_sampler_is_passed_over_without_being_asked_for_its_indices(size: int) -> None:
    n = 10**12
    order = ShuffleSampler(n, seed=5).order(0)
    loader = tdi.DataLoader(RANGE(n), size, sampler=ShuffleSampler(n, seed=5), collate_fn=list)
    assert next(iter(loader)) == order.block(0, size).tolist()
    loader.seek(0, n // size - 2)
    rest = [order.block(n - left, n - left + size).tolist() for left in (2 * size, size)]
    batches = iter(loader)
    assert [next(batches, None) for _ in range(3)] == [*rest, None]


def test_a_short_batch_that_is_passed_over_counts_unless_it_is_dropped() -> None:
    for drop_last, passed in ((False, SkippedBatches(4, 11)), (True, SkippedBatches(3, 9))):
        assert batches_of(BatchSampler(SequentialSampler(range(11)), 3, drop_last)).skip(99) == passed


@pytest.mark.parametrize(("rows", "asked"), [(0, "ab"), (1, "ab"), (2, "ab"), (3, "b"), (4, "b"), (5, "b"), (6, "")])
def test_a_whole_batch_that_is_half_delivered_is_asked_for_once_by_its_first_row(rows: int, asked: str) -> None:
    cut = Cutter(Topology(num_workers=3, replicas_per_worker=1, worker=1), False, None)
    draws = SamplerDraws(["a", "b"], cut, collate=False, lead=0, draw=call_directly, numbers=None)
    draws.skip(rows)
    taken = list(iter(draws.take_row, None))
    assert [row.row_of_whole for row in taken] == [0, 1, 2, 0, 1, 2][rows:]
    assert [row.pieces for row in taken] == [(place in {rows, 3},) for place in range(rows, 6)]
    assert [draws.take_request() for _ in asked] == [(False, each, 0) for each in asked]
    with pytest.raises(StopIteration):
        draws.take_request()


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (range(16), r"ended after 4 batch\(es\).*after step 5, "),
        (range(15), r"ended after 4 batch\(es\).*after step 5, "),
        (range(23, -1, -1), r"batch 5 of the epoch \(digest \d+\).*saved \(digest \d+\)"),
    ],
)
def test_a_sampler_with_fewer_or_other_batches_than_were_passed_over_is_refused(order: range, message: str) -> None:
    saved = tdi.DataLoader(RANGE(24), 4, sampler=Order(24, lambda _: range(24)))
    resumed = tdi.DataLoader(RANGE(24), 4, sampler=Order(24, lambda _: order))
    batches = iter(saved)
    for _ in range(5):
        next(batches)
    resumed.load_state_dict(saved.state_dict())
    with pytest.raises(tdi.StateMismatch, match=message):
        next(iter(resumed))


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
