"""Epochs of files with enough steps for every kind of bookkeeping that is not done at each of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import torchdistinput as tdi
from tests.oracle.test_in_process import fake_strategy
from tests.support.collectives import FakeCollectives
from torchdistinput import readers
from torchdistinput.coordination.channel import Channel
from torchdistinput.coordination.exchanges import Exchange

SIZES = (110, 5, 17, 0, 9, 3, 150, 1, 7, 4, 96, 12, 133, 2, 40, 5)
MIXED: dict[str, Any] = {"shuffle_files": True, "shuffle_buffer": 50, "cycle_length": 2, "block_length": 3}


def write(folder: Path, sizes: Sequence[int]) -> None:
    for file, size in enumerate(sizes):
        (folder / f"{file:02}.txt").write_text("".join(f"{1000 * file + record}\n" for record in range(size)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("files")
    write(path, SIZES)
    return str(path)


def files(folder: str, order: dict[str, Any]) -> tdi.FileDataset:
    return tdi.FileDataset(folder + "/*.txt", readers.text_lines, map_fn=int, seed=2, **order)


def test_nothing_but_votes_is_exchanged_inside_an_epoch_of_files(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, gather = list[str](), Channel.gather

    def gathers(self: Channel, mine: str) -> Exchange[list[str]]:
        texts.append(mine)
        return (yield from gather(self, mine))

    def reads(rank: int) -> int:
        data = fake_strategy(ranks, rank, 1).distribute_dataset(
            files(folder, MIXED), tdi.InputOptions(prefetch=2), global_batch_size=4
        )
        next(iterator := iter(data))
        if rank == 0:
            monkeypatch.setattr(Channel, "gather", gathers)
        return 1 + sum(1 for _ in iterator)

    ranks = FakeCollectives(2, timeout_seconds=20)
    first, second = ranks.run(reads)
    assert (first == second, texts) == (True, [])


def states(ranks: FakeCollectives, folder: str, order: dict[str, Any], rank: int) -> list[str]:
    data = fake_strategy(ranks, rank, 1).distribute_dataset(files(folder, order), global_batch_size=4)
    return [json.dumps(data.state_dict()) for _ in data]


def test_a_state_grows_little_with_the_files_in_progress(folder: str) -> None:
    for order in ({}, MIXED, {"cycle_length": 5}):
        ranks = FakeCollectives(2, timeout_seconds=20)
        found = ranks.run(partial(states, ranks, folder, order))[0]
        assert isinstance(found, list), found
        most = 4 * order.get("cycle_length", 1)  # of two workers, each of which may have opened the next ones
        for text in found:
            in_progress = len(re.findall(r'"[0-9a-f]{8}\\?"', text))  # each has a mark
            assert in_progress <= most
            assert len(text) - len(found[-1]) < 64 * in_progress + 64, text
