"""Random programs: what a script does with inputs of the oracle. A program follows from a seed and a number."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tests.oracle import program as oracle
from tests.oracle.data import COLLATES
from tests.oracle.test_on_ranks import drawn

__all__ = ["CALLS", "Opening", "Program", "churning_program", "inside", "program_of", "turn_of"]

CALLS: Final = ("reduce", "gather", "state_dict")
_MOST_AHEAD: Final = 32
"""Steps that a rank may hold ahead of the one in use, where the library decides."""


@dataclass(frozen=True)
class Opening:
    """An iterator of one input, or one of each of two that are read together, as by ``zip``.

    Args:
      inputs: the numbers of the inputs.
      steps: after how many steps all ranks leave; ``None`` reads to the end.
      leaves: ``drop`` lets go of the iterator, ``close`` closes it, ``keep`` keeps it until the end of the round.
    """

    inputs: tuple[int, ...]
    steps: int | None
    leaves: str


@dataclass(frozen=True)
class Program:
    """What every rank runs.

    Args:
      own_store: whether the launcher hosts the store, as torchrun does; else rank 0 hosts it.
      own_group: whether the script makes the default group itself; else ``Strategy()`` does.
      timeout_seconds: of the strategy.
      inputs: programs of the oracle, each of one turn, of the same ranks; its actions are not played.
      openings: their iterators, one after the other.
      rounds: how often strategy, inputs and iterators are made anew.
      think_seconds: how long a step takes.
      calls: what is called between two steps, in turns.
      calls_every: after how many steps each.
      closes: whether inputs, and a group of its own, are closed at the end; else all is left to the exit.
      exits_fully: whether the interpreter takes itself apart at its end, which costs more than a small program; else
        only its exit functions are called.
    """

    own_store: bool
    own_group: bool
    timeout_seconds: float
    inputs: tuple[oracle.Program, ...]
    openings: tuple[Opening, ...]
    rounds: int
    think_seconds: float
    calls: tuple[str, ...]
    calls_every: int
    closes: bool
    exits_fully: bool

    @property
    def world(self) -> int:
        """Ranks."""
        return turn_of(self.inputs[0]).world

    @property
    def num_iterators(self) -> int:
        """Iterators that a rank makes."""
        return self.rounds * sum(len(opening.inputs) for opening in self.openings)

    @property
    def steps_at_least(self) -> int:
        """About how many steps it makes; none fewer under DATA."""
        lengths = [_steps_at_least(each) for each in self.inputs]
        whole = [min(lengths[number] for number in opening.inputs) for opening in self.openings]
        asked = [opening.steps for opening in self.openings]
        return self.rounds * sum(
            most if steps is None else min(most, steps) for most, steps in zip(whole, asked, strict=True)
        )

    @property
    def most_ahead(self) -> list[int]:
        """Steps of each input that a rank may hold ahead of the one in use."""
        return [_MOST_AHEAD if turn_of(each).prefetch is None else turn_of(each).prefetch or 0 for each in self.inputs]

    @property
    def steps_in_flight(self) -> int:
        """By how many steps two ranks may differ: those that each holds of every input, and the one in use."""
        return sum(each + 2 for each in self.most_ahead)


def turn_of(source: oracle.Program) -> oracle.Turn:
    """How an input is read."""
    (turn,) = source.turns
    return turn


def inside(folder: Path, number: int) -> Path:
    """Where the files of an input are, in the folder of a trial."""
    return folder / f"input-{number}"


def _steps_at_least(source: oracle.Program) -> int:
    if source.is_ready:
        return len(source.sizes)
    most = {"batches": max(3, source.batch), "tokens": 7 + source.batch}.get(source.order, source.batch)
    return len(source.numbers) // most


def program_of(rng: random.Random) -> Program:
    """A random program."""
    inputs = [_input(rng) for _ in range(rng.choice([1, 1, 1, 2]))]
    files = [len(each.sizes) for each in inputs if each.has_files and each.policy == "FILE"]
    world = min([rng.choice([2, 2, 3, 4]), *files])
    return Program(
        own_store=rng.random() < 0.5,
        own_group=rng.random() < 0.3,
        timeout_seconds=rng.choice([5.0, 6.0]),
        inputs=tuple(_read_by(world, each, rng, alone=len(inputs) == 1) for each in inputs),
        openings=tuple(_opening(rng, inputs) for _ in range(rng.randint(1, 5))),
        rounds=rng.choice([1, 1, 1, 2]),
        think_seconds=rng.choice([0.0, 0.0, 0.002, 0.01, 0.02]),
        calls=tuple(rng.sample(CALLS, rng.randint(0, 2))),
        calls_every=rng.randint(1, 7),
        closes=rng.random() < 0.5,
        exits_fully=rng.random() < 0.3,
    )


def churning_program(rng: random.Random) -> Program:
    """A program that mostly makes, half reads and drops iterators; half of them before their first batch."""
    workers, world = rng.choice([0, 0, 0, 0, 1, 2]), rng.choice([2, 3, 4])
    prefetches = rng.sample([None, 0, 1, 2, 3], 3)
    inputs = tuple(
        oracle.Program("items", (length,), batch=batch, turns=(oracle.Turn(world, 1, prefetch, workers),))
        for length, batch, prefetch in zip([0, 19, rng.randint(1, 40)], [4, 1, 3], prefetches, strict=True)
    )
    choices = [(0,), (1,), (1,), (2,), (2,), (0, 1), (1, 0), (1, 2)]
    openings = tuple(
        Opening(rng.choice(choices), rng.choice([0, 0, 0, 1, 2, 3, None]), rng.choice(["drop", "drop", "close"]))
        for _ in range(rng.randint(5, 12) if workers else rng.randint(10, 30))
    )
    return Program(
        own_store=rng.random() < 0.5,
        own_group=rng.random() < 0.5,
        timeout_seconds=15.0,
        inputs=inputs,
        openings=openings,
        rounds=rng.randint(2, 3),
        think_seconds=0.0,
        calls=(),
        calls_every=1,
        closes=rng.random() < 0.5,
        exits_fully=rng.random() < 0.3,
    )


def _input(rng: random.Random) -> oracle.Program:
    """A program of the oracle that several ranks can play, and of which each step of each is known."""
    while True:
        (found,) = drawn(1, rng.randrange(10**6))
        found = replace(found, turns=found.turns[:1], bad=frozenset(), odd_batch=(0, ""), sums=False, extras="plain")
        is_told = found.shows not in {"", "length"}  # data that is told its epoch, which no opening here tells
        is_dealt = not found.has_files or found.policy != "FILE" or len(found.sizes) > 1
        if found.is_exact and is_dealt and not is_told and COLLATES[found.collate].certain:
            return found


def _read_by(world: int, source: oracle.Program, rng: random.Random, *, alone: bool) -> oracle.Program:
    """The input, read by so many ranks. Only one that is alone may draw from the default generator."""
    turn = turn_of(source)
    # Those that outlive an epoch draw one seed for all, which the order of torch's samplers would tell.
    persistent = turn.loader_workers > 0 and source.order in {"in order", "permuted", "batches"} and rng.random() < 0.7
    turn = oracle.Turn(world, 1, turn.prefetch, turn.loader_workers, persistent=persistent)
    return replace(source, own_generator=source.own_generator or not alone, turns=(turn,))


def _opening(rng: random.Random, inputs: list[oracle.Program]) -> Opening:
    numbers: tuple[int, ...] = (rng.randrange(len(inputs)),)
    # torch draws once more at the end of a shuffled epoch, so none is left before it; nor one with a state of its own.
    whole = [each.order == "shuffled" or each.data == "kept" for each in inputs]
    if len(inputs) == 2 and not any(whole) and rng.random() < 0.3:
        numbers = rng.choice([(0, 1), (1, 0)])
    steps = rng.choice([None, None, 0, rng.randint(1, 12), rng.randint(1, 30)])
    if any(whole[number] for number in numbers) and steps:
        steps = None
    loads = any(turn_of(inputs[number]).loader_workers for number in numbers)
    kept = [] if loads else ["keep"]  # the workers may persist: one iterator at a time
    return Opening(numbers, steps, rng.choice(["drop", "drop", "drop", "close", *kept]))
