"""The order of sources read from front to end: that of the law with all sizes known; shares of tokens, T1 to T4."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest

from torchdistinput.errors import StateMismatch
from torchdistinput.plan.file_resharding import FileCursor, ReaderCursor
from torchdistinput.plan.mixed_turns import (
    Changes,
    MixtureCursor,
    SampleTurns,
    SourceCursor,
    TokenTurns,
    cursor_from_json,
)
from torchdistinput.plan.mixing import MixedOrder, Stop, shares


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
        turns = SampleTurns(known, now, stop, (seed,), length)
        found: list[Any] = []
        for at, _ in [each for each in changes if each not in now]:
            found += read(turns, supply, len(found), dice, max(0, min(at, len(whole)) - len(found)))
            turns.change([each for each in changes if each in now or each[0] <= at])
        found += read(turns, supply, len(found), dice, dice.randint(0, 100))
        resumed = SampleTurns([turns.size(source) for source in range(len(sources))], changes, stop, (seed,), length)
        assert [*found, *read(resumed, supply, len(found), dice)] == list(zip(*expected, strict=True))


def tokens_of(sources: Sequence[Sequence[int]], order: Sequence[tuple[int, int]]) -> list[int]:
    return [sources[source][index % len(sources[source])] for source, index in order]


def test_random_programs_of_tokens_can_be_stopped_and_taken_up_anywhere(all_cells: bool) -> None:
    for seed in range(10_000 if all_cells else 150):
        dice, sources, changes, stop, length = program(seed)
        supply = Lists(sources, repeats=stop == "repeat")
        order = read(TokenTurns([0] * len(sources), changes, stop, length), supply, 0, dice)
        for source in range(len(sources)):  # in order, none twice, none left out
            assert [index for own, index in order if own == source] == list(range(supply.taken[source]))
        if stop == "all" and length is None:
            weighed = [source for source, share in enumerate(changes[-1][1]) if share]
            assert all(supply.taken[source] == len(sources[source]) for source in weighed)
        at = dice.randint(0, len(order))
        again = Lists(sources, repeats=stop == "repeat")
        first = TokenTurns([0] * len(sources), changes, stop, length)
        begun = read(first, again, 0, dice, at)
        used = [first.used(source) for source in range(len(sources))]
        assert [*begun, *read(TokenTurns(used, changes, stop, length), again, at, dice)] == order


def test_shares_of_tokens_are_exact_to_one_sample_at_every_position() -> None:
    dice = random.Random(3)
    sources = [[dice.randint(1, 100) for _ in range(5000)] for _ in range(3)]
    weights = shares([0.5, 0.3, 0.2])
    order = read(TokenTurns([0] * 3, [(0, weights)], "first", None), Lists(sources, repeats=False), 0, dice)
    assert len(order) > 6000
    tokens = [0, 0, 0]
    for (source, _), length in zip(order, tokens_of(sources, order), strict=True):
        tokens[source] += length
        paid = [Fraction(each) / weight for each, weight in zip(tokens, weights, strict=True)]
        assert max(paid) - min(paid) <= 100 / min(weights)


def test_a_change_of_weights_begins_a_new_count() -> None:
    sources = [[10] * 100, [10] * 100]
    changes = [(0, shares([1, 1])), (20, shares([3, 1]))]
    order = read(TokenTurns([0, 0], changes, "first", 60), Lists(sources, repeats=False), 0, random.Random(1))
    assert [sum(source == 0 for source, _ in part) for part in (order[:20], order[20:])] == [10, 30]


def test_samples_without_tokens_have_turns_like_others() -> None:
    turns = TokenTurns([0, 0], [(0, shares([1, 1]))], "first", 10)
    order = read(turns, Lists([[0], [1]], repeats=True), 0, random.Random(1))
    assert sum(source == 0 for source, _ in order) == 5


def test_a_cursor_survives_json_and_a_damaged_one_is_refused() -> None:
    files = ReaderCursor((FileCursor(1, 5, 2, 2, 70),), opened=1)
    inner = MixtureCursor(3, (SourceCursor(3, 9, 4, None, 1, 2, files),))
    cursor = MixtureCursor(8, (SourceCursor(5, size=5), SourceCursor(3, place=inner)))
    assert cursor_from_json(json.loads(cursor.to_text())) == cursor
    for bad in (["mixture", 1, [[1]]], ["mixture", 1, [[0, 0, 0, None, 0, -1, None]]], ["mixture", -1, []], "mixture"):
        with pytest.raises(StateMismatch, match="damaged"):
            cursor_from_json(bad)
