"""Options, costs and packs: what is refused, how samples are divided by their costs, and which pack has which items."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchdistinput.errors import BatchingError
from torchdistinput.plan.balancing import (
    Costs,
    Division,
    StepCosts,
    balanced_split,
    check_costs,
    divide,
    runs_within,
)
from torchdistinput.plan.options import InputOptions, InputReplicationMode, Step
from torchdistinput.plan.packing import Item, Packing, check_packing, pack_window
from torchdistinput.plan.topology import Topology

SMALL = [list(costs) for size in range(1, 6) for costs in itertools.product((0, 1, 2, 5), repeat=size)]
WORLDS = [(workers, local) for workers in range(1, 5) for local in range(1, 4)]


def by_rule(costs: list[int], replicas: int) -> list[list[int]]:
    """Laws C2 and C4: the places of each replica."""
    mine: list[list[int]] = [[] for _ in range(replicas)]
    loads = [0] * replicas
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        owner = min(range(replicas), key=lambda k: (loads[k], len(mine[k]), k))
        mine[owner].append(place)
        loads[owner] += costs[place]
    return [sorted(part) for part in mine]


def parts(costs: Any, replicas: int, *, equal: bool = False) -> list[list[int]]:
    order, sizes = balanced_split(np.array(costs, dtype=np.float64), replicas, equal_counts=equal)
    ends = list(itertools.accumulate(sizes))
    return [order[end - size : end].tolist() for end, size in zip(ends, sizes, strict=True)]


def test_each_sample_goes_to_the_replica_that_the_law_names() -> None:
    drawn = np.random.default_rng(1)
    large = ((40, 3), (64, 8), (129, 64), (50, 64), (121, 40), (400, 130), (300, 7), (700, 40), (90, 2))
    batches = [(costs, replicas) for costs in SMALL for replicas in range(1, 7)]
    batches += [((drawn.lognormal(0, 1, size) * 100).astype(int).tolist(), replicas) for size, replicas in large]
    for costs, replicas in batches:
        assert parts(costs, replicas) == by_rule(costs, replicas), (costs, replicas)
        equal = parts(costs, replicas, equal=True)
        assert sorted(itertools.chain.from_iterable(equal)) == list(range(len(costs)))
        assert {len(part) for part in equal} <= {len(costs) // replicas, -(-len(costs) // replicas)}


def least_possible(costs: Costs, replicas: int, *, equal: bool) -> float:
    """A bound from below for the slowest replica: the mean; or what the largest samples set.

    The parts with the ``j`` largest samples are ``j`` at most, and ``j`` equal parts have so many other samples. And
    two of ``N + 1`` samples are in one part.
    """
    falling = np.sort(costs)[::-1]
    rest = (len(costs) // replicas - 1) * equal
    cheapest = np.append(0.0, falling[::-1].cumsum())
    parts = np.arange(1, replicas + 1)
    bounds = (falling.cumsum()[:replicas] + cheapest[parts * rest]) / parts
    together = falling[replicas - 1 : replicas + 1].sum()
    return float(max(costs.sum() / replicas, bounds.max(), together))


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("replicas", [2, 3, 4, 8, 16, 32, 64])
def test_lognormal_lengths_are_balanced_to_five_percent_or_the_bound_of_the_largest(
    power: int, replicas: int, all_cells: bool
) -> None:
    drawn = np.random.default_rng(replicas)
    for per_replica in (8, 11, 16, 24, 32, 64, 200):
        for _ in range(200 if all_cells else 2):
            costs = drawn.lognormal(0, 1, replicas * per_replica) ** power
            for equal in (False, True):
                slowest = max(costs[part].sum() for part in parts(costs, replicas, equal=equal))
                assert slowest <= 1.05 * least_possible(costs, replicas, equal=equal), (per_replica, equal)


def test_costs_of_any_scale_give_the_same_split() -> None:
    costs = np.random.default_rng(2).lognormal(0, 1, 50)
    expected = balanced_split(costs, 4)
    for scale in (2.0**-900, 2.0**-30, 2.0**900):
        found = balanced_split(costs * scale, 4)
        assert found.sizes == expected.sizes
        assert (found.order == expected.order).all()
    assert sum(balanced_split(np.full(6, 5e-324), 4).sizes) == 6


def test_a_batch_that_is_too_large_for_one_word_is_refused() -> None:
    with pytest.raises(BatchingError, match="too large to be balanced over 32768 replicas"):
        balanced_split(np.ones(2**20), 2**15)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, -float("inf")])
def test_a_cost_that_is_no_cost_is_found(bad: float) -> None:
    assert check_costs(np.array([0.0, 1.0, bad, 2.0, bad])) == 2
    assert check_costs(np.array([0.0, 1.0])) is None


# ------------------------------------------------------------------------------------------------------ whole worlds


def divisions(costs: list[int], workers: int, local: int) -> Iterator[Division]:
    """The division on each worker."""
    for worker in range(workers):
        topology = Topology(num_workers=workers, replicas_per_worker=local, worker=worker)
        yield divide(np.array(costs, dtype=np.float64), topology)


def test_the_pieces_of_all_workers_are_the_global_batch_once() -> None:
    for costs in SMALL[::7]:
        for workers, local in WORLDS:
            found = list(divisions(costs, workers, local))
            assert len({division.digest for division in found}) == 1
            pieces = [division.order[lo:hi].tolist() for division in found for lo, hi in division.row]
            assert pieces == by_rule(costs, workers * local)
            for division in found:
                assert division.costs.tolist() == [costs[place] for place in division.order]


# ------------------------------------------------------------------------------------------------------ micro-batches


def test_micro_batches_are_within_the_bound_and_as_many_on_every_replica() -> None:
    for costs in SMALL[::5]:
        for workers, local in WORLDS:
            bound = max(costs) + 1
            found = [
                (division, place, StepCosts(division).micro_batches(bound, place))
                for division in divisions(costs, workers, local)
                for place in range(local)
            ]
            assert len({len(slices) for _, _, slices in found}) == 1
            needed = []
            for division, place, slices in found:
                lo, hi = division.row[place]
                mine = division.costs[lo:hi]
                covered = [each for one in slices for each in range(hi - lo)[one]]
                assert covered == list(range(hi - lo))
                assert all(mine[one].sum() <= bound for one in slices)
                needed.append(len(runs_within(mine, bound)))
            assert len(slices) == max(needed)


def test_a_sample_above_the_bound_is_refused_on_every_replica() -> None:
    for division in divisions([1, 9, 1, 1], 2, 2):
        for place in range(2):
            for bound in (8, float("nan")):
                with pytest.raises(ValueError, match=rf"max_cost is {bound}, and a sample of this step costs 9;"):
                    StepCosts(division).micro_batches(bound, place)


def test_samples_that_could_not_be_read_are_missing_in_their_micro_batches() -> None:
    (division,) = divisions([2, 1, 1, 2, 2], 1, 1)
    assert StepCosts(division).micro_batches(3, 0) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert StepCosts(division, ((1, 4),)).micro_batches(3, 0) == [slice(0, 1), slice(1, 3), slice(3, 3)]


def test_the_defaults_are_those_of_the_guide() -> None:
    options = InputOptions()
    assert options.auto_shard_policy is None  # AUTO; of the drop-in DATA
    assert (options.prefetch, options.least_ahead, options.most_ahead) == (None, 2, 32)
    assert options.fetch_to_device
    assert options.coordination == "on"
    assert options.timeout_seconds is None
    assert options.replication_mode is InputReplicationMode.PER_WORKER


@pytest.mark.parametrize(
    ("wrong", "kind", "told"),
    [
        ({"auto_shard_policy": "DATA"}, TypeError, r"auto_shard_policy is 'DATA'; a member of AutoShardPolicy"),
        ({"replication_mode": "PER_WORKER"}, TypeError, r"replication_mode is 'PER_WORKER'"),
        ({"prefetch": True}, TypeError, r"prefetch is True; an int is needed"),
        ({"prefetch": 1.5}, TypeError, r"prefetch is 1\.5; an int is needed"),
        ({"prefetch": -1}, ValueError, r"prefetch is -1; it must be 0 or more"),
        ({"max_errors": -1}, ValueError, r"max_errors is -1; it must be 0 or more"),
        ({"max_errors": "3"}, TypeError, r"max_errors is '3'; an int is needed"),
        ({"trace": 3}, TypeError, r"trace is 3; the name of a folder is needed"),
        ({"log_every": -1}, ValueError, r"log_every is -1; it must be 0 or more"),
        ({"on_error": "ignore"}, ValueError, r"on_error is 'ignore'; it must be 'raise' or 'skip'"),
        ({"timeout_seconds": 0}, ValueError, r"timeout_seconds is 0; it must be positive"),
        ({"timeout_seconds": float("nan")}, ValueError, r"timeout_seconds is nan; it must be positive"),
        ({"coordination": "maybe"}, ValueError, r"coordination is 'maybe'; it must be 'on' or 'off'"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(wrong: dict[str, Any], kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        InputOptions(**wrong)


def test_a_folder_may_be_a_path() -> None:
    assert InputOptions(trace=Path("look")).measures


def test_options_and_steps_are_frozen_values() -> None:
    assert InputOptions() == InputOptions()
    assert InputOptions(prefetch=1) != InputOptions()
    with pytest.raises(dataclasses.FrozenInstanceError):
        InputOptions().prefetch = 3  # type: ignore[misc]
    step = Step(0, 1, 4, (2, 2), 2, 1)
    assert step == Step(epoch=0, index=1, global_size=4, local_sizes=(2, 2), num_replicas=2, num_workers=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        step.index = 2  # type: ignore[misc]


def tokens(packs: Sequence[Sequence[Item]]) -> Counter[tuple[int, int]]:
    return Counter((item.sample, place) for pack in packs for item in pack for place in range(item.start, item.stop))


def searched(lengths: list[int], room: int, *, best: bool) -> list[list[int]]:
    """The packs by the words of the law, in the order in which they begin."""
    packs: list[list[int]] = []
    order = sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)) if best else range(len(lengths))
    for item in order:
        free = [room - sum(lengths[each] for each in pack) for pack in packs]
        fits = [number for number, rest in enumerate(free) if rest >= lengths[item]]
        if not fits:
            packs.append([item])
        else:
            packs[min(fits, key=lambda number: (free[number], number)) if best else fits[0]].append(item)
    return sorted(sorted(pack) for pack in packs)


def packs_of(found: Packing) -> list[list[Item]]:
    return [found.pack(number) for number in range(len(found))]


@pytest.mark.parametrize("strategy", ["best_fit", "first_fit"])
def test_packs_are_those_of_a_plain_search(strategy: Any, all_cells: bool) -> None:
    for seed in range(2000 if all_cells else 100):
        dice = random.Random(seed)
        room = dice.randint(1, 40)
        lengths = [dice.randint(1, room) for _ in range(dice.randint(0, dice.choice([60, 200])))]
        packs = packs_of(pack_window(np.array(lengths, np.int64), 5, room, strategy, "error"))
        assert [[item.sample - 5 for item in pack] for pack in packs] == searched(
            lengths, room, best=strategy == "best_fit"
        )


def test_every_token_is_in_one_pack_or_is_counted(all_cells: bool) -> None:
    for seed in range(4000 if all_cells else 300):
        dice = random.Random(seed)
        room = dice.randint(1, 30)
        lengths = np.array([dice.randint(0, 70) for _ in range(dice.randint(0, 40))], np.int64)
        strategy: Any = dice.choice(["best_fit", "first_fit", "concat"])
        overflow: Any = dice.choice(["split", "truncate", "drop"])
        found = pack_window(lengths, 0, room, strategy, overflow)
        packs = packs_of(found)
        seen = tokens(packs)
        assert set(seen.values()) <= {1}
        assert len(seen) + found.dropped + found.truncated == lengths.sum()
        assert all(0 < sum(item.stop - item.start for item in pack) <= room for pack in packs)
        assert all(pack == sorted(pack) for pack in packs)
        assert packs == sorted(packs, key=lambda pack: pack[0])
        if strategy == "concat":
            assert all(sum(item.stop - item.start for item in pack) == room for pack in packs[:-1])


def test_a_sample_that_is_too_long_is_named() -> None:
    with pytest.raises(ValueError, match="sample 12 has 9 tokens, more than max_length=8"):
        pack_window(np.array([1, 2, 9]), 10, 8, "best_fit", "error")
    with pytest.raises(ValueError, match="sample 11 has -2 tokens"):
        pack_window(np.array([1, -2]), 10, 8, "concat", "error")
    for arguments in (
        (0, 1, "concat", "drop", "sample"),
        (1, 0, "concat", "drop", "sample"),
        (1, 1, "worst", "drop", "sample"),
        (1, 1, "concat", "cut", "sample"),
        (1, 1, "concat", "drop", "text"),
    ):
        with pytest.raises(ValueError, match="must be"):
            check_packing(*arguments)
