"""Over real ranks: one agreed end, batches of size 0, rows without data, and ends that are early or in error."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests import structures
from tests.epochs import Raised, lists, raised
from torchdistinput import readers
from torchdistinput.testing import run_ranks

HANG_SECONDS = 20.0  # far above any healthy run, far below the coordination timeouts that these tests leave alone


def one() -> tdi.Strategy:
    return tdi.Strategy(devices=["cpu"])


def number_range(n: int, batch_size: int) -> Any:
    return DataLoader(range(n), batch_size=batch_size)  # type: ignore[arg-type]


def write(folder: Path, *sizes: int) -> None:
    start = 0
    for number, size in enumerate(sizes):
        (folder / f"{number}.txt").write_text("".join(f"{k}\n" for k in range(start, start + size)))
        start += size


# One agreed end


def uneven_functions(sizes: list[list[int]], local_replicas: int) -> list[Any]:
    """For each prefetch: the sizes delivered at each step on this rank, and the step's own account of them."""
    strategy = tdi.Strategy(devices=["cpu"] * local_replicas)
    found = []
    for prefetch in (0, 1, 2, 5):
        options = tdi.InputOptions(prefetch=prefetch)
        dataset = strategy.distribute_datasets_from_function(structures.batches_of(sizes), options)
        steps = []
        for element in dataset:
            local = tuple(len(piece) for piece in strategy.local_results(element))
            assert local == dataset.step.local_sizes
            steps.append((dataset.step.index, dataset.step.global_size, local))
        found.append(steps)
    return found


UNEVEN = [[[2, 2, 2], [2]], [[1], [3, 3]], [[], [2, 1]], [[2, 2], [2, 2]], [[], []]]


def all_uneven() -> list[list[Any]]:
    return [uneven_functions(sizes, 1) for sizes in UNEVEN]


def test_two_workers_of_different_length_end_together_after_the_longer() -> None:
    for rank, outcomes in enumerate(run_ranks(2, all_uneven)):
        for sizes, found in zip(UNEVEN, outcomes, strict=True):
            steps = max(len(mine) for mine in sizes)
            filled = [[*mine, *[0] * (steps - len(mine))] for mine in sizes]
            want = [(t, filled[0][t] + filled[1][t], (filled[rank][t],)) for t in range(steps)]
            assert found == [want] * 4, sizes


def test_three_workers_with_two_replicas_end_together_after_the_longest() -> None:
    sizes = [[2, 1, 2], [], [3, 3, 3, 3, 1]]
    ranks = run_ranks(3, uneven_functions, sizes, 2)
    local = [[(2, 1), (2, 0), (0, 0)], [(0, 0)] * 3, [(3, 3), (3, 3), (1, 0)]]
    for rank, found in enumerate(ranks):
        want = [(t, sum(sum(local[i][t]) for i in range(3)), local[rank][t]) for t in range(3)]
        assert found == [want] * 4


def uneven_files(folder: str) -> list[list[list[int]]]:
    strategy = one()
    found = []
    for prefetch in (0, 1, 2):
        data = tdi.FileDataset(str(Path(folder) / "*.txt"), readers.text_lines, map_fn=int)
        dataset = strategy.distribute_dataset(data, tdi.InputOptions(prefetch=prefetch), global_batch_size=3)
        found.append([element.tolist() for element in dataset])
    return found


def test_files_of_different_length_end_together_and_each_record_comes_once(tmp_path: Path) -> None:
    write(tmp_path, 7, 0, 2, 5, 1)
    ranks = run_ranks(3, uneven_files, str(tmp_path))
    for epochs in zip(*ranks, strict=True):
        assert len({len(steps) for steps in epochs}) == 1
        assert sorted(value for steps in epochs for step in steps for value in step) == list(range(15))
        assert all(any(step) for step in zip(*epochs, strict=True)), "a step without any sample was delivered"


def test_a_row_without_a_sample_is_passed_over_and_not_counted(tmp_path: Path) -> None:
    write(tmp_path, 3, 0)
    first, second = run_ranks(2, rows_of_batch_size_one, str(tmp_path))
    assert first == [(0, 1, [0]), (1, 1, [1]), (2, 1, [2])]
    assert second == [(0, 1, []), (1, 1, []), (2, 1, [])]


def rows_of_batch_size_one(folder: str) -> list[Any]:
    """G = 1 over two workers: each batch is a row with a sample and a row without."""
    data = tdi.FileDataset(str(Path(folder) / "*.txt"), readers.text_lines, map_fn=int)
    dataset = one().distribute_dataset(data, global_batch_size=1)
    return [(dataset.step.index, dataset.step.global_size, element.tolist()) for element in dataset]


# Batches of size 0


def empties(kinds: list[str]) -> dict[str, Any]:
    """Each kind: worker 0 has two batches, the others none; then one replica of worker 0 has none either."""
    found = {}
    for kind in kinds:
        dataset_fn = structures.batches_of([[2, 1], [], []], structures.KINDS[kind])
        found[kind] = [structures.described(element) for element in one().distribute_datasets_from_function(dataset_fn)]
    return found


def test_a_rank_that_never_saw_a_sample_gets_batches_of_size_0_of_the_right_structure() -> None:
    first, *others = run_ranks(3, empties, list(structures.KINDS))
    for kind, make in structures.KINDS.items():
        assert first[kind] == [structures.described(make(2)), structures.described(make(1))], kind
        for found in others:
            assert found[kind] == [structures.described(make(0))] * 2, kind


def empties_after_samples(kinds: list[str], local_replicas: int) -> dict[str, Any]:
    strategy = tdi.Strategy(devices=["cpu"] * local_replicas)
    found = {}
    for kind in kinds:
        dataset_fn = structures.batches_of([[1, 1, 1], [2]], structures.KINDS[kind])
        dataset = strategy.distribute_datasets_from_function(dataset_fn)
        found[kind] = [
            [structures.described(piece) for piece in strategy.local_results(element)] for element in dataset
        ]
    return found


@pytest.mark.parametrize("local_replicas", [1, 2])
def test_a_rank_that_ran_out_gets_batches_of_size_0_of_the_right_structure(local_replicas: int) -> None:
    first, second = run_ranks(2, empties_after_samples, list(structures.KINDS), local_replicas)
    for kind, make in structures.KINDS.items():
        two, single, none = (structures.described(make(size)) for size in (2, 1, 0))
        if local_replicas == 1:
            assert first[kind] == [[single]] * 3, kind
            assert second[kind] == [[two], [none], [none]], kind
        else:
            assert first[kind] == [[single, single], [single, none]], kind
            assert second[kind] == [[two, none], [none, none]], kind


def parse(line: str) -> dict[str, Any]:
    return {"text": line, "vector": torch.full((2,), float(line)), "n": int(line)}


def empties_of_files(folder: str) -> list[Any]:
    data = tdi.FileDataset(str(Path(folder) / "*.txt"), readers.text_lines, map_fn=parse)
    dataset = one().distribute_dataset(DataLoader(data, batch_size=2))
    return [structures.described(element) for element in dataset]


def test_a_rank_whose_files_are_empty_gets_batches_of_size_0_of_the_right_structure(tmp_path: Path) -> None:
    write(tmp_path, 2, 0)
    first, second = run_ranks(2, empties_of_files, str(tmp_path))
    dtypes = {"vector": ("tensor", "torch.float32", (0, 2)), "n": ("tensor", "torch.int64", (0,))}
    assert len(first) == 2
    assert second == [("dict", {"text": ("list", []), **dtypes})] * 2


def specs_before_any_sample() -> list[Any]:
    dataset = one().distribute_datasets_from_function(structures.batches_of([[2], []], structures.mapping))
    spec = dataset.element_spec
    steps = [structures.described(element) for element in dataset]
    return [{key: (leaf.shape, str(leaf.dtype)) for key, leaf in spec.items()}, len(steps)]


def test_element_spec_is_known_on_a_rank_that_has_no_sample() -> None:
    want = {"x": ((None, 5), "torch.float64"), "y": ((None,), "torch.int32")}
    assert run_ranks(2, specs_before_any_sample) == [[want, 1], [want, 1]]


# Leaving early


def footprint() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def break_often(epochs: int, prefetch: int) -> tuple[list[list[int]], list[tuple[int, int]]]:
    dataset = one().distribute_dataset(number_range(40, 4), tdi.InputOptions(prefetch=prefetch))
    seen, sizes = [], []
    for number in range(epochs):
        rows = []
        for element in dataset:
            rows.append(element.tolist()[0])
            if dataset.step.index == number % 5:
                break
        seen.append(rows)
        sizes.append(footprint())
    return seen, sizes


@pytest.mark.parametrize("prefetch", [0, 2, 4])
def test_a_break_on_all_ranks_is_clean_and_leaves_nothing_behind(prefetch: int) -> None:
    ranks = run_ranks(2, break_often, 20, prefetch)
    for rank, (seen, sizes) in enumerate(ranks):
        assert seen == [[4 * t + 2 * rank for t in range(number % 5 + 1)] for number in range(20)]
        assert max(sizes[10:]) <= max(sizes[:10]), f"threads and files grow: {sizes}"


def break_and_read_on(epochs: int) -> list[list[int]]:
    """A whole epoch after each broken one, on the same group."""
    dataset = one().distribute_dataset(number_range(10, 4))
    found = []
    for _ in range(epochs):
        for _ in dataset:
            break
        found.append([value for element in dataset for value in element.tolist()])
    return found


def test_the_epoch_after_a_break_is_whole() -> None:
    first, second = run_ranks(2, break_and_read_on, 5)
    assert first == [[0, 1, 4, 5, 8]] * 5
    assert second == [[2, 3, 6, 7, 9]] * 5


def leave(rank_that_leaves: int, how: str, prefetch: int) -> tuple[int, Raised | None, float]:
    """This rank's number of steps, its error, and how long the error took to come."""
    data = (torch.arange(4) for _ in range(100_000))
    dataset = one().distribute_dataset(lambda: data, tdi.InputOptions(prefetch=prefetch, timeout_seconds=60))
    steps = 0
    started = time.monotonic()

    def loop() -> None:
        nonlocal steps
        for _ in dataset:
            steps += 1
            if dist.get_rank() == rank_that_leaves and steps == 3:
                break

    def by_close() -> None:
        nonlocal steps
        iterator = iter(dataset)
        for _ in range(3):
            next(iterator)
            steps += 1
        iterator.close()

    leaves = dist.get_rank() == rank_that_leaves
    error = raised(by_close if leaves and how == "close" else loop)
    waited = time.monotonic() - started
    dist.barrier()  # the rank that left lives on: it is not its death that the others see
    return steps, error, waited


@pytest.mark.parametrize(
    ("world", "leaver", "how", "prefetch"),
    [(2, 0, "break", 2), (2, 1, "close", 0), (3, 1, "break", 0), (3, 2, "close", 2)],
)
def test_a_rank_that_leaves_early_gives_the_others_an_error_that_names_it(
    world: int, leaver: int, how: str, prefetch: int
) -> None:
    ranks = run_ranks(world, leave, leaver, how, prefetch)
    for rank, (steps, error, waited) in enumerate(ranks):
        if rank == leaver:
            assert (steps, error) == (3, None)
            continue
        assert error is not None
        assert error.kind == "RankLost"
        assert f"rank {leaver}" in error.message or f"[{leaver}]" in error.message
        assert 3 <= steps <= 3 + max(prefetch, 1) + 1
        assert waited < HANG_SECONDS


def interrupted(rank_that_stops: int) -> Any:
    """One rank's loop is interrupted, as by Ctrl-C, and its traceback is kept: only ``close`` tells the others."""
    dataset = one().distribute_dataset(lambda: (torch.arange(4) for _ in range(100_000)))
    steps = 0
    started = time.monotonic()

    def loop() -> None:
        nonlocal steps
        for _ in dataset:
            steps += 1
            if steps == 3 and dist.get_rank() == rank_that_stops:
                raise KeyboardInterrupt
            time.sleep(0.001)

    if dist.get_rank() == rank_that_stops:
        with pytest.raises(KeyboardInterrupt) as kept:
            loop()
        assert kept.traceback is not None  # the traceback keeps the iterator alive, as an interactive session does
        dataset.close()
        return None
    return raised(loop), time.monotonic() - started


def test_an_iterator_kept_alive_by_a_traceback_is_announced_at_close() -> None:
    first, second = run_ranks(2, interrupted, 1)
    assert second is None
    error, waited = first
    assert error.kind == "RankLost"
    assert "rank 1" in error.message or "[1]" in error.message
    assert waited < HANG_SECONDS


# Errors at the same step


class BrokenError(Exception):
    """What the user's data raises."""


def failing(step: int, on: list[int], way: str, prefetch: int) -> tuple[int, Raised | None]:
    """Batches until ``step``, then an error on the ranks ``on``: in a dataset function, or in a map-style dataset."""

    def dataset_fn(context: tdi.InputContext) -> Iterator[torch.Tensor]:
        for t in itertools.count():
            if t == step and context.input_pipeline_id in on:
                raise BrokenError(f"no batch {t} here")
            yield torch.arange(2)

    strategy = one()
    options = tdi.InputOptions(prefetch=prefetch)
    if way == "function":
        dataset = strategy.distribute_datasets_from_function(dataset_fn, options)
    else:
        workers = 1 if way == "workers" else 0
        data = DataLoader(FailsAt(step, on), batch_size=2 * dist.get_world_size(), num_workers=workers)
        dataset = strategy.distribute_dataset(data, options)
    steps = 0

    def loop() -> None:
        nonlocal steps
        for _ in dataset:
            steps += 1

    error = raised(loop)
    return steps, error


class FailsAt(torch.utils.data.Dataset[int]):
    """A map-style dataset that fails for the samples of one step, on some ranks."""

    def __init__(self, step: int, on: list[int]) -> None:
        self.step = step
        self.on = on

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        if index // (2 * dist.get_world_size()) == self.step and dist.get_rank() in self.on:
            raise BrokenError(f"sample {index} is broken")
        return index


@pytest.mark.parametrize(
    ("world", "step", "on", "way", "prefetch"),
    [
        (2, 3, [1], "function", 2),
        (2, 0, [0], "function", 0),
        (2, 4, [1], "map-style", 2),
        (2, 2, [0], "map-style", 0),
        (2, 3, [1], "workers", 2),
        (3, 5, [0, 2], "function", 4),
    ],
)
def test_an_error_at_a_step_lets_every_rank_deliver_the_steps_before_it(
    world: int, step: int, on: list[int], way: str, prefetch: int
) -> None:
    for rank, (steps, error) in enumerate(run_ranks(world, failing, step, on, way, prefetch)):
        assert steps == step
        assert error is not None
        assert error.kind == "SourceError"
        assert "BrokenError" in error.message
        for failed in on:
            assert f"rank {failed}" in error.message or f"{failed}" in error.message
        assert (error.cause == "BrokenError") == (rank in on)


def after_the_error() -> list[Any]:
    """An epoch that fails on rank 0, then the same strategy with other data."""
    strategy = one()
    data = DataLoader(FailsAt(1, [0]), batch_size=4)
    error = raised(lambda: list(strategy.distribute_dataset(data)))
    rest = [element.tolist() for element in strategy.distribute_dataset(number_range(6, 4))]
    return [None if error is None else error.kind, rest]


def test_a_strategy_is_of_use_after_an_error() -> None:
    assert run_ranks(2, after_the_error) == [["SourceError", [[0, 1], [4]]], ["SourceError", [[2, 3], [5]]]]


def fails_when_opened() -> list[Any]:
    """The dataset function itself raises, on one rank."""

    def dataset_fn(context: tdi.InputContext) -> Any:
        if context.input_pipeline_id == 1:
            raise BrokenError("no data here")
        return [torch.arange(2)]

    return [raised(lambda: list(one().distribute_datasets_from_function(dataset_fn)))]


def test_a_dataset_function_that_raises_is_an_error_on_every_rank() -> None:
    for (error,) in run_ranks(2, fails_when_opened):
        assert error is not None
        assert error.is_input_error
        assert "BrokenError" in error.message
        assert "no data here" in error.message


# Several iterators, groups and ways to coordinate


def train_and_validate() -> tuple[list[Any], list[Any]]:
    strategy = one()
    train = iter(strategy.distribute_dataset(number_range(12, 4)))
    validation = strategy.distribute_dataset(number_range(5, 4))
    seen, validated = [], []
    for element in train:
        seen.append(element.tolist())
        validated.append([batch.tolist() for batch in validation])
    return seen, validated


def test_a_validation_iterator_lives_beside_a_training_iterator() -> None:
    first, second = run_ranks(2, train_and_validate)
    assert first == ([[0, 1], [4, 5], [8, 9]], [[[0, 1], [4]]] * 3)
    assert second == ([[2, 3], [6, 7], [10, 11]], [[[2, 3], []]] * 3)


def two_in_turn() -> list[Any]:
    strategy = one()
    left = iter(strategy.distribute_dataset(number_range(8, 4)))
    right = iter(strategy.distribute_dataset(number_range(12, 4)))
    found = []
    for _ in range(4):
        for iterator in (left, right):
            optional = iterator.get_next_as_optional()
            found.append(optional.get_value().tolist() if optional.has_value() else None)
    return found


def test_two_iterators_are_read_in_turn_with_ends_of_their_own() -> None:
    first, second = run_ranks(2, two_in_turn)
    assert first == [[0, 1], [0, 1], [4, 5], [4, 5], None, [8, 9], None, None]
    assert second == [[2, 3], [2, 3], [6, 7], [6, 7], None, [10, 11], None, None]


def on_a_sub_group() -> Any:
    group = dist.new_group([1, 2])
    found = None
    if dist.get_rank() != 0:
        strategy = tdi.Strategy(devices=["cpu"], process_group=group)
        topology = (strategy.num_input_pipelines, strategy.input_pipeline_id, strategy.num_replicas_in_sync)
        batches = [element.tolist() for element in strategy.distribute_dataset(number_range(6, 4))]
        sizes = [[1, 1], [1]]
        counts = [len(element) for element in strategy.distribute_datasets_from_function(structures.batches_of(sizes))]
        total = strategy.reduce("SUM", torch.tensor(dist.get_rank()), axis=None)
        found = (topology, batches, counts, int(total))
    dist.barrier()
    return found


def test_a_strategy_on_a_sub_group_concerns_its_ranks_alone() -> None:
    assert run_ranks(3, on_a_sub_group) == [
        None,
        ((2, 0, 2), [[0, 1], [4]], [1, 1], 3),
        ((2, 1, 2), [[2, 3], [5]], [1, 0], 3),
    ]


def iter_on_one_rank_only() -> tuple[Raised | None, float]:
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=3)
    dataset = strategy.distribute_dataset(number_range(6, 4))
    started = time.monotonic()
    error = raised(lambda: next(iter(dataset))) if dist.get_rank() == 0 else None
    waited = time.monotonic() - started
    dist.barrier()
    return error, waited


def test_an_iter_on_one_rank_only_is_an_error_that_names_the_others() -> None:
    (error, waited), *others = run_ranks(3, iter_on_one_rank_only)
    assert [found for found, _ in others] == [None, None]
    assert error is not None
    assert error.kind == "CoordinationTimeout"
    assert "1" in error.message
    assert "2" in error.message
    assert "rank" in error.message
    assert waited < HANG_SECONDS


def late_to_a_step() -> tuple[int, Raised | None, float]:
    """Rank 1 stops asking for batches without leaving: the others name it when the time is up."""
    strategy = tdi.Strategy(devices=["cpu"])
    options = tdi.InputOptions(prefetch=0, timeout_seconds=3)
    iterator = iter(strategy.distribute_dataset(number_range(40, 4), options))
    steps = 0
    started = time.monotonic()

    def loop() -> None:
        nonlocal steps
        while dist.get_rank() == 0 or steps < 2:
            next(iterator)
            steps += 1

    error = raised(loop)
    waited = time.monotonic() - started
    dist.barrier()
    return steps, error, waited


def test_a_rank_that_stops_asking_is_named_when_the_time_is_up() -> None:
    (steps, error, waited), (other_steps, other_error, _) = run_ranks(2, late_to_a_step)
    assert (other_steps, other_error) == (2, None)
    assert steps >= 2
    assert error is not None
    assert error.kind == "CoordinationTimeout"
    assert "rank 1" in error.message or "[1]" in error.message
    assert waited < HANG_SECONDS


def endless(local_replicas: int) -> tuple[list[Any], Raised | None]:
    strategy = tdi.Strategy(devices=["cpu"] * local_replicas)
    dataset = strategy.distribute_dataset(lambda: (torch.arange(4) + 4 * t for t in itertools.count()))
    found = []
    for element in dataset:
        found.append([lists(piece) for piece in strategy.local_results(element)])
        if len(found) == 10:
            break
    no_length = raised(lambda: len(dataset))
    functions = strategy.distribute_datasets_from_function(lambda context: itertools.repeat(torch.ones(3)))
    assert len(list(itertools.islice(functions, 10))) == 10
    dataset.close()
    functions.close()
    return found, no_length


def test_infinite_sources_go_on_until_all_ranks_leave() -> None:
    (first, no_length), (second, _) = run_ranks(2, endless, 1)
    assert first == [[[4 * t, 4 * t + 1]] for t in range(10)]
    assert second == [[[4 * t + 2, 4 * t + 3]] for t in range(10)]
    assert no_length is not None
    assert no_length.kind == "TypeError"


def uncoordinated() -> tuple[list[Any], Raised | None]:
    strategy = one()
    options = tdi.InputOptions(coordination="off")
    dataset = strategy.distribute_datasets_from_function(structures.batches_of([[2, 2, 2], [1]]), options)
    found = []
    loss = None
    for element in dataset:
        found.append((len(element), dataset.step.index, dataset.step.global_size, dataset.step.local_sizes))
        loss = raised(lambda: tdi.average_loss(torch.ones(2), dataset.step))
    return found, loss


def test_without_coordination_each_worker_has_its_own_end() -> None:
    (first, first_loss), (second, second_loss) = run_ranks(2, uncoordinated)
    assert first == [(2, t, None, (2,)) for t in range(3)]
    assert second == [(1, 0, None, (1,))]
    for loss in (first_loss, second_loss):
        assert loss is not None
        assert "coordination" in loss.message


def uncoordinated_failure() -> tuple[int, Raised | None]:
    """Without coordination a failure is this worker's own."""

    def dataset_fn(context: tdi.InputContext) -> Iterator[torch.Tensor]:
        yield torch.ones(1)
        if context.input_pipeline_id == 1:
            raise BrokenError("only here")
        yield torch.ones(1)

    dataset = one().distribute_datasets_from_function(dataset_fn, tdi.InputOptions(coordination="off"))
    steps = 0

    def loop() -> None:
        nonlocal steps
        for _ in dataset:
            steps += 1

    error = raised(loop)
    return steps, error


def test_without_coordination_a_failure_stays_on_its_worker() -> None:
    first, (steps, error) = run_ranks(2, uncoordinated_failure)
    assert first == (2, None)
    assert steps == 1
    assert error is not None
    assert error.kind == "SourceError"
    assert error.cause == "BrokenError"


# Beside training


def train(prefetch: int) -> tuple[list[float], list[float]]:
    """DDP over data of uneven length on the default group, with collectives of the training between the steps."""
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(3, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sizes = [[3, 2, 3, 1, 2, 3], [2, 1]]
    dataset = one().distribute_datasets_from_function(
        structures.batches_of(sizes, features), tdi.InputOptions(prefetch=prefetch)
    )
    totals = []
    for _ in range(3):
        for x in dataset:
            loss = tdi.average_loss(model(x).squeeze(1).square(), dataset.step)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            total = loss.detach().clone()
            dist.all_reduce(total)
            optimizer.step()
            totals.append(total.item())
    return totals, [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def train_twice() -> list[Any]:
    return [train(prefetch) for prefetch in (0, 2)]


def features(n: int) -> torch.Tensor:
    return torch.arange(3 * n, dtype=torch.float64).reshape(n, 3) / 10


def test_collectives_of_the_training_and_the_coordination_do_not_mix() -> None:
    first, second = run_ranks(2, train_twice)
    assert first == second
    assert first[0] == first[1]
    assert len(first[0][0]) == 18
