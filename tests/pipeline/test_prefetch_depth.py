"""How far the ranks read ahead: the same at every step, on all ranks and in every run, within the bytes."""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.oracle.test_in_process import fake_strategy
from tests.support.collectives import FakeCollectives
from tests.support.scripted import Script, compose, play, results_of
from tests.support.waiting import wait_for
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
    refs: list[weakref.ref[Any]] = []
    for _ in range(20):
        delivered = party.engine.take()
        assert delivered is not None
        refs.append(weakref.ref(delivered.transfers[0]))
        party.sent.clear()
        del delivered
        wait_for(lambda: refs[-1]() is None)
    party.engine.close()


Fn = Callable[[Any], Any]


def numbers(size: int) -> Any:
    return [torch.tensor(number) for number in range(size)]


def total(batch: torch.Tensor) -> int:
    return int(batch.sum())


def steps_of(world: int, play: Callable[[Any], Any], replicas: int = 2) -> list[Any]:
    """What each rank plays with its strategy."""
    ranks = FakeCollectives(world)
    found = ranks.run(lambda rank: play(fake_strategy(ranks, rank, replicas)))
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: DataLoader(numbers(23), 5), {"balance": list(range(23))}),
        (lambda: DataLoader(numbers(23), 5), {"balance": tdi.Balance(range(23), equal_counts=True)}),
        (lambda: DataLoader(tdi.Mixture({"a": numbers(9), "b": numbers(7)}, {"a": 2, "b": 1}, stop="all"), 5), {}),
    ],
    ids=["balance", "equal counts", "mixture"],
)
def test_sums_do_not_depend_on_who_reads_what(make: Callable[[], Any], options: dict[str, Any]) -> None:
    def play(strategy: tdi.Strategy) -> list[Any]:
        options_of_sums = tdi.InputOptions(sums={"all": total}, **options)
        with strategy.distribute_dataset(make(), options_of_sums) as dataset:
            found = []
            for group in tdi.groups(dataset, 2):
                for element, step in group:
                    own = sum(total(part) for part in strategy.local_results(element))
                    assert step.local_sums == {"all": own}
                found.append(([step.sums for _, step in group], group.sums, group.global_size))
            return found

    (alone,) = steps_of(1, play, 1)
    for steps, sums, _ in alone:
        assert sums == {"all": sum(step["all"] for step in steps)}
    assert (len(alone[0][0]), alone[0][2]) == (2, 10)
    for world in (2, 3):
        assert steps_of(world, play) == [alone] * world


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ([lambda batch: batch.sum().to("meta"), total], "tensor of shape [], torch.int64, on meta; an int is needed"),
        ([lambda batch: batch, total], "on cpu; an int is needed"),
        ([lambda _: 0.5, total], "returned the float 0.5; an int is needed"),
        ([total, lambda batch: batch.double().mean()], "in the training loop by strategy.reduce('sum', value)"),
        ([lambda _: 1 << 48, total], "a sum of 49 bits over this rank's part; an int of at most 48 bits is needed"),
        ([lambda _: True, total], "returned a bool; an int is needed"),
        ([lambda _: None, total], "returned a NoneType"),
        ([lambda batch: 1 // 0, total], "ZeroDivisionError"),
    ],
)
def test_a_function_that_fails_on_a_rank_is_an_error_on_all_at_its_step(functions: Sequence[Fn], words: str) -> None:
    def play(strategy: tdi.Strategy) -> tuple[int, str]:
        bad = functions[strategy.input_pipeline_id]
        steps: list[Any] = []

        def function(batch: torch.Tensor) -> Any:
            return bad(batch) if batch[0] >= 8 else total(batch)

        options = tdi.InputOptions(sums={"tokens": function}, prefetch=1)
        with strategy.distribute_dataset(DataLoader(numbers(16), 4), options) as dataset:
            with pytest.raises(tdi.SourceError) as caught:
                steps.extend(dataset)
            assert caught.value.step == 2
            return len(steps), str(caught.value)

    for steps, message in steps_of(2, play, 1):
        assert steps == 2
        assert "sums['tokens']" in message
        assert words in message.split("\n\nThe traceback")[0]


def test_sums_of_other_names_are_a_disagreement() -> None:
    def play(strategy: tdi.Strategy) -> str:
        options = tdi.InputOptions(sums={f"of {strategy.input_pipeline_id}": total})
        with pytest.raises(tdi.RankDisagreement) as caught:
            strategy.distribute_dataset(DataLoader(numbers(4), 2), options)
        return str(caught.value)

    assert all("sums" in message for message in steps_of(2, play))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"sums": [total]}, TypeError, "sums is .*a dict of functions by name is needed"),
        ({"sums": {1: total}}, TypeError, "a name in sums is 1; a text is needed"),
        ({"sums": {"a": 1}}, TypeError, r"sums\['a'\] is 1; a function is needed"),
        ({"sums": {"a": total}, "coordination": "off"}, ValueError, "need coordination='on'"),
    ],
)
def test_options_that_make_no_sums_are_refused(options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        tdi.InputOptions(**options)
