"""Mixtures: the law of the order, M1 to M6; read from front to end; shares of tokens, T1 to T4."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest

from torchdistinput.errors import StateMismatch
from torchdistinput.plan.file_resharding import FileCursor, ReaderCursor
from torchdistinput.plan.mixing import MixedOrder, Stop, shares
from torchdistinput.plan.stream_mixing import (
    Changes,
    MixtureCursor,
    SampleOrder,
    SourceCursor,
    TokenOrder,
    cursor_from_json,
)


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

    def done(self, source: int) -> int:
        return self.taken[source]

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


def test_the_order_is_the_same_as_if_all_sizes_were_known_before(all_cells: bool) -> None:
    for seed in range(10_000 if all_cells else 1000):
        dice, sources, changes, stop, length = program(seed)
        sizes = [len(each) for each in sources]
        whole = MixedOrder(sizes, changes, stop, (seed,), length)
        expected = [each.tolist() for each in whole.at(range(len(whole)))]
        supply = Lists(sources, repeats=stop == "repeat")
        known = [dice.choice([None, None, size]) for size in sizes]
        # The others are set while it is read. Where all sources of the weights have ended, the next ones hold at once.
        late = stop != "all" or all(all(shares) for _, shares in changes)
        now = [each for each in changes if not each[0] or not late or dice.random() < 0.5]
        turns = SampleOrder(known, now, stop, (seed,), length)
        found: list[Any] = []
        for at, _ in [each for each in changes if each not in now]:
            found += read(turns, supply, len(found), dice, max(0, min(at, len(whole)) - len(found)))
            turns.change([each for each in changes if each in now or each[0] <= at])
        found += read(turns, supply, len(found), dice, dice.randint(0, 100))
        resumed = SampleOrder([turns.size(source) for source in range(len(sources))], changes, stop, (seed,), length)
        assert [*found, *read(resumed, supply, len(found), dice)] == list(zip(*expected, strict=True))


def tokens_of(sources: Sequence[Sequence[int]], order: Sequence[tuple[int, int]]) -> list[int]:
    return [sources[source][index % len(sources[source])] for source, index in order]


def test_random_programs_of_tokens_can_be_stopped_and_taken_up_anywhere(all_cells: bool) -> None:
    for seed in range(10_000 if all_cells else 150):
        dice, sources, changes, stop, length = program(seed)
        supply = Lists(sources, repeats=stop == "repeat")
        order = read(TokenOrder([0] * len(sources), changes, stop, length), supply, 0, dice)
        for source in range(len(sources)):  # in order, none twice, none left out
            assert [index for own, index in order if own == source] == list(range(supply.taken[source]))
        if stop == "all" and length is None:
            weighed = [source for source, share in enumerate(changes[-1][1]) if share]
            assert all(supply.taken[source] == len(sources[source]) for source in weighed)
        at = dice.randint(0, len(order))
        again = Lists(sources, repeats=stop == "repeat")
        first = TokenOrder([0] * len(sources), changes, stop, length)
        begun = read(first, again, 0, dice, at)
        used = [first.used(source) for source in range(len(sources))]
        assert [*begun, *read(TokenOrder(used, changes, stop, length), again, at, dice)] == order


def test_shares_of_tokens_are_exact_to_one_sample_at_every_position() -> None:
    dice = random.Random(3)
    sources = [[dice.randint(1, 100) for _ in range(5000)] for _ in range(3)]
    weights = shares([0.5, 0.3, 0.2])
    order = read(TokenOrder([0] * 3, [(0, weights)], "first", None), Lists(sources, repeats=False), 0, dice)
    assert len(order) > 6000
    tokens = [0, 0, 0]
    for (source, _), length in zip(order, tokens_of(sources, order), strict=True):
        tokens[source] += length
        paid = [Fraction(each) / weight for each, weight in zip(tokens, weights, strict=True)]
        assert max(paid) - min(paid) <= 100 / min(weights)


def test_a_change_of_weights_begins_a_new_count() -> None:
    sources = [[10] * 100, [10] * 100]
    changes = [(0, shares([1, 1])), (20, shares([3, 1]))]
    order = read(TokenOrder([0, 0], changes, "first", 60), Lists(sources, repeats=False), 0, random.Random(1))
    assert [sum(source == 0 for source, _ in part) for part in (order[:20], order[20:])] == [10, 30]


def test_a_cursor_survives_json_and_a_damaged_one_is_refused() -> None:
    files = ReaderCursor((FileCursor(1, 5, 2, 2, 70),), opened=1)
    inner = MixtureCursor(3, (SourceCursor(3, 9, 4, None, 1, 2, files),))
    cursor = MixtureCursor(8, (SourceCursor(5, size=5), SourceCursor(3, place=inner)))
    assert cursor_from_json(json.loads(cursor.to_text())) == cursor
    for bad in (["mixture", 1, [[1]]], ["mixture", 1, [[0, 0, 0, None, 0, -1, None]]], ["mixture", -1, []], "mixture"):
        with pytest.raises(StateMismatch, match="damaged"):
            cursor_from_json(bad)
