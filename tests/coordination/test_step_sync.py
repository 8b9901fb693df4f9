"""All ranks take the same steps: how failures, stops and differences are told, each on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdistinput as tdi
from tests.support.collectives import FakeCollectives
from tests.support.scripted import results_of
from torchdistinput.batches.schema import structure_of
from torchdistinput.batches.schema_check import SchemaChecker
from torchdistinput.coordination import step_sync
from torchdistinput.coordination.batch_digests import digest_of_read, number_of_size
from torchdistinput.coordination.channel import Channel
from torchdistinput.coordination.exchanges import conclude
from torchdistinput.coordination.step_sync import StepSync
from torchdistinput.step_types import Failed, LocalStep, Skipped


class Odd:
    """No plain value."""


def share(size: int, **more: Any) -> LocalStep:
    return LocalStep([torch.zeros(size)], (size,), **more)


def past_end() -> LocalStep:
    return LocalStep(is_past_end=True)


def lossy(size: int, *left_out: str) -> LocalStep:
    return share(size, skipped=Skipped(len(left_out), left_out))


def make(channel: Channel | None, rank: int, *, slots: int = 4, piece: Any = None, **more: Any) -> StepSync:
    """A stage of one rank, which has seen ``piece`` if it is given."""
    checker = more.pop("checker", SchemaChecker())
    if piece is not None:
        checker.take(structure_of(piece))

    def complete(of_step: LocalStep) -> None:
        assert checker.structure is not None
        pieces = of_step.pieces or [None]
        of_step.pieces = [checker.structure.empty() if each is None else each for each in pieces]
        of_step.sizes = of_step.sizes or (0,)

    return StepSync(channel, slots=slots, checker=checker, complete=complete, name=rank, begins_at=(3, 0), **more)


STOP = "stop after two steps"
NUMBERS = torch.zeros(1)


@dataclass(frozen=True)
class Case:
    """What each rank holds, and what all must be told.

    Args:
      held: of each rank.
      error: the class.
      words: what is in the message on all ranks.
      before: the global sizes of the steps before.
      pieces: what each rank has seen.
      options: of the stage; a list has one value for each rank.
    """

    held: Sequence[Sequence[LocalStep | str]]
    error: type[BaseException]
    words: Sequence[str]
    before: Sequence[int] = ()
    pieces: Sequence[Any] = (NUMBERS,) * 3
    options: dict[str, Any] = field(default_factory=dict)


def voted(case: Case) -> list[tuple[list[int | None], BaseException | None]]:
    """Each rank holds its steps, and all vote until it is over: the sizes of the steps, and the error."""
    world = FakeCollectives(len(case.held))

    def rank_votes(rank: int) -> tuple[list[int | None], BaseException | None]:
        own = {name: each[rank] if isinstance(each, list) else each for name, each in case.options.items()}
        channel = world.ranks(rank).open_channel(0)
        stage = make(channel, rank, piece=case.pieces[rank], **own)
        held = [replace(each) for each in case.held[rank] if isinstance(each, LocalStep)]
        for step in held:
            stage.note_left_out(step.skipped.first)
        delivered: list[LocalStep] = []
        while True:
            found = conclude(stage.vote(held, stops_after=2 if STOP in case.held[rank] else None))
            delivered += [step for step in held[: found.steps] if not step.is_passed]
            held = held[found.steps :]
            if found.is_last:
                channel.abort("closed")
                assert not channel.is_dead  # it was released: what closes the iterator tells the others nothing
                return [step.global_size for step in delivered], found.error

    return results_of(world, rank_votes)


def broken(error: Exception, where: str = "") -> LocalStep:
    return LocalStep(failure=Failed(error, where))


def digests(*drawn: int) -> list[LocalStep]:
    return [share(1, draw_digest=digest) for digest in drawn]


LOSSY: tuple[list[LocalStep], list[LocalStep]] = (
    [share(2), lossy(1, "a"), share(2), lossy(0, "b", "c"), share(2), past_end()],
    [share(2), lossy(1, "d"), share(2), share(2), lossy(1, "e"), past_end()],
)
ONE_LOST: list[LocalStep] = [lossy(1, "a"), past_end()]
READ = (
    "the ranks read different data at step 1 of epoch 3 (a checksum of the batch, its size, or the end of the data): "
    "rank 0: 8 sample(s); rank 1: 7 sample(s); rank 2: ended. Under policy DATA each rank reads all of the data and "
    "keeps its part of each batch, so every rank must read the same batches. Do this."
)
CASES: dict[str, Case] = {
    "a failure after two steps": Case(
        [[share(1), share(1), broken(ValueError("bad"), "file x")], [share(1)] * 3],
        tdi.SourceError,
        ["rank 0 failed at step 2 of epoch 3 (file x): ValueError: bad"],
        (2, 2),
        options={"slots": 1},
    ),
    "failures that are alike are told once": Case(
        [[broken(ValueError("a"))], [share(1)], [broken(ValueError("a"))]],
        tdi.SourceError,
        ["the input of ranks 0, 2 failed at step 0"],
    ),
    "an error of ours keeps its class": Case(
        [[broken(tdi.BatchingError("no size"))], [share(1)]],
        tdi.BatchingError,
        ["rank 0 failed at step 0 of epoch 3: BatchingError: no size"],
    ),
    "a rank that stops": Case(
        [[share(1)], [STOP], [share(1)]],
        tdi.RankLost,
        ["rank 1 stopped reading after step 1 of epoch", "decide on a value that all ranks know"],
    ),
    "a rank that stops past its end": Case(
        [[share(1)], [past_end(), STOP]], tdi.RankLost, ["rank 1 stopped reading after step 1 of epoch"]
    ),
    "a structure that cannot be told": Case(
        [[past_end()], [share(1)]],
        tdi.BatchingError,
        ["rank 1: a batch has the key (1, 2)"],
        pieces=[None, {(1, 2): torch.zeros(1)}],
    ),
    "structures that differ": Case(
        [[share(1), past_end()]] * 3,
        tdi.BatchingError,
        ["rank 0: float32[batch]; rank 1: float32[batch]; rank 2: int64[batch]"],
        pieces=[NUMBERS, NUMBERS, NUMBERS.long()],
    ),
    "samplers that draw differently": Case(
        [digests(7, 8, 9), digests(7, 5, 9), digests(7, 8, 9)],
        tdi.RankDisagreement,
        ["samplers of the ranks differ at step 1 of epoch 3", "rank 0: 8; rank 1: 5; rank 2: 8"],
        (3,),
    ),
    "ranks that read different data": Case(
        [
            [share(1, read=digest_of_read(1)), past_end() if rank == 2 else share(1, read=number_of_size(8 - rank))]
            for rank in range(3)
        ],
        tdi.RankDisagreement,
        [READ],
        (3,),
        options={"hint": "Do this."},
    ),
    "more left out than may be, of ranks that read the same": Case(
        [ONE_LOST, ONE_LOST],
        tdi.SourceError,
        ["up to step 0 of epoch 3, and max_errors=0", "rank 0: a"],
        options={"max_errors": 0, "counts": [True, False]},
    ),
    **{
        f"more left out than {most} over all ranks and steps": Case(
            LOSSY,
            tdi.SourceError,
            [f"up to step {steps} of epoch 3, and max_errors={most}", "\nrank 0: a", "\nrank 1: d"],
            (4, 2, 4, 2, 4)[:steps],
            options={"max_errors": most},
        )
        for most, steps in ((0, 1), (1, 1), (2, 3), (3, 3), (4, 4))
    },
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_ends_an_epoch_is_told_on_all_ranks_after_the_steps_before_it(case: Case) -> None:
    for rank, (steps, error) in enumerate(voted(case)):
        assert steps == list(case.before)
        assert type(error) is case.error
        assert all(str(error).count(words) == 1 for words in case.words), str(error)
        failed = any(isinstance(held, LocalStep) and held.failure for held in case.held[rank])
        assert (error.__cause__ is not None) == failed
        assert failed or "Failed" not in str(case.held) or "traceback of rank" in str(error)


def test_a_rank_that_cannot_take_over_the_structure_of_another_one_fails_on_all_ranks() -> None:
    cannot = SchemaChecker(may_lack=True, tries=True)  # an empty part cannot be made of an object
    case = Case(
        [[past_end()], [share(1)]],
        tdi.BatchingError,
        ["rank 0 failed at step 0 of epoch 3: BatchingError: it is not known how to make an element"],
        pieces=[None, Odd()],
        options={"checker": [cannot, SchemaChecker()]},
    )
    for steps, error in voted(case):
        assert steps == []
        assert type(error) is case.error
        assert case.words[0] in str(error)


@pytest.mark.parametrize(
    ("held", "options", "sizes"),
    [
        (LOSSY, {"max_errors": 5}, [4, 2, 4, 2, 3]),
        ((ONE_LOST, ONE_LOST), {"max_errors": 1, "counts": [True, False]}, [1]),
    ],
    ids=["as many left out as may be", "ranks that read the same"],
)
def test_what_is_no_error_ends_with_the_data_and_ranks_that_read_the_same_count_once(
    held: Sequence[Sequence[LocalStep | str]], options: dict[str, Any], sizes: list[int]
) -> None:
    assert voted(Case(held, tdi.SourceError, [], options=options)) == [(sizes, None)] * 2


def test_plain_values_are_told_whatever_an_error_of_the_user_holds() -> None:
    odd: Any = {"file": Path("a.txt"), "offset": "near the end", "indices": [torch.tensor(3), (1, 2), Odd()]}
    for _, found in voted(Case([[broken(tdi.SourceError("odd", **odd))], [share(1)]], tdi.SourceError, [])):
        assert isinstance(found, tdi.SourceError)
        assert (found.file, found.offset) == ("a.txt", None)
        assert found.indices is not None
        assert found.indices[:2] == (3, "(1, 2)")
        assert "Odd" in str(found.indices[2])


def test_each_rank_learns_who_voted_last_in_the_vote_before_and_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """By clocks of their own: the rank that came last waits for nobody."""
    slows, late_us = [1, 0, 2, 2], 50_000
    world, of_rank = FakeCollectives(3), threading.local()
    monkeypatch.setattr(step_sync, "perf_counter", lambda: next(of_rank.clock))

    def rank_votes(rank: int) -> list[tuple[int | None, int, int]]:
        of_rank.clock = chain.from_iterable((0.0, 0.0 if rank == slow else late_us / 1e6) for slow in slows)
        stage, told = make(world.ranks(rank).open_channel(0), rank, piece=NUMBERS), []
        for _ in slows:
            conclude(stage.vote([share(1)]))
            told.append((None, 0, 0) if stage.waits is None else (stage.waits.last, stage.late_us, stage.waits.late))
        return told

    for rank, found in enumerate(results_of(world, rank_votes)):
        assert found == [(None, 0, 0), *((last, late_us * (rank != last), late_us) for last in slows[:-1])]
