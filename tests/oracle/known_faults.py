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


def _is_cut(program: Program) -> bool:
    return any(turn.num_replicas > 1 for turn in program.turns)


def _passes_over(program: Program) -> bool:
    """Whether a row may have no sample on any rank."""
    if program.skips and program.bad:
        return True
    if program.is_ready or program.order == "batches":
        return 0 in program.sizes or not all(map(program.is_shared, program.turns))
    return any(not program.is_shared(turn) and program.batch < turn.num_replicas for turn in program.turns)


def _goes_to_a_step(program: Program) -> bool:
    return any(action.kind in {"seek", "skip"} and action.steps for turn in program.turns for action in turn.actions)


GONE_TO = Turn(2, actions=(Action("skip", 4), Action("read")))
TWO = (Turn(replicas=2),)

FAULTS = [
    Fault(
        "padded steps of several replicas have another structure",
        lambda program: "pad" in program.extras and any(turn.replicas > 1 for turn in program.turns),
        Program(sizes=(3,), collate="pair", extras="pad", turns=TWO),
    ),
    Fault(
        "an empty part whose count is not in dim 0",
        lambda program: program.collate == "time first" and _is_cut(program),
        Program(sizes=(1,), collate="time first", turns=TWO),
    ),
    Fault(
        "numbers of an empty part are those of another step",
        lambda program: program.collate == "counted" and _is_cut(program),
        Program(sizes=(3,), collate="counted", turns=TWO),
    ),
    Fault(
        "where a step is gone to, rows that were passed over count as steps",
        lambda program: _passes_over(program) and _goes_to_a_step(program),
        Program(sizes=(6,), policy="OFF", order="batches", turns=(GONE_TO,)),
    ),
    Fault(
        "a file that changed at equal size is read on",
        lambda program: any(turn.changes == "same size" for turn in program.turns),
        Program(
            "files",
            (4,),
            turns=(Turn(actions=(Action("read", 1),)), Turn(changes="same size")),
        ),
    ),
    Fault(
        "columns of a rank whose replicas are all empty are no PerReplica",
        lambda program: program.collate == "columns" and any(turn.replicas > 1 for turn in program.turns),
        Program(sizes=(1,), collate="columns", turns=(Turn(2, 2),)),
    ),
    Fault(
        "vectors as long as a part has samples are cut in its empty part",
        lambda program: program.collate == "columns" and _is_cut(program),
        Program(sizes=(5,), batch=4, collate="columns", turns=(Turn(world=2),)),
    ),
    Fault(
        "arrays that were collated become tensors",
        lambda program: program.collate == "arrays",
        Program(collate="arrays"),
    ),
]


def known_fault(program: Program) -> str:
    """The name of a fault that a program may show; empty for none."""
    return next((fault.name for fault in FAULTS if fault.may_show(program)), "")
