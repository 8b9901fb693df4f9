"""The right sequence of every rank: torch's own loader of one process, cut by the laws of the oracle of the tests.

Nothing of the library takes part in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch import manual_seed

from tests.oracle.laws import Samples, batched, files_of, ready_batches, steps_of
from tests.oracle.program import Turn
from trials.data import global_loader, numbers_in
from trials.programs import Input, Opening, Program

__all__ = ["Samples", "Steps", "expected_steps"]

Steps = list[list[Samples]]
"""Of each rank, of each step, the samples."""


def expected_steps(program: Program) -> Iterator[list[Steps]]:
    """For each iterator that the program opens, of each input in it, the steps of every rank.

    They go to the end of the data where each rank has its own, else as far as the program reads: so an order is drawn
    when torch draws it.
    """
    manual_seed(program.seed)
    for _ in range(program.rounds):
        loaders = [_global_batches(each, program) for each in program.inputs]
        for opening in program.openings:
            sources = [program.inputs[number] for number in opening.inputs]
            chosen = [loaders[number] for number in opening.inputs]
            if all(each.is_cut for each in sources):
                read = _read(chosen, opening)
            else:
                read = [list(map(_samples, loader)) for loader in chosen]
            yield [_of_ranks(source, program.world, batches) for source, batches in zip(sources, read, strict=True)]


def _global_batches(source: Input, program: Program) -> Iterable[Any]:
    """What gives the global batches of an input."""
    laws = source.as_read
    if laws.is_map_style:
        return global_loader(source, program.seed)
    if laws.is_ready:
        return ready_batches(laws.sizes)
    samples = [record for file in files_of(laws) for record in file] if source.data == "files" else laws.numbers
    return batched(samples, source.batch, drop_last=source.drop_last)


def _samples(batch: Any) -> Samples:
    return batch if isinstance(batch, list) and (not batch or isinstance(batch[0], int)) else numbers_in(batch)


def _read(loaders: Sequence[Iterable[Any]], opening: Opening) -> list[list[Samples]]:
    """The batches of each loader, read together as the program does."""
    if opening.steps == 0:  # the library's iterator leaves the epoch to the next one
        return [[] for _ in loaders]
    read: list[list[Samples]] = [[] for _ in loaders]
    for elements in islice(zip(*loaders, strict=False), opening.steps):
        for batches, element in zip(read, elements, strict=True):
            batches.append(_samples(element))
    return read


def _of_ranks(source: Input, world: int, batches: Sequence[Samples]) -> Steps:
    steps = steps_of(source.as_read, Turn(world, loader_workers=source.num_workers), batches)
    return [[step[rank][0] for step in steps] for rank in range(world)]
