"""The right sequence of every rank, by the laws of the oracle of the tests.

Of the library only the order of shuffled files takes part in it, as one process reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.oracle.data import OneProcess
from tests.oracle.laws import Samples, steps_of
from trials.programs import Opening, Program, inside, turn_of

__all__ = ["Samples", "Steps", "expected_steps"]

Steps = list[list[Samples]]
"""Of each step, of each input, the samples of one rank."""


def expected_steps(program: Program, folder: Path) -> Iterator[list[Steps]]:
    """For each iterator that the program opens, or each two that it reads together, the steps of every rank.

    Args:
      program: the program.
      folder: of the trial, with the files of each input.
    """
    orders = [OneProcess(each, inside(folder, number)) for number, each in enumerate(program.inputs)]
    epochs = [0] * len(program.inputs)
    for _ in range(program.rounds):
        # The default generator goes on from round to round; all else begins anew.
        epochs = [0 if each.own_generator else epoch for each, epoch in zip(program.inputs, epochs, strict=True)]
        for opening in program.openings:
            yield _read(program, opening, orders, epochs)


def _read(program: Program, opening: Opening, orders: list[OneProcess], epochs: list[int]) -> list[Steps]:
    """The steps of every rank; an epoch of which an input gave nothing, and which did not end, comes again."""
    chosen = [program.inputs[number] for number in opening.inputs]
    ahead = [
        iter(steps_of(source, turn_of(source), orders[number](epochs[number])))
        for number, source in zip(opening.inputs, chosen, strict=True)
    ]
    begun, found = set[int](), [Steps() for _ in range(program.world)]
    while opening.steps is None or len(found[0]) < opening.steps:
        together = []
        for number, steps in zip(opening.inputs, ahead, strict=True):
            begun.add(number)
            step = next(steps, None)
            if step is None:
                break
            together.append(step)
        if len(together) < len(chosen):
            break
        for rank, of_rank in enumerate(found):
            of_rank.append([step[rank][0] for step in together])
    for number in begun:
        epochs[number] += 1
    return found
