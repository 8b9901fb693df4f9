"""Over real ranks: what each measured reaches all of them, by itself every 64 steps and on request."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchdistinput as tdi
from torchdistinput import readers
from torchdistinput.testing import run_ranks

Stats = dict[str, Any]


def one(timeout_seconds: float = 60) -> tdi.Strategy:
    return tdi.Strategy(devices=["cpu"], timeout_seconds=timeout_seconds)


def write(folder: Path, *sizes: int) -> None:
    for number, size in enumerate(sizes):
        (folder / f"{number}.txt").write_text("".join(f"{1000 * number + record}\n" for record in range(size)))


# On request


def uneven(context: tdi.InputContext) -> list[torch.Tensor]:
    """Rank r has 3 + r batches of size 1 + r, of 8 bytes a sample."""
    rank = context.input_pipeline_id
    return [torch.zeros(1 + rank, 2)] * (3 + rank)


def ask() -> list[Stats]:
    """Each rank: what is gathered before an epoch, after two steps, and after the end of it; and the rest, locally."""
    found = []
    with one().distribute_datasets_from_function(uneven) as dataset:
        found.append(dataset.gather_stats())
        for step, _ in enumerate(dataset):
            if step == 1:
                found.append(dataset.gather_stats())
        found += [dataset.stats(), dataset.gather_stats()]
    return found


def test_gather_stats_gives_every_rank_the_window_of_each() -> None:
    first, second = run_ranks(2, ask)
    for mine, theirs in zip(first, second, strict=True):
        assert mine["ranks"] == theirs["ranks"]
    for rank, (before, within, asked, after) in enumerate((first, second)):
        assert [(each["rank"], each["steps"]) for each in before["ranks"]] == [(0, 0), (1, 0)]
        assert [(each["rank"], each["samples"], each["bytes"]) for each in within["ranks"]] == [(0, 2, 16), (1, 4, 32)]
        assert asked["ranks"] == within["ranks"]
        # The step that only rank 1 has a sample for is a step of rank 0 too.
        assert [(each["steps"], each["samples"]) for each in after["ranks"]] == [(4, 3), (4, 8)]
        assert after["ranks"][rank] == {"rank": rank, **after["window"]}
        assert after["seconds_coordinating"] > 0
        assert after["seconds_reading"] > 0


# By itself


class Parse:
    """Reads a record; slowly on one rank."""

    def __init__(self, slow: int) -> None:
        self._slow = slow

    def __call__(self, line: str) -> torch.Tensor:
        if dist.get_rank() == self._slow:
            time.sleep(0.005)
        return torch.tensor([int(line)])


def logged() -> list[str]:
    """The lines that the library logs in this rank from now on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchdistinput")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return lines


def loader_with_a_slow_rank() -> tuple[list[str], list[Stats]]:
    """The log, and the windows that are known in the second of two short epochs. Rank 1 reads slowly."""
    lines = logged()
    data: Any = [str(number) for number in range(30)]
    parse = Parse(slow=1)
    with tdi.DataLoader(
        data, batch_size=5, collate_fn=lambda rows: torch.stack([parse(row) for row in rows]), log_every=6
    ) as loader:
        known = []
        for _ in range(2):
            for _ in loader:
                dist.barrier()  # as the gradients' all_reduce: the fast rank waits here, not for its input
                known = loader.stats()["ranks"]
    return lines, known


def test_a_short_epoch_is_exchanged_and_the_line_tells_the_rank_that_waits_most() -> None:
    (lines, known), (silent, known_too) = run_ranks(2, loader_with_a_slow_rank)
    assert known == known_too
    assert [(each["rank"], each["steps"], each["samples"]) for each in known] == [(0, 6, 18), (1, 6, 12)]
    assert silent == []
    assert lines[0] == "dataset 1 (map-style list): policy DATA, global batch 5 = 3 + 2 over 2 ranks"
    assert lines[1].startswith("step 6 of epoch 0: input-bound ")
    assert re.match(r"step 6 of epoch 1: input-bound \d+ % on rank [01], slowest rank 1: ", lines[2])


Seen = tuple[list[int], list[list[Stats]], Stats, list[str]]

LONG = (("DATA", 0), ("FILE", 2))


def read_all(folder: str) -> list[Seen]:
    return [read_long(folder, *case) for case in LONG]


def read_long(folder: str, policy: str, prefetch: int) -> Seen:
    """Each rank: at how many steps the numbers of the ranks changed, these numbers, the last ones, and the log."""
    lines = logged()
    files = tdi.FileDataset(folder + "/?.txt", readers.text_lines, map_fn=Parse(slow=1))
    options = tdi.InputOptions(
        auto_shard_policy=tdi.AutoShardPolicy[policy], prefetch=prefetch, log_every=70, timeout_seconds=60
    )
    changes: list[int] = []
    told: list[list[Stats]] = []
    with one().distribute_dataset(files, options, global_batch_size=2) as dataset:
        last: list[Stats] = []
        for step, _ in enumerate(dataset, 1):
            found = dataset.stats()["ranks"]
            if found != last:
                last = found
                changes.append(step)
                told.append(found)
        total = dataset.stats()
    return changes, told, total, [line for line in lines if "input-bound" in line]


def test_every_64_steps_all_ranks_learn_who_is_slow_and_the_first_one_logs_it(tmp_path: Path) -> None:
    write(tmp_path, 145, 145)
    for (policy, prefetch), first, second in zip(LONG, *run_ranks(2, read_all, str(tmp_path)), strict=True):
        (changes, told, total, lines), (_, told_too, total_too, silent) = first, second
        assert told[-1] == told_too[-1]
        assert max(changes) >= 64 - prefetch
        if policy == "DATA":  # without periodic syncs of the source: after 64 and 128 rows, and at no other step
            assert len(changes) == 2
        fast, slow = told[-1]
        assert (fast["rank"], slow["rank"]) == (0, 1)
        assert 64 - prefetch - 1 <= slow["steps"] <= 71
        assert slow["seconds_reading"] >= 0.0049 * slow["samples"]
        assert slow["seconds_reading"] > fast["seconds_reading"]
        assert total["samples"] + total_too["samples"] == 290
        assert silent == []
        assert len(lines) == 2
        for line, step in zip(lines, (70, 140), strict=True):
            assert line.startswith(f"step {step} of epoch 0: input-bound ")
            assert "slowest rank 1: " in line


# Ranges for torch's profiler
