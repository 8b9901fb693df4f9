"""What a loop over a dataset measures of itself: exact counts, sums of seconds, windows, a line in the log, ranges."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support.upstream import Calls, LoneVotes, executor_of
from torchdistinput import build_pipeline as pipeline_module
from torchdistinput.batches import pytree
from torchdistinput.batches.schema_check import SchemaChecker
from torchdistinput.coordination.exchanges import Exchange
from torchdistinput.iterator import EpochProgress
from torchdistinput.pipeline import metrics, step_maker
from torchdistinput.pipeline import pipeline_executor as executor_module
from torchdistinput.pipeline.fetch import Fetch
from torchdistinput.pipeline.metrics import Metrics, StatsSync, summary
from torchdistinput.pipeline.step_maker import StepMaker
from torchdistinput.pipeline.to_device import ToDevice
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.rng import call_directly
from torchdistinput.sources.torch_loader.open_runs import OpenRuns
from torchdistinput.step_types import Drawn, EmptyStep, End, Held, LocalStep, Outcome, Skipped, Start

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


@final
class Said(LoneVotes):
    """Votes that were cast beforehand."""

    alone = True
    holds = True

    def __init__(self, outcomes: Iterable[Outcome]) -> None:
        self._outcomes = list(outcomes)

    def settle(self, held: Held) -> Outcome:
        return self._outcomes.pop(0)

    def hold(self, held: Held) -> None:
        pass

    def vote(self, fits: int | None = None) -> Exchange[list[Outcome]]:
        yield from ()
        return [self._outcomes.pop(0)]

    def stop(self, delivered: int) -> list[LocalStep]:
        return []


def nothing() -> None:
    pass


@final
class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def test_without_read_ahead_a_step_is_waited_for_from_its_draw_on_and_read_until_it_is_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A complete one is read all the time; what is passed over is waited for, too, but not the end of the data."""
    clock, meter = Clock(), Metrics()
    monkeypatch.setattr(executor_module, "perf_counter", clock.perf_counter)
    complete, incomplete = LocalStep([], (2,), [torch.zeros(2)]), LocalStep([torch.zeros(2)], (2,))
    drawn = iter([incomplete, complete, incomplete, complete, incomplete])

    def draw() -> Held:
        clock.now += 1
        return next(drawn)

    def produce(held: Drawn | Held) -> Held:
        clock.now += 10
        assert held is incomplete
        return incomplete

    calls = Calls(draw, produce, print, nothing, nothing, nothing)
    votes = Said([incomplete, complete, EmptyStep(None), complete, End()])
    executor = executor_of(calls, votes, meter)
    found = []
    while executor.take() is not None:
        told = meter.window()
        found.append((told["seconds_waiting"], told["seconds_reading"]))
        clock.now += 1000
    assert found == [(11, 1), (12, 2), (12 + 11 + 1, 2 + 1 + 1)]
    assert meter.window()["seconds_waiting"] == 24


class OfTwoThreads:
    """A clock that is read by several: while one reads it, another does something."""

    def __init__(self) -> None:
        self.now = 0.0
        self.meanwhile: list[Callable[[], None]] = []

    def perf_counter(self) -> float:
        self.now += 1
        if self.meanwhile:
            self.meanwhile.pop()()
        return self.now


def test_no_time_is_lost_where_a_step_is_completed_while_another_one_is_filled_in_a_vote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, meter, checker = OfTwoThreads(), Metrics(), SchemaChecker()
    monkeypatch.setattr(step_maker, "perf_counter", clock.perf_counter)
    checker.take(pytree.structure_of(torch.zeros(2)))
    no_source: Any = None
    stream = pipeline_module.open_stream(no_source, 0, call_directly, Start())  # of which nothing is read
    own = StepMaker(Fetch(stream, checker), checker, None, ToDevice([]), 1, meter, OpenRuns())
    for first, second in ((own.fill, own.complete), (own.complete, own.fill)):
        before = meter.window()["seconds_copying"]
        clock.meanwhile = [partial(second, LocalStep([], ())), nothing]  # at the second reading
        first(LocalStep([], ()))
        assert meter.window()["seconds_copying"] - before == 1 + 3


# Samples that were left out


def test_skipped_samples_are_counted_also_in_steps_that_lost_all_of_them() -> None:
    meter = Metrics()
    left: list[LocalStep] = []
    calls = Calls(lambda: Drawn(0), lambda drawn: LocalStep([], ()), left.extend, nothing, nothing, nothing)
    votes = Said(
        [
            EmptyStep(LocalStep([], (0,), skipped=Skipped(2, ("a", "b")))),
            LocalStep([], (3,), skipped=Skipped(1, ("c",)), global_size=3, rows=2),
            EmptyStep(None),
            LocalStep([], (4,), global_size=4, rows=3),
            End(),
        ]
    )
    executor = executor_of(calls, votes, meter)
    progress = EpochProgress(
        0, Start(), tuple, meter, Topology(num_workers=1, replicas_per_worker=1, worker=0), knows_all=True, log_every=0
    )
    found = []
    while (taken := executor.take()) is not None:
        progress.add(taken, sum(taken.sizes), 10)
        found.append((meter.skipped, meter.samples, meter.bytes, meter.stats(0)["window"]["skipped"]))
    assert found == [(3, 3, 10, 3), (3, 7, 20, 3)]
    assert len(left) == 1


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


@final
class Told:
    """Landmarks of a stream that remembers what it was told."""

    every = 24
    early = True

    def __init__(self) -> None:
        self.learned: list[tuple[int, list[str]]] = []

    def mine(self, rows: int) -> str:
        return json.dumps(["\udcff.txt", rows])

    def learn(self, rows: int, texts: Sequence[str]) -> None:
        self.learned.append((rows, list(texts)))


def test_the_landmarks_of_the_stream_pass_through_unchanged() -> None:
    meters, inner = [Metrics(rank) for rank in (2, 5)], [Told(), Told()]
    both = [StatsSync(meter, each) for meter, each in zip(meters, inner, strict=True)]
    meters[1].deliver(7, 28)
    meters[1].skipped += 1
    texts = [each.mine(48) for each in both]
    assert max(map(len, texts)) < 300
    for each in both:
        assert (each.every, each.early) == (24, True)
        each.learn(48, texts)
    assert [each.learned for each in inner] == [[(48, [Told().mine(48)] * 2)]] * 2
    assert meters[0].ranks == meters[1].ranks == [meter.own() for meter in meters]
    assert [(each["rank"], each["samples"], each["skipped"]) for each in meters[0].ranks] == [(2, 0, 0), (5, 7, 1)]


def test_without_landmarks_of_the_stream_there_is_one_every_64_rows() -> None:
    meter = Metrics(1)
    periodic_sync = StatsSync(meter, None)
    periodic_sync.learn(64, [periodic_sync.mine(64)])
    assert (periodic_sync.every, periodic_sync.early, meter.ranks) == (64, False, [meter.own()])


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
