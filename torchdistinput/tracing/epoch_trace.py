"""The times of the stages of one epoch on this rank, put together step by step.

Rows pass the stages in order, each on one thread at a time, so that queues match the times of a row. A row gets the
number of its step when it is delivered: which rows are passed over is not known before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, Final, NamedTuple, final

from torchdistinput.plan.balancing import StepCosts
from torchdistinput.plan.step_agreement import AgreedWaits
from torchdistinput.step_types import LocalStep, SourceCounts
from torchdistinput.tracing.read_times import NO_PARTS, PARTS, BatchTimes, ReadTimes
from torchdistinput.tracing.trace_file import LineMaker, TraceFile
from torchdistinput.tracing.waits import NOT_EXPLAINED, Seconds, Waits

_SHORT_WAIT: Final = 10e-6
"""A ``next`` that takes less did not wait."""


@final
class RowTimes:
    """The times of a row.

    Args:
      number: of the row in the epoch.
      drawn: of its draw, with what the draw read.
    """

    __slots__ = ("copied", "drawn", "fetched", "number", "reads")

    def __init__(self, number: int, drawn: BatchTimes) -> None:
        self.number = number
        self.drawn = drawn
        self.fetched: tuple[float, float] | None = None
        """When this process read or awaited the row after it was drawn, by ``perf_counter``, if it did."""
        self.reads: Sequence[BatchTimes] = ()
        """What loader workers measured."""
        self.copied: tuple[float, float] | None = None
        """When its copies to the devices were begun."""


class _StepEvent(NamedTuple):
    """A delivered step, and the user's code since the one before."""

    number: int
    row: RowTimes | None
    samples: int
    began: float
    ended: float
    before: _DeliveredStep | None
    num_bytes: int
    """Of the step before."""
    waited: tuple[Seconds, Seconds] = NOT_EXPLAINED
    """What the loop waited for."""


class _DeliveredStep(NamedTuple):
    number: int
    delivered: float
    samples: int
    in_all: int
    ready: int
    costs: StepCosts | None


class _VoteEvent(NamedTuple):
    number: int
    began: float
    ended: float
    step: int
    steps: int
    held: int
    ahead: int
    peers: Mapping[int, Sequence[float]]


class _LastVoter(NamedTuple):
    """Who came last in a vote, by how many seconds, and by how many later than this rank; what it did if it is this."""

    rank: int
    made_wait: float
    late: float
    did: tuple[Seconds, Seconds]


@final
class EpochTrace:
    """Measures one epoch of this rank. Each method is called on the thread that did what it notes.

    Args:
      epoch: its number.
      first_step: the number of the first step that is delivered.
      times: what the source measures; ``None`` where it measures nothing.
      file: where the events are written; ``None`` for no trace.
      dataset: its name in messages.
      rank: this rank, as users know it.
      rank_of: the name of a rank of the vote, as users know it.
      counts: see ``Stream.counts``, of the steps that were delivered.
    """

    def __init__(
        self,
        epoch: int,
        first_step: int,
        times: ReadTimes | None,
        file: TraceFile | None,
        *,
        dataset: str = "",
        rank: int = 0,
        rank_of: Callable[[int], int] = int,
        counts: Callable[[], SourceCounts | None] = lambda: None,
    ) -> None:
        self.waits = Waits()
        """Says what the training loop waited for."""
        self._rank = rank
        self._counts, self._counts_before = counts, counts()
        self._at = {"epoch": epoch, "iterator": 0 if file is None else file.next_iterator()}
        self._dataset = dataset
        self._step = first_step
        self._times = times
        self._file = file
        self._rank_of = rank_of
        if times is not None:  # what was drawn before the first step belongs to none
            times.take()
            times.received.clear()
        self._rows: deque[RowTimes] = deque()  # drawn, and not delivered
        self._unfetched: deque[RowTimes] = deque()
        self._copies: dict[int, tuple[float, float]] = {}  # by the id of a step that was not delivered yet
        self._drawn = 0
        self._last: _DeliveredStep | None = None
        self._bytes = 0
        self._votes = self._agreed = self._resolved = 0
        self._vote_began = 0.0
        self._vote_held = 0
        self._vote_line: _VoteEvent | None = None  # of the last vote: who was last in it is told by the next one
        self.ahead = 0
        """The prefetch depth."""
        self.peers: dict[int, list[float]] = {}
        """For each partner in the vote: when this rank's message was sent and the partner's was received."""
        self._stopped = False

    def draws(self, draw: Callable[[], LocalStep]) -> Callable[[], LocalStep]:
        """The function, which draws the next row, timed."""
        times, rows, unfetched, waits = self._times, self._rows, self._unfetched, self.waits

        def timed() -> LocalStep:
            began = perf_counter()
            if times is not None:
                times.enter()
            step = draw()
            drawn = BatchTimes(began, perf_counter(), NO_PARTS) if times is None else times.take()
            row = RowTimes(self._drawn, drawn)
            self._drawn += 1
            rows.append(row)
            if step.drawn is not None:
                unfetched.append(row)
            waits.reads.append(drawn)
            return step

        return timed

    def fetched(self, began: float, ended: float) -> None:
        """The row that was drawn first, of those that were not, is complete."""
        row = self._unfetched.popleft()
        row.fetched = began, ended
        if self._times is not None:
            row.reads = tuple(self._times.received)
            self._times.received.clear()
        self.waits.fetched(row.number, row.reads or [BatchTimes(began, ended, NO_PARTS)])

    def copied(self, step: LocalStep, began: float, ended: float) -> None:
        """The pieces of a step were made and sent to their devices."""
        self._copies[id(step)] = began, ended

    def vote_begins(self, num_held: int) -> None:
        """This rank votes; it has held ``num_held`` rows in the epoch so far."""
        self._vote_began, self._vote_held = perf_counter(), num_held - self._resolved
        self.peers.clear()

    def vote_ends(
        self, agreed: Sequence[LocalStep], told: AgreedWaits | None, late: float, called: float, waits_since: float
    ) -> None:
        """The vote ended.

        Args:
          agreed: its steps.
          told: who came last in the vote before; ``None`` where nobody is blamed.
          late: by how many seconds later than this rank.
          called: when ``next`` was called, in which it ended.
          waits_since: since when this rank did nothing but wait for its end.
        """
        last = None
        if told is not None and told.last is not None:
            rank, made_wait = self._rank_of(told.last), told.late / 1e6
            did = self.waits.was_last(made_wait) if rank == self._rank else NOT_EXPLAINED
            last = _LastVoter(rank, made_wait, late, did)
        self.waits.vote_ends(called, waits_since, self._resolved)
        steps = sum(not step.is_passed for step in agreed)
        self._resolved += len(agreed)
        ended = perf_counter()
        if self._file is not None:
            self._write_vote(last)
            self._vote_line = _VoteEvent(
                *(self._votes, self._vote_began, ended, self._step + self._agreed, steps, self._vote_held, self.ahead),
                dict(self.peers),
            )
        self._votes += 1
        self._agreed += steps

    def _write_vote(self, last: _LastVoter | None) -> None:
        if self._file is not None and self._vote_line is not None:
            self._file.append((self._vote_lines, (self._vote_line, last)))
            self._vote_line = None

    def delivered(self, step: LocalStep, began: float, ended: float, num_bytes: int, ready: int) -> None:
        """A step was delivered.

        Args:
          step: the step.
          began: when ``next`` was called.
          ended: when it was there.
          num_bytes: of all steps before, in the epoch.
          ready: steps that are ready after it.
        """
        row = self._rows.popleft() if self._rows else None
        if row is not None:
            row.copied = self._copies.pop(id(step), None)
        waited = self.waits.delivered(began, ended, 0 if row is None else row.number)
        number, samples, size = self._step, sum(step.sizes), num_bytes - self._bytes
        if self._file is not None:
            event = _StepEvent(number, row, samples, began, ended, self._last, size, waited)
            self._file.append((self._step_lines, event))
        self._last = _DeliveredStep(number, ended, samples, step.global_size, ready, step.costs)
        self._bytes = num_bytes
        self._step += 1
        self._agreed -= 1

    def passed(self, step: LocalStep) -> None:
        """A row without a sample on any rank was passed over."""
        if self._rows:
            self._rows.popleft()
        self._copies.pop(id(step), None)

    def stops(self, called: float, num_bytes: int) -> None:
        """The iterator ends, after ``next`` was called last at ``called``. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        if self._file is not None:
            self._write_vote(None)
            now = perf_counter()
            if self._last is not None and called <= self._last.delivered:
                called = now
            last = _StepEvent(self._step, None, 0, called, now, self._last, num_bytes - self._bytes)
            self._file.append((self._stop_lines, (last, self._counts_before, self._counts())))

    # The lines, made on the thread that writes

    def _step_lines(self, make: LineMaker, event: _StepEvent) -> Iterator[str]:
        yield from self._user_step(make, event)
        if event.row is not None:
            yield from self._row_lines(make, event.number, event.row, event.samples)
        if event.ended - event.began >= _SHORT_WAIT:
            yield self._line(make, "wait", event.began, event.ended, event.number, **_explained(event.waited))

    def _line(self, make: LineMaker, stage: str, began: float, ended: float, step: int, **more: Any) -> str:
        return make.slice(self._dataset, stage, began, ended, f"{stage} {step}", {**self._at, "step": step, **more})

    def _user_step(self, make: LineMaker, event: _StepEvent) -> Iterator[str]:
        if event.before is not None:
            number, delivered, samples, in_all, ready, costs = event.before
            cost = {} if costs is None else {"cost": costs.of_this_worker}
            counts = {"samples": samples, "global": in_all, "bytes": event.num_bytes, "ready": ready}
            yield self._line(make, "step", delivered, event.began, number, **counts, **cost)

    def _row_lines(self, make: LineMaker, step: int, row: RowTimes, samples: int) -> Iterator[str]:
        drawn, reads = row.drawn, row.reads
        yield self._line(make, "draw", drawn.began, drawn.ended, step, **(_parts_of(drawn) if row.fetched else {}))
        if row.fetched is None:  # the draw was all
            reads = [drawn]
        elif not reads:
            reads = [BatchTimes(*row.fetched, NO_PARTS)]
        for each in reads:
            yield self._line(make, "fetch", each.began, each.ended, step, samples=samples, **_facts_of(each))
        if row.copied is not None:
            yield self._line(make, "copy", *row.copied, step)

    def _vote_lines(self, make: LineMaker, event: tuple[_VoteEvent, _LastVoter | None]) -> Iterator[str]:
        vote, last = event
        more: dict[str, Any] = {"vote": vote.number, "steps": vote.steps, "held": vote.held, "ahead": vote.ahead}
        more["peers"] = {
            self._rank_of(peer): [make.clock(sent), make.clock(received)]
            for peer, (sent, received) in vote.peers.items()
            if sent and received
        }
        if last is not None:
            more |= {"last": last.rank, "made_wait": _us(last.made_wait), "late": _us(last.late)}
            more |= _explained(last.did)
        yield self._line(make, "vote", vote.began, vote.ended, vote.step, **more)

    def _stop_lines(
        self, make: LineMaker, last: tuple[_StepEvent, SourceCounts | None, SourceCounts | None]
    ) -> Iterator[str]:
        event, before, counts = last
        yield from self._user_step(make, event)
        shares = {"shares": _amounts(before, counts)} if before and counts else {}
        yield make.instant("stop", event.ended, {**self._at, "step": event.number, "dataset": self._dataset, **shares})


def _amounts(before: SourceCounts, counts: SourceCounts) -> dict[str, int]:
    """The tokens of each source where they are counted, else the samples."""
    unit = "tokens" if any(each["tokens"] for each in counts.values()) else "samples"
    return {name: each[unit] - before[name][unit] for name, each in counts.items()}


def _us(seconds: float) -> int:
    return round(1e6 * seconds)


def _explained(found: tuple[Seconds, Seconds]) -> dict[str, Any]:
    told = zip(("in", "files"), found, strict=True)
    return {name: {key: _us(each) for key, each in seconds.items()} for name, seconds in told if seconds}


def _parts_of(times: BatchTimes) -> dict[str, Any]:
    return {name: _us(each) for name, each in zip(PARTS, times.parts, strict=True) if each}


def _facts_of(times: BatchTimes) -> dict[str, Any]:
    facts = _parts_of(times)
    if times.worker is not None:
        facts["worker"] = times.worker
    if times.file is not None:
        facts["file"] = times.file
    if times.number is not None:
        facts["index" if times.file is None else "record"] = times.number
    return facts
