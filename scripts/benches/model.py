"""What a benchmark is: tables, whose rows are contenders and whose columns say what was measured of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

__all__ = ["Case", "Column", "Contender", "Kind", "Measured", "Table", "Target", "largest", "rate", "total"]

Kind = Literal["limit", "ours", "peer", "before"]
"""``limit``: what no loader can beat. ``before``: what users write by hand."""

Measured = Mapping[str, float]
"""What one rank measured, by name."""


@dataclass(frozen=True)
class Column:
    """One figure of each contender.

    Args:
      name: what it is; the unit included.
      better: which way is better.
      combine: the figure of what each rank measured, in the order of the ranks.
    """

    name: str
    better: Literal["more", "less"]
    combine: Callable[[Sequence[Measured]], float]


@dataclass(frozen=True)
class Contender:
    """Somebody who is measured.

    Args:
      name: as the table says it.
      kind: who it is.
      run: measures on one rank; at the top level of a module, as it is sent by name to processes of its own.
      args: for ``run``.
      needs: packages that it takes, beside those of the library; without them it is left out.
      fresh: whether it takes interpreters that have imported nothing yet, instead of forks of one with torch in it.
      once: whether one round will do, as it takes very long.
      apart: whether its packages are in the environment of ``scripts/test_apart``, as they exclude others.
    """

    name: str
    kind: Kind
    run: Callable[..., Measured]
    args: tuple[object, ...] = ()
    needs: tuple[str, ...] = ()
    fresh: bool = False
    once: bool = False
    apart: bool = False


@dataclass(frozen=True)
class Target:
    """What is to be reached: a ratio of two figures of one table, or a figure itself.

    Args:
      column: the name of the column.
      ours: the contender whose figure it is.
      bound: of the ratio, or of the figure.
      against: the others of the ratio, the best of which counts; none: the figure itself is bounded.
      better_by: the ratio says how many times better ours is than the other; else it is ours over the other.
    """

    column: str
    ours: str
    bound: float
    against: tuple[str, ...] = ()
    better_by: bool = True


@dataclass(frozen=True)
class Table:
    """Contenders that are measured side by side.

    Args:
      title: what they all do.
      columns: what is measured; the first one is drawn in the plot.
      contenders: the rows.
      world: how many ranks.
      rounds: how often each contender is measured at most, in turns.
      targets: what is to be reached.
      note: what the reader should know.
    """

    title: str
    columns: tuple[Column, ...]
    contenders: tuple[Contender, ...]
    world: int = 1
    rounds: int = 3
    targets: tuple[Target, ...] = field(default=())
    note: str = ""


class Case(Protocol):
    """A case, by its sizes."""

    def __call__(self, *, small: bool, folder: Path) -> Sequence[Table]:
        """The tables; ``small`` takes sizes that only show that they work, ``folder`` is for files, by name of case."""


def rate(amount: str, seconds: str) -> Callable[[Sequence[Measured]], float]:
    """All ranks' amount over the time of the slowest one."""
    return lambda ranks: sum(rank[amount] for rank in ranks) / max(rank[seconds] for rank in ranks)


def largest(name: str) -> Callable[[Sequence[Measured]], float]:
    """The figure of the rank that has the largest one."""
    return lambda ranks: max(rank[name] for rank in ranks)


def total(name: str) -> Callable[[Sequence[Measured]], float]:
    """The sum over the ranks."""
    return lambda ranks: sum(rank[name] for rank in ranks)
