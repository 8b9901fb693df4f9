"""What a user reads of an error that tells of other ranks: its sentence is the last of at most 15 lines."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

import torchdistinput as tdi
from torchdistinput.testing import run_ranks

DATA: Any = range(400)


def told(call: Callable[[], object]) -> str:
    """The traceback of an error, as Python prints it if the user's program is one frame; empty if there is none."""
    try:
        call()
    except tdi.InputError as error:
        frames = error.__traceback__
        while frames and frames.tb_next and frames.tb_next.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        return "".join(traceback.format_exception(type(error), error, frames))
    return ""


def read(loader: Any, *, until: int | None = None) -> None:
    for step, _ in enumerate(loader):
        if step == until:
            break


def differ() -> Iterator[str]:
    """Each rank: what it is told where the last rank calls something else, leaves alone, or ends."""
    strategy, rank = tdi.Strategy(devices=["cpu"]), dist.get_rank()
    is_last = rank == dist.get_world_size() - 1
    yield told(lambda: strategy.distribute_dataset(DataLoader(DATA, 8 + is_last)))
    for loader in (strategy.distribute_dataset(DataLoader(DATA, 8)), tdi.DataLoader(DATA, 8)):
        yield told(lambda: read(loader, until=5 if is_last else None))  # noqa: B023 - runs at once
        if is_last:
            loader.seek(0, 3)
        yield told(lambda: read(loader))  # noqa: B023
    yield told(lambda: strategy.gather(1.0, axis=0) if is_last else strategy.reduce("SUM", 1.0))
    if is_last:
        return
    yield told(lambda: strategy.reduce("SUM", 1.0))
    yield told(lambda: read(loader))


def all_told() -> list[str]:
    return list(differ())


@pytest.mark.parametrize("world", [2, 3])
def test_the_sentence_is_the_last_of_15_lines(world: int) -> None:
    found = run_ranks(world, all_told)
    for rank, texts in enumerate(found):
        for number, text in enumerate(texts):
            if not text and number in {1, 3} and rank == world - 1:  # it left its loop itself
                continue
            lines = text.splitlines()
            assert lines[-1].startswith(("torchdistinput.errors.Rank", "torchdistinput.errors.Coord")), text
            assert len(lines) <= 15, text
            assert "Departed" not in text
    assert [len(texts) for texts in found] == [8] * (world - 1) + [6]
