"""``headspace=K``: after K steps the same K come again from memory, so that a step shows its time without any input."""

from __future__ import annotations

import logging
import re
import time
from functools import partial
from typing import Any, final

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import torchdistinput as tdi
from torchdistinput.errors import InputError
from torchdistinput.testing import run_ranks


@final
class Slow(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 39

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        time.sleep(0.01)
        return torch.tensor([index])


def run(workers: int) -> tuple[list[Any], list[int], str]:
    """Each rank: its steps in two epochs, what it read in the main process, and the last line that it logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchdistinput").addHandler(handler)
    logging.getLogger("torchdistinput").setLevel(logging.INFO)
    data, steps = Slow(), []
    loader = DataLoader(data, batch_size=4, num_workers=workers)
    with tdi.Strategy(devices=["cpu"]).distribute_dataset(loader, tdi.InputOptions(headspace=3, prefetch=2)) as dataset:
        for _ in range(2):
            for batch in dataset:
                steps.append(
                    (dataset.step.epoch, dataset.step.index, dataset.step.global_size, batch.flatten().tolist())
                )
                time.sleep(0.002)
        assert dataset.stats()["steps"] == len(dataset) == 10
    return steps, data.read, lines[-1]


def expected(rank: int, world: int) -> list[Any]:
    size = 4 // world
    parts = [list(range(4 * step + rank * size, 4 * step + (rank + 1) * size)) for step in range(3)]
    return [(epoch, step, 4, parts[step % 3]) for epoch in range(2) for step in range(10)]


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 0), (2, 2)])
def test_the_first_steps_come_again_in_as_many_steps_as_before(world: int, workers: int) -> None:
    found = run_ranks(world, run, workers)
    for rank, (steps, read, line) in enumerate(found):
        assert steps == expected(rank, world)
        assert len(set(read)) <= 4 // world * (3 + 3)  # and what was read ahead
        match = re.fullmatch(
            r"headspace in epoch 1: a step takes ([\d.]+) ms with its input and ([\d.]+) ms without: a loader that "
            r"takes no time would save (\d+) %",
            line,
        )
        assert match is not None
        assert float(match[1]) > float(match[2]) > 2


def test_a_state_is_refused_and_so_is_data_of_unknown_length() -> None:
    strategy, options = tdi.Strategy(devices=["cpu"]), tdi.InputOptions(headspace=2)
    with strategy.distribute_dataset([torch.zeros(2)] * 5, options) as dataset:
        assert sum(1 for _ in dataset) == 5
        calls = (dataset.state_dict, partial(dataset.load_state_dict, {}), partial(dataset.samples_of, 0, 0))
        for call in (*calls, partial(dataset.steps_of, 0, 0)):
            with pytest.raises(InputError, match=r"headspace=2, where the same steps come again"):
                call()
    with pytest.raises(InputError, match=r"headspace=2 repeats steps until .* their number is not known"):
        strategy.distribute_dataset(lambda: iter([torch.zeros(2)]), options)


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 9])
def test_fewer_steps_than_are_to_come_again(steps: int, caplog: pytest.LogCaptureFixture) -> None:
    with tdi.Strategy(devices=["cpu"]).distribute_dataset(
        [torch.zeros(2)] * steps, tdi.InputOptions(headspace=5)
    ) as dataset:
        for _ in range(2):
            assert sum(1 for _ in dataset) == steps
        iterator = iter(dataset)
        for _ in range(steps):
            assert iterator.has_next()
            next(iterator)
        assert not iterator.has_next()
    assert caplog.text.count(f"headspace=5, and an epoch has {steps} steps: no step comes again") == (steps <= 5)
