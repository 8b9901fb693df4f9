"""What a loop over a dataset measures of itself: exact counts, sums of seconds, windows, a line in the log, ranges."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, final

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

import torchdistinput as tdi
from torchdistinput.batches import pytree
from torchdistinput.pipeline import metrics
from torchdistinput.pipeline.metrics import Metrics, summary

KEYS = {
    *("steps", "samples", "bytes", "skipped", "seconds"),
    *("seconds_waiting", "seconds_reading", "seconds_coordinating", "seconds_copying"),
}


class Pair(NamedTuple):
    x: torch.Tensor
    names: list[str]


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: Any


def ragged(size: int, step: int) -> Any:
    """Every second step has another inner dim."""
    return {"x": torch.zeros(size, 1 + step % 2), "y": torch.zeros(size, dtype=torch.int16)}


ELEMENTS: dict[str, Callable[[int, int], Any]] = {
    "one tensor": lambda size, step: torch.zeros(size, 3),
    "nested": lambda size, step: (torch.zeros(size, 2, 5), {"a": [torch.zeros(size, dtype=torch.bool)], "b": 7}),
    "ragged": ragged,
    "ragged of equal bytes": lambda size, step: torch.zeros((size, 2, 3) if step % 2 else (size, 3, 2)),
    "with a list": lambda size, step: Pair(torch.zeros(size, 4, dtype=torch.float64), ["n"] * size),
    "a dataclass of arrays": lambda size, step: Record(torch.zeros(size), np.zeros((size, 2), dtype=np.float32)),
    "only a list": lambda size, step: ["n"] * size,
}
SIZES = (4, 4, 3, 4, 0, 1, 4)


def bytes_of(element: Any) -> int:
    """By the tensors themselves."""
    leaves = [leaf for leaf in pytree.flatten(element)[0] if isinstance(leaf, torch.Tensor)]
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", ELEMENTS)
def test_steps_samples_and_bytes_are_those_of_what_was_delivered(name: str, replicas: int, prefetch: int) -> None:
    make = ELEMENTS[name]
    batches = [make(size, step) for step, size in enumerate(SIZES)]
    strategy = tdi.Strategy(devices=["cpu"] * replicas)
    options = tdi.InputOptions(prefetch=prefetch)
    with strategy.distribute_dataset(lambda: batches, options) as dataset:
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
class Slow(torch.utils.data.Dataset[torch.Tensor]):
    """Takes a known time for each sample."""

    def __init__(self, size: int, seconds: float) -> None:
        self._size = size
        self._seconds = seconds

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._seconds)
        return torch.tensor([index])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_slow_source_shows_as_reading_and_as_waiting(prefetch: int, num_workers: int) -> None:
    strategy = tdi.Strategy(devices=["cpu"])
    loader = DataLoader(Slow(20, 0.005), batch_size=4, num_workers=num_workers)
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


def test_what_was_read_while_the_loop_was_busy_is_not_waited_for() -> None:
    strategy = tdi.Strategy(devices=["cpu"])
    loader = DataLoader(Slow(12, 0.01), batch_size=1, num_workers=1, prefetch_factor=12)
    with strategy.distribute_dataset(loader, tdi.InputOptions(prefetch=1)) as dataset:
        for step, _ in enumerate(dataset):
            if step == 0:
                time.sleep(0.5)  # the other eleven take 0.11 s
        found = dataset.stats()
    assert found["seconds"] - found["seconds_waiting"] >= 0.5
    assert found["seconds_reading"] > 0


def test_the_window_is_the_last_64_to_71_steps() -> None:
    sizes = [1 + (7 * step) % 5 for step in range(300)]
    with tdi.Strategy(devices=["cpu"]).distribute_dataset([torch.zeros(size, 2) for size in sizes]) as dataset:
        seconds = 0.0
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
            seconds += window["seconds"] / length
        assert seconds / 300 * 64 < dataset.stats()["seconds"]


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


def test_what_the_ranks_said_last_outlives_the_epoch() -> None:
    with tdi.Strategy(devices=["cpu"]).distribute_dataset([torch.zeros(2)] * 3) as dataset:
        list(dataset)
        [told] = dataset.gather_stats()["ranks"]
        assert told["steps"] == 3
        next(iter(dataset))
        assert dataset.stats()["steps"] == 1
        assert dataset.stats()["ranks"] == [told]


def nothing() -> None:
    pass


@final
class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


# Samples that were left out


# The line in the log

LINE = re.compile(
    r"step (\d+) of epoch (\d+): input-bound (\d+) %(?: on rank \d+)?, (?:slowest rank (\d+): )?([\d.]+) ms/step "
    r"\(reading ([\d.]+), copying ([\d.]+); coordinating ([\d.]+), waiting ([\d.]+)\)"
)


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str | Any, ...]]:
    lines = [
        each.getMessage() for each in caplog.records if each.name == "torchdistinput" and "input-bound" in each.msg
    ]
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
    due = [(str(s), str(e)) for e, first in ((0, 5), (1, 1)) for s in range(first, 11) if every and s % every == 0]
    lines = logged(caplog)
    assert [line[:2] for line in lines] == due
    for line in lines:
        assert line[3] is None
        assert float(line[5]) >= 3.9  # two samples of 2 ms
        assert int(line[2]) > 0


def test_the_line_tells_the_largest_share_of_waiting_and_the_rank_that_reads_and_copies_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    meter = Metrics(4)
    for _ in range(640):  # 10 ms a step, of which 1.2 ms are waited for
        clock.now += 0.010
        meter.drawing += 0.001
        meter.fetching += 0.002
        meter.coordinating += 0.005
        meter.copying += 0.0004
        meter.waiting += 0.0012
        meter.last = clock.now
        meter.deliver(8, 64)
    own = "step 640 of epoch 2: input-bound 12 %, 3.4 ms/step (reading 3.0, copying 0.4; coordinating 5.0, waiting 1.2)"
    assert summary(2, 640, meter) == own
    slow = {"rank": 3, "steps": 64, "seconds_reading": 0.512, "seconds_copying": 0.0064, "seconds_waiting": 0.1088}
    meter.ranks = [meter.own(), {**meter.own(), **slow, "seconds_coordinating": 0.0192}, meter.own()]
    assert summary(2, 640, meter) == (
        "step 640 of epoch 2: input-bound 17 % on rank 3, slowest rank 3: 8.1 ms/step "
        "(reading 8.0, copying 0.1; coordinating 0.3, waiting 1.7)"
    )
    assert summary(0, 0, Metrics()).startswith("step 0 of epoch 0: input-bound 0 %, 0.0 ms/step")


# What the ranks tell each other


# Ranges for torch's profiler


def forever() -> Iterator[torch.Tensor]:
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
