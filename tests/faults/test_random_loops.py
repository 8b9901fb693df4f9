"""Random loops over real ranks, of which some stop or fail where others do not; the oracle has those that are alike.

However the ranks behave, nobody hangs, nobody sees a step that others do not have, and the next input works.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchdistinput as tdi
from tests.support.epochs import Raised, raised
from torchdistinput.testing import run_ranks

HANG_SECONDS = 15.0
NEVER = 10**9


@dataclasses.dataclass(frozen=True)
class Round:
    """One input and what each rank does with it: its sizes, where it fails, where it stops, how slow it is."""

    prefetch: int
    sizes: list[list[int]]
    fails: list[int]
    stops: list[int]
    delays: list[float]

    @property
    def end(self) -> int:
        """The first step that all ranks are past."""
        return max(len(sizes) for sizes in self.sizes)

    @property
    def failure(self) -> int:
        """The first step that some rank cannot make."""
        return min(
            (fail for fail, sizes in zip(self.fails, self.sizes, strict=True) if fail < len(sizes)), default=NEVER
        )


def rounds(seed: int, world: int) -> list[Round]:
    """The rounds of a seed."""
    rng = random.Random(seed)
    return [
        Round(
            prefetch=rng.choice([0, 1, 2, 5]),
            sizes=[[rng.randint(1, 3) for _ in range(rng.randint(0, 12))] for _ in range(world)],
            fails=[rng.choice([NEVER, NEVER, NEVER, 2, 5]) for _ in range(world)],
            stops=[rng.choice([NEVER, NEVER, 1, 3, 6]) for _ in range(world)],
            delays=[rng.choice([0.0, 0.0, 0.003, 0.01]) for _ in range(world)],
        )
        for _ in range(8)
    ]


def play(seed: int, world: int) -> list[tuple[list[Any], Raised | None, float]]:
    """One rank: the steps of each round, its error, and the time it took."""
    rank = dist.get_rank()
    strategy = tdi.Strategy(devices=["cpu"])
    found = []
    for each in rounds(seed, world):

        def batches(context: tdi.InputContext, each: Round = each) -> Iterator[torch.Tensor]:
            for t, size in enumerate(each.sizes[context.input_pipeline_id]):
                if t == each.fails[context.input_pipeline_id]:
                    raise KeyError(t)
                yield torch.ones(size)

        options = tdi.InputOptions(prefetch=each.prefetch, timeout_seconds=30)
        dataset = strategy.distribute_datasets_from_function(batches, options)
        steps: list[Any] = []

        def loop(dataset: Any = dataset, steps: list[Any] = steps, each: Round = each) -> None:
            for element in dataset:
                steps.append((dataset.step.index, dataset.step.global_size, len(element)))
                time.sleep(each.delays[rank])
                if len(steps) >= each.stops[rank]:
                    break

        started = time.monotonic()
        error = raised(loop)
        found.append((steps, error, time.monotonic() - started))
    return found


@pytest.mark.parametrize(("seed", "world"), [(3, 2), (4, 3), (5, 4)])
def test_ranks_that_stop_or_fail_at_different_steps_hang_nobody(seed: int, world: int) -> None:
    ranks = run_ranks(world, play, seed, world)
    for number, each in enumerate(rounds(seed, world)):
        for rank in range(world):
            steps, error, waited = ranks[rank][number]
            done = len(steps)
            assert waited < HANG_SECONDS
            assert done <= min(each.end, each.failure)
            if error is None:
                assert done in (each.stops[rank], each.end), each
            elif error.kind == "RankLost":
                assert min(stop for other, stop in enumerate(each.stops) if other != rank) <= done, each
            else:
                assert error.kind == "SourceError"
                assert "KeyError" in error.message
                assert done == each.failure, each
