"""The log of positions: as many are kept as may be asked for, and what is said does not depend on it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from torchdistinput.sources.kernel.row_stream import PositionLog


def log_of(most_behind: int) -> PositionLog[list[Any]]:
    return PositionLog(-3, [0], 0, most_behind, lambda found, told: [*found, *told])


def test_a_log_that_drops_old_notes_says_what_one_that_keeps_all_says() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        behind = rng.choice([0, 2, 7])
        short, whole = log_of(behind), log_of(10**9)
        before = 0  # the row before the batch that is read
        for batch in range(150):
            rows, told = rng.choice([1, 1, 3]), rng.choice([batch, None])
            short.add(rows, told)
            whole.add(rows, told)
            for row in {max(0, before - behind), before, before + rows}:
                assert short.at(row) == whole.at(row), (seed, batch)
                assert short.in_progress(row) == whole.in_progress(row), (seed, batch)
            before += rows
        assert len(short._notes) <= behind + 32
        with pytest.raises(AssertionError, match="are forgotten"):
            short.at(-4)
