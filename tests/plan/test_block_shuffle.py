"""The law of the block shuffle, exhaustively over small sizes, and at the limits."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from torchdistinput.plan.block_shuffle import BlockShuffle

SIZES = [*itertools.product(range(14), range(1, 6), range(1, 5))]


def by_law(order: list[int], n: int, block: int, window: int) -> None:
    """Asserts S1 to S4 of an order."""
    assert sorted(order) == list(range(n))
    sizes = {number: min(block, n - number * block) for number in range(-(-n // block))}
    left = dict(sizes)
    seen = 0
    for _ in range(0, len(sizes), window):
        here: Counter[int] = Counter()
        blocks = min(window, len(left))
        while blocks or here:
            number = order[seen] // block
            here[number] += 1
            seen += 1
            if here[number] == sizes[number]:
                blocks -= 1
            if not blocks:
                break
        assert dict(here) == {number: left.pop(number) for number in here}
    assert not left


@pytest.mark.parametrize("key", [(0,), (3, -1), (2**70, 5)])
def test_each_window_has_all_samples_of_its_blocks_and_no_others(key: tuple[int, ...]) -> None:
    for n, block, window in SIZES:
        shuffle = BlockShuffle(n, block, window, *key)
        order = [*shuffle]
        assert len(shuffle) == n
        by_law(order, n, block, window)


def test_any_piece_is_cut_from_the_one_order() -> None:
    for n, block, window in [(13, 3, 2), (24, 4, 3), (25, 4, 3), (1000, 7, 5)]:
        order = [*BlockShuffle(n, block, window, 8)]
        for start, stop in itertools.combinations(range(0, n + 1, 1 + n // 20), 2):
            assert BlockShuffle(n, block, window, 8).block(start, stop).tolist() == order[start:stop]


def test_a_huge_order_is_entered_anywhere_at_once() -> None:
    n, block, window = 2**62 - 12_345, 1000, 16
    shuffle = BlockShuffle(n, block, window, 1)
    for place in (0, n // 3, n - 2000):
        found = shuffle.block(place, place + 1000)
        assert len(set(found.tolist())) == 1000
        assert found.min() >= 0
        assert found.max() < n
        assert len(set((found // block).tolist())) <= 2 * window


def test_the_order_is_a_promise() -> None:
    assert [*BlockShuffle(23, 4, 2, 7, 0)] == PROMISED
    assert [*BlockShuffle(23, 4, 2, 7, 1)] != PROMISED
    assert [*BlockShuffle(23, 4, 2, 8, 0)] != PROMISED


PROMISED = [11, 10, 4, 5, 9, 7, 6, 8, 21, 22, 14, 13, 20, 15, 12, 3, 18, 16, 19, 2, 0, 17, 1]


def test_the_short_block_comes_at_each_place_alike_often() -> None:
    places = Counter([*BlockShuffle(7, 2, 1, seed)].index(6) for seed in range(4000))
    # Behind 0, 1, 2 or 3 full blocks of two samples.
    assert set(places) == {0, 2, 4, 6}
    assert all(abs(count - 1000) < 150 for count in places.values())


@pytest.mark.parametrize(("window", "least"), [(1, 0.0), (4, 0.55), (16, 0.85), (64, 0.97)])
def test_neighbours_are_the_less_related_the_wider_the_window(window: int, least: float) -> None:
    """How far apart neighbours are, over that of a full shuffle (a third of n), within a window of many blocks."""
    n, block = 64_000, 100
    order = BlockShuffle(n, block, window, 1).block(0, n)
    same = (order[1:] // block == order[:-1] // block).mean()
    assert same <= 1 / window + 0.02
    apart = np.abs(np.diff(order)).mean() / (n / 3)
    assert apart >= least


@pytest.mark.parametrize(("n", "block", "window"), [(-1, 1, 1), (2**62 + 1, 1, 1), (5, 0, 1), (5, 1, 0)])
def test_sizes_out_of_range_are_refused(n: int, block: int, window: int) -> None:
    with pytest.raises(ValueError, match="needs 0 <= n|at least 1"):
        BlockShuffle(n, block, window)


def test_places_outside_are_refused() -> None:
    shuffle = BlockShuffle(5, 2, 2, 1)
    for start, stop in ((-1, 2), (2, 6), (3, 2)):
        with pytest.raises(IndexError, match="outside of a shuffle"):
            shuffle.block(start, stop)
