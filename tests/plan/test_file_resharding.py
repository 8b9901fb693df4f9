"""What a world has begun and left is dealt to the next one completely, and survives being written down."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from torchdistinput.errors import StateMismatch
from torchdistinput.plan.file_resharding import FileCursor, ReaderCursor, checked_deals, fresh_files, redeal
from torchdistinput.plan.topology import shards_of

A, B, C, D, E = (FileCursor(file, 10 * file, file, 2 * file, 100) for file in range(5))


# Fresh files


@pytest.mark.parametrize("sizes", [None, [5, 9, 1, 1, 30, 2, 9, 0]], ids=["in turn", "by size"])
@pytest.mark.parametrize("num_files", [0, 1, 2, 3, 5, 8])
def test_every_file_is_opened_once_over_three_worlds(num_files: int, sizes: list[int] | None) -> None:
    order = [file * 7 % (num_files or 1) for file in range(num_files)] if num_files % 7 else list(range(num_files))
    for worlds in itertools.product(range(1, 5), repeat=3):
        for seed in range(3):
            opened: list[int] = []
            deals: list[list[int]] = []
            for number, num_workers in enumerate(worlds):
                fresh = fresh_files(order, deals, sizes)
                assert fresh == [file for file in order if file not in opened]
                shares = shards_of(fresh, num_workers, sizes)
                last = number == len(worlds) - 1
                counts = [
                    len(share) if last else (worker * 3 + seed + number) % (len(share) + 1)
                    for worker, share in enumerate(shares)
                ]
                for share, taken in zip(shares, counts, strict=True):
                    opened += share[:taken]
                _, deals = redeal([ReaderCursor(opened=taken) for taken in counts], deals, 1)
            assert sorted(opened) == sorted(order)
            assert fresh_files(order, deals, sizes) == []


# Lanes


def test_lanes_are_dealt_those_in_slots_first() -> None:
    places = [ReaderCursor((A, None, B), 2, 1, (C,), 4), ReaderCursor((D,), 0, 0, (E,), 3)]
    dealt, deals = redeal(places, [[1, 2]], 2)
    assert dealt == [ReaderCursor(waiting=(A, D, E)), ReaderCursor(waiting=(B, C))]
    assert deals == [[1, 2], [2, 4, 3]]


def test_every_lane_is_dealt_once_between_all_worlds() -> None:
    for old, new, newer in itertools.product(range(1, 5), repeat=3):
        for seed in range(4):
            files = itertools.count()
            places = [
                ReaderCursor(
                    tuple(None if (slot + seed) % 3 == 0 else FileCursor(next(files)) for slot in range(worker + seed)),
                    waiting=tuple(FileCursor(next(files)) for _ in range((worker * seed) % 3)),
                    opened=worker,
                )
                for worker in range(old)
            ]
            every = range(next(files))
            deals: list[list[int]] = []
            for num_workers in (new, newer):
                places, deals = redeal(places, deals, num_workers)
                assert len(places) == num_workers
                assert sorted(cursor.file for place in places for cursor in place.cursors) == list(every)
                counts = [len(place.cursors) for place in places]
                assert max(counts) - min(counts) <= 1
                assert all(place == ReaderCursor(waiting=place.waiting) for place in places)
            assert deals == [[old, *range(old)], [new, *[0] * new]]


# As JSON


PLACES = [
    ReaderCursor(),
    ReaderCursor((None, None)),
    ReaderCursor((A, None, B), 2, 5, (C, D), 7),
    ReaderCursor((FileCursor(0),), 0, 0, (), 1),
    ReaderCursor(waiting=(FileCursor(9, 2**40, 2**33, 2**34, 2**41),)),
]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_place_survives_being_written_down(place: ReaderCursor) -> None:
    assert place.to_text() == json.dumps(place.to_json())
    assert ReaderCursor.from_json(json.loads(place.to_text())) == place


def test_a_file_in_progress_costs_less_than_64_bytes() -> None:
    cursor = FileCursor(54_321, 12_345_678_901, 123_456_789, 123_456_999, 98_765_432_109)
    one, two = (len(json.dumps(ReaderCursor((cursor,) * number).to_json())) for number in (1, 2))
    assert two - one < 64


GOOD: list[Any] = PLACES[2].to_json()


BAD: list[tuple[Any, str]] = [
    (None, r"the cursor of a reader must be \[slots, turn, taken, waiting, opened\], found None"),
    ([GOOD[0], 3, *GOOD[2:]], r"the turn of a reader must be the number of one of its 3 slots"),
    ([GOOD[0], -1, *GOOD[2:]], r"turn in the cursor of a reader must be an int of at least 0, found -"),
    ([*GOOD[:4], True], r"opened in the cursor of a reader must be an int"),
    ([[3], 0, *GOOD[2:]], r"the place of a file must be \[file, offset, record, delivered, size, mark\]"),
    ([[[1, 2, 3, 4, -2]], 0, *GOOD[2:]], r"the place of a file must be"),
    ([[[1, 2, 5, 4, 5]], 0, *GOOD[2:]], r"an anchor that is not behind the records that were deliv"),
    ([*GOOD[:3], [None], 0], r"the place of a file must be"),
]
"""Other damage to a saved state is refused by ``tests/state/test_hostile_states.py``."""


@pytest.mark.parametrize(("place", "message"), BAD)
def test_a_place_that_is_none_is_refused_with_what_was_found(place: Any, message: str) -> None:
    with pytest.raises(StateMismatch, match=message):
        ReaderCursor.from_json(place)


@pytest.mark.parametrize("deals", [None, [3], [[0]], [[2, 1]], [[1, -1]], [[True, 1]]])
def test_deals_that_are_none_are_refused(deals: Any) -> None:
    with pytest.raises(StateMismatch, match="the saved state is damaged"):
        checked_deals(deals)
