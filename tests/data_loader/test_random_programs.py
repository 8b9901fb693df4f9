"""Random programs with the drop-in, held against torch's loader with the same program in one process.

Loaders that shuffle, alone or in a ``zip``, with generators of their own or a common one, with loader workers that live
on or not, and loops that are left early: at any number of ranks the order of every epoch is torch's, the generators and
torch's default random state are left as torch leaves them, and no rank is refused for the state of its generator.
Where steps are read ahead, generators may be drawn from further than torch draws; all ranks draw equally far.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, TensorDataset

import torchdistinput as tdi
from torchdistinput.testing import run_ranks


class Input(NamedTuple):
    """One loader of a program."""

    length: int
    batch_size: int
    drop_last: bool = False
    order: str = "shuffle"
    generator: str | None = "own"
    workers: int = 2
    persistent: bool = True
    prefetch_factor: int | None = None
    prefetch: int | None = None


class Program(NamedTuple):
    """Loaders that are read together, and after how many steps each epoch is left."""

    inputs: tuple[Input, ...]
    stops: tuple[int | None, ...]
    policy: str = "DATA"

    @property
    def is_torchs(self) -> bool:
        """Whether torch's order is certain: user code, and generators of users, may be ahead when a loop is left."""
        if len(self.inputs) == 1 and not any(self.stops):
            return True
        return all(
            each.order != "own" and (each.prefetch == 0 or each.generator is None or each.order == "in order")
            for each in self.inputs
        )


class Own(Sampler[int]):
    """A sampler of the user's, which draws at each index."""

    def __init__(self, length: int, generator: torch.Generator | None) -> None:
        self.length = length
        self.generator = generator

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            yield int(torch.randint(self.length, (), generator=self.generator))


def random_program(seed: int) -> Program:
    rng = random.Random(seed)
    policy = rng.choice(["DATA", "DATA", "DATA", "OFF"])
    inputs = []
    for _ in range(1 if policy == "OFF" else rng.choice([1, 2, 2])):
        length, workers = rng.choice([1, 2, 3, 4, 5, 8, 13, 20, 53]), rng.choice([0, 0, 1, 2])
        drop_last = rng.random() < 0.4
        size = rng.choice([1, 1, 2, 3, 4, 6])
        inputs.append(
            Input(
                length,
                min(size, length) if drop_last else size,
                drop_last,
                rng.choice(["shuffle"] * 5 + ["in order", "replacement", "more", "own"]),
                rng.choice([None, "own", "own", "common"]),
                workers,
                persistent=workers > 0 and rng.random() < 0.7,
                prefetch_factor=rng.choice([None, 1, 2, 3]) if workers else None,
                prefetch=rng.choice([None, 0, 1, 2, 5, 32]),
            )
        )
    stops = tuple(rng.choice([None, None, 1, 1, 2, 3, 5]) for _ in range(rng.randint(2, 4)))
    return Program(tuple(inputs), stops, policy)


def settings(each: Input, data: TensorDataset, generator: torch.Generator | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "batch_size": each.batch_size,
        "drop_last": each.drop_last,
        "num_workers": each.workers,
        "persistent_workers": each.persistent,
        "prefetch_factor": each.prefetch_factor,
        "generator": generator,
    }
    if each.order == "replacement":
        return {**found, "sampler": RandomSampler(data, replacement=True, generator=generator)}
    if each.order == "more":
        return {**found, "sampler": RandomSampler(data, num_samples=2 * each.length + 1, generator=generator)}
    if each.order == "own":
        return {**found, "sampler": Own(each.length, generator)}
    return {**found, "shuffle": each.order == "shuffle"}


class Played(NamedTuple):
    """The batches of each step of each epoch, and the next draw of each random state."""

    epochs: list[list[list[list[int]]]]
    draws: list[int]


def at_the_first_next(loader: Any) -> Iterator[Any]:
    """Begins an epoch of torch's loader where this library begins one."""
    yield from loader


def play(program: Program, strategy: tdi.Strategy | None, steps_a_batch: int = 1) -> Played:
    """Runs a program: with the drop-in if there is a strategy, else with torch's loader."""
    torch.manual_seed(77)
    common = torch.Generator().manual_seed(5)
    generators = [
        {None: None, "own": torch.Generator().manual_seed(10 + place), "common": common}[each.generator]
        for place, each in enumerate(program.inputs)
    ]
    loaders: list[Any] = []
    for each, generator in zip(program.inputs, generators, strict=True):
        data = TensorDataset(torch.arange(each.length))
        if strategy is None:
            loaders.append(DataLoader(data, **settings(each, data, generator)))
        else:
            given = settings(each, data, generator)
            policy = tdi.AutoShardPolicy[program.policy]
            options = tdi.InputOptions(auto_shard_policy=policy, prefetch=each.prefetch)
            loaders.append(tdi.DataLoader(data, strategy=strategy, options=options, **given))
    epochs: list[list[list[list[int]]]] = []
    for stop in program.stops:
        steps: list[list[list[int]]] = []
        for batches in zip(*map(at_the_first_next, loaders), strict=False):
            steps.append([numbers.tolist() for (numbers,) in batches])
            if stop is not None and len(steps) == -(-stop // steps_a_batch):
                break
        epochs.append(steps)
    draws = [int(torch.randint(2**31, (), generator=generator)) for generator in (None, *generators)]
    return Played(epochs, draws)


def play_all(programs: Sequence[Program]) -> list[Played | str]:
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=60)
    found: list[Played | str] = []
    for program in programs:
        try:
            found.append(play(program, strategy))
        except tdi.InputError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def joined(ranks: Sequence[list[list[list[int]]]]) -> list[list[list[int]]]:
    """The parts of all ranks put together, step by step and loader by loader."""
    return [
        [[number for part in parts for number in part] for parts in zip(*step, strict=True)]
        for step in zip(*ranks, strict=True)
    ]


def in_a_row(steps: list[list[list[int]]]) -> list[int]:
    return [number for step in steps for number in step[0]]


def check(program: Program, ranks: Sequence[Played | str]) -> None:
    """Each rank under OFF reads all that torch reads, in its order, and steps are parts of batches there."""
    told = [each for each in ranks if isinstance(each, Played)]
    assert len(told) == len(ranks), (program, [each for each in ranks if isinstance(each, str)])
    assert all(each.draws[1:] == told[0].draws[1:] for each in told), program
    if not program.is_torchs:
        return
    if program.policy == "DATA":
        expected = play(program, None)
        assert [joined(each) for each in zip(*(each.epochs for each in told), strict=True)] == expected.epochs, program
        assert told[0].draws == expected.draws, program
        return
    expected = play(program, None, len(ranks))
    assert told[0].draws == expected.draws, program
    for each in told:
        for stop, steps, batches in zip(program.stops, each.epochs, expected.epochs, strict=True):
            found, wanted = in_a_row(steps), in_a_row(batches)
            assert found == (wanted if stop is None else wanted[: len(found)]), program


def test_a_loader_whose_parts_are_empty_on_a_rank_is_drawn_no_further_there_than_on_the_others() -> None:
    inputs = (Input(1, 1, drop_last=True), Input(53, 6))
    program = Program(inputs, (None, None, None))
    check(program, [each[0] for each in run_ranks(4, play_all, [program])])


def test_a_loop_that_is_left_early_leaves_the_generator_as_torch_does_where_nothing_is_read_ahead() -> None:
    programs = [
        Program((Input(4, 4, prefetch=0, prefetch_factor=factor),), (1, None, None), policy)
        for policy in ("OFF", "DATA")
        for factor in (1, None)
    ]
    programs.append(Program((Input(20, 2, prefetch=0, workers=0, persistent=False),), (1, 5, None)))
    programs.append(Program((Input(20, 2, order="more", prefetch=0),), (1, 5, None)))
    programs.append(Program((Input(100, 20, order="replacement", prefetch=0, workers=0, persistent=False),), (1, 5)))
    programs.append(Program((Input(4, 1, prefetch=0, prefetch_factor=2),), (None, 5, 5), "OFF"))
    for program, *ranks in zip(programs, *run_ranks(2, play_all, programs), strict=True):
        check(program, ranks)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_programs_read_what_torch_reads(world: int, all_cells: bool) -> None:
    programs = [random_program(1000 * world + number) for number in range(40 if all_cells else 3)]
    for program, *ranks in zip(programs, *run_ranks(world, play_all, programs, timeout_seconds=240), strict=True):
        check(program, ranks)
