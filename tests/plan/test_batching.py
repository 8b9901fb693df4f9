"""Batches, steps and files: the smallest split, sharding by files, and how many steps are read ahead."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.oracle import laws
from tests.oracle.program import Program, Turn
from torchdistinput.errors import BatchingError, ShardingError, StateMismatch
from torchdistinput.plan.batching import (
    Cutter,
    Limits,
    check_batch_size,
    check_replica,
    distinct_steps,
    refuse_empty_pieces,
    split,
)
from torchdistinput.plan.file_resharding import FileCursor, ReaderCursor, checked_deals, fresh_files, redeal
from torchdistinput.plan.options import agreed_bound, drawn_at_once, ready_at_a_vote, steps_that_fit
from torchdistinput.plan.topology import AutoShardPolicy, Topology, parts_of, resolve_policy, shards_of

BATCH_SIZES = range(1, 25)
WORLDS = [(workers, local) for workers in range(1, 6) for local in range(1, 5)]


def topologies(workers: int, local: int) -> list[Topology]:
    return [Topology(num_workers=workers, replicas_per_worker=local, worker=worker) for worker in range(workers)]


def worlds() -> Iterator[tuple[int, list[Topology]]]:
    """Every global batch size with every world."""
    for workers, local in WORLDS:
        for size in BATCH_SIZES:
            yield size, topologies(workers, local)


def sizes(row: Limits) -> list[int]:
    return [hi - lo for lo, hi in row]


def samples(rows: Sequence[Sequence[tuple[int, int]]]) -> list[list[list[int]]]:
    return [[list(range(lo, hi)) for lo, hi in row] for row in rows]


def test_law_s_the_pieces_are_the_batch_in_order_and_the_first_are_the_fullest() -> None:
    for size, replicas in itertools.product(range(25), range(1, 21)):
        (pieces,) = samples([[split(size, replicas, k) for k in range(replicas)]])
        assert pieces == laws.split(list(range(size)), replicas)


def test_law_g_of_a_shared_batch_each_worker_takes_its_pieces_in_one_step() -> None:
    for size, world in worlds():
        for last in range(size + 1):
            cut = laws.split(list(range(last)), world[0].num_replicas)
            for topology in world:
                rows = Cutter(topology, shared=True, global_batch_size=size).rows(last)
                assert samples(rows) == [[cut[k] for k in topology.replica_ids]]


@pytest.mark.parametrize("ready", [False, True])
def test_laws_c_t_and_r_a_workers_own_batch_is_cut_as_the_oracle_says(ready: bool) -> None:
    for size, world in worlds():
        program = Program("ready" if ready else "items", batch=size)
        for topology in world:
            turn = Turn(topology.num_workers, topology.replicas_per_worker)
            cutter = Cutter(topology, shared=False, global_batch_size=None if ready else size)
            for batch in [list(range(last)) for last in range(1, size + 1)]:
                rows = laws.rows_of(program, turn, topology.worker, [batch])
                if topology.num_workers == 1:  # any policy is DATA
                    rows = [laws.split(batch, turn.replicas)]
                assert samples(cutter.rows(len(batch))) == rows


def test_law_c_every_step_sums_to_the_global_batch_over_the_workers() -> None:
    for size, world in worlds():
        rows = [Cutter(topology, shared=False, global_batch_size=size).rows(size) for topology in world]
        assert [sum(sum(sizes(row)) for row in step) for step in zip(*rows, strict=True)] == [size] * len(world)


def test_the_certain_piece_size_is_the_size_of_every_piece() -> None:
    for size, world in worlds():
        for topology in world:
            for shared in (True, False):
                cutter = Cutter(topology, shared=shared, global_batch_size=size)
                certain = cutter.certain_piece_size(drop_last=True)
                found = {length for row in cutter.rows(size) for length in sizes(row)}
                assert certain is None or found == {certain}
                assert (certain is None) == (size % topology.num_replicas != 0)
                assert cutter.certain_piece_size(drop_last=False) is None
    assert Cutter(topologies(1, 1)[0], shared=True).certain_piece_size(drop_last=True) is None


def test_no_piece_exceeds_the_largest_piece_size_and_one_has_it() -> None:
    for size, world in worlds():
        for shared in (True, False):
            largest = 0
            for topology in world:
                cutter = Cutter(topology, shared=shared, global_batch_size=size)
                bound = cutter.largest_piece_size
                assert bound is not None
                for last in range(1, size + 1):
                    found = max(length for row in cutter.rows(last) for length in sizes(row))
                    assert found <= bound
                    largest = max(largest, found)
            assert largest == -(-size // world[0].num_replicas)
    assert Cutter(topologies(2, 1)[0], shared=True).largest_piece_size is None


def test_distinct_steps_are_the_first_of_each_size_that_occurs() -> None:
    for samples in range(40):
        for size in range(1, 14):
            for drop_last in (True, False):
                batches = [min(size, samples - start) for start in range(0, samples, size)]
                if drop_last:
                    batches = [batch for batch in batches if batch == size]
                expected = [(batches.index(batch), batch) for batch in dict.fromkeys(batches)]
                assert distinct_steps(samples, size, drop_last=drop_last) == expected


def test_a_batch_is_refused_exactly_when_it_leaves_a_replica_empty() -> None:
    for size in range(1, 25):
        for replicas in range(1, 21):
            empty = any(lo == hi for lo, hi in (split(size, replicas, k) for k in range(replicas)))
            if not empty:
                refuse_empty_pieces(3, size, replicas)
                continue
            with pytest.raises(BatchingError, match=rf"step 3 has {size} sample.*replica {replicas - 1} of {replicas}"):
                refuse_empty_pieces(3, size, replicas)


@pytest.mark.parametrize("size", [0, -1, 2.0, "4", None, True])
def test_a_batch_size_is_a_positive_int(size: object) -> None:
    with pytest.raises(BatchingError, match="a positive int is needed"):
        check_batch_size(size)
    assert check_batch_size(3) == 3


def test_a_replica_is_one_of_those_that_exist() -> None:
    check_replica(3, 2)
    with pytest.raises(ValueError, match=r"rank is 3; it must be in \[0, 3\)"):
        check_replica(3, 3)
    with pytest.raises(ValueError, match="rank is -1"):
        check_replica(3, -1)
    with pytest.raises(BatchingError, match="num_replicas is 0"):
        check_replica(0, 0)


AUTO, FILE, DATA, HINT, OFF = (
    AutoShardPolicy.AUTO,
    AutoShardPolicy.FILE,
    AutoShardPolicy.DATA,
    AutoShardPolicy.HINT,
    AutoShardPolicy.OFF,
)


def resolve(
    policy: AutoShardPolicy, files: int | None, can_shard: bool, workers: int
) -> AutoShardPolicy | type[ShardingError]:
    try:
        return resolve_policy(policy, num_files=files, can_shard=can_shard, num_workers=workers)
    except ShardingError:
        return ShardingError


def expected(
    policy: AutoShardPolicy, files: int | None, can_shard: bool, workers: int
) -> AutoShardPolicy | type[ShardingError]:
    """The laws of the policies, one a line."""
    enough: AutoShardPolicy | type[ShardingError] = FILE if (files or 0) >= workers else ShardingError
    return {
        AUTO: DATA if files is None else enough,
        FILE: ShardingError if files is None else enough,
        DATA: DATA,
        OFF: OFF,
        HINT: HINT if can_shard else ShardingError,
    }[policy]


def test_every_policy_with_every_source_resolves_by_the_laws() -> None:
    for case in itertools.product(AutoShardPolicy, [None, 0, 1, 2, 3, 4, 9], [False, True], range(1, 6)):
        assert resolve(*case) == expected(*case), case


@pytest.mark.parametrize("policy", [AUTO, FILE])
def test_too_few_files_is_told_with_both_numbers_and_the_way_out(policy: AutoShardPolicy) -> None:
    with pytest.raises(ShardingError, match=r"2 file\(s\).*not enough for 3 ranks.*AutoShardPolicy\.DATA.*more files"):
        resolve_policy(policy, num_files=2, can_shard=False, num_workers=3)


def test_file_without_files_is_told_with_what_is_needed_even_in_one_process() -> None:
    with pytest.raises(
        ShardingError, match=r"no files to deal out; a FileDataset or a FragmentSource is needed.*AutoShardPolicy\.DATA"
    ):
        resolve_policy(FILE, num_files=None, can_shard=True, num_workers=1)


def test_hint_without_a_shard_method_is_told_with_its_signature() -> None:
    with pytest.raises(ShardingError, match=r"no method shard\(num_shards=, index=\)"):
        resolve_policy(HINT, num_files=4, can_shard=False, num_workers=2)


def test_files_by_size_go_to_the_least_loaded_worker_the_largest_first() -> None:
    for count, workers in itertools.product(range(6), range(1, 5)):
        for sizes in itertools.product(range(4), repeat=count):
            order = [number * 3 % count if count % 3 else number for number in range(count)]
            shares = shards_of(order, workers, sizes)
            loads = [0] * workers
            wanted: list[set[int]] = [set() for _ in range(workers)]
            for size in (3, 2, 1, 0):
                for file in (file for file in order if sizes[file] == size):
                    least = loads.index(min(loads))
                    wanted[least].add(file)
                    loads[least] += size
            assert list(map(set, shares)) == wanted
            assert sorted(file for share in shares for file in share) == list(range(count))
            assert all(share == [file for file in order if file in share] for share in shares)
            assert max(loads) - min(loads) <= max(sizes, default=0)


def test_files_of_one_size_are_dealt_as_without_sizes() -> None:
    for count, workers in itertools.product(range(9), range(1, 5)):
        order = list(range(count))[::-1]
        assert shards_of(order, workers, [5] * count) == shards_of(order, workers)
        assert shards_of(order, workers) == [order[worker::workers] for worker in range(workers)]


def test_the_parts_of_a_file_are_few_and_even_and_make_up_the_file() -> None:
    for size, largest in itertools.product(range(40), range(1, 45)):
        parts = parts_of(size, largest)
        assert [byte for start, end in parts for byte in range(start, end)] == list(range(size))
        sizes = [end - start for start, end in parts]
        assert max(sizes) <= largest
        assert max(sizes) - min(sizes) <= 1
        assert (len(parts) - 1) * largest < max(1, size)


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
