"""The log that each rank of a program must write: steps, ends and errors, and the state after each turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from tests.oracle.data import OneProcess
from tests.oracle.laws import Samples, Step, micro_batches, ready_batches, steps_of, sums_of, turned
from tests.oracle.program import Action, Program, Turn

Place = tuple[int, int, int]
"""The epoch, the steps, and the samples of these steps that a state has."""


@dataclass
class Delivered:
    """A step, as one rank gets it.

    Args:
      epoch: its epoch.
      index: its number in the epoch.
      global_size: samples on all ranks.
      pieces: the samples of each local replica.
      sums: see ``laws.sums_of``, where they are asked for.
      reads: the samples that this rank has read since the step before, where that is known.
      micro: in how many micro-batches each part is cut, where it was divided by cost.
    """

    epoch: int
    index: int
    global_size: int
    pieces: list[Samples]
    sums: tuple[int, ...] = ()
    reads: Samples = field(default_factory=list)
    micro: int = 0


@dataclass
class Log:
    """What a rank saw in a turn.

    Args:
      steps: the steps.
      ends: after how many of them an epoch ended.
      error: the class of the error that ended it, if one did.
      lost: the steps that were read after the state was taken.
      states: the places that the state may have; the one that it has.
      saves: the same for each state that was taken after a step.
      grown: by how many samples the data had grown then.
      skipped: after each step, how many samples were left out since the iterator began: by all ranks; by this one.
    """

    steps: list[Delivered] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    error: str = ""
    lost: list[Delivered] = field(default_factory=list)
    states: tuple[Place, ...] = ()
    saves: list[tuple[Place, ...]] = field(default_factory=list)
    grown: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)


class _Broken(Exception):
    """The data failed."""


class _Position:
    """Where the ranks are in a turn."""

    def __init__(self, program: Program, turn: Turn, orders: OneProcess, at: tuple[int, int]) -> None:
        self.program, self.turn, self.orders = program, turn, orders
        self.next = self.saved = self.begin = at
        self.live: Iterator[Step] | None = None
        self.read_any, self.lost_before = False, 0
        self.told: int | None = None
        self.shown: int | None = None
        self.told_by_owner = set[int]()
        self.is_loaded = at != (0, 0)
        self.pictures = 0
        self.grown = turn.grown
        self.targets: list[tuple[int, int] | None] = []
        self.logs = [Log() for _ in range(turn.world)]

    def steps(self, epoch: int) -> list[Step]:
        """The steps of an epoch, without the samples that are left out."""
        return [step for step, _ in self.steps_and_losses(epoch) if any(any(row) for row in step)]

    def steps_and_losses(self, epoch: int) -> list[tuple[Step, int]]:
        """The same, also without a sample; and how many were left out in the epoch up to the end of each."""
        steps = steps_of(self.program, self.turn, self.orders(epoch, self.grown))
        steps = [turned(self.program, epoch, step) for step in steps]
        if not self.program.skips:
            return [(step, 0) for step in steps]
        found, losses, bad = list[tuple[Step, int]](), 0, self.program.bad
        for step in steps:
            losses += sum(number in bad for row in step for piece in row for number in piece)
            found.append(([[[each for each in piece if each not in bad] for piece in row] for row in step], losses))
        return found

    def act(self, action: Action) -> None:
        if action.kind in {"read", "infer"}:
            self.read(1 if action.kind == "infer" else action.steps)
        elif action.kind == "break":
            self.leave()
        elif action.kind == "seek":
            self.go_to(self.next[0] + action.epochs, action.steps)
        elif action.kind == "tell":
            self.tell(action.epochs, own=bool(action.steps))
        elif action.kind == "reload":
            self.reload(begin=bool(action.steps))
        elif action.kind == "grow":
            self.grow(action.steps)
        elif action.kind == "draw":
            self.draw(action.steps)
        elif action.kind == "picture":
            self.take_picture()
        elif action.kind == "skip":
            self.leave()
            self.go_to(self.next[0], action.steps)

    def open(self) -> Iterator[Step]:
        """The rest of the epoch that is read; begins one, if none is."""
        if self.live is None:
            self.is_loaded, self.shown = False, None
            self.live, self.read_any = iter(self.steps(self.next[0])[self.next[1] :]), False
            self.lost_before = self.losses_up_to(self.next[1])
            self.saved = self.next
        return self.live

    def read(self, count: int, *, lost: bool = False) -> None:
        """Reads so many steps, or to the end of the epoch."""
        live = self.open()
        done = 0
        while count == 0 or done < count:
            step = next(live, None)
            if step is None:
                if self.loses_too_many(None):
                    raise _Broken
                self.live, self.next = None, self.following()
                self.saved = self.next
                for log in self.logs:
                    if not lost:
                        log.ends.append(len(log.steps))
                return
            epoch, index = self.next[0], self.saved[1]
            if self.is_broken(step) or self.loses_too_many(index + 1):
                raise _Broken
            self.deliver(step, epoch, index, lost=lost)
            self.saved, self.read_any = (epoch, index + 1), True
            done += 1
            if not lost:
                self.note(index)

    def deliver(self, step: Step, epoch: int, index: int, *, lost: bool = False) -> None:
        size = sum(len(piece) for row in step for piece in row)
        for rank, (log, row) in enumerate(zip(self.logs, step, strict=True)):
            sums = sums_of(step, rank) if self.program.sums else ()
            reads = self.reads(rank, index)
            micro = micro_batches(step) if self.program.tells_costs and self.turn.odd is None else 0
            (log.lost if lost else log.steps).append(Delivered(epoch, index, size, row, sums, reads, micro))

    def take_picture(self) -> None:
        """Reads a step of the next epoch by another iterator, which has begun it; and one of this epoch."""
        if self.live is None or not self.read_any:
            return
        self.pictures += 1
        epoch = self.next[0] + self.pictures
        first = self.steps(epoch)[:1]
        for step in first:
            self.deliver(step, epoch, 0)
        self.read(1)
        if first and not self.saved[1]:  # at the end nothing was delivered, and the state is that of the other one
            self.saved = epoch, 1

    def reads(self, rank: int, index: int) -> Samples:
        """What a rank has read since the step before: its own samples alone, and as far ahead as it is to read."""
        depth = self.program.depth(self.turn)
        if depth is None:
            return []
        steps = self.steps(self.next[0])[index + depth if self.read_any else index : index + depth + 1]
        return [number for step in steps for piece in step[rank] for number in piece]

    def note(self, index: int) -> None:
        """Notes what holds after a step."""
        if self.program.skips:
            self.logs[0].skipped.append(self.losses_up_to(index + 1) - self.lost_before)
        for log in self.logs if self.turn.save_each else []:
            log.saves.append(self.states())
            log.grown.append(self.grown)

    def is_broken(self, step: Step) -> bool:
        """Whether a sample of a step cannot be read by a rank that reads it."""
        odd, bad, rows = self.turn.odd, self.program.bad, step
        place, how = self.program.odd_batch
        if how and how != "keys":
            bad = frozenset(ready_batches(self.program.sizes)[place])
        reads_all = self.program.data == "stream" and self.program.is_shared(self.turn)
        if odd is not None and odd.does == "fails" and not reads_all:
            rows = [step[odd.rank]]
        return any(number in bad for row in rows for piece in row for number in piece)

    def losses_up_to(self, steps: int | None) -> int:
        """How many samples are left out of the epoch up to the end of so many steps, or of all."""
        done = losses = 0
        for step, losses_there in self.steps_and_losses(self.next[0]):
            if done == steps:
                break
            losses, done = losses_there, done + any(any(row) for row in step)
        return losses

    def loses_too_many(self, steps: int | None) -> bool:
        """Whether more samples were left out than may be, since the iterator began."""
        most = self.program.max_errors
        return most is not None and self.losses_up_to(steps) - self.lost_before > most

    def following(self) -> tuple[int, int]:
        """The place that follows the epoch that is read."""
        told, self.told = self.told, None
        pictures, self.pictures = self.pictures, 0
        return (self.next[0] + pictures + 1 if told is None else told), 0

    def leave(self) -> None:
        """Leaves the loop: the next epoch follows; an epoch of which nothing was read stays the next one."""
        if self.live is not None:
            self.live = None
            if self.read_any or self.told is not None:
                self.next = self.following()

    def tell(self, epochs: int, *, own: bool) -> None:
        """Tells the number of the next epoch. A step of it that was gone to is kept.

        Where the user's own object is told, between two epochs, this counts as well. A number that it shows already
        cannot be seen: it is that of the next epoch, or a later one than can be shown.
        """
        if own or self.program.shows:
            self.leave()
        if own and epochs:
            epochs += 2
            while self.next[0] + epochs in self.told_by_owner:
                epochs += 1
            self.told_by_owner.add(self.next[0] + epochs)
        if self.live is not None:
            self.told = self.shown = self.next[0] + epochs
            self.targets.append((self.told, 0))
            return
        if epochs or not self.next[1]:
            self.next = (self.next[0] + epochs, 0)
        # A ShuffleSampler shows this number already, and so do the files that the dataset told it.
        if epochs or not own or not (self.program.order == "permuted" or self.shown == self.next[0]):
            self.saved = self.next
        self.targets.append(self.next)

    def grow(self, samples: int) -> None:
        """Lets the data grow between two epochs, and reads a step of the next; not where it begins in the middle."""
        if self.live is None and self.next[1]:
            self.targets.append(None)
            return
        if self.live is not None:
            self.read(0)
        self.targets.append(self.next)
        self.orders.forget(self.next[0])
        self.grown += samples
        self.read(1)

    def draw(self, numbers: int) -> None:
        """Draws after ``iter`` and before the first ``next``, where the epoch begins; and reads a step.

        The order follows from where the generator stands then: of the default ones that of the first rank. Where a
        place was loaded, the state tells the order, and nothing is drawn here.
        """
        if self.live is None and self.is_loaded:
            self.targets.append(None)
        else:
            if self.live is not None:
                self.read(0)
            self.targets.append(self.next)
            self.orders.draw(self.next[0], numbers)
        self.read(1)

    def reload(self, *, begin: bool) -> None:
        """Loads the state of now, or that of the turn's begin; not where two places are right."""
        if self.grown != self.turn.grown if begin else len(self.states()) > 1:
            self.targets.append(None)
            return
        self.live = self.told = None
        self.next = self.saved = self.begin if begin else self.saved
        self.targets.append(self.next)

    def go_to(self, epoch: int, step: int) -> None:
        """Goes to a step that is there."""
        self.leave()
        count = len(self.steps(epoch))
        step = min(step, count if self.program.is_map_style else max(0, count - 1))
        self.next = self.saved = (epoch, step)
        self.targets.append(self.next)

    def states(self) -> tuple[Place, ...]:
        """The places that the state may have: after the last step of an epoch also the next one's beginning."""
        epoch, index = self.saved
        if not index:  # its data may grow before it begins
            return ((epoch, 0, 0),)
        steps = self.steps(epoch)
        samples = sum(len(piece) for step in steps[:index] for row in step for piece in row)
        if index == len(steps):
            following = epoch + self.pictures + 1 if self.told is None else self.told
            if self.live is None and self.next != self.saved:
                following = self.next[0]
            return (epoch, index, samples), (following, 0, 0)
        return ((epoch, index, samples),)


def log_of(
    program: Program, turn: Turn, orders: OneProcess, at: tuple[int, int]
) -> tuple[list[Log], list[tuple[int, int] | None], int]:
    """The log of each rank in a turn that begins at a step.

    Returns:
      The logs; the epochs and steps that it goes to, if it does; and how much the data has grown at its end.
    """
    place = _Position(program, turn, orders, at)
    try:
        for action in turn.actions:
            place.act(action)
    except _Broken:
        for log in place.logs:
            log.error = "BatchingError" if program.odd_batch[1] else "SourceError"
    for log in place.logs:
        log.states = () if log.error and not program.tells_failures(turn) else place.states()
    if turn.lost and not place.logs[0].error:
        with suppress(_Broken):
            place.read(turn.lost, lost=True)
    return place.logs, place.targets, place.grown
