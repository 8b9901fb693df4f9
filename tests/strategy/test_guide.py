"""The examples of TensorFlow's distributed input guide, in one process with CPU replicas for its devices."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from tests.oracle.test_in_process import fake_strategy
from tests.support.collectives import FakeCollectives
from tests.support.epochs import epoch
from torchdistinput.testing import run_ranks


def replicas(count: int) -> tdi.Strategy:
    return tdi.Strategy(devices=["cpu"] * count)


def number_range(n: int, batch_size: int) -> Any:
    return DataLoader(range(n), batch_size=batch_size)  # type: ignore[arg-type]


def ones_and_ones(n: int) -> Any:
    return DataLoader(TensorDataset(torch.ones(n, 1), torch.ones(n, 1)), batch_size=16)


def train_step(inputs: Any) -> torch.Tensor:
    features, labels = inputs
    return torch.as_tensor(labels - 0.3 * features)


def test_a_for_loop_runs_the_step_on_every_replica() -> None:
    strategy = replicas(2)
    shapes = []
    for element in strategy.distribute_dataset(ones_and_ones(100)):
        losses = strategy.local_results(strategy.run(train_step, args=(element,)))
        assert all(torch.allclose(loss, torch.tensor(0.7)) for loss in losses)
        shapes.append([tuple(loss.shape) for loss in losses])
    assert shapes == [[(8, 1), (8, 1)]] * 6 + [[(2, 1), (2, 1)]]


def test_an_explicit_iterator_runs_a_fixed_number_of_steps_in_each_of_many_epochs() -> None:
    strategy = replicas(2)
    dataset = strategy.distribute_dataset(ones_and_ones(100))
    losses = []
    for number in range(10):
        iterator = iter(dataset)
        for _ in range(5):
            element = next(iterator) if number % 2 else iterator.get_next()
            losses.append(strategy.run(train_step, args=(element,)))
        assert iterator.step.epoch == number
    assert len(losses) == 50
    dataset.close()


@pytest.mark.parametrize("count", [1, 2])
def test_get_next_at_the_end_raises_out_of_range_and_again_on_each_further_call(count: int) -> None:
    iterator = iter(replicas(count).distribute_dataset(number_range(6, 4)))
    iterator.get_next()
    iterator.get_next()
    for _ in range(3):
        with pytest.raises(tdi.OutOfRangeError):
            iterator.get_next()
    with pytest.raises(StopIteration):
        next(iterator)
    assert not iterator.get_next_as_optional().has_value()
    assert issubclass(tdi.OutOfRangeError, StopIteration)


@pytest.mark.parametrize("count", [2, 4])
def test_a_loop_of_fixed_length_ends_early_by_get_next_as_optional(count: int) -> None:
    strategy = replicas(count)
    iterator = iter(strategy.distribute_dataset(number_range(9, 4)))
    found = []
    for _ in range(5):
        optional = iterator.get_next_as_optional()
        if not optional.has_value():
            break
        results = strategy.run(lambda x: x, args=(optional.get_value(),))
        found.append([result.tolist() for result in strategy.local_results(results)])
    assert (
        found
        == {
            2: [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]],
            4: [[[0], [1], [2], [3]], [[4], [5], [6], [7]], [[8], [], [], []]],
        }[count]
    )
    for _ in range(2):
        optional = iterator.get_next_as_optional()
        assert not optional.has_value()
        with pytest.raises(ValueError, match="value"):
            optional.get_value()


def leaf_specs(spec: Any) -> list[tdi.TensorSpec]:
    """The spec of one replica's leaves, in order."""
    if isinstance(spec, tdi.PerReplica):
        return leaf_specs(spec.values[0])
    if isinstance(spec, tdi.TensorSpec):
        return [spec]
    return [leaf for child in (spec.values() if isinstance(spec, dict) else spec) for leaf in leaf_specs(child)]


@pytest.mark.parametrize("count", [1, 2])
def test_element_spec_describes_a_replicas_part_and_consumes_nothing(count: int) -> None:
    strategy = replicas(count)
    dataset = strategy.distribute_dataset(ones_and_ones(100))
    for spec in (dataset.element_spec, iter(dataset).element_spec):
        found = leaf_specs(spec)
        assert [(leaf.shape[1:], leaf.dtype) for leaf in found] == [((1,), torch.float32)] * 2
        assert all(leaf.shape[0] is None for leaf in found), "the last batch is smaller, so no size is certain"
    dataset.close()


@pytest.mark.parametrize("count", [1, 2])
def test_element_spec_opens_the_iterator_that_the_next_iter_returns(count: int) -> None:
    strategy = replicas(count)
    opened = []

    def numbers() -> Iterator[torch.Tensor]:
        opened.append(True)
        yield from (torch.arange(4), torch.arange(4, 8))

    dataset = strategy.distribute_dataset(numbers)
    assert [leaf.dtype for leaf in leaf_specs(dataset.element_spec)] == [torch.int64]
    assert leaf_specs(dataset.element_spec) == leaf_specs(dataset.element_spec)
    assert [number for step in epoch(strategy, dataset) for piece in step for number in piece] == list(range(8))
    assert len(opened) == 1


def predict(index: torch.Tensor, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return index, 2 * inputs


def among_threads(world: int, count: int, play: Callable[[tdi.Strategy], Any]) -> list[Any]:
    """What each rank of a world of threads returns, with so many replicas each."""
    ranks = FakeCollectives(world, timeout_seconds=20)
    found = ranks.run(lambda rank: play(fake_strategy(ranks, rank, count)))
    assert not [each for each in found if isinstance(each, BaseException)], found
    return found


def predictions(strategy: tdi.Strategy) -> tuple[dict[int, int], dict[int, int]]:
    """Of this rank's replicas, and gathered of all."""
    dataset = strategy.distribute_dataset(DataLoader(list(enumerate(range(24))), batch_size=7))  # type: ignore[arg-type]
    mine: dict[int, int] = {}
    gathered: dict[int, int] = {}
    for index, inputs in dataset:
        output_index, outputs = strategy.run(predict, args=(index, inputs))
        for indices, values in zip(strategy.local_results(output_index), strategy.local_results(outputs), strict=True):
            mine.update(zip(indices.tolist(), values.tolist(), strict=True))
        everyone = (strategy.gather(each, axis=0).tolist() for each in (output_index, outputs))
        gathered.update(zip(*everyone, strict=True))
    return mine, gathered


@pytest.mark.parametrize(("world", "count"), [(1, 1), (1, 5), (2, 1), (2, 2), (3, 1)])
def test_predictions_are_ordered_by_an_index_in_the_batch(world: int, count: int) -> None:
    ranks = among_threads(world, count, predictions)
    assert {index: value for mine, _ in ranks for index, value in mine.items()} == {k: 2 * k for k in range(24)}
    assert sum(len(mine) for mine, _ in ranks) == 24
    assert [list(gathered.items()) for _, gathered in ranks] == [[(k, 2 * k) for k in range(24)]] * world


@pytest.mark.parametrize("policy", ["FILE", "DATA"])
def test_records_are_shuffled_before_they_are_parsed_and_only_the_kept_ones_are_parsed(
    policy: str, tmp_path: Path
) -> None:
    for file in range(2):
        (tmp_path / f"{file}.txt").write_text("".join(f"{10 * file + record}\n" for record in range(10)))

    def read(strategy: tdi.Strategy) -> tuple[list[int], int]:
        parsed: list[str] = []

        def parse(line: str) -> int:
            parsed.append(line)
            return int(line)

        data = tdi.FileDataset(f"{tmp_path}/*.txt", tdi.readers.text_lines, map_fn=parse, shuffle_buffer=5, seed=2)
        options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy[policy])
        dataset = strategy.distribute_dataset(data, options, global_batch_size=4)
        return [value for element in dataset for value in element.tolist()], len(parsed)

    ranks = among_threads(2, 1, read)
    assert sorted(value for values, _ in ranks for value in values) == list(range(20))
    assert all(values != sorted(values) for values, _ in ranks)
    assert [count for _, count in ranks] == [10, 10]


@pytest.mark.parametrize("count", [1, 2])
def test_batches_come_from_a_generator_that_never_ends(count: int) -> None:
    def input_gen() -> Iterator[Any]:
        random = np.random.default_rng(1)
        while True:
            yield random.random(4)

    strategy = replicas(count)
    iterator = iter(strategy.distribute_dataset(input_gen))
    wanted = list(itertools.islice(input_gen(), 4))
    for batch in wanted:
        result = strategy.local_results(strategy.run(lambda x: x, args=(next(iterator),)))
        assert [value.dtype for value in result] == [torch.float64] * count
        assert np.concatenate([value.numpy() for value in result]).tolist() == batch.tolist()
    iterator.close()


def test_a_dataset_function_gets_its_context_and_its_batches_go_to_the_replicas_in_turn() -> None:
    strategy = replicas(2)
    contexts: list[tdi.InputContext] = []

    def dataset_fn(context: tdi.InputContext) -> Any:
        contexts.append(context)
        batch_size = context.get_per_replica_batch_size(4)
        return number_range(9, batch_size)

    dataset = strategy.distribute_datasets_from_function(dataset_fn)
    assert epoch(strategy, dataset) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]]
    assert [(c.num_input_pipelines, c.input_pipeline_id, c.num_replicas_in_sync) for c in contexts] == [(1, 0, 2)]


def test_the_batch_dimension_of_element_spec_is_the_piece_size_where_every_batch_is_full() -> None:
    data: Any = DataLoader(range(10), batch_size=4, drop_last=True)  # type: ignore[arg-type]
    for count, size in ((1, 4), (2, 2), (4, 1)):
        with replicas(count).distribute_dataset(data) as dataset:
            assert [leaf.shape for leaf in leaf_specs(dataset.element_spec)] == [(size,)]
    with replicas(3).distribute_dataset(data) as dataset:
        assert [leaf.shape for leaf in leaf_specs(dataset.element_spec)] == [(None,)]


def test_a_dataset_function_may_be_called_once_per_replica() -> None:
    strategy = replicas(2)

    def dataset_fn(context: tdi.InputContext) -> Any:
        rows = range(context.input_pipeline_id, 7, context.num_input_pipelines)
        return DataLoader(list(rows), batch_size=2)  # type: ignore[arg-type]

    options = tdi.InputOptions(replication_mode=tdi.InputReplicationMode.PER_REPLICA)
    dataset = strategy.distribute_datasets_from_function(dataset_fn, options)
    assert epoch(strategy, dataset) == [[[0, 2], [1, 3]], [[4, 6], [5]]]


SETTINGS = [
    (prefetch, persistent, read_before)
    for prefetch in (0, 32)
    for persistent in (True, False)
    for read_before in (True, False)
]


def at_the_first_next(loader: Any) -> Iterator[Any]:
    """Begins an epoch of torch's loader where this library begins one."""
    yield from loader


def drawn(prefetch: int | None, *, persistent: bool, read_before: bool) -> list[Any]:
    """The first batch of a shuffled loader that is read beside a drop-in with loader workers; a number drawn after it.

    Args:
      prefetch: of the shuffled one; ``None`` for torch's loaders alone.
      persistent: whether the workers of the drop-in live on.
      read_before: whether it was read once before.
    """
    torch.manual_seed(301)
    data = TensorDataset(torch.arange(1))
    shuffled: Any = DataLoader(TensorDataset(torch.arange(108)), batch_size=5, shuffle=True)
    beside: Any = DataLoader(data, batch_size=4, num_workers=1, persistent_workers=persistent)
    if prefetch is not None:
        beside = tdi.DataLoader(data, batch_size=4, num_workers=1, persistent_workers=persistent)
        shuffled = tdi.Strategy(["cpu"]).distribute_dataset(shuffled, tdi.InputOptions(prefetch=prefetch))
    if read_before:
        list(beside)
    (batch,), _ = next(zip(at_the_first_next(shuffled), at_the_first_next(beside), strict=True))
    return [batch.tolist(), torch.rand(1).item()]


def on_ranks() -> list[list[Any]]:
    return [drawn(prefetch, persistent=lives, read_before=read) for prefetch, lives, read in SETTINGS]


@functools.cache
def by_torch(*, persistent: bool, read_before: bool) -> list[Any]:
    return drawn(None, persistent=persistent, read_before=read_before)


@pytest.mark.parametrize("world", [1, 3])
def test_loaders_of_different_strategies_that_are_read_together_draw_as_torchs(world: int) -> None:
    ranks = run_ranks(world, on_ranks)
    for number, (_, persistent, read_before) in enumerate(SETTINGS):
        batch, after = by_torch(persistent=persistent, read_before=read_before)
        assert [value for rank in ranks for value in rank[number][0]] == batch
        assert {rank[number][1] for rank in ranks} == {after}
