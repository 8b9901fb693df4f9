"""ShuffleSampler: its epochs are keyed permutations. How random those are is tested in ``tests/plan``."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from torchdistinput.plan.block_shuffle import BlockShuffle
from torchdistinput.plan.permutation import Permutation
from torchdistinput.sources.map_style.samplers import ShuffleSampler
from torchdistinput.testing import run_ranks


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
