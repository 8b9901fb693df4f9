"""The transfer stage sends and hands over the pieces of a step together, each through its replica's copier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, final

import pytest

from torchdistinput.devices.copy_ahead import Transfer
from torchdistinput.pipeline.to_device import ToDevice


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


def test_a_thread_that_enters_ends_up_on_the_first_device() -> None:
    log: list[str] = []
    ToDevice([LoggingCopier("0", log), LoggingCopier("1", log)]).enter_thread()
    assert log == ["enter 1", "enter 0"]


def test_if_one_piece_cannot_be_sent_those_before_it_are_given_up() -> None:
    log: list[str] = []
    transfer = ToDevice([LoggingCopier("0", log), LoggingCopier("1", log, fails=True), LoggingCopier("2", log)])
    with pytest.raises(MemoryError):
        transfer.send(["a", "b", "c"])
    assert log == ["send 0", "send 1", "discard a 0"]
