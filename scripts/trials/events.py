"""What happens to a program, to whom, and when."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from typing import Final

from trials.programs import Program, turn_of

__all__ = ["ACTIONS", "FREEZE_SECONDS", "Event", "event_of"]

FREEZE_SECONDS: Final = 3.0
ACTIONS: Final = {
    "kill": signal.SIGKILL,
    "freeze for 3 s": signal.SIGSTOP,
    "freeze": signal.SIGSTOP,
    "SIGINT": signal.SIGINT,
    "SIGTERM": signal.SIGTERM,
}


@dataclass(frozen=True)
class Event:
    """What happens.

    Args:
      action: one of ``ACTIONS``.
      target: ``rank``, ``loader worker`` (of the rank), ``store`` (the process of the launcher that hosts it), or
        ``all ranks``.
      rank: whose progress is waited for; with the first two targets also whom it hits.
      after: what that rank has told last: ``start, group, strategy, distribute, iter, open, step, end``.
      count: how often it has told that.
      delay: seconds between that and the event.
    """

    action: str
    target: str
    rank: int
    after: str
    count: int
    delay: float

    @property
    def kind(self) -> str:
        """For the summary."""
        return f"{self.action}: {self.target}"


def event_of(rng: random.Random, program: Program, action: str) -> Event:
    """A random event of a kind for a program."""
    targets = ["rank"] * 6
    if action in {"SIGINT", "SIGTERM"}:
        targets += ["all ranks"] * 2
    elif program.own_store:
        targets += ["store"] * 3
    targets += ["loader worker"] * (4 if any(turn_of(each).loader_workers for each in program.inputs) else 0)
    target = rng.choice(targets)
    # Before the group of a script's own is there, waits are torch's own.
    moments = {"group" if program.own_group else "start": 1, "strategy": 2, "distribute": 2, "end": 2}
    moments.update({"iter": 3, "open": 3, "step": 7})
    if target == "loader worker":
        moments = {"open": 3, "step": 7}
    elif target == "rank" and rng.random() < 0.3:  # the one that hosts the store, if the launcher does not
        return _at(rng, program, action, target, 0, moments)
    return _at(rng, program, action, target, rng.randrange(program.world), moments)


def _at(rng: random.Random, program: Program, action: str, target: str, rank: int, moments: dict[str, int]) -> Event:
    after = rng.choices(list(moments), list(moments.values()))[0]
    most = {
        "strategy": program.rounds,
        "distribute": program.rounds * len(program.inputs),
        "iter": program.rounds * len(program.openings),
        "open": program.rounds * len(program.openings),
        "step": max(1, program.steps_at_least),
    }.get(after, 1)
    delay = rng.choice([0.0, 0.0005, 0.002, 0.005, 0.02, 0.1]) * rng.random()
    return Event(action, target, rank, after, rng.randint(1, most), delay)
