"""How far the ranks read ahead: the same at every step, on all ranks and in every run, within the bytes."""

from __future__ import annotations

import random
import time
import weakref

import pytest

from tests.support.collectives import FakeCollectives
from tests.support.scripted import Script, compose, play, results_of
from torchdistinput.plan.options import drawn_at_once

MOST = 32
FIRST = 2
PLENTY = 1 << 40


def ahead_at_each_step(
    rows: int,
    rooms: list[int | None],
    *,
    depth: int = FIRST,
    leaves_after: int = 1 << 30,
    seed: int = 0,
    first: tuple[int, ...] = (),
) -> list[list[int]]:
    """For each rank, after each step: for how many steps beyond it user code was called. Steps have one byte.

    Args:
      rows: steps of the epoch.
      rooms: for each rank the bytes that may be ready ahead; ``None`` for a fixed depth.
      depth: the prefetch depth at first.
      leaves_after: steps after which the loop is left.
      seed: of the moments that votes and loops take now and then.
      first: bytes of the first steps.
    """
    sizes = (*first, *(1,) * (rows - len(first)))
    world, drawn = FakeCollectives(len(rooms)), random.Random(seed)
    for vote in range(0, rows, 3):
        world.delay(rank=drawn.randrange(len(rooms)), step=vote, seconds=0.001)

    def rank_reads(rank: int) -> list[int]:
        rng = random.Random(seed + rank)
        script = Script(sizes)
        party = compose(world, rank, script, depth=depth, max_bytes=rooms[rank], weigh=lambda step: step.sizes[0])
        found: list[int] = []
        while len(found) != leaves_after and party.engine.take() is not None:
            found.append(len(party.stream.draws) - len(found) - 1)
            if rng.random() < 0.2:
                time.sleep(rng.choice([0.0001, 0.001]))
        party.engine.close()
        return found

    return results_of(world, rank_reads)


def by_rule(rows: int, bound: int, depth: int = FIRST) -> list[int]:
    """One step more with each step, in rows."""
    found, drawn = [], depth + 1
    for step in range(rows):
        if step:
            depth = min(depth + 1, bound)
            if drawn - step <= depth + 1 - drawn_at_once(depth):
                drawn = step + depth + 1
        found.append(drawn - step - 1)
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_the_read_ahead_is_a_function_of_the_number_of_the_step(num_ranks: int, seed: int) -> None:
    """So seeded runs repeat, and a loop that all leave at one step leaves all generators in the same state."""
    for found in ahead_at_each_step(100, [PLENTY] * num_ranks, leaves_after=60, seed=seed):
        assert found == by_rule(60, MOST)


def test_an_explicit_depth_stays() -> None:
    for depth in (0, 1, 2, 5, 7):
        for found in ahead_at_each_step(60, [None] * 2, depth=depth):
            assert set(found[:50]) == {depth}


@pytest.mark.parametrize(("depth", "at_once"), [(8, 2), (16, 4), (20, 5), (32, 8), (48, 8)])
def test_where_much_is_read_ahead_steps_are_drawn_in_rows_the_same_ones_on_all_ranks(depth: int, at_once: int) -> None:
    expected = [depth - step % at_once for step in range(100)]
    for found in ahead_at_each_step(150, [None] * 3, depth=depth):
        assert found[:100] == expected


@pytest.mark.parametrize(("room", "most"), [(0, 2), (4, 3), (9, 8), (21, 20), (33, 32), (99, 32)])
def test_the_read_ahead_grows_within_the_bytes_of_the_rank_that_has_least_room(room: int, most: int) -> None:
    """Of steps of one byte, so many and the one in use fit."""
    for found in ahead_at_each_step(120, [PLENTY, room]):
        assert found[:80] == by_rule(80, most)


@pytest.mark.parametrize(("first", "most"), [((4, 1, 1), 5), ((1, 1, 4), 23)])
def test_the_read_ahead_fits_the_first_step(first: tuple[int, ...], most: int) -> None:
    """However many steps are there when the ranks agree: else runs would not repeat."""
    for found in ahead_at_each_step(120, [PLENTY, 24], first=first):
        assert found[:80] == by_rule(80, most)


@pytest.mark.parametrize("depth", [4, 8, 16])
def test_a_deep_read_ahead_votes_for_most_of_it_at_once(depth: int) -> None:
    world = FakeCollectives(2)
    script = Script((1,) * 64, pauses=frozenset(range(65)))
    seen = play(world, [script] * 2, depth=depth)
    assert all(len(each.steps) == 64 for each in seen)
    assert world.num_exchanges() <= 2 * 64 // (2 * depth // 3) + 4


@pytest.mark.parametrize("depth", [0, 2, 8])
def test_a_step_that_was_taken_and_dropped_is_kept_by_nobody(depth: int) -> None:
    """Memory that comes back when nothing refers to it must come back, also while the thread waits."""
    party = compose(FakeCollectives(1), 0, Script((3,) * 40, in_background=bool(depth)), depth=depth)
    for _ in range(20):
        delivered = party.engine.take()
        assert delivered is not None
        gone = weakref.ref(delivered.transfers[0])
        party.sent.clear()
        del delivered
        deadline = time.monotonic() + 10
        while gone() is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert gone() is None
    party.engine.close()
