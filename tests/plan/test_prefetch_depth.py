"""The prefetch depth: its bound, the rows in which steps are drawn, and when a vote is due."""

from __future__ import annotations

import itertools

from torchdistinput.plan.options import agreed_bound, drawn_at_once, ready_at_a_vote, steps_that_fit


def test_the_steps_ahead_and_the_one_in_use_fit() -> None:
    for largest, max_bytes in itertools.product(range(1, 9), range(80)):
        fits = steps_that_fit(largest, max_bytes)
        assert fits is not None
        assert (fits + 2) * largest > max_bytes
        assert fits == 0 or (fits + 1) * largest <= max_bytes
    assert steps_that_fit(0, 100) is None


def test_the_bound_is_what_fits_within_its_limits() -> None:
    assert [agreed_bound(fits, 2, 32) for fits in (None, 0, 2, 3, 32, 99)] == [2, 2, 2, 3, 32, 32]


def test_votes_wait_until_two_thirds_are_used_up_where_much_is_read_ahead() -> None:
    assert [ready_at_a_vote(steps) for steps in range(4)] == [1, 2, 3, 4]
    for steps in range(4, 200):
        ready = ready_at_a_vote(steps)
        assert 1 <= ready <= steps
        assert (steps + 1 - ready) % drawn_at_once(steps) == 0  # right after a row was drawn
        assert abs(ready - steps / 3) <= drawn_at_once(steps) / 2
    assert ready_at_a_vote(32, rounds=12) == 12


def test_steps_are_drawn_in_rows_of_a_quarter_of_those_ahead_and_never_so_many_that_none_is_left() -> None:
    rows = [drawn_at_once(steps) for steps in range(1000)]
    assert rows[:8] == [1] * 8
    assert rows == sorted(rows)
    assert rows[-1] == 8
    assert all(row <= max(1, steps // 4) for steps, row in enumerate(rows))
