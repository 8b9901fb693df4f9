"""What a loop over a dataset measures of itself: exact counts, seconds, a line in the log, ranges; on ranks too."""

from __future__ import annotations

import itertools
import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.data import Numbers
from tests.support.launched import lines_logged
from tests.support.structures import KINDS, Pair
from torchdistinput.batches import pytree
from torchdistinput.pipeline import metrics
from torchdistinput.pipeline.metrics import Metrics
from torchdistinput.plan.step_agreement import AgreedWaits
from torchdistinput.testing import run_ranks
from torchdistinput.tracing.epoch_trace import EpochTrace
from torchdistinput.tracing.read_times import BatchTimes

ALONE = {
    *("epoch", "steps", "samples", "bytes", "skipped_samples", "fresh_batches", "seconds", "samples_per_second"),
    *("wait_seconds", "read_seconds", "vote_seconds", "copy_seconds"),
    *("exposed_wait_seconds", "made_others_wait_seconds"),
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
                assert (found["samples"], found["bytes"], found["skipped_samples"]) == (samples, size, 0)
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


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_slow_source_shows_as_reading_and_as_waiting(prefetch: int) -> None:
    strategy = tdi.Strategy(devices=["cpu"])
    loader = DataLoader(Numbers(20, each=lambda _: time.sleep(0.005)), batch_size=4)
    outside = 0.0
    with strategy.distribute_dataset(loader, tdi.InputOptions(prefetch=prefetch)) as dataset:
        iterator = iter(dataset)
        for _ in range(5):  # not the last next, which finds the end: it delivers nothing, so it is not waited for
            called = time.perf_counter()
            next(iterator)
            outside += time.perf_counter() - called
        found = dataset.stats()
    assert found["read_seconds"] >= 0.1
    assert (0.02 if prefetch else 0.1) <= found["wait_seconds"] <= outside  # nothing is read before the first next
    assert found["seconds"] >= found["wait_seconds"] == found["exposed_wait_seconds"]
    assert found["vote_seconds"] == 0
    if prefetch == 0:  # it all happens in next, once
        assert found["wait_seconds"] >= found["read_seconds"] + found["copy_seconds"]


def unreadable() -> None:
    raise ValueError("unreadable")


def test_skipped_samples_are_counted_also_in_steps_that_lost_all_of_them() -> None:
    data, options = Numbers(8, dict.fromkeys((0, 1, 3), unreadable)), tdi.InputOptions(on_error="skip")
    with tdi.Strategy(devices=["cpu"]).distribute_dataset(DataLoader(data, 2), options) as dataset:
        assert [batch.tolist() for batch in dataset] == [[2], [4, 5], [6, 7]]
        found = dataset.stats()
    assert (found["steps"], found["skipped_samples"]) == (3, 3)


def test_before_anything_was_read_all_numbers_are_there_and_none_is_above_zero() -> None:
    strategy = tdi.Strategy(devices=["cpu"])
    tensors = torch.utils.data.TensorDataset(torch.zeros(4))
    loaders: list[Any] = [strategy.distribute_dataset([torch.zeros(2)]), tdi.DataLoader(tensors)]
    for loader in loaders:
        found = loader.stats()
        assert set(found) == ALONE
        assert [each for each in found.values() if isinstance(each, int) and each] == []
        json.dumps(found)
        for _ in loader:
            pass
        assert loader.stats()["steps"] > 0
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
    data = Numbers(20, each=lambda _: time.sleep(0.002))
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


def lines_of(meters: Sequence[Metrics], steps: int) -> list[str]:
    return [meter.line(2, steps, alone=False) for meter in meters]


def test_the_first_rank_says_what_all_know_and_the_rank_in_question_why(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    meters = [Metrics(10, rank_of=[10, 11, 12].__getitem__), *(Metrics(11 + n, is_first=False) for n in range(2))]
    for meter in meters:
        meter._rank_of = meters[0]._rank_of
    assert meters[0].line(0, 0, alone=True) == "step 0 of epoch 0: no step was measured yet"
    for _ in range(640):  # 10 ms a step, of which 1.2 ms are waited for
        clock.now += 0.010
        for meter in meters:
            meter.waiting += 0.0012
            meter.last = clock.now
            meter.steps += 1
            meter.samples += 8
            meter.bytes += 64
    own = "the training loop waited 768 ms of 6.4 s (12 %) for its input"
    assert meters[0].line(2, 640, alone=True) == f"step 640 of epoch 2: {own}"
    # Before a vote has told it, nothing is known of the others, and only the first one speaks.
    assert lines_of(meters, 640) == [f"step 640 of epoch 2, as rank 10 alone sees it: {own}", "", ""]
    assert set(meters[0].stats(2, alone=False)) == ALONE - {"exposed_wait_seconds", "made_others_wait_seconds"}
    # Rank 11 came last, by 500 ms.
    told = AgreedWaits(1, 0, 500_000, 2, 900_000, alike=False)
    meters[1].trace = trace = EpochTrace(2, 0, None, None, rank=11, rank_of=[10, 11, 12].__getitem__)
    trace.waits.reads.append(BatchTimes(106.0, 106.4, (0.0, 0.4, 0.0), file="a.tar"))
    trace.vote_ends([], None, 0.0, 106.3, 106.5)
    trace.vote_ends([], told, 0.0, 106.3, 106.5)
    for meter in meters:
        meter.learn(told._replace(late=10**9), of_first_vote=True)  # ranks begin at different times
        meter.learn(told, of_first_vote=False)
    late = "step 640 of epoch 2: rank 11 made the others wait 500 ms of 6.4 s (8 %)"
    cause = "80 % of it in __getitem__, most of that in a.tar; loader workers would help: now the training thread reads"
    assert lines_of(meters, 640) == [late, f"{late}: {cause}", ""]
    for meter in meters:
        found = meter.stats(2, alone=False)
        assert (found["exposed_wait_seconds"], found["exposed_wait_rank"]) == (0.9, 12)
        assert (found["latest_rank"], found["latest_rank_made_wait_seconds"]) == (11, 0.5)
        assert found["made_others_wait_seconds"] == (0.5 if meter.rank == 11 else 0)
        assert found["wait_seconds"] == pytest.approx(0.768)
    # A loop that waits longer, for nobody.
    for meter in meters:
        meter.learn(told._replace(late=0, waiter=0, waited=2 * 10**6), of_first_vote=False)
    waited = "the training loop of rank 10 waited 2.0 s of 6.4 s (31 %) for its input"
    assert lines_of(meters, 640) == [f"step 640 of epoch 2: {waited}", "", ""]
    # All of them.
    for meter in meters:
        meter.learn(told._replace(late=0, waiter=2, waited=1_600_000, alike=True), of_first_vote=False)
    meters[0].waiting = 1.5
    alike = "step 640 of epoch 2: all ranks wait alike for their input, 1.5 s of 6.4 s (23 %)"
    assert lines_of(meters, 640) == [alike, "", ""]


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


def ask() -> list[dict[str, Any]]:
    """Each rank: its numbers after two steps, and after the end."""
    found = []
    with tdi.Strategy(devices=["cpu"]).distribute_datasets_from_function(uneven) as dataset:
        for step, _ in enumerate(dataset):
            if step == 1:
                found.append(dataset.stats())
        return [*found, dataset.stats()]


def check_asked(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    amounts = [[(each["steps"], each["samples"], each["bytes"]) for each in found] for found in (first, second)]
    # The step that only rank 1 has a sample for is a step of rank 0 too.
    assert amounts == [[(2, 2, 16), (4, 3, 24)], [(2, 4, 32), (4, 8, 64)]]
    for _, after in (first, second):
        assert after["vote_seconds"] > 0
        assert after["read_seconds"] > 0


class Parse:
    """Reads a record; slowly on one rank."""

    def __init__(self, slow: int) -> None:
        self._slow = slow

    def __call__(self, line: str) -> torch.Tensor:
        if dist.get_rank() == self._slow:
            time.sleep(0.005)
        return torch.tensor([int(line)])


def loader_with_a_slow_rank() -> list[str]:
    """The log of two short epochs. Rank 1 reads slowly."""
    lines = lines_logged()
    data: Any = [str(number) for number in range(30)]
    parse = Parse(slow=1)
    with tdi.DataLoader(
        data,
        batch_size=5,
        collate_fn=lambda rows: torch.stack([parse(row) for row in rows]),
        options=tdi.InputOptions(log_every=6),
    ) as loader:
        for _ in range(2):
            for _ in loader:
                dist.barrier()  # as the gradients' all_reduce: the fast rank waits here, not for its input
    return lines


def check_short(first: list[str], second: list[str]) -> None:
    """The first rank says what is known; which rank is slower is the machine's. The other one speaks of itself only."""
    assert first[0] == "dataset 1 (map-style list): policy DATA, global batch 5 = 3 + 2 over 2 ranks"
    assert len(first[1:]) == 2
    for epoch, line in enumerate(first[1:]):
        said = "rank [01] made the others wait|the training loop of rank [01] waited|all ranks wait"
        assert re.match(f"dataset 1, step 6 of epoch {epoch}: (not input-bound: )?({said}) ", line)
    assert all(" rank 1 " in line and "% of it in" in line for line in second)


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
            told.append(dataset.stats())
            own.append(told[-1]["wait_seconds"])
    return own, told


def test_a_rank_knows_the_longest_wait_of_all_ranks_within_an_epoch() -> None:
    """By the last of 30 steps each rank knows that of the 20th: no exchange of all numbers is needed."""
    found = run_ranks(2, longest_waits)
    for _, told in found:
        assert told[-1]["exposed_wait_seconds"] >= max(own[19] for own, _ in found)
        assert told[-1]["exposed_wait_rank"] in (0, 1)
        assert told[-1]["latest_rank"] in (0, 1)


def on_ranks() -> tuple[Any, Any]:
    return ask(), loader_with_a_slow_rank()


def test_each_rank_measures_itself_and_says_why_the_others_wait_for_it() -> None:
    asked, short = zip(*run_ranks(2, on_ranks), strict=True)
    check_asked(*asked)
    check_short(*short)
