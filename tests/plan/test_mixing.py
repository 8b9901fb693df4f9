"""Mixtures: the law of the order, M1 to M5: as it is read, and as it is known before."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest

from torchdistinput.errors import StateMismatch
from torchdistinput.plan.file_resharding import FileCursor, ReaderCursor
from torchdistinput.plan.mixing import (
    Changes,
    MixtureCursor,
    MixtureOrder,
    SourceCursor,
    Stop,
    cursor_from_json,
    mixture_length,
    shares,
)


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


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (([1, 1], [(1, shares([1, 1]))], "first"), "rising positions from 0"),
        (([1, 1], [(0, shares([1, 1]))], "repeat"), "needs a number of samples"),
    ],
)
def test_orders_that_cannot_be_are_refused(arguments: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        mixture_length(*arguments)


class Lists:
    """Sources that are lists of lengths; no source tells its size before it has ended."""

    def __init__(self, sources: Sequence[Sequence[int]], *, repeats: bool) -> None:
        self.sources, self.repeats = sources, repeats
        self.taken = [0] * len(sources)

    def _left(self, source: int, count: int) -> list[int]:
        own = self.sources[source]
        ends = self.taken[source] + count
        return [own[at % len(own)] for at in range(self.taken[source], ends if self.repeats else min(ends, len(own)))]

    def have(self, source: int, count: int) -> int:
        return len(self._left(source, count))

    def length(self, source: int, number: int) -> int:
        return self._left(source, number + 1)[number]

    def take(self, drawn: Sequence[int]) -> list[tuple[int, int]]:
        found = []
        for source in drawn:
            found.append((source, self.taken[source]))
            self.taken[source] += 1
        return found


def read(turns: Any, supply: Lists, position: int, dice: random.Random, until: int | None = None) -> list[Any]:
    """The order, drawn in pieces of any size."""
    found: list[Any] = []
    while until is None or len(found) < until:
        count = dice.randint(1, 40)
        drawn = turns.draw(position + len(found), count if until is None else min(count, until - len(found)), supply)
        found += supply.take(drawn)
        if not drawn:
            break
    return found


def program(seed: int) -> tuple[random.Random, list[list[int]], Changes, Stop, int | None]:
    dice = random.Random(seed)
    sizes = [dice.choice([1, 2, dice.randint(1, 30), dice.randint(1, 200)]) for _ in range(dice.randint(1, 5))]
    sources = [[dice.randint(0, 9) for _ in range(size)] for size in sizes]  # small ones end between changes of weights
    starts = [0, *sorted(dice.sample(range(1, dice.choice([20, 300])), dice.randint(0, 5)))]
    changes = [(at, shares([dice.randint(0, 9) + (not source) for source in range(len(sources))])) for at in starts]
    stop: Stop = dice.choice(["first", "all", "repeat"])
    return dice, sources, changes, stop, dice.randint(1, 500) if stop == "repeat" or dice.random() < 0.3 else None


def test_the_order_that_is_read_has_the_length_that_is_known_before(all_cells: bool) -> None:
    for seed in range(10_000 if all_cells else 1000):
        dice, sources, changes, stop, length = program(seed)
        supply = Lists(sources, repeats=stop == "repeat")
        order = MixtureOrder([0] * len(sources), changes, stop, length)
        found = read(order, supply, 0, dice, dice.randint(0, 100))
        resumed = MixtureOrder(order.used, changes, stop, length)
        found += read(resumed, supply, len(found), dice)
        assert len(found) == mixture_length([len(each) for each in sources], changes, stop, length)
        if stop == "all" and length is None and len(changes) == 1:
            weighed = [source for source, share in enumerate(changes[0][1]) if share]
            assert sorted(found) == [(source, index) for source in weighed for index in range(len(sources[source]))]


def test_of_sources_that_used_as_much_for_their_weight_the_first_comes() -> None:
    supply = Lists([[1]] * 3, repeats=True)
    order = read(MixtureOrder([0] * 3, [(0, shares([2, 1, 1]))], "repeat", 8), supply, 0, random.Random(1))
    assert [source for source, _ in order] == [0, 1, 2, 0] * 2
    assert mixture_length([4, 2, 2], [(0, shares([2, 1, 1]))], "first") == 8
    assert mixture_length([3, 2, 2], [(0, shares([2, 1, 1]))], "first") == 7  # where a fourth of the first would come
    assert mixture_length([4, 2, 1], [(0, shares([2, 1, 1]))], "first") == 6  # before the second of the last


def test_samples_are_shared_at_every_position() -> None:
    for weights in ([1, 1], [3, 2, 1], [0.7, 0.2999, 0.0001], [1, 0, 5], [1]):
        exact = shares(weights)
        counts = [0] * len(weights)
        supply = Lists([[1]] * len(weights), repeats=True)
        order = read(MixtureOrder(counts, [(0, exact)], "repeat", 30_000), supply, 0, random.Random(1))
        assert len(order) == 30_000
        scales = [1 / float(each) if each else None for each in exact]
        for source, _ in order:
            counts[source] += 1
            used = [count * scale for count, scale in zip(counts, scales, strict=True) if scale]
            assert max(used) - min(used) <= max(scale for scale in scales if scale) + 1e-6


def tokens_of(sources: Sequence[Sequence[int]], order: Sequence[tuple[int, int]]) -> list[int]:
    return [sources[source][index % len(sources[source])] for source, index in order]


def test_random_programs_of_tokens_can_be_stopped_and_taken_up_anywhere(all_cells: bool) -> None:
    for seed in range(10_000 if all_cells else 150):
        dice, sources, changes, stop, length = program(seed)
        supply = Lists(sources, repeats=stop == "repeat")
        order = read(MixtureOrder([0] * len(sources), changes, stop, length, tokens=True), supply, 0, dice)
        for source in range(len(sources)):  # in order, none twice, none left out
            assert [index for own, index in order if own == source] == list(range(supply.taken[source]))
        if stop == "all" and length is None:
            weighed = [source for source, share in enumerate(changes[-1][1]) if share]
            assert all(supply.taken[source] == len(sources[source]) for source in weighed)
        at = dice.randint(0, len(order))
        again = Lists(sources, repeats=stop == "repeat")
        first = MixtureOrder([0] * len(sources), changes, stop, length, tokens=True)
        begun = read(first, again, 0, dice, at)
        resumed = MixtureOrder(first.used, changes, stop, length, tokens=True)
        assert [*begun, *read(resumed, again, at, dice)] == order


def test_shares_of_tokens_are_exact_to_one_sample_at_every_position() -> None:
    dice = random.Random(3)
    sources = [[dice.randint(1, 100) for _ in range(5000)] for _ in range(3)]
    weights = shares([0.5, 0.3, 0.2])
    order = read(
        MixtureOrder([0] * 3, [(0, weights)], "first", None, tokens=True), Lists(sources, repeats=False), 0, dice
    )
    assert len(order) > 6000
    tokens = [0, 0, 0]
    for (source, _), length in zip(order, tokens_of(sources, order), strict=True):
        tokens[source] += length
        paid = [Fraction(each) / weight for each, weight in zip(tokens, weights, strict=True)]
        assert max(paid) - min(paid) <= 100 / min(weights)


def test_a_change_of_weights_begins_a_new_count() -> None:
    sources = [[10] * 100, [10] * 100]
    changes = [(0, shares([1, 1])), (20, shares([3, 1]))]
    order = read(
        MixtureOrder([0, 0], changes, "first", 60, tokens=True), Lists(sources, repeats=False), 0, random.Random(1)
    )
    assert [sum(source == 0 for source, _ in part) for part in (order[:20], order[20:])] == [10, 30]


def test_a_cursor_survives_json_and_a_damaged_one_is_refused() -> None:
    files = ReaderCursor((FileCursor(1, 5, 2, 2, 70),), opened=1)
    inner = MixtureCursor(3, (SourceCursor(3, 9, 4, 1, 2, files),))
    cursor = MixtureCursor(8, (SourceCursor(5, used=5), SourceCursor(3, place=inner)))
    assert cursor_from_json(json.loads(cursor.to_text())) == cursor
    for bad in (["mixture", 1, [[1]]], ["mixture", 1, [[0, 0, 0, 0, -1, None]]], ["mixture", -1, []], "mixture"):
        with pytest.raises(StateMismatch, match="damaged"):
            cursor_from_json(bad)
    with pytest.raises(StateMismatch, match=r"of a mixture of version 0\.2"):
        cursor_from_json(["mixture", 1, [[0, 0, 0, None, 0, 1, None]]])
