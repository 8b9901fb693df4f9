"""The stages together over fake ranks: random data, ends, failures and departures, against what the laws say."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, final

import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from tests.support.collectives import FakeCollectives
from tests.support.scripted import (
    Law,
    Party,
    Script,
    Seen,
    compose,
    law,
    play,
    random_script,
    read,
    results_of,
    values,
)
from torchdistinput.batches.schema_check import SchemaChecker
from torchdistinput.devices.copy_ahead import HostCopier, Transfer
from torchdistinput.errors import CoordinationTimeout, InputError, RankLost, SourceError
from torchdistinput.pipeline import engine as engine_module
from torchdistinput.pipeline import step_completer
from torchdistinput.pipeline.metrics import Metrics
from torchdistinput.pipeline.step_maker import StepMaker
from torchdistinput.pipeline.to_device import ToDevice
from torchdistinput.step_types import (
    Failed,
    LocalStep,
    Origin,
    PartialPiece,
    ReadFailure,
    RowSizes,
    SizedRow,
    Skipped,
)

SEEDS = range(60)


def world_of(seed: int, *, may_fail: bool) -> tuple[FakeCollectives, list[Script], Law, int, random.Random]:
    """1 to 4 ranks with random scripts, their laws, and a random depth, some so deep that votes wait."""
    rng = random.Random(seed)
    scripts = [random_script(rng, may_fail=may_fail) for _ in range(rng.randint(1, 4))]
    return FakeCollectives(len(scripts)), scripts, law(scripts), rng.choice([0, 1, 2, 3, 5, 8]), rng


def check_tidy(seen: list[Seen]) -> None:
    """Nothing is left: the stream closed, the devices let go of once, each share handed over or given up."""
    for each in seen:
        party = each.party
        assert party.stream.closed >= 1
        assert party.devices_closed == 1
        given_up = {id(share) for share in party.discarded}
        kept = [share for share in party.sent if id(share) not in given_up]
        assert len(kept) == len(each.steps)


def check_messages(world: FakeCollectives, laws: Law) -> None:
    """No more of them than steps, the end, and an abort message."""
    assert world.num_exchanges() <= laws.num_rows + 2


@pytest.mark.parametrize("seed", SEEDS)
def test_every_rank_delivers_what_the_laws_say_up_to_the_common_end_or_failure(seed: int) -> None:
    world, scripts, laws, depth, _ = world_of(seed, may_fail=True)
    seen = play(world, scripts, depth=depth)
    for rank, each in enumerate(seen):
        assert each.steps == laws.steps[rank]
        if not laws.failing:
            assert each.error is None
            continue
        assert isinstance(each.error, SourceError)
        assert [f"rank {other} failed" in str(each.error) for other in range(len(scripts))] == [
            other in laws.failing for other in range(len(scripts))
        ]
        assert (each.error.__cause__ is not None) == (rank in laws.failing)
    check_tidy(seen)
    check_messages(world, laws)


@pytest.mark.parametrize("seed", SEEDS[::2])
def test_when_all_leave_at_one_step_nobody_sees_an_error(seed: int) -> None:
    world, scripts, laws, depth, rng = world_of(seed, may_fail=False)
    leaves = rng.randint(0, len(laws.steps[0]))
    seen = play(world, [dataclasses.replace(each, leaves_after=leaves) for each in scripts], depth=depth)
    for rank, each in enumerate(seen):
        assert each.error is None
        assert each.steps == laws.steps[rank][:leaves]
    check_tidy(seen)
    check_messages(world, laws)


@pytest.mark.parametrize("seed", SEEDS[::2])
def test_when_some_leave_the_others_are_told_who(seed: int) -> None:
    world, scripts, laws, depth, rng = world_of(seed, may_fail=False)
    total = len(laws.steps[0])
    leaves = rng.randint(0, total)
    who = [rank for rank in range(len(scripts)) if rng.random() < 0.5]
    parts = [dataclasses.replace(each, leaves_after=leaves) if r in who else each for r, each in enumerate(scripts)]
    seen = play(world, parts, depth=depth)
    for rank, each in enumerate(seen):
        assert each.steps == laws.steps[rank][: len(each.steps)]
        if rank in who:
            assert (len(each.steps), each.error) == (leaves, None)
        elif each.error is None:
            assert len(each.steps) == total
        else:
            assert isinstance(each.error, RankLost)
            assert any(f"rank {other}" in str(each.error) for other in who)
            assert leaves <= len(each.steps) <= leaves + depth + 1
    check_tidy(seen)


@pytest.mark.parametrize("seed", SEEDS[::2])
def test_a_broken_connection_ends_all_ranks_after_the_same_steps(seed: int) -> None:
    world, scripts, laws, depth, rng = world_of(seed, may_fail=False)
    victim, step = rng.randrange(len(scripts)), rng.randint(0, 4)
    seen = play(world.fail_at(rank=victim, step=step), scripts, depth=depth)
    assert len({len(each.steps) for each in seen}) == 1
    for rank, each in enumerate(seen):
        assert each.steps == laws.steps[rank][: len(each.steps)]
        if world.num_exchanges() > step or each.error is not None:
            assert isinstance(each.error, RankLost)
            assert f"rank {victim}" in str(each.error)
        else:
            assert each.steps == laws.steps[rank]
    check_tidy(seen)


@pytest.mark.parametrize("depth", [0, 1])
def test_an_error_comes_once_then_it_is_said_that_the_epoch_ended_by_it_and_then_comes_the_end(depth: int) -> None:
    party = compose(FakeCollectives(1), 0, Script((), "draw"), depth=depth)
    with pytest.raises(SourceError, match="failed at step 0"):
        party.engine.take()
    with pytest.raises(InputError, match="this epoch ended with the error above, after step 0.*SourceError: ") as told:
        party.engine.take()
    assert type(told.value) is InputError
    for _ in range(3):
        assert party.engine.take() is None


def test_peek_shows_the_step_that_take_returns_and_close_gives_it_up() -> None:
    party = compose(FakeCollectives(1), 0, Script((2, 3)), depth=0)
    first = party.engine.peek()
    assert first is party.engine.peek()
    assert first is party.engine.take()
    second = party.engine.peek()
    assert second is not None
    party.engine.close()
    assert second in party.discarded
    assert party.engine.take() is None


@pytest.mark.parametrize("late", [0, 2])
def test_a_late_rank_is_named_within_the_timeout_and_learns_that_it_was_given_up(late: int) -> None:
    world = FakeCollectives(3).delay(rank=late, step=2, seconds=60.0)

    def rank_reads(rank: int) -> Seen:
        script = Script((1,) * 6)
        timeout_seconds = 90.0 if rank == late else 4.0
        return read(compose(world, rank, script, depth=0, timeout_seconds=timeout_seconds), script)

    for rank, seen in enumerate(world.run(rank_reads)):
        assert not isinstance(seen, BaseException)
        assert len(seen.steps) == 2
        if rank == late:
            assert isinstance(seen.error, RankLost)
            assert f"gave up waiting for rank {late}" in str(seen.error)
        elif isinstance(seen.error, RankLost):  # another rank's clock was first
            assert f"gave up waiting for rank {late}" in str(seen.error)
        else:
            assert isinstance(seen.error, CoordinationTimeout)
            assert f"rank {late} did not come to the exchange at step 2 within 4 seconds" in str(seen.error)


def test_a_bug_in_a_stage_reaches_the_consumer_and_the_other_ranks() -> None:
    world = FakeCollectives(2)

    def rank_reads(rank: int) -> Seen:
        script = Script((1,) * 5)
        party = compose(world, rank, script, depth=0)
        if rank == 1:
            party.calls.make = broken
        return read(party, script)

    def broken(step: object) -> None:
        raise ZeroDivisionError("oh")

    first, second = world.run(rank_reads)
    assert isinstance(first, Seen)
    assert isinstance(first.error, RankLost)
    assert "rank 1 failed: ZeroDivisionError: oh" in str(first.error)
    assert isinstance(second, Seen)
    assert isinstance(second.error, ZeroDivisionError)


def input_thread() -> threading.Thread:
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "torchdistinput-input"]
    return thread


def test_an_engine_that_is_closed_by_its_own_thread_ends_and_cleans_up() -> None:
    """The garbage collector may find a dropped iterator on any thread, this one too."""
    party = compose(None, 0, Script((1,) * 9, in_background=True), depth=2)
    make = party.calls.make

    def closes(step: LocalStep) -> None:
        party.engine.close()
        make(step)

    party.calls.make = closes
    thread = input_thread()
    with pytest.raises(InputError, match="was closed by another thread"):
        party.engine.take()
    thread.join(5)
    assert not thread.is_alive()
    assert (party.stream.closed >= 1, party.devices_closed) == (True, 1)


def test_devices_are_let_go_of_only_when_the_thread_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "GRACE_SECONDS", 0.05)
    party = compose(None, 0, Script((1,) * 9, in_background=True), depth=2)
    make, reading, go_on = party.calls.make, threading.Event(), threading.Event()
    closed_meanwhile: list[int] = []

    def waits(step: LocalStep) -> None:
        reading.set()
        go_on.wait(10)
        closed_meanwhile.append(party.devices_closed)
        make(step)

    def take() -> None:
        with pytest.raises(InputError, match="closed by another thread"):
            party.engine.take()

    party.calls.make = waits
    thread, reader = input_thread(), threading.Thread(target=take, daemon=True)
    reader.start()
    assert reading.wait(10)
    party.engine.close()
    go_on.set()
    thread.join(10)
    reader.join(10)
    assert closed_meanwhile == [0]
    assert party.devices_closed == 1


def test_a_buffer_that_nobody_holds_is_not_kept_alive_by_its_end() -> None:
    party: Party | None = compose(FakeCollectives(1), 0, Script((1,)), depth=1)
    assert party is not None
    steps = []
    while (delivered := party.engine.take()) is not None:
        steps.append(values(delivered))
    gone = weakref.ref(party.engine)
    del party, delivered
    gc.collect()
    assert gone() is None
    assert steps == [(1, [0])]


# Who does the work


@pytest.mark.parametrize("world", [None, FakeCollectives(1)], ids=["alone", "with votes"])
@pytest.mark.parametrize("in_background", [False, True])
def test_a_thread_completes_steps_only_where_it_may_wait_and_casts_no_vote(
    world: FakeCollectives | None, in_background: bool
) -> None:
    script = Script((1,) * 20, in_background=in_background)
    party = compose(world, 0, script, depth=3)
    here, makers, voters = threading.current_thread().name, set(), set()
    make, vote = party.calls.make, party.coordinate.vote

    def noted(step: LocalStep) -> None:
        makers.add(threading.current_thread().name)
        make(step)

    def noted_vote(*args: Any, **more: Any) -> Any:
        voters.add(threading.current_thread().name)
        return vote(*args, **more)

    party.calls.make = noted
    party.coordinate.vote = noted_vote  # type: ignore[method-assign]
    assert len(read(party, script).steps) == 20
    assert makers == {"torchdistinput-input" if in_background else here}
    assert voters == {here}


@pytest.mark.parametrize("world", [None, FakeCollectives(2)], ids=["alone", "two ranks"])
def test_steps_come_in_order_however_long_they_take(world: FakeCollectives | None) -> None:
    script = Script((1,) * 60, in_background=True, slow=frozenset(random.Random(7).sample(range(60), 12)))

    def rank_reads(rank: int) -> list[list[int]]:
        party = compose(world, rank, script, depth=4)
        found = []
        while (taken := party.engine.take()) is not None:
            found.append([value - 100 * rank for value in values(taken)[1]])
        party.engine.close()
        return found

    for steps in [rank_reads(0)] if world is None else results_of(world, rank_reads):
        assert steps == [[place] for place in range(60)]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("oh")])
def test_after_an_interruption_no_step_is_lost_in_silence(error: BaseException) -> None:
    world = FakeCollectives(2)

    def rank_reads(rank: int) -> list[str]:
        party = compose(world, rank, Script((1,) * 9), depth=2)
        party.engine.take()
        if rank == 0:

            def broken(step: LocalStep) -> None:
                raise error

            party.calls.make = broken
        told = []
        for _ in range(12):
            try:
                party.engine.take()
            except BaseException as raised:  # noqa: BLE001,RUF100 - it is looked at below
                told.append(f"{type(raised).__name__}: {raised}")
        party.engine.close()
        return told[:2]

    first, second = results_of(world, rank_reads)
    assert first[0].startswith(type(error).__name__)
    assert ("interrupted while it read" if isinstance(error, KeyboardInterrupt) else "ValueError: oh") in first[1]
    assert all(f"rank 0 failed: {type(error).__name__}" in each for each in second)


def read_with_an_interruption(world: FakeCollectives | None, moment: int, found: list[Any]) -> None:
    """Reads to the end, with a Ctrl-C at one of the moments at which Python would raise it: calls and their ends.

    Not while it closes, when nothing comes any more; nor in a garbage collection, which may close another engine.
    """
    gc.disable()
    files = {engine_module.__file__, step_completer.__file__}
    party = compose(world, 0, Script((1, 0, 1, 1, 1), in_background=True), depth=2)
    moments = itertools.count()

    def press(frame: FrameType, event: str, _: Any) -> None:
        comes = event in {"call", "c_return"} and frame.f_code.co_filename in files and not party.engine.closed
        if comes and next(moments) == moment:
            sys.setprofile(None)
            raise KeyboardInterrupt

    steps: list[list[int]] = []
    sys.setprofile(press)
    try:
        for _ in range(7):
            try:
                taken = party.engine.take()
            except KeyboardInterrupt:
                continue
            if taken is None:
                break
            steps.append(values(taken)[1])
    except InputError:  # it refuses to go on
        steps.append([-1])
    finally:
        sys.setprofile(None)
        gc.enable()
        party.engine.close()
    found += [next(moments) > moment, steps]


@pytest.mark.parametrize("world", [lambda: None, lambda: FakeCollectives(1)], ids=["alone", "with votes"])
def test_wherever_it_is_interrupted_no_step_is_lost_in_silence(
    world: Callable[[], FakeCollectives | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "GRACE_SECONDS", 0.05)
    for moment in itertools.count():
        found: list[Any] = []
        reader = threading.Thread(target=read_with_an_interruption, args=(world(), moment, found), daemon=True)
        reader.start()
        reader.join(20)
        assert not reader.is_alive(), moment
        pressed, steps = found
        delivered, refused = [step for step in steps if step != [-1]], steps[-1:] == [[-1]]
        assert delivered == [[0], [2], [3], [4]][: len(delivered)], moment
        assert refused or len(delivered) == 4, moment
        if not pressed:
            return


class Rows:
    """A stream over a list of rows and their sizes; an exception in the list is raised in its place."""

    in_background = True

    def __init__(self, *rows: Any) -> None:
        self.left = list(rows)

    def draw(self) -> Any:
        return True

    def fetch(self, drawn: Any) -> SizedRow | None:
        row = self.left.pop(0)
        if isinstance(row, Exception):
            raise row
        pieces, sizes = row
        return pieces, RowSizes(0, sizes, None), 0

    def close(self) -> None:
        """Has nothing to close."""


def made(stream: Rows, number: int, *, together: bool = False) -> list[LocalStep]:
    """So many steps, each drawn and made; or all drawn before the first is made."""
    maker = StepMaker(stream, SchemaChecker(), None, ToDevice([HostCopier()]), 1, Metrics(), {})
    steps = []
    for _ in range(number):
        steps.append(maker.draw())
        if not together:
            maker.make(steps[-1])
    for step in steps if together else []:
        maker.make(step)
    assert all(step.is_made for step in steps)
    return steps


def test_what_was_drawn_beyond_a_failure_is_not_read() -> None:
    stream = Rows(ValueError("broken"), ([torch.zeros(1)], (1,)))
    first, *others = made(stream, 3, together=True)
    assert first.failure is not None
    assert all(step.is_past_end for step in others)
    assert len(stream.left) == 1


def test_the_error_of_the_data_is_unwrapped_and_its_place_kept() -> None:
    wrapped, original = ReadFailure("sample 3", Origin(indices=(3,), worker=1)), ValueError("bad record")
    wrapped.__cause__ = original
    (step,) = made(Rows(wrapped), 1)
    assert step.failure == Failed(original, "sample 3", Origin(indices=(3,), worker=1))


def test_after_a_draw_that_failed_nothing_more_is_drawn() -> None:
    def fails() -> Any:
        stream.left.append("drawn")
        raise KeyError("no such key")

    stream = Rows()
    stream.draw = fails  # type: ignore[method-assign]
    first, *others = made(stream, 3)
    assert first.failure is not None
    assert all(step.is_past_end for step in others)
    assert stream.left == ["drawn"]


def test_what_is_left_of_a_piece_is_the_piece_and_what_is_missing_is_counted_also_after_torch_has_pinned_it() -> None:
    row = [
        PartialPiece(torch.zeros(2), Skipped(3, ("a", "b")), (0, 1, 2)),
        torch.zeros(1),
        pin_memory(PartialPiece(None, Skipped(9, ("c",) * 9), (0,))),  # type: ignore[no-untyped-call] # torch's
        None,
    ]
    whole, thin = made(Rows(([torch.zeros(1)] * 4, (1, 1, 1, 1)), (row, (5, 1, 1, 0))), 2)
    assert whole.skipped == Skipped(0, ())
    assert thin.sizes == (2, 1, 0, 0)
    assert [None if piece is None else len(piece) for piece in thin.pieces] == [2, 1, None, None]
    assert thin.skipped == Skipped(12, ("a", "b", *["c"] * 8))


@final
class LoggingCopier:
    """A copier that writes down what it is asked."""

    def __init__(self, name: str, log: list[str], *, fails: bool = False, meanwhile: Callable[[], Any] = int) -> None:
        self._name, self._log, self._fails, self._meanwhile = name, log, fails, meanwhile

    def _say(self, verb: str) -> None:
        self._log.append(f"{verb} {self._name}")

    def enter_thread(self) -> None:
        self._say("enter")

    def begin_step(self) -> None:
        self._say("begin")

    def send(self, batch: Any) -> Transfer:
        self._say("send")
        self._meanwhile()
        if self._fails:
            raise MemoryError("no room")
        return Transfer(batch)

    def hand_over(self, transfer: Transfer) -> Any:
        self._say("hand over")
        return transfer.batch

    def discard(self, transfer: Transfer) -> None:
        self._say(f"discard {transfer.batch}")

    def close(self) -> None:
        self._say("close")


def test_two_threads_send_one_after_the_other() -> None:
    """The background thread sends a step while the consumer sends empty pieces in a vote."""
    log: list[str] = []
    other = threading.Thread(target=lambda: transfer.send([1, 2]))

    def meanwhile() -> None:
        if other.ident is None:
            other.start()
            other.join(0.05)

    transfer = ToDevice([LoggingCopier("0", log, meanwhile=meanwhile), LoggingCopier("1", log)])
    transfer.send([1, 2])
    other.join(10)
    assert log == ["send 0", "send 1"] * 2


def test_each_piece_goes_through_the_copier_of_its_replica() -> None:
    log: list[str] = []
    transfer = ToDevice([LoggingCopier("0", log), LoggingCopier("1", log)])
    transfer.begin_step()
    transfers = transfer.send(["a", "b"])
    assert transfer.hand_over(transfers) == ["a", "b"]
    transfer.discard(transfers)
    transfer.close()
    assert log == [
        *("begin 0", "begin 1", "send 0", "send 1", "hand over 0", "hand over 1"),
        *("discard a 0", "discard b 1", "close 0", "close 1"),
    ]


def test_if_one_piece_cannot_be_sent_those_before_it_are_given_up() -> None:
    log: list[str] = []
    transfer = ToDevice([LoggingCopier("0", log), LoggingCopier("1", log, fails=True), LoggingCopier("2", log)])
    with pytest.raises(MemoryError):
        transfer.send(["a", "b", "c"])
    assert log == ["send 0", "send 1", "discard a 0"]
