"""Runs contenders: each measurement in processes of its own, round after round in turns: all see the same noise."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benches.model import Column, Contender, Measured, Table, Target
from benches.peers import APART, missing, missing_apart
from torchdistinput.testing import run_ranks

__all__ = ["Reached", "Result", "Row", "reached", "run_table"]

_SCRIPTS = Path(__file__).parent.parent
_SECONDS = 180.0  # bound on one measurement


@dataclass
class Row:
    """What became of a contender.

    Args:
      contender: who.
      rounds: for each column, by its name, the figure of each round.
      failure: why there are none.
    """

    contender: Contender
    rounds: dict[str, list[float]] = field(default_factory=dict)
    failure: str = ""

    def median(self, column: str) -> float | None:
        """The figure that counts."""
        found = self.rounds.get(column)
        return statistics.median(found) if found else None


@dataclass(frozen=True)
class Reached:
    """A target, and what was reached: ``value`` is ``None`` where somebody it needs is missing."""

    target: Target
    value: float | None
    other: str
    at_least: bool

    @property
    def met(self) -> bool | None:
        """Whether; ``None`` is unknown."""
        if self.value is None:
            return None
        return self.value >= self.target.bound if self.at_least else self.value <= self.target.bound


@dataclass(frozen=True)
class Result:
    """A table with its figures."""

    case: str
    table: Table
    rows: list[Row]
    absent: list[str]
    reached: list[Reached]


def run_table(case: str, table: Table, say: Callable[[str], None]) -> Result:
    """Measures all that can be measured here, in turns.

    Args:
      case: its name.
      table: what is measured.
      say: is told what is going on.
    """
    here = {each.name: not (missing_apart if each.apart else missing)(each.needs) for each in table.contenders}
    rows = [Row(contender) for contender in table.contenders if here[contender.name]]
    absent = [name for name, is_here in here.items() if not is_here]
    for turn in range(table.rounds):
        for row in rows:
            if row.failure or (turn and row.contender.once):
                continue
            say(f"{case}: {table.title}, world {table.world}: round {turn + 1} of {table.rounds}: {row.contender.name}")
            _measure(table, row)
    return Result(case, table, rows, absent, [reached(target, table, rows) for target in table.targets])


def _measure(table: Table, row: Row) -> None:
    contender = row.contender
    try:
        if contender.fresh or contender.apart:
            ranks: Sequence[Measured] = _fresh(contender)
        else:
            ranks = run_ranks(table.world, contender.run, *contender.args, timeout_seconds=_SECONDS)
    except Exception as error:  # a peer that cannot do it, says so in its row, and the others go on
        row.failure = str(error).strip().splitlines()[-1][:200]
        print(f"{contender.name}: {error}", file=sys.stderr)
        return
    for column in table.columns:
        row.rounds.setdefault(column.name, []).append(column.combine(ranks))


def _fresh(contender: Contender) -> list[Measured]:
    """In an interpreter that has imported nothing, of the environment that the contender takes."""
    call = f"from {contender.run.__module__} import {contender.run.__name__} as run; import json; print(json.dumps("
    code = f"{call}run(*{contender.args!r})))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_SCRIPTS), str(_SCRIPTS.parent)])}
    command = [str(APART) if contender.apart else sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [json.loads(done.stdout.splitlines()[-1])]


def reached(target: Target, table: Table, rows: Sequence[Row]) -> Reached:
    """What became of a target, by the medians of the rows."""
    column = next(column for column in table.columns if column.name == target.column)
    figures = {row.contender.name: row for row in rows if row.median(column.name) is not None}
    more = column.better == "more"
    at_least = target.better_by if target.against else more
    others = [name for name in target.against if name in figures]
    if target.ours not in figures or (target.against and not others):
        return Reached(target, None, "", at_least)
    ours = figures[target.ours]
    if not target.against:
        return Reached(target, ours.median(column.name), "", at_least)
    best = (max if more else min)(others, key=lambda name: figures[name].median(column.name) or 0.0)
    return Reached(target, _ratio(ours, figures[best], column, target), best, at_least)


def _ratio(ours: Row, other: Row, column: Column, target: Target) -> float:
    """The median over the rounds: the two of a round were measured one after the other."""
    turned = target.better_by and column.better == "less"
    pairs = zip(ours.rounds[column.name], other.rounds[column.name], strict=False)
    return statistics.median(_over(b, a) if turned else _over(a, b) for a, b in pairs)


def _over(a: float, b: float) -> float:
    return a / b if b else float("inf")
