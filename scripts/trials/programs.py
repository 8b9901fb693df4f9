"""Random programs: what a script does with distributed inputs. A program follows from a seed and a number."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Final

from tests.oracle import program as oracle

__all__ = ["CALLS", "Input", "Opening", "Program", "churning_program", "program_of"]

_SHARES: Final = (0.4, 0.05, 0.0, 0.35, 0.2)  # of the samples, in each file
DATA_POLICIES: Final = ("DATA", "AUTO")
CALLS: Final = ("reduce", "gather", "state_dict")


@dataclass(frozen=True)
class Input:
    """One input of a program.

    Args:
      data: ``items`` (map-style), ``table`` (tensors in memory), ``files``, ``stream`` (iterable, sample by sample),
        ``ready`` (iterable, ready batches), or ``function`` (a dataset function).
      length: samples; of a function, those of the first rank.
      batch: the global batch size.
      order: ``in order``, ``shuffled`` (a generator of its own), or ``drawn`` (the default generator).
      policy: how it is divided.
      drop_last: whether a short last batch is dropped.
      num_workers: loader workers.
      persistent: whether they outlive an epoch.
      prefetch: steps ahead.
      drop_in: whether it is the drop-in ``DataLoader``.
    """

    data: str
    length: int
    batch: int
    order: str = "in order"
    policy: str = "DATA"
    drop_last: bool = False
    num_workers: int = 0
    persistent: bool = False
    prefetch: int | None = None
    drop_in: bool = False

    @property
    def is_cut(self) -> bool:
        """Whether a step is a global batch that is cut for all replicas; else each worker reads batches of its own."""
        if self.data == "files" and self.policy == "AUTO":
            return False
        return self.policy in DATA_POLICIES and self.data != "function"

    @property
    def as_read(self) -> oracle.Program:
        """The input as the oracle of the tests knows it; but for the order of map-style data, which torch gives."""
        full, rest = divmod(self.length, self.batch)
        sizes = (self.batch,) * full + (rest,) * (rest > 0) if self.data in {"ready", "function"} else (self.length,)
        policy = "DATA" if self.is_cut else self.policy
        if self.data == "files":
            sizes = tuple(round(self.length * share) for share in _SHARES)
            policy = "FILE" if policy == "AUTO" else policy
        return oracle.Program(self.data, sizes, policy, self.batch, self.drop_last)

    @property
    def draws_ahead(self) -> bool:
        """Whether the order of later epochs depends on how far this rank had read ahead when it left one."""
        return self.order != "in order" and self.prefetch != 0

    @property
    def most_ahead(self) -> int:
        """Steps that a rank may hold ahead of the one in use."""
        return 32 if self.prefetch is None else self.prefetch


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
      world: ranks.
      own_store: whether the launcher hosts the store, as torchrun does; else rank 0 hosts it.
      own_group: whether the script makes the default group itself; else ``Strategy()`` does.
      timeout_seconds: of the strategy.
      seed: of all generators, and of the files.
      inputs: the inputs.
      openings: their iterators, one after the other.
      rounds: how often strategy, inputs and iterators are made anew.
      think_seconds: how long a step takes.
      calls: what is called between two steps, in turns.
      calls_every: after how many steps each.
      closes: whether inputs, and a group of its own, are closed at the end; else all is left to the exit.
      exits_fully: whether the interpreter takes itself apart at its end, which costs more than a small program; else
        only its exit functions are called.
    """

    world: int
    own_store: bool
    own_group: bool
    timeout_seconds: float
    seed: int
    inputs: tuple[Input, ...]
    openings: tuple[Opening, ...]
    rounds: int
    think_seconds: float
    calls: tuple[str, ...]
    calls_every: int
    closes: bool
    exits_fully: bool

    @property
    def num_iterators(self) -> int:
        """Iterators that a rank makes."""
        return self.rounds * sum(len(opening.inputs) for opening in self.openings)

    @property
    def steps_at_least(self) -> int:
        """About how many steps it makes; none fewer under DATA."""
        lengths = [-(-each.length // each.batch) for each in self.inputs]
        whole = [min(lengths[number] for number in opening.inputs) for opening in self.openings]
        asked = [opening.steps for opening in self.openings]
        return self.rounds * sum(
            most if steps is None else min(most, steps) for most, steps in zip(whole, asked, strict=True)
        )

    @property
    def steps_in_flight(self) -> int:
        """By how many steps two ranks may differ: those that each holds of every input, and the one in use."""
        return sum(each.most_ahead + 2 for each in self.inputs)


def program_of(rng: random.Random) -> Program:
    """A random program."""
    drawn = rng.random() < 0.2
    if drawn:  # what is drawn from the default generator must be drawn by torch's loader in the same order
        inputs = tuple(_cut_input(rng, ["in order", "shuffled", "drawn"]) for _ in range(rng.randint(1, 2)))
    else:
        inputs = tuple(_any_input(rng) for _ in range(rng.choice([1, 1, 1, 2])))
    return Program(
        world=rng.choice([2, 2, 3, 4]),
        own_store=rng.random() < 0.5,
        own_group=rng.random() < 0.3,
        timeout_seconds=rng.choice([5.0, 6.0]),
        seed=rng.randrange(1000),
        inputs=inputs,
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
    prefetches = rng.sample([None, 0, 1, 2, 3], 3)
    workers = rng.choice([0, 0, 0, 0, 1, 2])
    inputs = tuple(
        Input("items", length, batch, num_workers=workers, prefetch=prefetch)
        for length, batch, prefetch in zip([0, 19, rng.randint(1, 40)], [4, 1, 3], prefetches, strict=True)
    )
    choices = [(0,), (1,), (1,), (2,), (2,), (0, 1), (1, 0), (1, 2)]
    openings = tuple(
        Opening(rng.choice(choices), rng.choice([0, 0, 0, 1, 2, 3, None]), rng.choice(["drop", "drop", "close"]))
        for _ in range(rng.randint(5, 12) if workers else rng.randint(10, 30))
    )
    return Program(
        world=rng.choice([2, 3, 4]),
        own_store=rng.random() < 0.5,
        own_group=rng.random() < 0.5,
        timeout_seconds=15.0,
        seed=rng.randrange(1000),
        inputs=inputs,
        openings=openings,
        rounds=rng.randint(2, 3),
        think_seconds=0.0,
        calls=(),
        calls_every=1,
        closes=rng.random() < 0.5,
        exits_fully=rng.random() < 0.3,
    )


def _any_input(rng: random.Random) -> Input:
    data = rng.choice(["items"] * 3 + ["table"] * 2 + ["files"] * 2 + ["stream", "ready", "function"])
    if data in ("items", "table") and rng.random() < 0.7:
        return _cut_input(rng, ["in order", "shuffled"], [data])
    policies = {
        "files": ["AUTO", "DATA", "FILE", "FILE", "OFF"],
        "stream": ["DATA", "OFF", "HINT"],
        "ready": ["AUTO", "OFF"],
    }
    return Input(
        data,
        _length(rng),
        rng.randint(1, 9),
        policy=rng.choice(policies.get(data, ["OFF"])),
        drop_last=data in ("items", "files", "stream") and rng.random() < 0.2,
        prefetch=_prefetch(rng),
        **_workers(rng, data),
    )


def _cut_input(rng: random.Random, orders: list[str], data: list[str] | None = None) -> Input:
    """Map-style data under DATA."""
    kind = rng.choice(data or ["items", "table"])
    return Input(
        kind,
        _length(rng),
        rng.randint(1, 12),
        order=rng.choice(orders),
        policy=rng.choice(DATA_POLICIES),
        drop_last=rng.random() < 0.2,
        prefetch=_prefetch(rng),
        drop_in=rng.random() < 0.3,
        **_workers(rng, kind),
    )


def _length(rng: random.Random) -> int:
    return rng.choice([1, rng.randint(2, 30), rng.randint(30, 200), rng.randint(30, 200)])


def _prefetch(rng: random.Random) -> int | None:
    return rng.choice([None, 0, 1, 3, 32])


def _workers(rng: random.Random, data: str) -> dict[str, Any]:
    num_workers = 0 if data in ("ready", "function") else rng.choice([0, 0, 1, 2])
    return {"num_workers": num_workers, "persistent": num_workers > 0 and rng.random() < 0.5}


def _opening(rng: random.Random, inputs: tuple[Input, ...]) -> Opening:
    numbers: tuple[int, ...] = (rng.randrange(len(inputs)),)
    together = len(inputs) == 2 and len({each.is_cut for each in inputs}) == 1
    if together and not any(each.draws_ahead for each in inputs) and rng.random() < 0.3:
        numbers = rng.choice([(0, 1), (1, 0)])
    chosen = [inputs[number] for number in numbers]
    # An epoch that is left before its first batch comes again, which shows where an order is drawn.
    least = 0 if all(each.order == "in order" for each in inputs) else 1
    steps = rng.choice([None, None, least, rng.randint(1, 12), rng.randint(1, 30)])
    if any(each.draws_ahead for each in chosen):
        steps = None
    kept = [] if any(each.persistent for each in chosen) else ["keep"]
    return Opening(numbers, steps, rng.choice(["drop", "drop", "drop", "close", *kept]))
