"""Trace files of ranks that never ran: an oracle for what merges them.

Ranks read, vote along a tree over a network with delays of its own each way, wait and train, in true time;
what they write is by their own clocks, which are wrong and drift. The truth is returned beside the files.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchdistinput.tracing.events import FIRST_PID, FORM, STAGES, head, line_of, track_names, track_of

MS = 1_000_000
BASE_NS = 1_764_200_000_000_000_000
RUN = "3fa9c2d1"


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
      train: how long the training code takes for a step.
      late: the rank that is late, by ``late_ns``, at each of ``late_steps``.
      file: that it reads then.
    """

    world: int = 3
    steps: int = 20
    epochs: int = 1
    hosts: Sequence[str] = ()
    clock_error: int = 11_560 * MS
    drift: float = 2e-5
    delay: int = 30_000
    asymmetry: float = 4.0
    train: int = 10 * MS
    late: int = -1
    late_ns: int = 50 * MS
    late_steps: Sequence[int] = (5, 11)
    file: str = "web-0193.tar"
    seed: int = 0
    run: str = RUN
    base_ns: int = BASE_NS


@dataclass
class Truth:
    """What happened, in true time: when each rank voted, by epoch and step."""

    votes: dict[tuple[int, int], list[float]] = field(default_factory=dict)


def simulate(folder: Path, what: Simulation) -> Truth:
    """Writes the files of all ranks."""
    chance = random.Random(what.seed)
    hosts = what.hosts or [f"node-{rank}" for rank in range(what.world)]
    wrong = {
        host: (chance.randint(-what.clock_error, what.clock_error), chance.uniform(-what.drift, what.drift))
        for host in dict.fromkeys(hosts)
    }
    ranks = [_Rank(what, rank, host, *wrong[host], chance.randrange(40 * MS)) for rank, host in enumerate(hosts)]
    pairs = [(a, b) for a in range(what.world) for b in range(what.world)]
    delays = {pair: what.delay * chance.uniform(1, what.asymmetry) for pair in pairs}
    truth = Truth()
    for epoch in range(what.epochs):
        for step in range(what.steps):
            starts = [rank.read(epoch, step, chance) for rank in ranks]
            truth.votes[epoch, step] = starts
            ends, peers = _vote(starts, delays, chance)
            for rank, end, told in zip(ranks, ends, peers, strict=True):
                rank.vote(epoch, step, starts, end, told)
        for rank in ranks:
            rank.stop(epoch)
    folder.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        path = folder / f"rank-{rank.rank:05}-{what.run}.json"
        path.write_text("[\n" + "".join(map(line_of, rank.events)))
    return truth


def _vote(
    starts: Sequence[float], delays: Mapping[tuple[int, int], float], chance: random.Random
) -> tuple[list[float], list[dict[int, tuple[float, float]]]]:
    """Messages up a tree and down again. When it ended on each rank, and each rank's messages."""
    now, world = list(starts), len(starts)
    peers: list[dict[int, tuple[float, float]]] = [{} for _ in starts]
    up: dict[int, tuple[float, float]] = {}
    for child in range(world - 1, 0, -1):
        parent = (child - 1) // 2
        received = max(now[parent], now[child] + delays[child, parent] * chance.uniform(1, 1.5))
        up[child] = now[child], received
        now[parent] = received
    now[0] += 1000
    for child in range(1, world):
        parent = (child - 1) // 2
        now[child] = now[parent] + delays[parent, child] * chance.uniform(1, 1.5)
        peers[child][parent] = up[child][0], now[child]
        peers[parent][child] = now[parent], up[child][1]
    return now, peers


class _Rank:
    def __init__(self, what: Simulation, rank: int, host: str, error: int, drift: float, start: int) -> None:
        self.what, self.rank, self.start, self.drift = what, rank, start, drift
        self.base_ns = what.base_ns + error + round(start * (1 + drift))
        facts = {"form": FORM, "run": what.run, "rank": rank, "world_size": what.world, "host": host}
        self.events: list[Mapping[str, Any]] = [
            *head(rank, host, 4711 + rank, {**facts, "base_ns": self.base_ns, "version": "0.3.0"})
        ]
        for stage in STAGES:
            self.events += track_names(rank, track_of(0, stage, None), stage)
        self.free = self.called = 100.0 * MS  # the training thread asks for the next step

    def own(self, true: float) -> float:
        """What the clock shows, since the start of the file's clock."""
        return round((true - self.start) * (1 + self.drift)) / 1000

    def write(self, stage: str, began: float, ended: float, epoch: int, step: int, **more: Any) -> None:
        start = self.own(began)
        at = {"pid": FIRST_PID + self.rank, "tid": track_of(0, stage, None), "ts": start}
        args = {"epoch": epoch, "iterator": epoch, "step": step, **more}
        event = {"ph": "X", "cat": stage, "name": f"{stage} {step}", **at, "dur": round(self.own(ended) - start, 3)}
        self.events.append({**event, "args": args})

    def read(self, epoch: int, step: int, chance: random.Random) -> float:
        """Reads a step in ``next``; returns when it is held."""
        what, self.called = self.what, self.free
        is_late = self.rank == what.late and step in what.late_steps
        held = self.free + 3 * MS * chance.uniform(0.8, 1.2) + what.late_ns * is_late
        file = {"file": what.file} if is_late else {}
        self.write("fetch", self.free, held, epoch, step, samples=8, getitem=round((held - self.free) / 1000), **file)
        return held

    def vote(
        self, epoch: int, step: int, starts: Sequence[float], end: float, peers: Mapping[int, tuple[float, float]]
    ) -> None:
        """Votes for the step; and trains on it."""
        last = max(range(len(starts)), key=lambda rank: starts[rank])
        late, made_wait = (round((starts[last] - each) / 1000) for each in (starts[self.rank], min(starts)))
        told = {str(peer): [self.own(each) for each in times] for peer, times in peers.items()}
        facts: dict[str, Any] = {"vote": step, "steps": 1, "held": 1, "ahead": 0, "peers": told}
        facts |= {"last": last, "made_wait": made_wait, "late": late}
        did: dict[str, Any] = {}
        if last == self.rank:
            did = {"in": {"getitem": made_wait}, "files": {self.what.file: made_wait} if made_wait > 40_000 else {}}
        self.write("vote", starts[self.rank], end, epoch, step, **facts, **did)
        self.write("wait", self.called, end, epoch, step, **{"in": {"getitem": 1000}})
        self.free = end + self.what.train
        amounts = {"samples": 8, "global": 8 * self.what.world, "bytes": 4096, "ready": 1}
        self.write("step", end, self.free, epoch, step, **amounts)

    def stop(self, epoch: int) -> None:
        at = {"pid": FIRST_PID + self.rank, "tid": 0, "ts": self.own(self.free)}
        args = {"epoch": epoch, "iterator": epoch, "step": self.what.steps, "dataset": "1", "shares": {"web": 5}}
        self.events.append({"ph": "i", "s": "p", "cat": "stop", "name": "stop", **at, "args": args})
