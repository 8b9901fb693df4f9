"""How far the ranks read ahead: the same at every step on all of them, further while votes show, within the bytes."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
import weakref
from typing import final

import pytest

from tests.support.scripted import Script, compose, play, results_of
from torchdistinput.plan.prefetch_depth import drawn_at_once
from torchdistinput.testing import FakeCollectives

MOST = 32
FIRST = 2
PLENTY = 1 << 40


@final
@dataclasses.dataclass(frozen=True)
class Loop:
    """How one rank reads.

    Args:
      step_bytes: of each step.
      room: bytes that may be ready ahead; ``None`` for a depth that stays.
      leaves_after: steps after which the loop is left.
      seed: of the moments that the loop takes now and then.
      large_from: the step from which steps have a hundred times the bytes.
    """

    step_bytes: int = 1
    room: int | None = PLENTY
    leaves_after: int | None = None
    seed: float | None = None
    large_from: int = 1 << 30


def ahead_at_each_step(loops: list[Loop], rows: int, *, depth: int = FIRST) -> list[list[int]]:
    """For each rank, after each step: for how many steps beyond it user code was called. Each vote takes a moment."""
    world = FakeCollectives(len(loops))
    for vote in range(rows):
        world.delay(rank=0, step=vote, seconds=0.001)

    def rank_reads(rank: int) -> list[int]:
        loop, rng = loops[rank], random.Random(loops[rank].seed)
        told = [depth]
        party = compose(world, rank, Script((1,) * rows), depth=depth, room=loop.room, deeper=told.append)
        found: list[int] = []
        while len(found) != loop.leaves_after and party.buffer.take() is not None:
            num_bytes = loop.step_bytes * (100 if len(found) >= loop.large_from else 1)
            party.meter.deliver(1, num_bytes)
            found.append(len(party.stream.draws) - len(found) - 1)
            assert max(told) >= found[-1]
            if loop.seed is not None and rng.random() < 0.2:
                time.sleep(rng.choice([0.0001, 0.001]))
        party.buffer.close()
        return found

    return results_of(world, rank_reads)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_loop_that_is_faster_than_the_votes_lets_all_ranks_read_further_ahead(num_ranks: int) -> None:
    first, *others = ahead_at_each_step([Loop()] * num_ranks, 600)
    assert others == [first] * len(others)
    assert max(first[:560]) == MOST
    assert first[0] == FIRST
    furthest = list(itertools.accumulate(first[:560], max))
    assert set(furthest) <= {2, 4, 8, 16, 32}
    assert all(most - drawn_at_once(most) < ahead for ahead, most in zip(first, furthest, strict=False))


@pytest.mark.parametrize("seed", range(6))
def test_ranks_of_different_speed_are_equally_far_ahead_at_each_step(seed: int) -> None:
    """So a loop that all leave at one step leaves the generators of all ranks in the same state."""
    rng = random.Random(seed)
    leaves = rng.randint(1, 120)
    loops = [Loop(seed=rng.choice([None, rng.random()]), leaves_after=leaves) for _ in range(rng.randint(2, 4))]
    first, *others = ahead_at_each_step(loops, 300)
    assert len(first) == leaves
    assert others == [first] * len(others)


def test_an_explicit_depth_stays() -> None:
    for depth in (0, 1, 2, 5, 7):
        for found in ahead_at_each_step([Loop(room=None)] * 2, 60, depth=depth):
            assert set(found[:50]) == {depth}


@pytest.mark.parametrize(("depth", "at_once"), [(8, 2), (16, 4), (20, 5), (32, 8), (48, 8)])
def test_where_much_is_read_ahead_steps_are_drawn_in_rows_the_same_ones_on_all_ranks(depth: int, at_once: int) -> None:
    expected = [depth - step % at_once for step in range(100)]
    loops = [Loop(room=None, seed=seed) for seed in (None, 0.5, 0.25)]
    for found in ahead_at_each_step(loops, 150, depth=depth):
        assert found[:100] == expected


@pytest.mark.parametrize(("room", "most"), [(4, 2), (5, 4), (8, 4), (9, 8), (32, 16), (33, 32)])
def test_the_read_ahead_grows_within_the_bytes_of_the_rank_that_has_least_room(room: int, most: int) -> None:
    """Of steps of one byte, so many and the one in use fit."""
    for found in ahead_at_each_step([Loop(), Loop(room=room)], 500):
        assert max(found[:460]) == most


def test_when_steps_become_so_large_that_they_do_not_fit_the_ranks_read_less_far_ahead() -> None:
    for found in ahead_at_each_step([Loop(), Loop(room=400, large_from=200)], 500):
        assert max(found) == MOST
        assert found[400] == FIRST


def test_one_rank_whose_steps_are_long_beside_the_votes_keeps_the_read_ahead_short() -> None:
    world = FakeCollectives(2)

    def rank_reads(rank: int) -> int:
        party = compose(world, rank, Script((1,) * 30), depth=FIRST, room=PLENTY)
        most = 0
        while party.buffer.take() is not None:
            party.meter.deliver(1, 1)
            most = max(most, party.buffer.depth)
            if rank:
                time.sleep(0.02)
        party.buffer.close()
        return most

    assert world.run(rank_reads) == [FIRST, FIRST]


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
        delivered = party.buffer.take()
        assert delivered is not None
        gone = weakref.ref(delivered.transfers[0])
        party.sent.clear()
        del delivered
        deadline = time.monotonic() + 10
        while gone() is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert gone() is None
    party.buffer.close()
