"""Samples of different lengths: batches divided by cost, in one process and on ranks; batches by tokens and buckets."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, Subset

import torchdistinput as tdi
from tests.data import Mapped, Stream
from tests.support import inputs
from tests.support.epochs import Raised, pieces, raised, steps_until_raised
from torchdistinput import readers
from torchdistinput.plan.balancing import balanced_split
from torchdistinput.testing import run_ranks

SAMPLES, GLOBAL_BATCH = 23, 8
COSTS = [float((7 * index) % 11) ** 2 for index in range(SAMPLES)]


def ten_times(index: int, unreadable: Sequence[int] = ()) -> torch.Tensor:
    if index in unreadable:
        raise OSError(f"sample {index} is lost")
    return torch.tensor(10 * index)


def tens(unreadable: Sequence[int] = ()) -> Any:
    """Sample ``index`` is ``10 * index``; those named cannot be read."""
    return Mapped(SAMPLES, partial(ten_times, unreadable=unreadable))


def stream() -> Stream:
    """The same samples in order, as an iterable."""
    return Stream(lambda: map(ten_times, range(SAMPLES)))


def cost_of_index(index: int) -> float:
    return COSTS[index]


def cost_of_value(value: Any) -> float:
    return COSTS[int(value) // 10]


def shuffled(data: Any, **more: Any) -> DataLoader[Any]:
    return DataLoader(data, GLOBAL_BATCH, shuffle=True, generator=torch.Generator().manual_seed(4), **more)


def lines(folder: Path) -> tdi.FileDataset:
    for file in range(3):
        values = range(file * 8, min(SAMPLES, file * 8 + 8))
        (folder / f"{file}.txt").write_text("".join(f"{10 * value}\n" for value in values))
    return lines_in(folder)


def lines_in(folder: Path) -> tdi.FileDataset:
    return tdi.FileDataset(f"{folder}/?.txt", readers.text_lines, map_fn=int)


KINDS: dict[str, tuple[Callable[[Path], Any], Any]] = {
    "tensors": (lambda _: shuffled(torch.arange(0, 10 * SAMPLES, 10)), np.array(COSTS)),
    "samples": (lambda _: shuffled(tens()), COSTS),
    "samples, a function": (lambda _: shuffled(tens()), cost_of_index),
    "samples, 2 loader workers": (lambda _: shuffled(tens(), num_workers=2), torch.tensor(COSTS)),
    "a batch sampler": (
        lambda _: DataLoader(tens(), batch_sampler=[[3, 1, 2], [5], [20, 21, 22, 4, 6, 7]]),
        COSTS,
    ),
    "an iterable": (lambda _: DataLoader(stream(), GLOBAL_BATCH), cost_of_value),
    "an iterable, a loader worker": (
        lambda _: DataLoader(stream(), GLOBAL_BATCH, num_workers=1),
        cost_of_value,
    ),
    "files": (lambda folder: DataLoader(lines(folder), GLOBAL_BATCH), cost_of_value),
    "files, 2 loader workers": (
        lambda folder: DataLoader(lines(folder), GLOBAL_BATCH, num_workers=2),
        cost_of_value,
    ),
}


def read(data: Any, replicas: int, **options: Any) -> tuple[list[list[Any]], list[tdi.Step]]:
    """The parts of each step, and the steps."""
    strategy = tdi.Strategy(devices=["cpu"] * replicas)
    found, steps = [], []
    with strategy.distribute_dataset(data, tdi.InputOptions(**options)) as loader:
        for element in loader:
            found.append(pieces(strategy, element))
            steps.append(loader.step)
    return found, steps


def by_law(batch: list[int], replicas: int, *, equal: bool = False) -> list[list[int]]:
    order, sizes = balanced_split(np.array([cost_of_value(value) for value in batch]), replicas, equal_counts=equal)
    ends = itertools.accumulate(sizes)
    return [[batch[place] for place in order[end - size : end]] for end, size in zip(ends, sizes, strict=True)]


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_are_those_of_the_law_and_make_the_same_global_batch(kind: str, equal: bool, tmp_path: Path) -> None:
    make, balance = KINDS[kind]
    whole, _ = read(make(tmp_path), 1)
    for replicas in (1, 3):
        parts, steps = read(make(tmp_path), replicas, balance=tdi.Balance(balance, equal_counts=equal))
        assert parts == [by_law(batch, replicas, equal=equal) for (batch,) in whole]
        assert [step.local_sizes for step in steps] == [tuple(map(len, row)) for row in parts]
        assert [step.global_size for step in steps] == [len(batch) for (batch,) in whole]


def rows_of_npy(folder: Path) -> tdi.FileDataset:
    np.save(folder / "0.npy", np.array([[10 * index, 1] for index in range(SAMPLES)]))
    return tdi.FileDataset([str(folder / "0.npy")], readers.npy_rows)


def columns_of_parquet(folder: Path) -> tdi.FileDataset:
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    pq.write_table(pa.table({"x": [10 * index for index in range(SAMPLES)]}), folder / "0.parquet", row_group_size=5)
    return tdi.FileDataset([str(folder / "0.parquet")], readers.parquet(["x"]))


@pytest.mark.parametrize(
    ("make", "value"),
    [(rows_of_npy, lambda row: row[0]), (columns_of_parquet, lambda row: row["x"])],
)
def test_records_that_are_rows_or_columns_are_divided(make: Any, value: Callable[[Any], int], tmp_path: Path) -> None:
    strategy = tdi.Strategy(devices=["cpu"] * 3)
    options = tdi.InputOptions(balance=lambda row: cost_of_value(value(row)))
    found = []
    with strategy.distribute_dataset(make(tmp_path), options, global_batch_size=GLOBAL_BATCH) as loader:
        for element in loader:
            parts = pieces(strategy, element)
            found.append([part["x"] if isinstance(part, dict) else [row[0] for row in part] for part in parts])
    batches = [list(range(start * 10, min(SAMPLES, start + 8) * 10, 10)) for start in (0, 8, 16)]
    assert found == [by_law(batch, 3) for batch in batches]


@pytest.mark.parametrize("kind", KINDS)
def test_the_index_tells_each_sample_and_outputs_come_back_in_order(kind: str, tmp_path: Path) -> None:
    make, balance = KINDS[kind]
    plain, _ = read(make(tmp_path), 1, with_index=True)
    numbers = {value: number for ((index, batch),) in plain for number, value in zip(index, batch, strict=True)}
    strategy = tdi.Strategy(devices=["cpu"] * 3)
    options = tdi.InputOptions(balance=balance, with_index=True)
    with strategy.distribute_dataset(make(tmp_path), options) as loader:
        for index, element in loader:
            for its, values in zip(pieces(strategy, index), pieces(strategy, element), strict=True):
                assert its == [numbers[value] for value in values]
            ordered = strategy.gather_ordered(index, element).tolist()
            at = {number: value for value, number in numbers.items()}
            assert ordered == [at[number] for number in sorted(itertools.chain(*pieces(strategy, index)))]


def test_samples_that_cannot_be_read_are_left_out_of_their_parts_and_micro_batches() -> None:
    lost = (3, 4, 11, 17)
    for workers in (0, 1):
        parts, steps = read(
            shuffled(tens(lost), num_workers=workers), 3, balance=COSTS, on_error="skip", with_index=True
        )
        whole, _ = read(shuffled(tens()), 1)
        bound = max(COSTS)
        for row, step, (batch,) in zip(parts, steps, whole, strict=True):
            planned = by_law(batch, 3)
            readable = [[value for value in part if value // 10 not in lost] for part in planned]
            assert [values for _, values in row] == readable
            counts = set()
            for replica, values in enumerate(readable):
                micro = [values[rows] for rows in step.micro_batches(bound, replica)]
                assert list(itertools.chain.from_iterable(micro)) == values
                assert all(sum(map(cost_of_value, each)) <= bound for each in micro)
                counts.add(len(micro))
            assert len(counts) == 1


def test_micro_batches_add_up_to_the_average_loss() -> None:
    strategy = tdi.Strategy(devices=["cpu"])
    with strategy.distribute_dataset(shuffled(tens()), tdi.InputOptions(balance=COSTS)) as loader:
        for values in loader:
            losses = values.double().square()
            runs = loader.step.micro_batches(max(COSTS))
            total = sum(tdi.average_loss(losses[rows], loader.step, rows=rows) for rows in runs)
            assert total == pytest.approx(tdi.average_loss(losses, loader.step))
            with pytest.raises(ValueError, match="this replica's part of the step has"):
                tdi.average_loss(losses[:0], loader.step, rows=slice(0, 1))
            with pytest.raises(ValueError, match="weights with rows"):
                tdi.average_loss(losses, loader.step, torch.ones(len(losses)), rows=slice(0, 1))


@pytest.mark.parametrize(
    ("samples", "more", "options"),
    [
        (SAMPLES, {"drop_last": True}, {"balance": COSTS}),
        (SAMPLES, {"drop_last": True}, {"balance": tdi.Balance(COSTS, equal_counts=True)}),
        (SAMPLES, {"drop_last": True}, {}),
        (SAMPLES, {}, {}),
        (SAMPLES - 1, {}, {}),
    ],
)
def test_frameworks_are_told_whether_the_parts_of_each_step_are_of_one_size(
    samples: int, more: dict[str, Any], options: dict[str, Any]
) -> None:
    strategy = tdi.Strategy(devices=["cpu"] * 2)
    data: Any = Subset(tens(), range(samples))
    loader = tdi.DataLoader(data, GLOBAL_BATCH, strategy=strategy, options=tdi.InputOptions(**options), **more)
    sizes = [{len(piece) for piece in pieces(strategy, element)} for element in loader]
    assert loader.has_equal_parts == all(len(each) == 1 for each in sizes)
    loader.close()


# ------------------------------------------------------------------------------------------------------------ refused


def nan_later(index: int) -> float:
    return float("nan") if index == 20 else 1.0


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("balance", "message"),
    [
        (nan_later, "the cost of sample 20 is nan; a finite number of 0 or more is needed"),
        (len, "the cost of sample 0 could not be found: TypeError: .* For map-style data the function gets the index"),
    ],
)
def test_a_function_that_finds_no_cost_is_an_error_at_the_step(balance: Any, message: str, workers: int) -> None:
    seen: list[Any] = []
    strategy = tdi.Strategy(devices=["cpu"] * 2)
    loader = strategy.distribute_dataset(
        DataLoader(tens(), GLOBAL_BATCH, num_workers=workers), tdi.InputOptions(balance=balance, prefetch=1)
    )
    with loader, pytest.raises(tdi.InputError, match=message):
        seen.extend(pieces(strategy, element) for element in loader)
    assert len(seen) == (2 if balance is nan_later else 0)


def test_a_record_without_a_cost_is_an_error_at_the_step(tmp_path: Path) -> None:
    for data in (
        DataLoader(lines(tmp_path), GLOBAL_BATCH),
        DataLoader(stream(), GLOBAL_BATCH),
    ):
        with pytest.raises(tdi.InputError, match="cost of sample 0 could not be found: .* The function gets a record"):
            read(data, 2, balance=lambda record: record.cost)
        with pytest.raises(tdi.InputError, match=r"the cost of record 3 is -1.0; a finite number"):
            read(data, 2, balance=lambda record: -1.0 if int(record) == 30 else 1.0)


def ready() -> Iterable[torch.Tensor]:
    return [torch.arange(4), torch.arange(4)]


NO_ARRAY = "an array with one number for each sample is needed"
REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    **{
        f"costs, {number}": (shuffled(tens()), {"balance": balance}, kind, message)
        for number, (balance, kind, message) in enumerate(
            (
                (
                    [*COSTS[:5], float("nan"), *COSTS[6:]],
                    tdi.BatchingError,
                    r"balance\[5\] is nan; a finite",
                ),
                ([*COSTS[:5], -1.0, *COSTS[6:]], tdi.BatchingError, r"balance\[5\] is -1.0; a finite number"),
                (np.array(COSTS[1:]), tdi.BatchingError, "balance has 22 costs, and the dataset 23 samples"),
                (np.ones((SAMPLES, 2)), TypeError, NO_ARRAY),
                (["a"] * SAMPLES, TypeError, NO_ARRAY),
                ("costs", TypeError, NO_ARRAY),
            )
        )
    },
    "an array for an iterable": (
        DataLoader(stream(), 4),
        {},
        TypeError,
        "has no samples by index; give a function",
    ),
    "ready batches": (ready(), {"balance": cost_of_value}, tdi.BatchingError, "yields ready batches"),
    "whole batches by index": (
        DataLoader(tens(), batch_size=None),
        {},
        tdi.InputError,
        "the sampler drew an item that is a whole batch",
    ),
    "another index": (
        DataLoader(tens(), sampler=[1, 99], batch_size=2),
        {},
        tdi.InputError,
        "balance has 23 costs, one for each index, and the sampler drew an index without one: IndexError",
    ),
    "padding": (DataLoader(tens(), 4), {"partial_batch": "pad"}, ValueError, "Give balance=Balance"),
    "a number": (DataLoader(tens(), 4), {"balance": 3}, TypeError, "balance is 3; an array with a cost"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_by_cost_is_refused(name: str) -> None:
    data, options, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        read(data, 2, **{"balance": COSTS, **options})


def test_a_dataset_function_makes_its_own_batches() -> None:
    strategy = tdi.Strategy(devices=["cpu"] * 2)
    with pytest.raises(tdi.InputError, match="whose batches are taken as they are"):
        strategy.distribute_datasets_from_function(lambda _: ready(), tdi.InputOptions(balance=COSTS))


def test_lists_of_indices_that_the_dataset_reads_at_once_are_divided() -> None:
    by_list = Mapped(SAMPLES, lambda indices: torch.tensor(indices) * 10)
    loader = DataLoader(by_list, batch_size=None, sampler=BatchSampler(SequentialSampler(range(SAMPLES)), 8, False))
    parts, _ = read(loader, 3, balance=COSTS)
    batches = [list(range(start * 10, min(SAMPLES, start + 8) * 10, 10)) for start in (0, 8, 16)]
    assert parts == [by_law(batch, 3) for batch in batches]


@pytest.mark.parametrize(("prefetch", "num_workers"), [(0, 0), (2, 0), (0, 1), (2, 1)])
def test_the_index_of_a_step_that_is_drawn_ahead_in_inference_mode_is_a_plain_tensor(
    prefetch: int, num_workers: int
) -> None:
    options = tdi.InputOptions(with_index=True, balance=tdi.Balance(COSTS), prefetch=prefetch)
    loader = tdi.DataLoader(tens(), GLOBAL_BATCH, num_workers=num_workers, options=options)
    steps = iter(loader)
    with torch.inference_mode():
        next(steps)
    assert not any(leaf.is_inference() for step in steps for leaf in step)


# ----------------------------------------------------------------------------------------- by tokens and by buckets


LENGTHS = np.random.default_rng(0).lognormal(3, 1, 400).astype(int) % 300


@pytest.mark.parametrize("padded", [False, True])
def test_batches_hold_at_most_so_many_tokens_and_no_sample_more_would_fit(padded: bool) -> None:
    for seed in range(20):
        dice = random.Random(seed)
        lengths = [dice.randint(0, 50) for _ in range(dice.randint(1, 200))]
        order = dice.sample(range(len(lengths)), len(lengths))
        batches = list(tdi.TokenBatchSampler(order, lengths, 100, padded=padded))
        assert [index for batch in batches for index in batch] == order

        def tokens(batch: list[int], lengths: list[int] = lengths) -> int:
            return max(lengths[each] for each in batch) * len(batch) if padded else sum(lengths[each] for each in batch)

        assert all(tokens(batch) <= 100 for batch in batches)
        for batch, following in pairwise(batches):
            assert tokens([*batch, following[0]]) > 100


def test_token_batches_are_bounded_in_samples_and_drop_what_is_too_long() -> None:
    sampler = tdi.TokenBatchSampler(range(6), [1, 1, 1, 99, 1, 1], 10, max_samples=2, too_long="drop", drop_last=True)
    assert list(sampler) == [[0, 1], [2, 4]]
    assert sampler.dropped == 1
    with pytest.raises(ValueError, match="sample 3 has 99 tokens, more than max_tokens=10"):
        list(tdi.TokenBatchSampler(range(6), [1, 1, 1, 99, 1, 1], 10))


def test_a_batch_has_samples_of_one_bucket_and_each_sample_comes_once() -> None:
    boundaries, sizes = [10, 40], [16, 8, 2]
    batches = list(tdi.BucketBatchSampler(SequentialSampler(range(400)), LENGTHS.tolist(), boundaries, sizes))
    assert sorted(index for batch in batches for index in batch) == list(range(400))
    for batch in batches:
        buckets = {int(np.searchsorted(boundaries, LENGTHS[index], side="right")) for index in batch}
        assert len(buckets) == 1
        assert len(batch) <= sizes[buckets.pop()]
    short = tdi.BucketBatchSampler(SequentialSampler(range(400)), LENGTHS.tolist(), boundaries, sizes, drop_last=True)
    assert {len(batch) for batch in short} == {16, 8, 2}


def test_epochs_are_those_of_the_sampler() -> None:
    shuffle = tdi.ShuffleSampler(400, seed=1)
    sampler = tdi.TokenBatchSampler(shuffle, LENGTHS.tolist(), 400)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    plain = tdi.BucketBatchSampler(range(400), LENGTHS.tolist(), [10], 7)
    plain.set_epoch(3)
    assert list(plain) == list(plain)


@pytest.mark.parametrize(
    ("make_one", "told"),
    [
        (lambda: tdi.TokenBatchSampler(range(3), [1, 1, 1], 0), "max_tokens"),
        (lambda: tdi.TokenBatchSampler(range(3), [1, 1, 1], 5, too_long="cut"), "too_long is 'cut'"),  # type: ignore[arg-type]
        (lambda: list(tdi.TokenBatchSampler(range(3), [1, -2, 1], 5)), "the length of sample 1 is -2"),
        (lambda: tdi.BucketBatchSampler(range(3), [1, 1, 1], [5, 5], 2), "rising lengths"),
        (lambda: tdi.BucketBatchSampler(range(3), [1, 1, 1], [5], [2]), "1 batch sizes for 2 buckets"),
        (lambda: tdi.BucketBatchSampler(range(3), [1, 1, 1], [5], 0), "batch_size"),
    ],
)
def test_bad_arguments_of_batch_samplers_are_told(make_one: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make_one()


# ------------------------------------------------------------------------------------------------ ranks that differ


def differs(at: int, record: Any) -> float:
    """Another cost of one sample on rank 1."""
    return 1.0 + (int(record) == at and dist.get_rank() == 1)


def nan_on_all(index: int) -> float:
    return float("nan") if index == 15 else 1.0


def nan_on_one(index: int) -> float:
    return nan_on_all(index) if dist.get_rank() == 1 else 1.0


def never_equal() -> list[float]:
    return [*COSTS[1:], 7.0 + dist.get_rank()]


def bad_on_one() -> list[float]:
    return COSTS if dist.get_rank() else [-1.0, *COSTS[1:]]


def too_short_on_one() -> list[float]:
    return COSTS[dist.get_rank() :]


@dataclasses.dataclass(frozen=True)
class Case:
    """What is given, and what every rank must be told.

    Args:
      kind: of data.
      balance: the option; a name of a function above that makes it is called.
      error: the class of the error.
      message: a part of it.
      at_step: after how many steps, if it is not raised when the dataset is distributed.
      policy: how the data is divided.
    """

    kind: str
    balance: Any
    error: str
    message: str
    at_step: int | None = None
    policy: str = "DATA"


ON_RANKS: dict[str, Callable[[Path], Any]] = {
    "samples": lambda _: shuffled(tens()),
    "in order": lambda _: DataLoader(tens(), GLOBAL_BATCH),
    "in order, a loader worker": lambda _: DataLoader(tens(), GLOBAL_BATCH, num_workers=1),
    "files": lambda folder: DataLoader(lines_in(folder), GLOBAL_BATCH),
    "iterable": lambda _: DataLoader(stream(), GLOBAL_BATCH),
    "a shard": lambda _: DataLoader(inputs.Table(range(SAMPLES)), GLOBAL_BATCH),
}
CASES = {
    "another array": Case("samples", "never_equal", "RankDisagreement", "the ranks differ in balance"),
    "a bad array on one": Case("samples", "bad_on_one", "BatchingError", "balance[0] is -1.0"),
    "a short array on one": Case("samples", "too_short_on_one", "BatchingError", "has 22 costs"),
    **{
        f"another function, {kind}": Case(
            kind, partial(differs, at), "RankDisagreement", "differ in the costs of the samples at step 1", 1
        )
        for kind, at in (("in order", 15), ("in order, a loader worker", 15), ("files", 150), ("iterable", 150))
    },
    **{
        f"{function.__name__}, {kind}": Case(kind, function, "BatchingError", "the cost of sample 15 is nan", 1)
        for kind in ("in order", "in order, a loader worker")
        for function in (nan_on_all, nan_on_one)
    },
    "batches of each rank's own": Case(
        "files", cost_of_value, "ShardingError", "auto_shard_policy=AutoShardPolicy.DATA", policy="FILE"
    ),
    "all data on each rank": Case("samples", COSTS, "ShardingError", "AutoShardPolicy.DATA)", policy="OFF"),
    "elements on each rank": Case(
        "iterable", cost_of_value, "ShardingError", "each rank has batches of its own", policy="OFF"
    ),
    "the index of a shard": Case("a shard", COSTS, "ShardingError", "counts in a rank's own shard", policy="HINT"),
}


def play(folder: Path) -> dict[str, tuple[int | None, Raised | None]]:
    """One rank: how each case ends, and after how many steps."""
    found: dict[str, tuple[int | None, Raised | None]] = {}
    for name, case in CASES.items():
        balance = globals()[case.balance]() if isinstance(case.balance, str) else case.balance
        options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy[case.policy], balance=balance, prefetch=2)
        strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=30)
        made: list[Any] = []
        data = ON_RANKS[case.kind](folder)
        error = raised(lambda: made.append(strategy.distribute_dataset(data, options)))  # noqa: B023 - called at once
        if error is None:
            with contextlib.closing(made[0]) as loader:
                found[name] = steps_until_raised(loader)
        else:
            found[name] = None, error
    return found


def test_bad_costs_are_the_same_error_on_every_rank_at_the_same_place(tmp_path: Path) -> None:
    lines(tmp_path)
    for rank in run_ranks(2, play, tmp_path, timeout_seconds=120):
        for name, case in CASES.items():
            steps, error = rank[name]
            assert error is not None, name
            assert steps == case.at_step, (name, steps, error)
            assert case.message in error.message, (name, error)
            assert error.kind == case.error, (name, error)
