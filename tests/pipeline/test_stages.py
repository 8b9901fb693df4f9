"""The stages before the vote: what is left of a row that was read, and pieces on their way to each replica's device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, final

import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from torchdistinput.batches.schema_check import SchemaChecker
from torchdistinput.devices.copy_ahead import HostCopier, Transfer
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
