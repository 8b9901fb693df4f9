"""The log of positions: as many are kept as may be asked for, and what is said does not depend on it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from torchdistinput.sources.kernel.position_log import PositionLog


def log_of(most_behind: int) -> PositionLog[list[Any]]:
    return PositionLog(-3, [0], 0, most_behind, lambda found, told: [*found, *told])


def test_a_log_that_drops_old_notes_says_what_one_that_keeps_all_says() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        behind = rng.choice([0, 2, 7])
        logs: list[PositionLog[Any]] = [
            PositionLog(-3, [0], 0, most, lambda found, told: [*found, *told]) for most in (behind, 10**9)
        ]
        short, whole = logs
        batch = asked = 0
        while batch < 150:
            rows = rng.choice([1, 1, 3])
            before, told = short.rows_read(10**9), rng.choice([batch, None])
            short.add(rows, told)
            whole.add(rows, told)
            batch += 1
            if rng.random() < 0.2:
                asked = max(asked, before - behind)
                assert short.at(asked) == whole.at(asked), seed
        assert len(short._notes) <= behind + 32
        with pytest.raises(AssertionError, match="are forgotten"):
            short.at(-4)
