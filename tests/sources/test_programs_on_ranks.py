"""Random programs on real ranks: mixtures, packs and balanced batches, weights that change, resumes at other worlds.

A program is data, and turns in which it is read: each by a number of ranks, from the state of the turn before. Its
global batches must be those of one process, whatever the turns. All programs are read in step, so that the ranks of a
world size are started once for each turn.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections import Counter, defaultdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.data import Mapped
from torchdistinput.testing import run_ranks

TURNS = 3
NAMES = ("web", "code", "book")
COUNTS = {"web": 170, "code": 90, "book": 40}
FIRST = {name: 1000 * number for number, name in enumerate(NAMES)}
ALL = [FIRST[name] + index for name in NAMES for index in range(COUNTS[name])]
LENGTHS = (np.random.default_rng(8).lognormal(2, 0.8, 150).astype(int) % 40).tolist()
KINDS = ("indices", "stream", "tokens", "packed")

Schedule = list[tuple[int, list[str]]]
"""From which position on which weights held, as exact fractions."""


@dataclasses.dataclass(frozen=True)
class Program:
    """What is read, and how.

    Args:
      kind: of data.
      seed: of all that was drawn for it.
      size: the global batch size.
      balance: whether batches are divided by cost.
      equal_counts: see ``tdi.Balance``.
    """

    kind: str
    seed: int
    size: int
    balance: bool
    equal_counts: bool


@dataclasses.dataclass(frozen=True)
class Turn:
    """One turn of a program.

    Args:
      program: the program.
      state: where it goes on, as JSON.
      until: steps at most.
      prefetch: steps ahead.
      loader_workers: processes of the ``DataLoader``.
      weights: of the mixture.
    """

    program: Program
    state: str | None
    until: int
    prefetch: int
    loader_workers: int
    weights: dict[str, int]


def drawn(seed: int) -> Program:
    dice = random.Random(seed)
    balance = dice.random() < 0.5
    kind = KINDS[seed % len(KINDS)]
    return Program(kind, seed, dice.randint(5, 30), balance, balance and dice.random() < 0.5)


def turn_of(program: Program, number: int, state: str | None) -> Turn:
    """The turn of that number; the last one goes on to the end."""
    dice = random.Random(1000 * program.seed + number)
    until = dice.randint(1, 8) if number < TURNS - 1 else 10**6
    weights = {"web": 5, "code": 3, "book": 1}
    if number and dice.random() < 0.7:
        weights = {name: dice.randint(1, 9) for name in NAMES}
    return Turn(program, state, until, dice.randint(0, 3), dice.choice([0, 0, 0, 1]), weights)


# Sample ``i`` has ``LENGTHS[i]`` tokens ``1000 i, 1000 i + 1, ...``.
TEXTS = Mapped(len(LENGTHS), lambda index: torch.arange(LENGTHS[index]) + 1000 * index)


def packs_of(program: Program) -> tdi.Packed:
    dice = random.Random(program.seed)
    strategy: Any = dice.choice(["best_fit", "first_fit", "concat"])
    return tdi.Packed(
        TEXTS, dice.randint(10, 50), lengths=LENGTHS, window=dice.randint(1, 60), strategy=strategy, overflow="split"
    )


def mixture_of(program: Program, folder: str, weights: Any) -> tdi.Mixture:
    in_order = {name: range(FIRST[name], FIRST[name] + COUNTS[name]) for name in NAMES}
    sources: dict[str, Any] = in_order
    more: dict[str, Any] = {"stop": "all", "seed": program.seed}
    if program.kind != "indices":
        files = tdi.FileDataset(
            f"{folder}/*.txt", tdi.readers.text_lines, map_fn=int, shuffle_files=True, shuffle_buffer=16, cycle_length=2
        )
        sources = {**in_order, "web": files}
    if program.kind == "tokens":
        lengths = {"web": len, "code": [1 + index % 9 for index in range(COUNTS["code"])], "book": lambda index: 7}
        more |= {"unit": "tokens", "lengths": lengths}
    return tdi.Mixture(sources, weights, **more)


def kept(samples: list[Any]) -> list[Any]:
    return samples


def loader_of(program: Program, data: Any, loader_workers: int) -> DataLoader[Any]:
    shuffle = True if isinstance(data, tdi.Packed) else None
    generator = torch.Generator().manual_seed(program.seed)
    return DataLoader(data, program.size, shuffle, num_workers=loader_workers, generator=generator, collate_fn=kept)


def cost_of(sample: Any) -> float:
    """Of the index of a pack."""
    return float(int(sample) % 17) ** 2


def cost_of_mixed(sample: tuple[int, Any]) -> float:
    """Of a number of a source, and a line of it or an index."""
    source, record = sample
    return source + cost_of(record)


def plain(sample: Any) -> Any:
    """A pack as its tokens."""
    return tuple(sample["tokens"].tolist()) if isinstance(sample, dict) else int(sample)


def play(turns: list[Turn], folder: str) -> list[tuple[list[list[Any]], str, Schedule]]:
    """One rank: its parts of the steps of each turn, the state then, and the weights."""
    strategy = tdi.Strategy(["cpu"], timeout_seconds=60)
    found = []
    for turn in turns:
        program = turn.program
        data: Any = packs_of(program) if program.kind == "packed" else mixture_of(program, folder, turn.weights)
        cost = cost_of if program.kind == "packed" else cost_of_mixed
        options = tdi.InputOptions(
            prefetch=turn.prefetch,
            balance=tdi.Balance(cost, equal_counts=program.equal_counts) if program.balance else None,
        )
        parts = []
        with strategy.distribute_dataset(loader_of(program, data, turn.loader_workers), options) as loader:
            if turn.state is not None:
                loader.load_state_dict(json.loads(turn.state), strict=program.kind == "packed")
            for samples in loader:
                parts.append([plain(sample) for sample in samples])
                if len(parts) == turn.until:
                    break
            state = json.dumps(loader.state_dict())
        changes = [] if program.kind == "packed" else data.weights.changes(0)
        found.append((parts, state, [(at, list(map(str, weights))) for at, weights in changes]))
    return found


def check(program: Program, folder: str, steps: list[list[list[Any]]], schedule: Schedule) -> None:
    """The steps, by their parts, are the batches of one process, and each sample and token came once."""
    if program.kind == "packed":
        batches = [[plain(pack) for pack in batch] for batch in loader_of(program, packs_of(program), 0)]
        tokens = [token for step in steps for part in step for pack in part for token in pack]
        assert sorted(tokens) == [1000 * index + place for index, size in enumerate(LENGTHS) for place in range(size)]
    else:
        weights = [(at, dict(zip(NAMES, map(Fraction, each), strict=True))) for at, each in schedule]
        order = list(mixture_of(program, folder, weights))
        batches = [order[start : start + program.size] for start in range(0, len(order), program.size)]
        assert Counter(itertools.chain(*itertools.chain(*steps))) == Counter(ALL)
    assert len(steps) == len(batches)
    for step, batch in zip(steps, batches, strict=True):
        joined = [sample for part in step for sample in part]
        if program.balance:
            assert sorted(joined) == sorted(batch)
            for part in step:
                places = [batch.index(sample) for sample in part]
                assert places == sorted(places)
        else:
            assert joined == batch
        if program.equal_counts:
            sizes = [len(part) for part in step]
            assert max(sizes) - min(sizes) <= 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made: Path = tmp_path_factory.mktemp("programs")
    for file in range(5):
        numbers = range(COUNTS["web"] * file // 5, COUNTS["web"] * (file + 1) // 5)
        (made / f"{file}.txt").write_text("".join(f"{number}\n" for number in numbers))
    return str(made)


def test_random_programs_give_the_batches_of_one_process(folder: str, all_cells: bool) -> None:
    worlds = [1, 2, 3, 5, 7] if all_cells else [2, 3]
    programs = [drawn(seed) for seed in range(400 if all_cells else 8)]
    steps: dict[Program, list[list[list[Any]]]] = {program: [] for program in programs}
    states: dict[Program, str] = {}
    left = list(programs)
    changes = 0
    for number in range(TURNS):
        by_world: dict[int, list[Turn]] = defaultdict(list)
        for place, program in enumerate(left):
            world = worlds[(place + program.seed + number) % len(worlds)]
            by_world[world].append(turn_of(program, number, states.get(program)))
        left = []
        for world, turns in sorted(by_world.items()):
            ranks = run_ranks(world, play, turns, folder, timeout_seconds=500)
            for place, turn in enumerate(turns):
                told = [rank[place] for rank in ranks]
                assert len({state for _, state, _ in told}) == 1, turn
                steps[turn.program] += [list(each) for each in zip(*(parts for parts, _, _ in told), strict=True)]
                states[turn.program] = told[0][1]
                assert len(told[0][1]) < 4096
                if json.loads(told[0][1])["epoch"] == 0:
                    left.append(turn.program)
                else:
                    check(turn.program, folder, steps[turn.program], told[0][2])
                    changes += max(0, len(told[0][2]) - 1)
    assert not left
    assert changes
