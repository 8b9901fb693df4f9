"""The laws of the cut, over all small worlds: batches of 1 to 24 samples, 1 to 5 workers of 1 to 4 replicas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torchdistinput.errors import BatchingError
from torchdistinput.plan.batching import (
    Cutter,
    Limits,
    check_batch_size,
    check_replica,
    cycle_sizes,
    distinct_steps,
    refuse_empty_pieces,
    split,
)
from torchdistinput.plan.topology import Topology

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


def in_order(row: Limits) -> list[int]:
    return [sample for lo, hi in row for sample in range(lo, hi)]


def test_law_s_the_pieces_are_the_batch_in_order_and_the_first_are_the_fullest() -> None:
    for size in range(25):
        for replicas in range(1, 21):
            pieces = [split(size, replicas, k) for k in range(replicas)]
            most = -(-size // replicas)
            assert [sample for lo, hi in pieces for sample in range(lo, hi)] == list(range(size))
            lengths = [hi - lo for lo, hi in pieces]
            assert all(0 <= length <= most for length in lengths)
            full = size // most if most else 0
            assert lengths[:full] == [most] * full
            assert sum(lengths[full:]) == lengths[full] if full < replicas else True
            assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(
    ("size", "replicas", "expected"),
    [(4, 3, [2, 2, 0]), (8, 3, [3, 3, 2]), (5, 4, [2, 2, 1, 0]), (1, 3, [1, 0, 0]), (0, 2, [0, 0]), (6, 2, [3, 3])],
)
def test_law_s_by_example(size: int, replicas: int, expected: list[int]) -> None:
    assert [hi - lo for lo, hi in (split(size, replicas, k) for k in range(replicas))] == expected


def test_law_g_a_shared_batch_is_one_step_and_all_pieces_together_are_the_batch() -> None:
    for size, world in worlds():
        for last in range(size + 1):
            rows = [Cutter(topology, shared=True, global_batch_size=size).rows(last) for topology in world]
            assert all(len(each) == 1 for each in rows)
            assert all(len(each[0]) == world[0].replicas_per_worker for each in rows)
            assert [sample for each in rows for sample in in_order(each[0])] == list(range(last))


def test_law_g_one_worker_cuts_a_global_batch_whether_it_is_shared_or_its_own() -> None:
    for local in range(1, 5):
        (alone,) = topologies(1, local)
        for size in BATCH_SIZES:
            for last in range(1, size + 1):
                own = Cutter(alone, shared=False, global_batch_size=size).rows(last)
                assert own == Cutter(alone, shared=True, global_batch_size=size).rows(last)


def test_law_c_a_full_batch_lasts_one_step_for_each_worker_and_is_delivered_whole() -> None:
    for size, world in worlds():
        for topology in world:
            rows = Cutter(topology, shared=False, global_batch_size=size).rows(size)
            assert len(rows) == topology.num_workers
            assert [sample for row in rows for sample in in_order(row)] == list(range(size))


def test_law_c_every_step_sums_to_the_global_batch_over_the_workers() -> None:
    for size, world in worlds():
        rows = [Cutter(topology, shared=False, global_batch_size=size).rows(size) for topology in world]
        for step in range(len(world)):
            assert sum(sum(sizes(of_worker[step])) for of_worker in rows) == size


def test_law_c_sizes_differ_by_at_most_one() -> None:
    for size, world in worlds():
        for topology in world:
            cycle = cycle_sizes(size, topology)
            assert len(cycle) == topology.num_replicas
            assert sum(cycle) == size
            assert max(cycle) - min(cycle) <= 1


def test_law_c_each_worker_starts_its_cycle_where_its_own_replicas_stand() -> None:
    for size, world in worlds():
        base = cycle_sizes(size, world[0])
        assert list(base) == sorted(base, reverse=True)
        for topology in world:
            turn = topology.worker * topology.replicas_per_worker
            assert cycle_sizes(size, topology) == tuple(base[(turn + k) % len(base)] for k in range(len(base)))


def test_law_c_by_example() -> None:
    """Seven samples, two workers of two replicas: 2 2 2 1 and, from the third on, 2 1 2 2."""
    first, second = topologies(2, 2)
    assert cycle_sizes(7, first) == (2, 2, 2, 1)
    assert cycle_sizes(7, second) == (2, 1, 2, 2)


def test_law_t_a_short_batch_is_split_without_its_trailing_empties_into_whole_rows() -> None:
    for size, world in worlds():
        for topology in world[1:]:
            local, replicas = topology.replicas_per_worker, topology.num_replicas
            cutter = Cutter(topology, shared=False, global_batch_size=size)
            for last in range(1, size):
                rows = cutter.rows(last)
                full = [split(last, replicas, k) for k in range(replicas) if k * -(-last // replicas) < last]
                flat = [piece for row in rows for piece in row]
                assert flat[: len(full)] == full
                assert all(lo == hi for lo, hi in flat[len(full) :])
                assert all(len(row) == local for row in rows)
                assert len(rows) == -(-len(full) // local)


def test_law_t_every_row_of_a_short_batch_has_a_sample_and_no_sample_is_lost() -> None:
    for size, world in worlds():
        for topology in world[1:]:
            cutter = Cutter(topology, shared=False, global_batch_size=size)
            for last in range(1, size):
                rows = cutter.rows(last)
                assert all(sum(sizes(row)) > 0 for row in rows)
                assert [sample for row in rows for sample in in_order(row)] == list(range(last))


def test_law_r_a_ready_batch_is_split_into_all_pieces() -> None:
    for size, world in worlds():
        for topology in world[1:]:
            rows = Cutter(topology, shared=False).rows(size)
            assert len(rows) == topology.num_workers
            assert [piece for row in rows for piece in row] == [
                split(size, topology.num_replicas, k) for k in range(topology.num_replicas)
            ]


def test_with_data_for_each_worker_as_many_samples_are_delivered_as_were_read() -> None:
    """FILE deals records out, OFF reads all of them everywhere: the cut adds and loses nothing in either case."""
    for size, world in worlds():
        cutters = [Cutter(topology, shared=False, global_batch_size=size) for topology in world]
        for records in (0, 1, size - 1, size, size + 1, 3 * size + size // 2):
            full, last = divmod(records, size)
            batches = [size] * full + ([last] if last else [])
            for cutter in cutters:
                assert sum(sum(sizes(row)) for batch in batches for row in cutter.rows(batch)) == records


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
