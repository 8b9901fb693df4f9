"""The law of packing, K1 to K5, against a plain search, over random windows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from torchdistinput.plan.packing import Item, Packing, check_packing, pack_window


def tokens(packs: Sequence[Sequence[Item]]) -> Counter[tuple[int, int]]:
    return Counter((item.sample, place) for pack in packs for item in pack for place in range(item.start, item.stop))


def searched(lengths: list[int], room: int, *, best: bool) -> list[list[int]]:
    """The packs by the words of the law, in the order in which they begin."""
    packs: list[list[int]] = []
    order = sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)) if best else range(len(lengths))
    for item in order:
        free = [room - sum(lengths[each] for each in pack) for pack in packs]
        fits = [number for number, rest in enumerate(free) if rest >= lengths[item]]
        if not fits:
            packs.append([item])
        else:
            packs[min(fits, key=lambda number: (free[number], number)) if best else fits[0]].append(item)
    return sorted(sorted(pack) for pack in packs)


def packs_of(found: Packing) -> list[list[Item]]:
    return [found.pack(number) for number in range(len(found))]


@pytest.mark.parametrize("strategy", ["best_fit", "first_fit"])
def test_packs_are_those_of_a_plain_search(strategy: Any, all_cells: bool) -> None:
    for seed in range(2000 if all_cells else 100):
        dice = random.Random(seed)
        room = dice.randint(1, 40)
        lengths = [dice.randint(1, room) for _ in range(dice.randint(0, dice.choice([60, 200])))]
        packs = packs_of(pack_window(np.array(lengths, np.int64), 5, room, strategy, "error"))
        assert [[item.sample - 5 for item in pack] for pack in packs] == searched(
            lengths, room, best=strategy == "best_fit"
        )


def test_every_token_is_in_one_pack_or_is_counted(all_cells: bool) -> None:
    for seed in range(4000 if all_cells else 300):
        dice = random.Random(seed)
        room = dice.randint(1, 30)
        lengths = np.array([dice.randint(0, 70) for _ in range(dice.randint(0, 40))], np.int64)
        strategy: Any = dice.choice(["best_fit", "first_fit", "concat"])
        overflow: Any = dice.choice(["split", "truncate", "drop"])
        found = pack_window(lengths, 0, room, strategy, overflow)
        packs = packs_of(found)
        seen = tokens(packs)
        assert set(seen.values()) <= {1}
        assert len(seen) + found.dropped + found.truncated == lengths.sum()
        assert all(0 < sum(item.stop - item.start for item in pack) <= room for pack in packs)
        assert all(pack == sorted(pack) for pack in packs)
        assert packs == sorted(packs, key=lambda pack: pack[0])
        if strategy == "concat":
            assert all(sum(item.stop - item.start for item in pack) == room for pack in packs[:-1])


def test_a_sample_that_is_too_long_is_named() -> None:
    with pytest.raises(ValueError, match="sample 12 has 9 tokens, more than max_length=8"):
        pack_window(np.array([1, 2, 9]), 10, 8, "best_fit", "error")
    with pytest.raises(ValueError, match="sample 11 has -2 tokens"):
        pack_window(np.array([1, -2]), 10, 8, "concat", "error")
    for arguments in (
        (0, 1, "concat", "drop", "sample"),
        (1, 0, "concat", "drop", "sample"),
        (1, 1, "worst", "drop", "sample"),
        (1, 1, "concat", "cut", "sample"),
        (1, 1, "concat", "drop", "text"),
    ):
        with pytest.raises(ValueError, match="must be"):
            check_packing(*arguments)
