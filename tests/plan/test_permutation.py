"""Keyed permutations and the block shuffle: the same for ever, addressed as iterated, as random as drawn ones."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter

import numpy as np
import pytest

from torchdistinput.plan.block_shuffle import BlockShuffle
from torchdistinput.plan.permutation import Permutation, shuffled, word, words_after

# Sizes on both sides of the change of method at 4096 and of powers of two, where the network's parts change.
SMALL = [*range(130), 255, 256, 257, 1000, 4095, 4096, 4097, 5000, 8191, 8192, 8193, 16383, 16385, 65537]


def test_random_access_equals_iteration() -> None:
    for n in SMALL:
        permutation = Permutation(n, 5, n)
        order = list(permutation)
        assert len(permutation) == len(order) == n
        assert shuffled(n, 5, n) == order
        assert [int(permutation.at(np.array(i))) for i in range(0, n, max(1, n // 7))] == order[:: max(1, n // 7)]
        assert permutation.block(n // 3, n // 2).tolist() == order[n // 3 : n // 2]
        assert permutation.at(np.arange(n)[::-1]).tolist() == order[::-1]


def test_the_order_is_a_promise() -> None:
    """Literal values: saved states and recorded runs depend on them, so they change with no version."""
    assert shuffled(10, 0) == [5, 9, 1, 8, 7, 3, 2, 6, 0, 4]
    assert shuffled(10, 1, 2) == [7, 2, 5, 9, 8, 1, 0, 6, 4, 3]
    assert shuffled(10, 2, 1) == [5, 6, 0, 7, 2, 9, 1, 4, 8, 3]
    assert shuffled(10) == [5, 7, 8, 2, 9, 0, 3, 1, 6, 4]
    assert shuffled(10, -1) == [2, 1, 7, 9, 3, 0, 5, 8, 6, 4]
    assert shuffled(10, 2**64) == [7, 4, 9, 1, 0, 6, 5, 3, 2, 8]
    assert Permutation(4096, 7, 1).block(0, 4).tolist() == [1490, 379, 1527, 3509]
    assert Permutation(4097, 7, 1).block(0, 4).tolist() == [3121, 3259, 3932, 4093]
    assert Permutation(10**6, 7, 1).block(0, 4).tolist() == [892141, 425386, 348727, 165565]
    assert Permutation(10**9, 7, 1).block(0, 4).tolist() == [324824681, 29156155, 638674975, 464958047]
    assert Permutation(10**12, 7, 1).block(0, 2).tolist() == [564546156688, 644065765474]
    assert Permutation(2**45, 7, 1).block(0, 2).tolist() == [9511614271354, 25524634716093]


# Of the first 4,096 elements, of 70,000 from the middle on and of the last 4,096, for three seeds; as they were before
# anything here was made faster.
DIGESTS = [
    (10, "075f52bb2672cca1"),
    (4096, "538223d3ef9f6447"),
    (4097, "123c6fc6a213e934"),
    (70_001, "2061499ce2f0702b"),
    (2**20, "0a56979ce20912c1"),
    (10**6, "c159948fc817dbe2"),
    (10**7, "ddbec59865185195"),
    (2**28 + 1, "1a68bfed2fc2211d"),
    (10**9, "2fcb3c410cd0b6ee"),
    (2**32 - 1, "b65b828fa04e53cd"),
    (2**32, "9456a163f4c5ad75"),
    (2**32 + 1, "c8c49f5fe82411b2"),
    (2**40 - 1, "daf5383b2dbaa5e3"),
    (2**40, "224383557ca69bd0"),
    (2**40 + 1, "a0dd260d72f7b17c"),
    (10**12, "69b009c486ccdf9d"),
    (2**45, "87e6717b6b8ffe7c"),
]


@pytest.mark.parametrize(("n", "wanted"), DIGESTS)
def test_the_order_is_a_promise_over_pieces_and_numbers_sent_again(n: int, wanted: str) -> None:
    digest = hashlib.sha256()
    few = min(n, 4096)
    for seed in (0, 1, 2**63):
        permutation = Permutation(n, seed, 7)
        middle = permutation.block(n // 2, min(n, n // 2 + 70_000))
        for elements in (permutation.block(0, few), middle, permutation.at(np.arange(n - few, n))):
            digest.update(elements.astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == wanted


def test_different_keys_give_different_orders() -> None:
    keys = [(), (0,), (1,), (-1,), (0, 0), (0, 1), (1, 0), (2**64,), (2**64 + 1,), (2**63,), (-(2**63),), (0, 0, 0)]
    for n in (50, 5000):
        assert len({tuple(Permutation(n, *key).block(0, 50).tolist()) for key in keys}) == len(keys)


@pytest.mark.parametrize("n", [10, 5000])
def test_places_outside_are_refused(n: int) -> None:
    permutation = Permutation(n, 1)
    with pytest.raises(IndexError, match=rf"index {n} is outside of a permutation of \[0, {n}\)"):
        permutation.at(np.array([0, n]))
    with pytest.raises(IndexError, match="index -1 "):
        permutation.at(np.array([0, -1]))
    with pytest.raises(TypeError, match="float64"):
        permutation.at(np.array([0.5]))
    for start, stop in ((0, n + 1), (-1, 2), (3, 2)):
        with pytest.raises(IndexError, match="block"):
            permutation.block(start, stop)


def test_a_length_out_of_range_and_a_key_that_is_no_int_are_refused() -> None:
    for n in (-1, 2**45 + 1):
        with pytest.raises(ValueError, match=f"got n={n}"):
            Permutation(n)
    with pytest.raises(TypeError):
        Permutation(5, "seed")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Permutation(5, 0.5)  # type: ignore[arg-type]


def test_all_orders_of_few_elements_are_equally_likely() -> None:
    """Chi-squared over all n! orders: its mean is n! - 1, its standard deviation sqrt(2 (n! - 1))."""
    for n in (2, 3, 4, 5):
        draws = 100 * math.factorial(n)
        counts = dict.fromkeys(itertools.permutations(range(n)), 0)
        for seed in range(draws):
            counts[tuple(shuffled(n, seed))] += 1
        freedom = len(counts) - 1
        chi_squared = sum((seen - 100) ** 2 / 100 for seen in counts.values())
        assert abs(chi_squared - freedom) < 4 * math.sqrt(2 * freedom), n


@pytest.mark.parametrize("n", [10**9, 10**12, 2**45])
def test_a_huge_order_looks_like_one_that_was_drawn(n: int) -> None:
    """Neighbours do not correlate, all regions come equally often, and each bit of a place moves each of its element.

    Bounds are 5 standard deviations, which one in 10**6 of the values exceeds.
    """
    permutation = Permutation(n, 5)
    found = permutation.block(n // 3, n // 3 + 2**17)
    values = found / n
    for lag in (1, 2, 3, 64, 1024, 65536):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) * math.sqrt(len(values) - lag) < 5, lag
    counts = np.bincount((values * 1024).astype(np.int64), minlength=1024)
    assert abs(float(((counts - 128) ** 2 / 128).sum()) - 1023) < 5 * math.sqrt(2 * 1023)
    bits = n.bit_length() - 2
    places = np.random.default_rng(1).integers(0, 2**bits, 4000)
    elements = permutation.at(places)
    for bit in range(bits):
        moved = elements ^ permutation.at(places ^ 2**bit)
        shares = (moved[:, None] >> np.arange(bits) & 1).mean(axis=0)
        assert np.abs(shares - 0.5).max() * 2 * math.sqrt(len(places)) < 5, bit


@pytest.mark.parametrize("key", [(), (5,), (-3, 2**70)])
def test_the_words_after_a_key_are_the_words_of_the_longer_key(key: tuple[int, ...]) -> None:
    after = words_after(*key)
    for last in (0, 1, 2, 77, -1, 2**63, 2**64 - 1, 2**64, -(2**64), 2**200):
        assert after(last) == word(*key, last)


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
    n, block, window = 2**45 - 12_345, 1000, 16
    shuffle = BlockShuffle(n, block, window, 1)
    for place in (0, n // 3, n - 2000):
        found = shuffle.block(place, place + 1000)
        assert len(set(found.tolist())) == 1000
        assert found.min() >= 0
        assert found.max() < n
        assert len(set((found // block).tolist())) <= 2 * window


def test_the_order_of_blocks_is_a_promise() -> None:
    assert [*BlockShuffle(23, 4, 2, 7, 0)] == PROMISED
    assert [*BlockShuffle(23, 4, 2, 7, 1)] != PROMISED
    assert [*BlockShuffle(23, 4, 2, 8, 0)] != PROMISED


PROMISED = [11, 10, 4, 5, 9, 7, 6, 8, 21, 22, 14, 13, 20, 15, 12, 3, 18, 16, 19, 2, 0, 17, 1]


@pytest.mark.parametrize(("window", "least"), [(1, 0.0), (4, 0.55), (16, 0.85), (64, 0.97)])
def test_neighbours_are_the_less_related_the_wider_the_window(window: int, least: float) -> None:
    """How far apart neighbours are, over that of a full shuffle (a third of n), within a window of many blocks."""
    n, block = 64_000, 100
    order = BlockShuffle(n, block, window, 1).block(0, n)
    same = (order[1:] // block == order[:-1] // block).mean()
    assert same <= 1 / window + 0.02
    apart = np.abs(np.diff(order)).mean() / (n / 3)
    assert apart >= least


@pytest.mark.parametrize(("n", "block", "window"), [(-1, 1, 1), (2**45 + 1, 1, 1), (5, 0, 1), (5, 1, 0)])
def test_sizes_out_of_range_are_refused(n: int, block: int, window: int) -> None:
    with pytest.raises(ValueError, match="needs 0 <= n|at least 1"):
        BlockShuffle(n, block, window)


def test_places_outside_of_a_shuffle_are_refused() -> None:
    shuffle = BlockShuffle(5, 2, 2, 1)
    for start, stop in ((-1, 2), (2, 6), (3, 2)):
        with pytest.raises(IndexError, match="outside of a shuffle"):
            shuffle.block(start, stop)
