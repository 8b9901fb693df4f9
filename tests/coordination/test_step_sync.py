"""All ranks take the same steps: one message of one size carries ends, failures, stops and structures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import pytest
import torch

from tests.support.interruptions import Interruption
from tests.support.scripted import results_of
from torchdistinput.batches.pytree import structure_of
from torchdistinput.batches.schema_check import SchemaChecker
from torchdistinput.coordination import step_sync as coordinate_module
from torchdistinput.coordination.batch_digests import digest_of_read, number_of_size
from torchdistinput.coordination.exchanges import conclude
from torchdistinput.coordination.process_group import Channel
from torchdistinput.coordination.step_sync import StepSync
from torchdistinput.errors import BatchingError, RankDisagreement, RankLost, SourceError
from torchdistinput.step_types import Ahead, EmptyStep, Failed, Held, LocalStep, Outcome, PastEnd, Raised, Skipped
from torchdistinput.testing import FakeCollectives

Turn = Callable[[StepSync], list[Outcome]]


class Odd:
    """No plain value."""


def share(size: int) -> LocalStep:
    return LocalStep([torch.zeros(size)], (size,))


def make(channel: Channel | None, rank: int, *, slots: int = 4, piece: Any = None, **more: Any) -> StepSync:
    """A stage of one rank, which has seen ``piece`` if it is given."""
    checker = SchemaChecker()
    if piece is not None:
        checker.take(structure_of(piece))

    def complete(of_step: LocalStep) -> None:
        assert checker.structure is not None
        pieces = of_step.pieces or [None]
        of_step.pieces = [checker.structure.empty() if each is None else each for each in pieces]
        of_step.sizes = of_step.sizes or (0,)

    return StepSync(channel, slots=slots, checker=checker, complete=complete, name=rank, begins_at=(3, 0), **more)


def vote(*held: Held) -> Turn:
    """Holds these steps and votes once."""

    def turn(coordinate: StepSync) -> list[Outcome]:
        for each in held:
            coordinate.hold(each)
        return conclude(coordinate.vote())

    return turn


def stop(coordinate: StepSync) -> list[Outcome]:
    """Stops after two steps, and votes."""
    coordinate.stop(2)
    return conclude(coordinate.vote())


def together(turns: list[Turn], pieces: list[Any] | None = None, *, slots: int = 4) -> list[list[Outcome]]:
    """Every rank takes its turn."""
    world = FakeCollectives(len(turns))
    found = pieces or [torch.zeros(1)] * len(turns)

    def rank_votes(rank: int) -> list[Outcome]:
        return turns[rank](make(world.ranks(rank).open_channel(0), rank, slots=slots, piece=found[rank]))

    return results_of(world, rank_votes)


def sizes(outcomes: list[Outcome]) -> list[Any]:
    """What was agreed, in short."""
    return [
        (each.global_size, *each.sizes) if isinstance(each, LocalStep) else type(each).__name__ for each in outcomes
    ]


def error(outcomes: list[Outcome]) -> BaseException:
    """The one error in them."""
    (raised,) = outcomes
    assert isinstance(raised, Raised)
    return raised.error


def test_a_step_is_agreed_when_every_rank_holds_it() -> None:
    first, second = together([vote(share(2), share(2), share(2)), vote(share(1))])
    assert sizes(first) == [(3, 2)]
    assert sizes(second) == [(3, 1)]


def test_one_message_covers_as_many_steps_as_there_are_slots() -> None:
    for outcomes in together([vote(*[share(1)] * 5), vote(*[share(1)] * 4)], slots=3):
        assert sizes(outcomes) == [(2, 1)] * 3


def test_a_rank_past_its_end_gets_empty_shares_until_all_are() -> None:
    first, second = together([vote(share(3), share(2), PastEnd()), vote(share(1), PastEnd(), PastEnd())])
    assert sizes(first) == [(4, 3), (2, 2), "End"]
    assert sizes(second) == [(4, 1), (2, 0), "End"]
    padded = second[1]
    assert isinstance(padded, LocalStep)
    assert padded.pieces[0].shape == (0,)


def test_a_step_without_a_sample_is_passed_over_and_is_not_the_end() -> None:
    empty = share(0)
    first, second = together([vote(empty, share(1)), vote(PastEnd(), PastEnd())])
    assert sizes(first) == ["EmptyStep", (1, 1)]
    assert sizes(second) == ["EmptyStep", (1, 0)]
    assert first[0] == EmptyStep(empty)
    assert second[0] == EmptyStep(None)


def test_a_failure_waits_until_what_was_held_before_it_is_delivered() -> None:
    def fails_third(coordinate: StepSync) -> list[Outcome]:
        first = vote(share(1), share(1), Failed(ValueError("bad"), "file x"))(coordinate)
        return [*first, *conclude(coordinate.vote())]

    def goes_on(coordinate: StepSync) -> list[Outcome]:
        first = vote(share(1), share(1), share(1))(coordinate)
        return [*first, *conclude(coordinate.vote())]

    failing, other = together([fails_third, goes_on])
    assert sizes(failing) == sizes(other) == [(2, 1), (2, 1), "Raised"]
    own, told = error(failing[2:]), error(other[2:])
    assert isinstance(own, SourceError)
    assert isinstance(own.__cause__, ValueError)
    assert isinstance(told, SourceError)
    assert told.__cause__ is None
    assert "rank 0 failed at step 2 of epoch 3 (file x): ValueError: bad" in str(told)
    assert "traceback of rank 0" in str(told)
    assert "traceback" not in str(own)


def test_a_later_failure_that_was_read_ahead_is_not_told() -> None:
    later = vote(share(1), Failed(KeyError("later"), ""))
    for outcomes in together([vote(Failed(ValueError("now"), "")), later]):
        assert "rank 0 failed" in str(error(outcomes))
        assert "later" not in str(error(outcomes))


def test_all_ranks_that_fail_at_one_step_are_named() -> None:
    turns = [vote(Failed(ValueError("a"), "")), vote(Failed(KeyError("b"), "")), vote(share(1))]
    for outcomes in together(turns):
        assert isinstance(error(outcomes), SourceError)
        assert "rank 0 failed" in str(error(outcomes))
        assert "rank 1 failed" in str(error(outcomes))


def test_failures_that_are_alike_are_told_once() -> None:
    turns = [vote(Failed(ValueError("a"), "")), vote(share(1)), vote(Failed(ValueError("a"), ""))]
    for outcomes in together(turns):
        assert str(error(outcomes)).count("the input of ranks 0, 2 failed at step 0") == 1


def test_an_error_of_ours_keeps_its_class_on_all_ranks() -> None:
    for outcomes in together([vote(Failed(BatchingError("no size"), "")), vote(share(1))]):
        assert type(error(outcomes)) is BatchingError
    source = SourceError("broken", file="a.txt", offset=7)
    for outcomes in together([vote(Failed(source, "")), vote(share(1))]):
        found = error(outcomes)
        assert isinstance(found, SourceError)
        assert (found.file, found.offset) == ("a.txt", 7)


def test_what_is_held_after_a_failure_does_not_count() -> None:
    for outcomes in together([vote(Failed(ValueError("bad"), ""), share(1)), vote(share(1))]):
        assert isinstance(error(outcomes), SourceError)


def test_a_rank_that_stops_is_named_to_those_that_go_on() -> None:
    for outcomes in together([vote(share(1)), stop, vote(share(1))]):
        found = error(outcomes)
        assert isinstance(found, RankLost)
        assert "rank 1 after 2 step(s)" in str(found)
        assert "decide on a value that all ranks know" in str(found)


def test_all_stopping_is_one_last_vote() -> None:
    for outcomes in together([stop, stop]):
        assert isinstance(error(outcomes), RankLost)


def test_a_rank_that_stops_past_its_end_does_not_spoil_the_common_end() -> None:
    def stops_at_end(coordinate: StepSync) -> list[Outcome]:
        coordinate.hold(PastEnd())
        return stop(coordinate)

    for outcomes in together([vote(PastEnd()), stops_at_end]):
        assert sizes(outcomes) == ["End"]
    for outcomes in together([vote(share(1)), stops_at_end]):
        assert isinstance(error(outcomes), RankLost)


def test_stop_returns_what_was_held_and_offers_nothing_more() -> None:
    held = [share(1), share(2)]
    coordinate = make(None, 0, piece=torch.zeros(1))
    for each in held:
        coordinate.hold(each)
    found = coordinate.stop(0)
    assert found == held
    found.clear()
    assert coordinate.stop(0) == []
    assert coordinate.holds


def test_a_stop_that_is_interrupted_at_any_line_loses_nothing_that_was_held() -> None:
    for line in itertools.count(1):
        coordinate = make(None, 0, piece=torch.zeros(1))
        coordinate.hold(first := share(1))
        coordinate.hold(second := share(2))
        came = Interruption(line, coordinate_module).press_in(partial(coordinate.stop, 2))
        found = coordinate.stop(2)
        assert {id(each) for each in found} == {id(first), id(second)}
        (outcome,) = conclude(coordinate.vote())
        assert isinstance(outcome, Raised)  # it has stopped
        if not came:
            break
    assert line > 5


def test_a_rank_that_saw_no_sample_learns_the_structure_from_the_others() -> None:
    known = {"x": torch.zeros(2, 5, dtype=torch.float64), "s": ["a", "b"], "n": None}
    turns: list[Turn] = [vote(PastEnd()), vote(LocalStep([known], (2,)))]
    first, second = together(turns, [None, known])
    assert sizes(first) == [(2, 0)]
    assert sizes(second) == [(2, 2)]
    told = first[0]
    assert isinstance(told, LocalStep)
    (empty,) = told.pieces
    assert empty["x"].shape == (0, 5)
    assert empty["x"].dtype == torch.float64
    assert (empty["s"], empty["n"]) == ([], None)


def test_a_structure_that_cannot_be_told_is_an_error_on_all_ranks() -> None:
    for outcomes in together([vote(PastEnd()), vote(share(1))], [None, {(1, 2): torch.zeros(1)}]):
        assert isinstance(error(outcomes), BatchingError)
        assert "rank 1: a batch has the key (1, 2)" in str(error(outcomes))


def test_structures_that_differ_are_told_before_any_step_is_delivered() -> None:
    pieces = [torch.zeros(1), torch.zeros(1), torch.zeros(1, dtype=torch.int64)]
    for outcomes in together([vote(share(1), PastEnd())] * 3, pieces):
        found = error(outcomes)
        assert isinstance(found, BatchingError)
        assert "rank 0: float32[batch]; rank 1: float32[batch]; rank 2: int64[batch]" in str(found)


def test_ranks_that_read_the_same_count_once() -> None:
    world = FakeCollectives(2)

    def rank_votes(rank: int) -> list[Outcome]:
        stage = make(world.ranks(rank).open_channel(0), rank, piece=torch.zeros(1), counts=rank == 0)
        return vote(share(4), PastEnd())(stage)

    for outcomes in results_of(world, rank_votes):
        assert sizes(outcomes) == [(4, 4), "End"]


def test_one_rank_alone_votes_without_a_message() -> None:
    coordinate = make(None, 0, piece=torch.zeros(1))
    assert coordinate.alone
    assert sizes(vote(share(2), share(0), PastEnd())(coordinate)) == [(2, 2), "EmptyStep", "End"]
    assert coordinate.over
    assert coordinate.waiting_since() is None
    assert coordinate.late() == []


def test_the_channel_is_given_back_after_the_last_vote() -> None:
    world = FakeCollectives(2)

    def rank_votes(rank: int) -> tuple[list[int], list[int]]:
        ranks = world.ranks(rank)
        stage = make(ranks.open_channel(0), rank, piece=torch.zeros(1))
        before = ranks.free_channels()
        vote(PastEnd())(stage)
        return before, ranks.free_channels()

    assert world.run(rank_votes) == [([1], [0, 1])] * 2


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_every_message_has_the_same_length(slots: int) -> None:
    world = FakeCollectives(2)

    def rank_votes(rank: int) -> None:
        stage = make(world.ranks(rank).open_channel(0), rank, slots=slots, piece=torch.zeros(1) if rank else None)
        steps: list[Held] = [share(rank), share(1), PastEnd()]
        for held in steps:
            stage.hold(held)
            if not stage.over:
                conclude(stage.vote())

    assert world.run(rank_votes) == [None, None]
    exchanges = [each for each in world.messages if each.kind == "exchange"]
    assert {len(each.content) for each in exchanges} == {4 + 2 * slots}
    assert all(word >= 0 for each in exchanges for word in each.content[: 4 + slots])


def test_samplers_that_draw_differently_are_told_after_the_steps_before() -> None:
    def drawn(*digests: int) -> Turn:
        return vote(*(LocalStep([torch.zeros(1)], (1,), draw_digest=digest) for digest in digests))

    for outcomes in together([drawn(7, 8, 9), drawn(7, 5, 9), drawn(7, 8, 9)]):
        assert sizes(outcomes) == [(3, 1), "Raised"]
        found = error(outcomes[1:])
        assert isinstance(found, RankDisagreement)
        assert "samplers of the ranks differ at step 1 of epoch 3" in str(found)
        assert "rank 0: 8; rank 1: 5; rank 2: 8" in str(found)


def test_ranks_that_read_different_data_are_told_what_each_read() -> None:
    world = FakeCollectives(3)

    def rank_votes(rank: int) -> list[Outcome]:
        stage = make(world.ranks(rank).open_channel(0), rank, piece=torch.zeros(1), hint="Do this.")
        stage.hold(LocalStep([torch.zeros(1)], (1,), read=digest_of_read(1)))
        last = PastEnd() if rank == 2 else LocalStep([torch.zeros(1)], (1,), read=number_of_size(8 - rank))
        stage.hold(last)
        return conclude(stage.vote())

    for outcomes in results_of(world, rank_votes):
        assert sizes(outcomes) == [(3, 1), "Raised"]
        assert str(error(outcomes[1:])) == (
            "the ranks read different data at step 1 of epoch 3 (a checksum of the batch, its size, or the end of the "
            "data): rank 0: 8 sample(s); rank 1: 7 sample(s); rank 2: ended. Under policy DATA each rank reads all of "
            "the data and keeps its part of each batch, so every rank must read the same batches. Do this."
        )


def lossy(size: int, *left_out: str) -> LocalStep:
    return LocalStep([torch.zeros(size)], (size,), skipped=Skipped(len(left_out), left_out))


def lossy_votes(
    *of_ranks: list[Held], max_errors: int, counting: tuple[bool, ...] = (True, True)
) -> list[list[Outcome]]:
    """Each rank holds its steps, and all vote until it is over."""
    world = FakeCollectives(len(of_ranks))

    def rank_votes(rank: int) -> list[Outcome]:
        channel = world.ranks(rank).open_channel(0)
        stage = make(channel, rank, piece=torch.zeros(1), max_errors=max_errors, counts=counting[rank])
        for held in of_ranks[rank]:
            stage.hold(held)
        outcomes: list[Outcome] = []
        while not stage.over:
            outcomes += conclude(stage.vote())
        return outcomes

    return results_of(world, rank_votes)


def test_samples_that_are_left_out_are_counted_over_all_ranks_and_steps() -> None:
    steps: tuple[list[Held], list[Held]] = (
        [share(2), lossy(1, "a"), share(2), lossy(0, "b", "c"), share(2), PastEnd()],
        [share(2), lossy(1, "d"), share(2), share(2), lossy(1, "e"), PastEnd()],
    )
    for max_errors, before in ((0, 1), (1, 1), (2, 3), (3, 3), (4, 4)):
        first, second = lossy_votes(*steps, max_errors=max_errors)
        assert [type(each).__name__ for each in first] == ["LocalStep"] * before + ["Raised"]
        found = error(first[before:])
        assert isinstance(found, SourceError)
        assert str(found) == str(error(second[before:]))
        assert (found.epoch, found.step, found.rank) == (3, before, None)
        assert f"up to step {before} of epoch 3, and max_errors={max_errors}" in str(found)
        assert "\nrank 0: a" in str(found)
        assert "\nrank 1: d" in str(found)
    for outcomes in lossy_votes(*steps, max_errors=5):
        assert [type(each).__name__ for each in outcomes] == ["LocalStep"] * 5 + ["End"]


def test_a_failure_at_the_same_step_comes_before_too_many_that_are_left_out() -> None:
    for outcomes in lossy_votes([lossy(1, "a")], [Failed(ValueError("bad"), "")], max_errors=0):
        assert "rank 1 failed at step 0" in str(error(outcomes))


def test_of_ranks_that_read_the_same_one_counts_what_is_left_out() -> None:
    steps: tuple[list[Held], list[Held]] = ([lossy(1, "a"), PastEnd()], [lossy(1, "a"), PastEnd()])
    for outcomes in lossy_votes(*steps, max_errors=1, counting=(True, False)):
        assert [type(each).__name__ for each in outcomes] == ["LocalStep", "End"]
    for outcomes in lossy_votes(*steps, max_errors=0, counting=(True, False)):
        found = error(outcomes)
        assert isinstance(found, SourceError)
        assert found.rank == 0
        assert "rank 1" not in str(found)


def test_one_rank_alone_stops_at_the_same_place() -> None:
    coordinate = make(None, 0, piece=torch.zeros(1), max_errors=1)
    assert sizes(vote(share(2), lossy(1, "a"), lossy(1, "b"))(coordinate)) == [(2, 2)]
    assert sizes(conclude(coordinate.vote())) == [(1, 1)]
    assert isinstance(error(conclude(coordinate.vote())), SourceError)


def test_plain_values_are_told_whatever_an_error_of_the_user_holds() -> None:
    odd: Any = {"file": Path("a.txt"), "offset": "near the end", "indices": [torch.tensor(3), (1, 2), Odd()]}
    for outcomes in together([vote(Failed(SourceError("odd", **odd), "")), vote(share(1))]):
        found = error(outcomes)
        assert isinstance(found, SourceError)
        assert found.file == "a.txt"
        assert found.offset is None
        assert found.indices is not None
        assert found.indices[:2] == (3, "(1, 2)")
        assert "Odd" in str(found.indices[2])


@final
class Passed:
    """Landmarks every 4 rows, which remember where they were passed."""

    every = 4
    early = False

    def __init__(self) -> None:
        self.rows: list[int] = []

    def mine(self, rows: int) -> str:
        return str(rows)

    def learn(self, rows: int, texts: Sequence[str]) -> None:
        assert texts == [str(rows)] * 2
        self.rows.append(rows)


@pytest.mark.parametrize("grows", [False, True])
def test_the_more_is_read_ahead_the_fewer_landmarks_are_passed_by_all_ranks(grows: bool) -> None:
    world = FakeCollectives(2)

    def rank_votes(rank: int) -> tuple[list[int], list[int]]:
        periodic_sync, depths = Passed(), []
        stage = make(
            world.ranks(rank).open_channel(0),
            rank,
            slots=32,
            periodic_sync=periodic_sync,
            least_ahead=2,
            ahead=None if grows else 2,
        )
        stage._checker.take(structure_of(torch.zeros(1)))
        for _ in range(64):
            stage.hold(share(1))
            outcomes = conclude(stage.vote(4 << rank))
            depths += [each.steps for each in outcomes if isinstance(each, Ahead)]
        return periodic_sync.rows, depths

    expected = ([*range(8, 65, 8)], [4]) if grows else ([*range(4, 65, 4)], [])
    assert results_of(world, rank_votes) == [expected] * 2
