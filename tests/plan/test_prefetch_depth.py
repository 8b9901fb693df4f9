"""A rank asks for a larger depth when votes are costly and the bytes allow it; the depth stays within its bounds."""

from __future__ import annotations

import itertools

from torchdistinput.plan.prefetch_depth import PrefetchDepth, changed, drawn_at_once, is_costly, ready_at_a_vote


def test_half_of_the_last_eight_votes_must_have_been_costly() -> None:
    for votes in itertools.product([False, True], repeat=9):
        read_ahead = PrefetchDepth(2, 100)
        for costly in votes:
            read_ahead.voted(costly=costly)
        assert read_ahead.requested_change(1) == (sum(votes[1:]) >= 4)


def test_after_a_change_the_votes_are_looked_at_anew() -> None:
    read_ahead = PrefetchDepth(2, 100)
    for steps in (4, 8):
        for _ in range(4):
            assert read_ahead.requested_change(1) == 0
            read_ahead.voted(costly=True)
        assert read_ahead.requested_change(1) == 1
        read_ahead.agreed(steps)


def test_the_bytes_of_the_steps_ahead_and_of_the_one_in_use_count() -> None:
    for steps, room, largest in itertools.product([2, 4, 16], range(0, 80, 3), range(5)):
        read_ahead = PrefetchDepth(steps, room)
        for _ in range(8):
            read_ahead.voted(costly=True)
        objects, fits = (steps + 1) * largest > room, (2 * steps + 1) * largest <= room
        assert read_ahead.requested_change(largest) == (-1 if objects else int(fits and largest > 0))


def test_a_number_that_was_given_is_never_to_be_changed() -> None:
    read_ahead = PrefetchDepth(2, None)
    for _ in range(8):
        read_ahead.voted(costly=True)
    assert [read_ahead.requested_change(largest) for largest in (0, 1, 1 << 60)] == [0, 0, 0]


def test_votes_wait_until_two_thirds_are_used_up_where_much_is_read_ahead() -> None:
    assert all(PrefetchDepth(steps, None).due_at > steps for steps in range(4))
    for steps in range(4, 200):
        ready = ready_at_a_vote(steps)
        assert PrefetchDepth(steps, None).due_at == ready >= 1
        assert (steps + 1 - ready) % drawn_at_once(steps) == 0  # right after a row was drawn
        assert abs(ready - steps / 3) <= drawn_at_once(steps) / 2
    assert PrefetchDepth(32, None, rounds=12).due_at == 12


def test_the_depth_stays_within_its_bounds() -> None:
    steps, seen = 2, []
    for change in [1] * 6 + [0] + [-1] * 6:
        steps = changed(steps, change, 2, 32)
        seen.append(steps)
    assert seen == [4, 8, 16, 32, 32, 32, 32, 16, 8, 4, 2, 2, 2]
    assert all(changed(5, change, 5, 5) == 5 for change in (-1, 0, 1))


def test_a_vote_is_costly_if_it_takes_more_than_an_eighth_of_the_time_between_two_or_comes_often() -> None:
    assert [is_costly(2.0, between) for between in (0.0, 15.0, 16.0, 99.0)] == [True, True, False, False]
    assert [is_costly(0.0, between) for between in (0.0, 0.0049, 0.005, 1.0)] == [True, True, False, False]


def test_steps_are_drawn_in_rows_of_a_quarter_of_those_ahead_and_never_so_many_that_none_is_left() -> None:
    rows = [drawn_at_once(steps) for steps in range(1000)]
    assert rows[:8] == [1] * 8
    assert rows == sorted(rows)
    assert rows[-1] == 8
    assert all(row <= max(1, steps // 4) for steps, row in enumerate(rows))
