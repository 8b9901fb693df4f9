"""Over real ranks: one agreed end, batches of size 0, errors at one step; and several iterators, ends of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support import structures
from tests.support.epochs import Raised, lists, raised, steps_until_raised
from tests.support.launched import Scenes, launched


def one() -> tdi.Strategy:
    return tdi.Strategy(devices=["cpu"])


def number_range(n: int, batch_size: int) -> Any:
    return DataLoader(range(n), batch_size=batch_size)  # type: ignore[arg-type]


FAILING: list[tuple[int, int, list[int], int]] = [  # world, step, on which ranks, prefetch
    (2, 3, [1], 2),
    (2, 0, [0], 0),
    (3, 5, [0, 2], 4),
]


def scenes_of(world: int, folder: Path) -> dict[str, Callable[[], Any]]:
    errors = {f"{case}": partial(failing, *case[1:]) for case in FAILING if case[0] == world}
    if world == 3:
        return {"empties": empties, "sub-group": on_a_sub_group, **errors}
    return {
        "specs": specs_before_any_sample,
        **errors,
        "fails when opened": fails_when_opened,
        "validation": train_and_validate,
        "endless": endless,
        "uncoordinated": uncoordinated,
        "as far as fits": reads_as_far_as_fits,
    }


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    return launched((2, 3), scenes_of, tmp_path_factory.mktemp("files"))


# Batches of size 0


def empties() -> dict[str, Any]:
    """Each kind: worker 0 has two batches, the others none; then one replica of worker 0 has none either."""
    found = {}
    for kind, make in structures.EMPTIABLE.items():
        dataset_fn = structures.batches_of([[2, 1], [], []], make)
        found[kind] = [structures.described(element) for element in one().distribute_datasets_from_function(dataset_fn)]
    return found


def test_a_rank_that_never_saw_a_sample_gets_batches_of_size_0_of_the_right_structure(scenes: Scenes) -> None:
    first, *others = scenes(3, "empties")
    for kind, make in structures.EMPTIABLE.items():
        assert first[kind] == [structures.described(make(2)), structures.described(make(1))], kind
        for found in others:
            assert found[kind] == [structures.described(make(0))] * 2, kind


def specs_before_any_sample() -> list[Any]:
    dataset = one().distribute_datasets_from_function(structures.batches_of([[2], []], structures.mapping))
    spec = dataset.element_spec
    steps = [structures.described(element) for element in dataset]
    return [{key: (leaf.shape, str(leaf.dtype)) for key, leaf in spec.items()}, len(steps)]


def test_element_spec_is_known_on_a_rank_that_has_no_sample(scenes: Scenes) -> None:
    want = {"x": ((None, 5), "torch.float64"), "y": ((None,), "torch.int32")}
    assert scenes(2, "specs") == [[want, 1], [want, 1]]


# Errors at the same step


class BrokenError(Exception):
    """What the user's data raises."""


def failing(step: int, on: list[int], prefetch: int) -> tuple[int, Raised | None]:
    """Batches of a dataset function until ``step``, then an error on the ranks ``on``."""

    def dataset_fn(context: tdi.InputContext) -> Iterator[torch.Tensor]:
        for t in itertools.count():
            if t == step and context.input_pipeline_id in on:
                raise BrokenError(f"no batch {t} here")
            yield torch.arange(2)

    return steps_until_raised(one().distribute_datasets_from_function(dataset_fn, tdi.InputOptions(prefetch=prefetch)))


@pytest.mark.parametrize("case", FAILING, ids=str)
def test_an_error_at_a_step_lets_every_rank_deliver_the_steps_before_it(
    case: tuple[int, int, list[int], int], scenes: Scenes
) -> None:
    world, step, on, *_ = case
    for rank, (steps, error) in enumerate(scenes(world, f"{case}")):
        assert steps == step
        assert error is not None
        assert error.kind == "SourceError"
        assert "BrokenError" in error.message
        for failed in on:
            assert f"rank {failed}" in error.message or f"{failed}" in error.message
        assert (error.cause == "BrokenError") == (rank in on)


def fails_when_opened() -> list[Any]:
    """The dataset function itself raises, on one rank."""

    def dataset_fn(context: tdi.InputContext) -> Any:
        if context.input_pipeline_id == 1:
            raise BrokenError("no data here")
        return [torch.arange(2)]

    return [raised(lambda: list(one().distribute_datasets_from_function(dataset_fn)))]


def test_a_dataset_function_that_raises_is_an_error_on_every_rank(scenes: Scenes) -> None:
    for (error,) in scenes(2, "fails when opened"):
        assert error is not None
        assert error.is_input_error
        assert "BrokenError" in error.message
        assert "no data here" in error.message


# Several iterators, and ends of their own


def train_and_validate() -> tuple[list[Any], list[Any]]:
    strategy = one()
    train = iter(strategy.distribute_dataset(number_range(12, 4)))
    validation = strategy.distribute_dataset(number_range(5, 4))
    seen, validated = [], []
    for element in train:
        seen.append(element.tolist())
        validated.append([batch.tolist() for batch in validation])
    return seen, validated


def test_a_validation_iterator_lives_beside_a_training_iterator(scenes: Scenes) -> None:
    first, second = scenes(2, "validation")
    assert first == ([[0, 1], [4, 5], [8, 9]], [[[0, 1], [4]]] * 3)
    assert second == ([[2, 3], [6, 7], [10, 11]], [[[2, 3], []]] * 3)


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


def test_a_strategy_on_a_sub_group_concerns_its_ranks_alone(scenes: Scenes) -> None:
    assert scenes(3, "sub-group") == [
        None,
        ((2, 0, 2), [[0, 1], [4]], [1, 1], 3),
        ((2, 1, 2), [[2, 3], [5]], [1, 0], 3),
    ]


def endless() -> tuple[list[Any], Raised | None]:
    dataset = one().distribute_dataset(lambda: (torch.arange(4) + 4 * t for t in itertools.count()))
    found = [lists(element) for element in itertools.islice(dataset, 10)]
    no_length = raised(lambda: len(dataset))
    dataset.close()
    return found, no_length


def test_infinite_sources_go_on_until_all_ranks_leave(scenes: Scenes) -> None:
    for rank, (found, no_length) in enumerate(scenes(2, "endless")):
        assert found == [[4 * t + 2 * rank, 4 * t + 2 * rank + 1] for t in range(10)]
        assert no_length.kind == "TypeError"


def uncoordinated() -> tuple[list[Any], Raised | None, Raised | None]:
    """Rank 1 has one step, and then fails."""

    def dataset_fn(context: tdi.InputContext) -> Iterator[torch.Tensor]:
        yield torch.ones(2)
        if context.input_pipeline_id == 1:
            raise KeyError("only here")
        yield torch.ones(1)

    dataset = one().distribute_datasets_from_function(dataset_fn, tdi.InputOptions(coordination="off"))
    found = []

    def loop() -> None:
        for element in dataset:
            found.append((len(element), dataset.step.index, dataset.step.global_size, dataset.step.local_sizes))

    error = raised(loop)
    return found, error, raised(lambda: tdi.average_loss(torch.ones(2), dataset.step))


def test_without_coordination_each_rank_has_its_own_end_and_failure(scenes: Scenes) -> None:
    (first, nothing, first_loss), (second, error, second_loss) = scenes(2, "uncoordinated")
    assert first == [(2, 0, None, (2,)), (1, 1, None, (1,))]
    assert (second, nothing) == (first[:1], None)
    assert (error.kind, error.cause) == ("SourceError", "KeyError")
    assert "coordination" in first_loss.message
    assert "coordination" in second_loss.message


def reads_as_far_as_fits() -> list[int]:
    drawn: list[int] = []

    def numbers(size: int) -> Iterator[torch.Tensor]:
        drawn.clear()
        for number in range(40):
            drawn.append(number)
            yield torch.full((1, size), number, dtype=torch.uint8)

    found = []
    for prefetch, size in ((None, 1), (None, 12 << 20), (3, 12 << 20)):  # bytes of a step on rank 0; none on rank 1
        dataset = one().distribute_dataset(partial(numbers, size), tdi.InputOptions(prefetch=prefetch))
        for steps, _ in enumerate(dataset, 1):
            if steps in (1, 10):
                found.append(len(drawn) - steps)
        dataset.close()
    return found


def test_an_epoch_reads_as_far_ahead_as_fits_every_rank_by_its_first_step(scenes: Scenes) -> None:
    assert scenes(2, "as far as fits") == [[2, 11, 2, 4, 3, 3]] * 2
