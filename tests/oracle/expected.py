"""The log that each rank of a program must write: steps, ends and errors, and the state after each turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tests.oracle.laws import Samples, Step, steps_of, sums_of
from tests.oracle.program import Program, Turn

Orders = Callable[[int], Sequence[Samples]]
"""Returns the batches of one process in an epoch."""


@dataclass
class Delivered:
    """A step, as one rank gets it.

    Args:
      epoch: its epoch.
      index: its number in the epoch.
      global_size: samples on all ranks.
      pieces: the samples of each local replica.
      sums: see ``laws.sums_of``, where they are asked for.
    """

    epoch: int
    index: int
    global_size: int
    pieces: list[Samples]
    sums: tuple[int, ...] = ()


@dataclass
class Log:
    """What a rank saw in a turn.

    Args:
      steps: the steps.
      ends: after how many of them an epoch ended.
      error: the class of the error that ended it, if one did.
      lost: the steps that were read after the state was taken.
      states: the epochs and steps that the state may have; the one that it has.
    """

    steps: list[Delivered] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    error: str = ""
    lost: list[Delivered] = field(default_factory=list)
    states: tuple[tuple[int, int], ...] = ()


class _Broken(Exception):
    """The data failed."""


class _Position:
    """Where the ranks are in a turn."""

    def __init__(self, program: Program, turn: Turn, orders: Orders, at: tuple[int, int]) -> None:
        self.program, self.turn, self.orders = program, turn, orders
        self.next = self.saved = at
        self.live: Iterator[Step] | None = None
        self.epoch_steps: list[Step] = []
        self.read_any = False
        self.targets: list[tuple[int, int]] = []
        self.logs = [Log() for _ in range(turn.world)]

    def steps(self, epoch: int) -> list[Step]:
        """The steps of an epoch, without the samples that are left out."""
        steps = steps_of(self.program, self.turn, self.orders(epoch))
        if not self.program.skips:
            return steps
        bad = self.program.bad
        steps = [[[[each for each in piece if each not in bad] for piece in row] for row in step] for step in steps]
        return [step for step in steps if any(any(row) for row in step)]

    def read(self, count: int, *, lost: bool = False) -> None:
        """Reads so many steps, or to the end of the epoch."""
        if self.live is None:
            self.epoch_steps = self.steps(self.next[0])
            self.live, self.read_any = iter(self.epoch_steps[self.next[1] :]), False
            self.saved = self.next
        done = 0
        while count == 0 or done < count:
            step = next(self.live, None)
            if step is None:
                self.live, self.next = None, (self.next[0] + 1, 0)
                self.saved = self.next
                for log in self.logs:
                    if not lost:
                        log.ends.append(len(log.steps))
                return
            epoch, index = self.next[0], self.saved[1]
            accumulate = self.program.accumulate
            group = [step] if not accumulate or index % accumulate else self.epoch_steps[index:][:accumulate]
            if any(number in self.program.bad for each in group for row in each for piece in row for number in piece):
                raise _Broken
            size = sum(len(piece) for row in step for piece in row)
            for rank, (log, row) in enumerate(zip(self.logs, step, strict=True)):
                sums = sums_of(self.epoch_steps, index, rank, accumulate) if accumulate else ()
                (log.lost if lost else log.steps).append(Delivered(epoch, index, size, row, sums))
            self.saved, self.read_any = (epoch, index + 1), True
            done += 1

    def leave(self) -> None:
        """Leaves the loop: the next epoch follows; an epoch of which nothing was read stays the next one."""
        if self.live is not None:
            self.live = None
            if self.read_any:
                self.next = (self.next[0] + 1, 0)

    def go_to(self, epoch: int, step: int) -> None:
        """Goes to a step that is there."""
        self.leave()
        step = max(0, min(step, len(self.steps(epoch)) - 1))
        self.next = self.saved = (epoch, step - step % (self.program.accumulate or 1))
        self.targets.append(self.next)

    def states(self) -> tuple[tuple[int, int], ...]:
        """The positions that the state may have: after the last step of an epoch also the next one's beginning."""
        if self.saved[1] and self.saved[1] == len(self.steps(self.saved[0])):
            return self.saved, (self.saved[0] + 1, 0)
        return (self.saved,)


def log_of(
    program: Program, turn: Turn, orders: Orders, at: tuple[int, int]
) -> tuple[list[Log], list[tuple[int, int]]]:
    """The log of each rank in a turn that begins at a step; and the epochs and steps that it goes to."""
    place = _Position(program, turn, orders, at)
    try:
        for action in turn.actions:
            if action.kind == "read":
                place.read(action.steps)
            elif action.kind == "break":
                place.leave()
            elif action.kind == "seek":
                place.go_to(place.next[0] + action.epochs, action.steps)
            else:
                place.leave()
                place.go_to(place.next[0], action.steps)
    except _Broken:
        for log in place.logs:
            log.error = "SourceError"
    for log in place.logs:
        log.states = () if log.error else place.states()
    if turn.lost and not place.logs[0].error:
        with suppress(_Broken):
            place.read(turn.lost, lost=True)
    return place.logs, place.targets
