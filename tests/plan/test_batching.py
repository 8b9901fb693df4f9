"""The laws of the cut, over all small worlds: batches of 1 to 24 samples, 1 to 5 workers of 1 to 4 replicas."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest

from tests.oracle import laws
from tests.oracle.program import Program, Turn
from torchdistinput.errors import BatchingError
from torchdistinput.plan.batching import (
    Cutter,
    Limits,
    check_batch_size,
    check_replica,
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
