"""Scripted streams, the stages composed over them without devices, and what each rank must then deliver."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, cast, final

import torch

from tests.support.collectives import FakeCollectives
from torchdistinput.batches.schema import structure_of
from torchdistinput.batches.schema_check import SchemaChecker
from torchdistinput.coordination.step_sync import StepSync
from torchdistinput.coordination.timeouts import StragglerTimeout
from torchdistinput.pipeline.engine import Engine
from torchdistinput.pipeline.metrics import Metrics
from torchdistinput.pipeline.step_maker import StepMaker
from torchdistinput.pipeline.to_device import ToDevice
from torchdistinput.plan.options import steps_that_fit
from torchdistinput.step_types import LocalStep, RowSizes, SizedRow

T = TypeVar("T")

Where = Literal["draw", "fetch", "transfer"]


_NUMBERS = structure_of(torch.arange(1))


class ScriptedError(Exception):
    """The data failed, as the script says."""


@final
@dataclass(frozen=True)
class Script:
    """What one rank does.

    Args:
      rows: samples in each row; 0 for a row without any.
      fails: where reading fails after the rows; ``None`` for a stream that ends there.
      leaves_after: steps after which the loop is left; ``None`` for never.
      in_background: whether rows are fetched by the background thread.
      finds_end: whether the end is found by drawing, or only by fetching.
      slow: places of rows that take a moment.
      pauses: steps after which the loop takes a moment.
    """

    rows: tuple[int, ...]
    fails: Where | None = None
    leaves_after: int | None = None
    in_background: bool = False
    finds_end: Literal["draw", "fetch"] = "draw"
    slow: frozenset[int] = frozenset()
    pauses: frozenset[int] = frozenset()


@final
class ScriptedStream:
    """The stream of a script: row ``s`` of rank ``r`` is filled with ``100 * r + s``."""

    def __init__(self, script: Script, rank: int) -> None:
        self.in_background = script.in_background
        self.draws: list[int] = []
        self.fetches: list[int] = []
        self.closed = 0
        self._script = script
        self._rank = rank
        self._next = 0

    def draw(self) -> int | None:
        place, self._next = self._next, self._next + 1
        self.draws.append(place)
        if place == len(self._script.rows):
            if self._script.fails == "draw":
                raise ScriptedError(f"draw {place} of {self._rank}")
            if self._script.fails is None and self._script.finds_end == "draw":
                return None
        return place

    def fetch(self, drawn: Any) -> SizedRow | None:
        place: int = drawn
        self.fetches.append(place)
        if place in self._script.slow:
            time.sleep(0.002)
        if place >= len(self._script.rows):
            if self._script.fails == "fetch":
                raise ScriptedError(f"fetch {place} of {self._rank}")
            if self._script.fails == "transfer" and place == len(self._script.rows):
                return [torch.full((1,), -1)], RowSizes(1, (1,), _NUMBERS), 0
            return None
        size = self._script.rows[place]
        piece = torch.full((size,), 100 * self._rank + place) if size else None
        return [piece], RowSizes(size, (size,), _NUMBERS), 0

    def close(self) -> None:
        self.closed += 1


def _nothing(*_: object) -> None:
    pass


@final
class ScriptedCopier:
    """A copy to nowhere, which may fail."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.enter_thread = self.begin_step = self.discard = self.close = _nothing

    def send(self, batch: torch.Tensor) -> Any:
        if batch.tolist() == [-1]:
            raise ScriptedError(f"transfer of {self._rank}")
        return batch

    def hand_over(self, transfer: Any) -> Any:
        return transfer


@final
@dataclass
class Calls:
    """What makes the steps, as calls of a test's own; see ``pipeline.step_maker``."""

    make: Callable[[LocalStep], None]
    discard: Callable[[LocalStep], None] = _nothing
    enter_thread: Callable[[], None] = _nothing
    close_source: Callable[[], None] = _nothing
    close_devices: Callable[[], None] = _nothing
    consumers: dict[object, float] = field(default_factory=dict)


@final
@dataclass
class Party:
    """One rank's stages over a script, and what became of them."""

    engine: Engine
    stream: ScriptedStream
    coordinate: StepSync
    meter: Metrics
    calls: Calls
    sent: list[LocalStep] = field(default_factory=list)
    discarded: list[LocalStep] = field(default_factory=list)
    devices_closed: int = 0


@final
@dataclass(frozen=True)
class Seen:
    """What one rank got.

    Args:
      steps: for each step the global size, and the values of this rank's piece.
      error: what ended it, but the end of the data.
      party: the stages.
    """

    steps: list[tuple[int | None, list[int]]]
    error: BaseException | None
    party: Party


def compose(
    world: FakeCollectives | None,
    rank: int,
    script: Script,
    *,
    depth: int,
    timeout_seconds: float = 20.0,
    max_bytes: int | None = None,
    weigh: Callable[[LocalStep], int] = lambda step: 1,
) -> Party:
    """A maker that counts what it sends, the votes and the engine of one local replica, as in ``build_pipeline``.

    With ``max_bytes``, the bytes that may be ready ahead, the depth may grow up to 32. ``weigh`` gives the
    bytes of a step.
    """
    checker = SchemaChecker()
    stream = ScriptedStream(script, rank)
    meter = Metrics()
    maker = StepMaker(stream, checker, None, ToDevice([ScriptedCopier(rank)]), 1, meter, {})

    def make(step: LocalStep, way: Callable[[LocalStep], None] = maker.make) -> None:
        way(step)
        if step.transfers:
            party.sent.append(step)

    discarded: list[LocalStep] = []

    def close_devices() -> None:
        party.devices_closed += 1

    channel = None if world is None else world.ranks(rank).open_channel(0)
    coordinate = StepSync(
        channel,
        slots=max(1, depth) if max_bytes is None else 32,
        checker=checker,
        complete=partial(make, way=maker.fill),
        name=None if world is None else rank,
        begins_at=(0, 0),
        least_ahead=depth,
        fits=None if max_bytes is None else lambda step: steps_that_fit(weigh(step), max_bytes),
    )
    calls = Calls(make, discarded.append, close_source=stream.close, close_devices=close_devices)
    in_background = depth > 0 and script.in_background
    engine = Engine(
        maker.draw,
        cast(Any, calls),
        coordinate,
        StragglerTimeout(channel, timeout_seconds, coordinate.give_up),
        meter,
        depth=depth if world is not None or in_background else 0,
        in_background=in_background,
    )
    engine.begin()
    party = Party(engine, stream, coordinate, meter, calls, discarded=discarded)
    return party


def values(delivered: LocalStep) -> tuple[int | None, list[int]]:
    """What a step brought this rank."""
    return delivered.global_size, [value for transfer in delivered.transfers for value in transfer.tolist()]


def read(party: Party, script: Script) -> Seen:
    """The loop of one rank."""
    steps: list[tuple[int | None, list[int]]] = []
    error: BaseException | None = None
    try:
        while script.leaves_after is None or len(steps) < script.leaves_after:
            delivered = party.engine.take()
            if delivered is None:
                break
            party.meter.steps += 1
            party.meter.samples += sum(delivered.sizes)
            steps.append(values(delivered))
            if len(steps) in script.pauses:
                time.sleep(0.002)
    except Exception as raised:
        error = raised
    party.engine.close()
    return Seen(steps, error, party)


def results_of(world: FakeCollectives, fn: Callable[[int], T]) -> list[T]:
    """What each rank returned; what the first that failed raised is raised."""
    found = []
    for result in world.run(fn):
        if isinstance(result, BaseException):
            raise result
        found.append(result)
    return found


def play(world: FakeCollectives, scripts: Sequence[Script], *, depth: int) -> list[Seen]:
    """Every rank reads its script."""

    def rank_reads(rank: int) -> Seen:
        return read(compose(world, rank, scripts[rank], depth=depth), scripts[rank])

    return results_of(world, rank_reads)


@final
@dataclass(frozen=True)
class Law:
    """What the laws say of a set of scripts that are read to the end.

    Args:
      steps: for each rank, what it delivers.
      failing: the ranks that fail; empty at a common end.
      num_rows: steps that are voted for, those without a sample included.
    """

    steps: list[list[tuple[int, list[int]]]]
    failing: list[int]
    num_rows: int


def law(scripts: Sequence[Script]) -> Law:
    """Row by row: a failure ends all, then the end of all; what has no sample is passed over."""
    steps: list[list[tuple[int, list[int]]]] = [[] for _ in scripts]
    place = 0
    while True:
        failing = [rank for rank, each in enumerate(scripts) if each.fails is not None and len(each.rows) == place]
        if failing or all(place >= len(each.rows) for each in scripts):
            return Law(steps, failing, place)
        sizes = [each.rows[place] if place < len(each.rows) else 0 for each in scripts]
        if sum(sizes):
            for rank, size in enumerate(sizes):
                steps[rank].append((sum(sizes), [100 * rank + place] * size))
        place += 1


def random_script(rng: random.Random, *, may_fail: bool) -> Script:
    """Up to a dozen rows, some empty, some slow."""
    rows = tuple(rng.choice([0, 1, 1, 2, 3]) for _ in range(rng.choice([0, 1, 2, 3, 5, 8, 12])))
    fails: Where | None = rng.choice(["draw", "fetch", "transfer"]) if may_fail and rng.random() < 0.2 else None
    places = range(len(rows) + 2)
    return Script(
        rows,
        fails,
        in_background=rng.random() < 0.5,
        finds_end=rng.choice(["draw", "fetch"]),
        slow=frozenset(place for place in places if rng.random() < 0.15),
        pauses=frozenset(place for place in places if rng.random() < 0.15),
    )
