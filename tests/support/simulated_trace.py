"""Trace files of ranks that never ran: an oracle for what reads them.

Ranks fetch, vote by recursive doubling over a network with delays of its own each way, wait and train, in true time;
what they write is by their own clocks, which are wrong and drift. The truth is returned beside the files.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MS = 1_000_000
BASE_NS = 1_764_200_000_000_000_000


@dataclass(frozen=True)
class Straggler:
    """What is planted: at each of ``steps`` the rank is late by ``ms``, at a stage."""

    rank: int
    stage: str = "getitem"  # or "collate", "sampler", "copy", "training"
    ms: int = 50
    steps: Sequence[int] = (5, 11)
    file: str | None = None


@dataclass(frozen=True)
class Simulation:
    """What is simulated. Times in nanoseconds.

    Args:
      world: ranks.
      steps: of each of ``epochs``.
      hosts: the name of each rank's host; by default each has one of its own.
      clock_error: each clock is wrong by up to so much.
      drift: each clock is too fast or slow by up to this part.
      delay: the least delay of a message, each way another one up to ``asymmetry`` times as much.
      workers: loader workers; 0: a step is fetched on the training thread.
      prefetch: steps fetched ahead.
      train: how long the training code takes for a step.
      fetch: how long reading a step takes.
      step_facts: more for the line of each step.
      stop_facts: more for the line of the end.
    """

    world: int = 3
    steps: int = 20
    epochs: int = 1
    hosts: Sequence[str] = ()
    clock_error: int = 11_560 * MS
    drift: float = 2e-5
    delay: int = 30_000
    asymmetry: float = 4.0
    workers: int = 2
    prefetch: int = 2
    train: int = 10 * MS
    fetch: int = 3 * MS
    stragglers: Sequence[Straggler] = ()
    seed: int = 0
    run: str = "3fa9c2d1"
    files: int = 4
    step_facts: Mapping[str, Any] = field(default_factory=dict)
    stop_facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Truth:
    """What happened, in true time."""

    votes: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # (epoch, step): when each rank voted
    waits: dict[int, int] = field(default_factory=dict)  # of each rank


class _Clock:
    def __init__(self, error: int, drift: float, start: int) -> None:
        self.error, self.drift, self.start = error, drift, start

    def own(self, true: float) -> int:
        """What the clock shows, since the header of its rank was written at ``start``."""
        return round((true - self.start) * (1 + self.drift))

    @property
    def base_ns(self) -> int:
        return BASE_NS + self.start + self.error


def simulate(folder: Path, what: Simulation) -> Truth:
    """Writes the files of all ranks."""
    chance = random.Random(what.seed)
    shared: dict[str, tuple[int, float]] = {}
    names = what.hosts or [f"node-{rank}" for rank in range(what.world)]
    clocks = []
    for name in names:
        wrong = (chance.randint(-what.clock_error, what.clock_error), chance.uniform(-what.drift, what.drift))
        error, drift = shared.setdefault(name, wrong)
        clocks.append(_Clock(error, drift, chance.randrange(0, 40 * MS)))
    # A host has one clock: where a rank's header was written changes nothing but by the reading of it.
    for clock, name in zip(clocks, names, strict=True):
        clock.error += round(clock.start * shared[name][1]) + chance.randint(-100_000, 100_000) * (name != names[0])
    delays = {
        (a, b): what.delay * chance.uniform(1, what.asymmetry) for a in range(what.world) for b in range(what.world)
    }
    ranks = [_Rank(what, rank, clocks[rank]) for rank in range(what.world)]
    truth = Truth()
    now = [100.0 * MS] * what.world
    for epoch in range(what.epochs):
        for rank in ranks:
            rank.begin(epoch, now[rank.rank])
        for step in range(what.steps):
            starts = [rank.ready(step) for rank in ranks]
            truth.votes[epoch, step] = [round(start) for start in starts]
            ends, peers = _vote(starts, delays, chance)
            for rank, start, end, told in zip(ranks, starts, ends, peers, strict=True):
                rank.vote(step, start, end, told)
            for rank in ranks:
                truth.waits[rank.rank] = truth.waits.get(rank.rank, 0) + rank.deliver(step)
        now = [rank.free for rank in ranks]
        for rank in ranks:
            rank.write("stop", rank.free, None, e=epoch, s=what.steps, **what.stop_facts)
    folder.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        header = {
            "trace": 1,
            "run": what.run,
            "rank": rank.rank,
            "world_size": what.world,
            "host": names[rank.rank],
            "pid": 4711 + rank.rank,
            "base_ns": rank.clock.base_ns,
            "version": "0.2.0",
        }
        text = "".join(f"{json.dumps(line)}\n" for line in [header, *rank.lines])
        (folder / f"rank-{rank.rank:05}-{what.run}.jsonl").write_text(text)
    return truth


def _vote(
    starts: Sequence[float], delays: Mapping[tuple[int, int], float], chance: random.Random
) -> tuple[list[float], list[dict[int, tuple[float, float]]]]:
    """Recursive doubling; ranks over the largest power of two join by a partner. Ends, and each rank's messages."""
    world = len(starts)
    now = list(starts)
    peers: list[dict[int, tuple[float, float]]] = [{} for _ in starts]
    power = 1 << (world.bit_length() - 1)

    def send(source: int, target: int, at: float) -> float:
        return at + delays[source, target] * chance.uniform(1, 1.5)

    def exchange(one: int, other: int) -> None:
        """A message is taken when its receiver looks for it, after it has sent its own."""
        sent = (now[one], now[other])
        got = (max(sent[0], send(other, one, sent[1])), max(sent[1], send(one, other, sent[0])))
        peers[one][other], peers[other][one] = (sent[0], got[0]), (sent[1], got[1])
        now[one], now[other] = got[0] + 1000, got[1] + 1000

    late: dict[int, float] = {}
    for extra in range(power, world):  # its vote is in the message; the answer comes at the end
        late[extra] = now[extra]
        now[extra - power] = max(now[extra - power], send(extra, extra - power, now[extra]))
        peers[extra - power][extra] = (0.0, now[extra - power])
    distance = 1
    while distance < power:
        for one in range(power):
            if one & distance == 0:
                exchange(one, one | distance)
        distance *= 2
    for extra in range(power, world):
        partner = extra - power
        answered = now[partner]
        peers[partner][extra] = (answered, peers[partner][extra][1])
        now[extra] = max(late[extra], send(partner, extra, answered))
        peers[extra][partner] = (late[extra], now[extra])
    return now, peers


class _Rank:
    def __init__(self, what: Simulation, rank: int, clock: _Clock) -> None:
        self.what, self.rank, self.clock = what, rank, clock
        self.lines: list[dict[str, Any]] = []
        self.free = 0.0  # the training thread asks for the next step
        self.epoch = 0
        self.chance = random.Random(what.seed * 1000 + rank)

    def write(self, kind: str, start: float, end: float | None, **more: Any) -> None:
        line = {"k": kind, "t": self.clock.own(start), **more}
        if end is not None:
            line["d"] = self.clock.own(end) - line["t"]
        self.lines.append(line)

    def begin(self, epoch: int, now: float) -> None:
        self.epoch, self.free = epoch, now
        self.reader = [now] * max(1, self.what.workers)
        self.voted = now
        self.delivered: list[float] = []

    def planted(self, stage: str, step: int) -> int:
        planted = (each for each in self.what.stragglers if each.rank == self.rank and each.stage == stage)
        return sum(each.ms * MS for each in planted if step in each.steps)

    def ready(self, step: int) -> float:
        """Draws, fetches and copies; returns when the step is held."""
        what, at = self.what, {"e": self.epoch, "s": step}
        ahead = step - 1 - what.prefetch
        asked = self.delivered[ahead] if ahead >= 0 else self.delivered[0] if self.delivered else self.free
        drawn = asked + 50_000 + self.planted("sampler", step)
        self.write("draw", asked, drawn, **at, parts={"sampler": round(drawn - asked)})
        reader = step % len(self.reader)
        start = max(drawn, self.reader[reader])
        getitem = what.fetch * self.chance.uniform(0.8, 1.2) + self.planted("getitem", step)
        collate = 200_000 + self.planted("collate", step)
        self.reader[reader] = end = start + getitem + collate
        names = [each.file for each in what.stragglers if each.rank == self.rank and step in each.steps and each.file]
        more: dict[str, Any] = {"worker": reader} if what.workers else {}
        name = names[0] if names else f"part-{step % what.files}.tar"
        more |= {"n": 8, "bytes": 4096, "file": name, "record": 8 * step}
        more["parts"] = {"getitem": round(getitem), "collate": round(collate)}
        self.write("fetch", start, end, **at, **more)
        copied = end + 100_000 + self.planted("copy", step)
        self.write("copy", end, copied, **at, bytes=4096)
        return max(copied, self.voted)

    def vote(self, step: int, start: float, end: float, peers: Mapping[int, tuple[float, float]]) -> None:
        own = self.clock.own
        told = {str(peer): [own(sent), own(got)] for peer, (sent, got) in peers.items()}
        self.write("vote", start, end, e=self.epoch, v=step, s=step, n=1, held=1, ahead=self.what.prefetch, peers=told)
        self.voted = end

    def deliver(self, step: int) -> int:
        """The training code of the step; returns how long its loop waited for it."""
        waited = max(0.0, self.voted - self.free)
        if waited:
            self.write("wait", self.free, self.voted, e=self.epoch, s=step)
        start = max(self.free, self.voted)
        self.delivered.append(start)
        self.free = start + self.what.train + self.planted("training", step)
        more = {"samples": 8, "global": 8 * self.what.world, "bytes": 4096, "ready": 1, **self.what.step_facts}
        self.write("step", start, self.free, e=self.epoch, s=step, **more)
        return round(waited)
