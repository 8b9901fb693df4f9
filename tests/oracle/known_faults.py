"""Faults that are known: which programs may show them, and the smallest one that does. A mend takes its entry out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.oracle.program import Action, Program, Turn


@dataclass(frozen=True)
class Fault:
    """A fault.

    Args:
      name: in a few words.
      may_show: whether a program may show it.
      smallest: a program that does.
    """

    name: str
    may_show: Callable[[Program], bool]
    smallest: Program


def _passes_over(program: Program) -> bool:
    """Whether a row may have no sample on any rank."""
    if program.skips and program.bad:
        return True
    if program.data == "function":
        return 0 in program.sizes
    if program.is_ready or program.order == "batches":
        return 0 in program.sizes or not all(map(program.is_shared, program.turns))
    return any(not program.is_shared(turn) and program.batch < turn.num_replicas for turn in program.turns)


def _goes_to_a_step(program: Program) -> bool:
    return any(action.kind in {"seek", "skip"} and action.steps for turn in program.turns for action in turn.actions)


GONE_TO = Turn(2, actions=(Action("skip", 4), Action("read")))
FAULTS = [
    Fault(
        "where a step is gone to, rows that were passed over count as steps",
        lambda program: _passes_over(program) and _goes_to_a_step(program),
        Program(
            sizes=(6,),
            policy="OFF",
            order="batches",
            turns=(Turn(2, actions=(Action("skip", 4), Action("read"))),),
        ),
    ),
]


def known_fault(program: Program) -> str:
    """The name of a fault that a program may show; empty for none."""
    return next((fault.name for fault in FAULTS if fault.may_show(program)), "")
