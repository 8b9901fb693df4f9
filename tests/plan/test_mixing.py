"""The law of mixtures, M1 to M6, over small worlds and random ones."""

from __future__ import annotations

import random
import time
from collections import Counter
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest

from torchdistinput.plan.mixing import MixedOrder, shares


def listed(order: MixedOrder) -> list[tuple[int, int]]:
    sources, indices = order.at(np.arange(len(order)))
    return list(zip(sources.tolist(), indices.tolist(), strict=True))


def test_weights_are_exact_fractions() -> None:
    assert shares([0.1, 0.2, 0.7]) == [Fraction(1, 10), Fraction(1, 5), Fraction(7, 10)]
    assert shares([3, 1, 0]) == [Fraction(3, 4), Fraction(1, 4), 0]
    assert shares([16, 1], temperature=2) == [Fraction(4, 5), Fraction(1, 5)]


@pytest.mark.parametrize(
    ("weights", "temperature", "told"),
    [
        ([-1, 2], None, "weight 0 is -1"),
        ([0, 0], None, "all weights are 0"),
        ([float("nan"), 1], None, "weight 0 is nan"),
        ([1e-9, 1], None, "must be"),
        ([1, 1], 0, "temperature=0"),
    ],
)
def test_bad_weights_are_told(weights: Any, temperature: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        shares(weights, temperature)


@pytest.mark.parametrize("weights", [[1, 1], [3, 2, 1], [0.7, 0.2999, 0.0001], [1, 0, 5], [1]])
def test_shares_are_exact_to_one_sample_at_the_end_of_every_block(weights: list[float]) -> None:
    exact = shares(weights)
    order = MixedOrder([7] * len(weights), [(0, exact)], "repeat", (1,), 60_000)
    counts = [0] * len(weights)
    block = max(256, -(-1 // min(each for each in exact if each)))
    for position, (source, index) in enumerate(listed(order)):
        if position % int(block) == 0:
            assert all(abs(count - each * position) < 1 for count, each in zip(counts, exact, strict=True))
        assert index == counts[source]  # the samples of a source come in order, none twice, none left out
        counts[source] += 1


def test_every_sample_comes_once_until_all_sources_have_ended() -> None:
    for sizes in product([0, 1, 5, 300], repeat=3):
        weights = [weight * (size > 0) for weight, size in zip([1, 2, 5], sizes, strict=True)]
        if not any(weights):
            continue
        order = MixedOrder(sizes, [(0, shares(weights))], "all", (3,))
        assert sorted(listed(order)) == [(source, index) for source, size in enumerate(sizes) for index in range(size)]


def test_the_first_source_that_ends_ends_the_mixture() -> None:
    for sizes in product([1, 4, 90, 700], repeat=2):
        for weights in ([1, 1], [9, 1]):
            order = MixedOrder(sizes, [(0, shares(weights))], "first", (5,))
            found = listed(order)
            longer = listed(MixedOrder(sizes, [(0, shares(weights))], "repeat", (5,), len(order) + 1))
            assert longer[:-1] == found
            assert longer[-1][1] == sizes[longer[-1][0]]  # the next position would begin an epoch
            assert all(index < sizes[source] for source, index in found)


def test_random_programs_keep_the_law_and_can_be_entered_anywhere(all_cells: bool) -> None:
    for seed in range(10_000 if all_cells else 200):
        dice = random.Random(seed)
        sizes = [dice.randint(1, 400) for _ in range(dice.randint(1, 5))]
        at = sorted(dice.sample(range(1, 500), dice.randint(0, 3)))
        changes = [
            (each, shares([dice.randint(0, 9) + (source == 0) for source in range(len(sizes))])) for each in [0, *at]
        ]
        stop: Any = dice.choice(["first", "all", "repeat"])
        length = dice.randint(1, 900) if stop == "repeat" or dice.random() < 0.3 else None
        order = MixedOrder(sizes, changes, stop, (seed,), length)
        found = listed(order)
        seen: Counter[int] = Counter()
        for source, index in found:
            assert index == seen[source]
            seen[source] += 1
            assert stop == "repeat" or index < sizes[source]
        again = MixedOrder(sizes, changes, stop, (seed,), length)
        places = [dice.randrange(len(found)) for _ in range(20)] if found else []
        sources, indices = again.at(places)
        assert list(zip(sources.tolist(), indices.tolist(), strict=True)) == [found[place] for place in places]
        assert length is None or len(found) <= length
        if stop == "all" and length is None:
            last = changes[-1][1]
            assert all(seen[source] == size for source, size in enumerate(sizes) if last[source])


def test_a_position_far_away_is_found_at_once() -> None:
    exact = shares([0.5, 0.3, 0.2])
    order = MixedOrder([10**9] * 3, [(0, exact)], "repeat", (1,), 10**10)
    began = time.monotonic()
    order.at([9 * 10**9])
    assert time.monotonic() - began < 5  # a bound on a hang: it takes less than a millisecond


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (([1, 1], [(1, shares([1, 1]))], "first", (1,)), "rising positions from 0"),
        (([1, 1], [(0, shares([1, 1]))], "repeat", (1,)), "needs a number of samples"),
    ],
)
def test_orders_that_cannot_be_are_refused(arguments: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        MixedOrder(*arguments)


def test_positions_outside_are_refused() -> None:
    order = MixedOrder([3], [(0, shares([1]))], "first", (1,))
    for position in (-1, 3):
        with pytest.raises(IndexError, match="outside of a mixture of 3 samples"):
            order.at([position])
