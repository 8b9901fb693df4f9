"""The log of positions: as many are kept as may be asked for, and what is said does not depend on it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from torchdistinput.sources.iterable.position import IterableTrack, Place, ReaderPosition
from torchdistinput.sources.kernel.cut import READ_HERE
from torchdistinput.sources.kernel.position_log import PositionLog


@pytest.mark.parametrize("read_ahead", [0, 1, 5])
def test_the_log_stays_short_where_nobody_asks_and_right_where_somebody_does(read_ahead: int) -> None:
    total = 400
    log = IterableTrack(Place((ReaderPosition(),)), read_ahead, owns_state=False)
    lengths = []
    for drawn in range(total):
        log.log.add(1, (1, READ_HERE))
        lengths.append(len(log.log._notes))
        delivered = drawn - read_ahead - 1
        if delivered >= 0 and drawn % 7 == 0:
            assert log.position(delivered) == ["iterable", 0, 0, delivered, [[delivered, delivered, None, 0, 0]]]
    assert max(lengths) <= read_ahead + 3 + 32


def test_a_place_from_before_there_were_digests_is_read_up_to_again() -> None:
    assert Place.from_json(["iterable", 0, 0, 9, [[5, 2, "{}"]]], 1) == Place((ReaderPosition(5, 5),), samples=9)


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
