"""What a loop over a dataset measures of itself: exact counts, seconds, a line in the log, ranges; on ranks too."""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

import torchdistinput as tdi
from tests.support.log_lines import lines_logged
from tests.support.structures import KINDS, Pair
from torchdistinput import readers
from torchdistinput.batches import pytree
from torchdistinput.pipeline import metrics
from torchdistinput.pipeline.metrics import Metrics, verdict_at
from torchdistinput.testing import run_ranks

KEYS = {
    *("steps", "samples", "bytes", "skipped", "seconds"),
    *("seconds_waiting", "seconds_reading", "seconds_coordinating", "seconds_copying"),
}


ELEMENTS: dict[str, Callable[[int, int], Any]] = {
    "nested": lambda size, _: KINDS["nested"](size),
    "ragged": lambda size, step: {"x": torch.zeros(size, 1 + step % 2), "y": torch.zeros(size, dtype=torch.int16)},
    "ragged of equal bytes": lambda size, step: torch.zeros((size, 2, 3) if step % 2 else (size, 3, 2)),
    "with an array": lambda size, _: Pair(torch.zeros(size), np.zeros((size, 2), dtype=np.float32)),  # type: ignore[arg-type]
    "only a list": lambda size, _: ["n"] * size,
}
SIZES = (4, 4, 3, 4, 0, 1, 4)


def bytes_of(element: Any) -> int:
    """By the tensors themselves."""
    leaves = [leaf for leaf in pytree.flatten(element)[0] if isinstance(leaf, torch.Tensor)]
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", ELEMENTS)
def test_steps_samples_and_bytes_are_those_of_what_was_delivered(name: str, replicas: int) -> None:
    make = ELEMENTS[name]
    batches = [make(size, step) for step, size in enumerate(SIZES)]
    strategy = tdi.Strategy(devices=["cpu"] * replicas)
    with strategy.distribute_dataset(lambda: batches) as dataset:
        for epoch in range(2):
            samples = size = 0
            for steps, element in enumerate(dataset, 1):
                samples += sum(dataset.step.local_sizes)
                size += sum(bytes_of(piece) for piece in strategy.local_results(element))
                found = dataset.stats()
                assert (found["epoch"], found["steps"]) == (epoch, steps)
                assert (found["samples"], found["bytes"], found["skipped"]) == (samples, size, 0)
                assert {key: found[key] for key in ("steps", "samples", "bytes", "skipped")} == {
                    key: found["window"][key] for key in ("steps", "samples", "bytes", "skipped")
                }
            assert samples == sum(SIZES)


@pytest.mark.parametrize("with_index", [False, True])
def test_padded_rows_and_masks_are_bytes_but_not_samples(with_index: bool) -> None:
    strategy = tdi.Strategy(devices=["cpu"] * 3)
    options = tdi.InputOptions(partial_batch="pad", with_index=with_index)
    data = [torch.zeros(5) for _ in range(11)]
    with strategy.distribute_dataset(lambda: data, options, global_batch_size=4) as dataset:
        size = sum(bytes_of(piece) for element in dataset for piece in strategy.local_results(element))
        found = dataset.stats()
    row = 5 * 4 + 1 + 8 * with_index
    assert size == 3 * 3 * 2 * row  # steps, replicas, rows of a piece
    assert (found["steps"], found["samples"], found["bytes"]) == (3, 11, size)


@final
class Slow(Dataset[torch.Tensor]):
    """Takes a known time for each sample."""

    def __init__(self, size: int, seconds: float) -> None:
        self._size = size
        self._seconds = seconds

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._seconds)
        return torch.tensor([index])


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_slow_source_shows_as_reading_and_as_waiting(prefetch: int) -> None:
    strategy = tdi.Strategy(devices=["cpu"])
    loader = DataLoader(Slow(20, 0.005), batch_size=4)
    with strategy.distribute_dataset(loader, tdi.InputOptions(prefetch=prefetch)) as dataset:
        iterator = iter(dataset)
        for _ in range(5):  # not the last next, which finds the end: it delivers nothing, so it is not waited for
            next(iterator)
        found = dataset.stats()
    assert found["seconds_reading"] >= 0.09
    assert found["seconds_waiting"] >= 0.09
    assert found["seconds"] >= found["window"]["seconds"] >= found["seconds_waiting"]
    assert found["seconds_coordinating"] == 0
    if prefetch == 0:  # it all happens in next, once
        assert found["seconds_waiting"] >= found["seconds_reading"] + found["seconds_copying"]


@final
class Unreadable(Dataset[torch.Tensor]):
    """The first batch and one sample of the second cannot be read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in (0, 1, 3):
            raise ValueError("unreadable")
        return torch.tensor([index])


def test_skipped_samples_are_counted_also_in_steps_that_lost_all_of_them() -> None:
    options = tdi.InputOptions(on_error="skip")
    with tdi.Strategy(devices=["cpu"]).distribute_dataset(DataLoader(Unreadable(), 2), options) as dataset:
        assert [batch.tolist() for batch in dataset] == [[[2]], [[4], [5]], [[6], [7]]]
        found = dataset.stats()
    assert (found["steps"], found["skipped"], found["window"]["skipped"]) == (3, 3, 3)


def test_the_window_is_the_last_64_to_71_steps() -> None:
    sizes = [1 + (7 * step) % 5 for step in range(300)]
    with tdi.Strategy(devices=["cpu"]).distribute_dataset([torch.zeros(size, 2) for size in sizes]) as dataset:
        apart = 0.0  # in windows that have no step in common
        for step, _ in enumerate(dataset, 1):
            found = dataset.stats()
            window = found["window"]
            assert set(window) == KEYS
            length = window["steps"]
            assert length == step if step < 64 else 64 <= length <= 71
            assert window["samples"] == sum(sizes[step - length : step])
            assert window["bytes"] == 8 * window["samples"]
            assert 0 <= window["seconds_reading"] <= found["seconds_reading"]
            assert window["seconds_waiting"] <= window["seconds"]
            apart += window["seconds"] if step % 75 == 0 else 0.0
        assert 0 < apart < dataset.stats()["seconds"]


def test_before_anything_was_read_all_numbers_are_there_and_none_is_above_zero() -> None:
    strategy = tdi.Strategy(devices=["cpu"])
    tensors = torch.utils.data.TensorDataset(torch.zeros(4))
    loaders: list[Any] = [strategy.distribute_dataset([torch.zeros(2)]), tdi.DataLoader(tensors)]
    for loader in loaders:
        for _ in range(2):
            found: dict[str, Any] = loader.stats()
            assert set(found) == {"epoch", "window", "ranks", "fresh_batches"} | KEYS
            assert set(found["window"]) == KEYS
            assert [
                each for each in (*found.values(), *found["window"].values()) if isinstance(each, int) and each
            ] == []
            assert found["ranks"] == []
            json.dumps(found)
        gathered = loader.gather_stats()
        assert gathered["ranks"] == [{"rank": 0, **gathered["window"]}]
        assert loader.stats()["ranks"] == gathered["ranks"]
        for _ in loader:
            pass
        assert loader.stats()["steps"] == loader.stats()["window"]["steps"] > 0
        loader.close()


@final
class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


# The line in the log

LINE = re.compile(r"dataset 1, step (\d+) of epoch (\d+): (.+)")


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str | Any, ...]]:
    lines = [each.getMessage() for each in caplog.records if each.name == "torchdistinput"]
    caplog.clear()
    matches = [LINE.fullmatch(line) for line in lines]
    return [match.groups() for match in matches if match is not None]


@pytest.mark.parametrize("every", [0, 1, 3, 100])
def test_a_line_is_logged_every_so_many_steps_of_an_epoch(every: int, caplog: pytest.LogCaptureFixture) -> None:
    data = Slow(20, 0.002)
    strategy = tdi.Strategy(devices=["cpu"])
    options = tdi.InputOptions(prefetch=0, log_every=every)
    with (
        caplog.at_level(logging.INFO, logger="torchdistinput"),
        strategy.distribute_dataset(DataLoader(data, batch_size=2), options) as dataset,
    ):
        dataset.seek(0, 4)
        for _ in range(2):
            for _ in dataset:
                pass
    steps = [(s, e) for e, first in ((0, 5), (1, 1)) for s in range(first, 11)]
    due = [(str(s), str(e)) for s, e in steps if every and (s % every == 0 or s == 10)]
    lines = logged(caplog)
    assert [line[:2] for line in lines] == due
    for line in lines:
        assert re.fullmatch(
            r"(not input-bound: )?the training loop waited .* for its input(: \d+ % of it in .+)?", line[2]
        )


def test_the_verdict_is_on_the_epoch_so_far_as_the_ranks_have_told_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    meter = Metrics(4)
    assert verdict_at(0, 0, meter, alone=True) == "step 0 of epoch 0: no step was measured yet"
    for _ in range(640):  # 10 ms a step, of which 1.2 ms are waited for
        clock.now += 0.010
        meter.waiting += 0.0012
        meter.last = clock.now
        meter.deliver(8, 64)
    own = "step 640 of epoch 2: the training loop waited 768 ms of 6.4 s (12 %) for its input"
    assert verdict_at(2, 640, meter, alone=True) == own
    meter.waited_for(7, 0, 0.5)  # until the ranks have exchanged their numbers, rank 7's own are not known
    alone = "step 640 of epoch 2, as rank 4 alone sees it: rank 7 made the others wait 500 ms of 6.4 s (8 %)"
    assert verdict_at(2, 640, meter, alone=False) == alone
    flat = meter.flat_stats(2, alone=False)
    assert math.isnan(flat["exposed_wait_seconds"])
    assert math.isnan(flat["made_others_wait_seconds"])
    assert meter.flat_stats(2, alone=True)["exposed_wait_seconds"] == flat["wait_seconds"]
    other = {"rank": 7, "seconds": 6.4, "waiting": 0.9, "waited_for": {}, "late_in": {"copy": 0.4}}
    meter.learn([meter.own(), {"rank": 7, **meter.window(), "epoch": other}])
    late = "rank 7 made the others wait 500 ms of 6.4 s (8 %): 100 % of it in the copy to the device"
    assert verdict_at(2, 640, meter, alone=False) == f"step 640 of epoch 2: {late}"
    meter.deliver(8, 64)
    assert verdict_at(2, 641, meter, alone=False) == f"step 641 of epoch 2, of 640 steps: {late}"
    flat = meter.flat_stats(2, alone=False)
    assert flat["wait_seconds"] == pytest.approx(0.768)
    assert (flat["exposed_wait_seconds"], flat["made_others_wait_seconds"]) == (0.9, 0)


# Ranges for torch's profiler


def forever() -> Any:
    return (torch.zeros(2) for _ in itertools.count())


@pytest.mark.parametrize("pads", [False, True])
def test_the_ranges_appear_in_a_profile_of_one_process(pads: bool) -> None:
    """Where nothing is padded or sent anywhere, nothing is copied."""
    options = tdi.InputOptions(prefetch=0, partial_batch="pad" if pads else "keep")
    data, size = (lambda: itertools.repeat(torch.zeros(2)), 3) if pads else (forever, None)
    with tdi.Strategy(devices=["cpu"]).distribute_dataset(data, options, global_batch_size=size) as dataset:
        iterator = iter(dataset)
        next(iterator)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            for _ in range(3):
                next(iterator)
        next(iterator)
        iterator.close()
    found = [event.name for event in profiled.events() if event.name.startswith("torchdistinput::")]
    assert {name: found.count(name) for name in found} == {
        metrics.FETCH: 3,
        metrics.WAIT: 3,
        **({metrics.COPY: 3} if pads else {}),
    }


def test_without_a_profiler_no_range_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    with tdi.Strategy(devices=["cpu"]).distribute_dataset(forever, tdi.InputOptions(prefetch=0)) as dataset:
        iterator = iter(dataset)
        monkeypatch.setattr("torch.autograd.profiler.record_function", refuse)
        assert len(next(iterator)) == 2
        iterator.close()


# Over real ranks


def uneven(context: tdi.InputContext) -> list[torch.Tensor]:
    """Rank r has 3 + r batches of size 1 + r, of 8 bytes a sample."""
    rank = context.input_pipeline_id
    return [torch.zeros(1 + rank, 2)] * (3 + rank)


def ask() -> list[Any]:
    """Each rank: what is gathered before an epoch, after two steps, and after the end of it; and the rest, locally."""
    found = []
    with tdi.Strategy(devices=["cpu"]).distribute_datasets_from_function(uneven) as dataset:
        found.append(dataset.gather_stats())
        for step, _ in enumerate(dataset):
            if step == 1:
                found.append(dataset.gather_stats())
        found += [dataset.stats(), dataset.gather_stats()]
    return found


def check_asked(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
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


class Parse:
    """Reads a record; slowly on one rank."""

    def __init__(self, slow: int) -> None:
        self._slow = slow

    def __call__(self, line: str) -> torch.Tensor:
        if dist.get_rank() == self._slow:
            time.sleep(0.005)
        return torch.tensor([int(line)])


def loader_with_a_slow_rank() -> tuple[list[str], list[Any]]:
    """The log, and the windows that are known in the second of two short epochs. Rank 1 reads slowly."""
    lines = lines_logged()
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


def check_short(first: Any, second: Any) -> None:
    """A short epoch is exchanged, and the line tells what rank 0 knows; which rank is slower is the machine's."""
    (lines, known), (silent, known_too) = first, second
    assert known == known_too
    assert [(each["rank"], each["steps"], each["samples"]) for each in known] == [(0, 6, 18), (1, 6, 12)]
    assert silent == []
    assert lines[0] == "dataset 1 (map-style list): policy DATA, global batch 5 = 3 + 2 over 2 ranks"
    for epoch, line in enumerate(lines[1:3]):
        about = f"dataset 1, step 6 of epoch {epoch}, as rank 0 alone sees it: "
        assert re.match(f"{about}(rank 1 made the others wait|the training loop( of rank 0)? waited) ", line)


LONG = (("DATA", 0), ("FILE", 2))


def read_long(folder: str, policy: str, prefetch: int) -> Any:
    """Each rank: at how many steps the numbers of the ranks changed, these numbers, the last ones, and the log."""
    lines = lines_logged()
    files = tdi.FileDataset(folder + "/?.txt", readers.text_lines, map_fn=Parse(slow=1))
    options = tdi.InputOptions(
        auto_shard_policy=tdi.AutoShardPolicy[policy], prefetch=prefetch, log_every=140, timeout_seconds=60
    )
    changes: list[int] = []
    told: list[list[Any]] = []
    with tdi.Strategy(devices=["cpu"]).distribute_dataset(files, options, global_batch_size=2) as dataset:
        last: list[Any] = []
        for step, _ in enumerate(dataset, 1):
            found = dataset.stats()["ranks"]
            if found != last:
                last = found
                changes.append(step)
                told.append(found)
        total = dataset.stats()
    return changes, told, total, [line for line in lines if ", step " in line]


def check_long(policy: str, prefetch: int, first: Any, second: Any) -> None:
    """Every 64 steps all ranks learn what each one took, and the first one logs a verdict; see ``test_stalls``."""
    (changes, told, total, lines), (_, _, total_too, silent) = first, second
    assert total["ranks"] == total_too["ranks"]  # in the loop one may have heard what the other hears in its next step
    assert max(changes) >= 64 - prefetch
    if policy == "DATA":  # without periodic syncs of the source: after 64 and 128 rows, and at no other step
        assert len(changes) == 2
    fast, slow = told[-1]
    assert (fast["rank"], slow["rank"]) == (0, 1)
    assert 64 - prefetch - 1 <= slow["steps"] <= 71
    assert slow["seconds_reading"] >= 0.0049 * slow["samples"]
    assert total["samples"] + total_too["samples"] == 290
    assert silent == []
    assert len(lines) == 2
    for line, step in zip(lines, (140, total["steps"]), strict=True):
        assert re.search(rf", step {step} of epoch 0(, of \d+ steps)?: .*(wait|waited).* \(\d+ %\)", line)


def longest_waits() -> tuple[list[float], list[dict[str, float]]]:
    """Each rank: what it was told of waits, and how long its own loop stood in ``next``, after each step."""
    data: Any = range(60)
    told, own = [], []
    collate = Parse(slow=1)
    options = tdi.InputOptions(prefetch=0)
    with tdi.Strategy(devices=["cpu"]).distribute_dataset(
        DataLoader(data, 2, collate_fn=lambda rows: collate(rows[0])), options
    ) as dataset:
        for _ in dataset:
            dist.barrier()
            told.append(dataset.stats(flat=True))
            own.append(told[-1]["wait_seconds"])
    return own, told


@pytest.mark.xfail(strict=True, reason="the vote is to carry the longest wait since the last one, and whose it was")
def test_a_rank_knows_the_longest_wait_of_all_ranks_within_an_epoch() -> None:
    """By the last of 30 steps each rank knows that of the 20th: no exchange of all numbers is needed."""
    found = run_ranks(2, longest_waits)
    for _, told in found:
        assert told[-1]["exposed_wait_seconds"] >= max(own[19] for own, _ in found)


def on_ranks(folder: str) -> list[Any]:
    return [ask(), loader_with_a_slow_rank(), *(read_long(folder, *case) for case in LONG)]


def test_what_each_rank_measured_reaches_all_of_them_on_request_and_by_itself(tmp_path: Path) -> None:
    for number in range(2):
        lines = "".join(f"{1000 * number + record}\n" for record in range(145))
        (tmp_path / f"{number}.txt").write_text(lines)
    asked, short, *long = zip(*run_ranks(2, on_ranks, str(tmp_path)), strict=True)
    check_asked(*asked)
    check_short(*short)
    for case, found in zip(LONG, long, strict=True):
        check_long(*case, *found)
