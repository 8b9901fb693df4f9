"""The right sequence of every rank: torch's own loader of one process, cut by the laws of ``DESIGN.md``, section 3.

Nothing of the library takes part in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from trials.data import Stream, file_contents, global_loader, numbers_in, samples_of_worker
from trials.programs import Input, Opening, Program

__all__ = ["Samples", "Steps", "expected_steps", "pieces_of_worker", "split"]

Samples = list[int]
Steps = list[list[Samples]]
"""Of each rank, of each step, the samples."""


def split(batch: Sequence[int], num_replicas: int) -> list[Samples]:
    """Law B1: a batch in equal pieces, the last of them shorter or empty."""
    size = -(-len(batch) // num_replicas)
    return [list(batch[replica * size : (replica + 1) * size]) for replica in range(num_replicas)]


def pieces_of_worker(
    batches: Sequence[Sequence[int]], batch_size: int | None, world: int, worker: int
) -> list[Samples]:
    """The steps of a worker that reads batches of its own, with one replica: one piece a step.

    Args:
      batches: what it reads.
      batch_size: a full batch is cut by the size cycle, others by law B1; ``None``: all by law B1.
      world: replicas.
      worker: its number.
    """
    steps: list[Samples] = []
    for batch in batches:
        if len(batch) == batch_size:
            least, more = divmod(batch_size, world)
            sizes = [least + 1] * more + [least] * (world - more)
            rest = iter(batch)
            steps += [list(islice(rest, size)) for size in sizes[worker:] + sizes[:worker]]
        else:
            steps += [piece for piece in split(batch, world) if piece]
    return steps


def in_step(workers: Sequence[list[Samples]]) -> Steps:
    """The same number of steps for all: who has no more gets empty pieces; a step without a sample is passed over."""
    longest = max(len(steps) for steps in workers)
    padded = [steps + [[]] * (longest - len(steps)) for steps in workers]
    rows = [row for row in zip(*padded, strict=True) if any(row)]
    return [[row[rank] for row in rows] for rank in range(len(workers))]


def expected_steps(program: Program) -> Iterator[list[Steps]]:
    """For each iterator that the program opens, of each input in it, the steps of every rank.

    They go to the end of the data where each worker has its own, else as far as the program reads: so an order is drawn
    when torch draws it.
    """
    torch.manual_seed(program.seed)
    for _ in range(program.rounds):
        loaders = [_loader(each, program) for each in program.inputs]
        for opening in program.openings:
            sources = [program.inputs[number] for number in opening.inputs]
            if all(each.is_cut for each in sources):
                read = _read([loaders[number] for number in opening.inputs], opening)
                yield [_cut(batches, program.world) for batches in read]
            else:
                workers = range(program.world)
                yield [in_step([_of_worker(each, program, worker) for worker in workers]) for each in sources]


def _loader(source: Input, program: Program) -> Any:
    """What gives the global batches of an input; of files, a list of them."""
    if not source.is_cut:
        return ()
    if source.data == "files":
        records = [record for file in file_contents(source) for record in file]
        return [torch.tensor(batch) for batch in _in_batches(records, source)]
    return global_loader(source, program.seed)


def _read(loaders: Sequence[Any], opening: Opening) -> list[list[Samples]]:
    """The batches of each loader, read together as the program does."""
    if opening.steps == 0:  # the library's iterator leaves the epoch to the next one
        return [[] for _ in loaders]
    read: list[list[Samples]] = [[] for _ in loaders]
    for elements in islice(zip(*loaders, strict=False), opening.steps):
        for batches, element in zip(read, elements, strict=True):
            batches.append(numbers_in(element))
    return read


def _cut(batches: Sequence[Samples], world: int) -> Steps:
    pieces = [split(batch, world) for batch in batches]
    return [[step[rank] for step in pieces] for rank in range(world)]


def _of_worker(source: Input, program: Program, worker: int) -> list[Samples]:
    """The steps of one worker that reads batches of its own."""
    world, size = program.world, source.batch
    if source.data == "function":
        return _in_batches(samples_of_worker(source, worker), source)
    if source.data == "files":
        files = file_contents(source)
        chosen = files if source.policy == "OFF" else files[worker::world]
        batches = _in_batches([record for file in chosen for record in file], source)
    else:
        data = Stream(source.length, worker, world) if source.policy == "HINT" else None
        batches = [numbers_in(element) for element in global_loader(source, program.seed, data)]
    return pieces_of_worker(batches, None if source.data == "batches" else size, world, worker)


def _in_batches(samples: Samples, source: Input) -> list[Samples]:
    batches = [samples[start : start + source.batch] for start in range(0, len(samples), source.batch)]
    return [batch for batch in batches if len(batch) == source.batch or not source.drop_last]
