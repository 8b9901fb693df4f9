"""Over real ranks: several iterators, sub-groups, ranks that do not come, endless sources, and no coordination."""

from __future__ import annotations

import itertools
import time
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

HANG_SECONDS = 20.0  # far above any healthy run, far below the coordination timeouts that these tests leave alone


def scenes_of(world: int, folder: Path) -> dict[str, Callable[[], Any]]:
    if world == 3:
        return {"sub-group": on_a_sub_group, "iter on one rank": iter_on_one_rank_only}
    return {
        "validation": train_and_validate,
        "in turn": two_in_turn,
        "late": late_to_a_step,
        "endless": partial(endless, 1),
        "uncoordinated": uncoordinated,
        "uncoordinated failure": uncoordinated_failure,
        "as far as fits": reads_as_far_as_fits,
        **{f"inference mode, {prefetch}": partial(first_in_inference_mode, prefetch) for prefetch in (None, 0, 4)},
    }


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    return launched((2, 3), scenes_of, tmp_path_factory.mktemp("files"))


def one() -> tdi.Strategy:
    return tdi.Strategy(devices=["cpu"])


def number_range(n: int, batch_size: int) -> Any:
    return DataLoader(range(n), batch_size=batch_size)  # type: ignore[arg-type]


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


def test_two_iterators_are_read_in_turn_with_ends_of_their_own(scenes: Scenes) -> None:
    first, second = scenes(2, "in turn")
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


def test_a_strategy_on_a_sub_group_concerns_its_ranks_alone(scenes: Scenes) -> None:
    assert scenes(3, "sub-group") == [
        None,
        ((2, 0, 2), [[0, 1], [4]], [1, 1], 3),
        ((2, 1, 2), [[2, 3], [5]], [1, 0], 3),
    ]


def iter_on_one_rank_only() -> tuple[Raised | None, float]:
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=4)
    dataset = strategy.distribute_dataset(number_range(6, 4))
    started = time.monotonic()
    error = raised(lambda: next(iter(dataset))) if dist.get_rank() == 0 else None
    waited = time.monotonic() - started
    dist.barrier()
    return error, waited


def test_an_iter_on_one_rank_only_is_an_error_that_names_the_others(scenes: Scenes) -> None:
    (error, waited), *others = scenes(3, "iter on one rank")
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
    options = tdi.InputOptions(prefetch=0, timeout_seconds=4)
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


def test_a_rank_that_stops_asking_is_named_when_the_time_is_up(scenes: Scenes) -> None:
    (steps, error, waited), (other_steps, other_error, _) = scenes(2, "late")
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


def test_infinite_sources_go_on_until_all_ranks_leave(scenes: Scenes) -> None:
    (first, no_length), (second, _) = scenes(2, "endless")
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


def test_without_coordination_each_worker_has_its_own_end(scenes: Scenes) -> None:
    (first, first_loss), (second, second_loss) = scenes(2, "uncoordinated")
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
            raise KeyError("only here")
        yield torch.ones(1)

    dataset = one().distribute_datasets_from_function(dataset_fn, tdi.InputOptions(coordination="off"))
    return steps_until_raised(dataset)


def test_without_coordination_a_failure_stays_on_its_worker(scenes: Scenes) -> None:
    first, (steps, error) = scenes(2, "uncoordinated failure")
    assert first == (2, None)
    assert steps == 1
    assert error is not None
    assert error.kind == "SourceError"
    assert error.cause == "KeyError"


def reads_as_far_as_fits() -> list[int]:
    drawn: list[int] = []

    def numbers() -> Iterator[torch.Tensor]:
        drawn.clear()
        for number in range(40):
            drawn.append(number)
            yield torch.tensor([number])

    found = []
    for prefetch, fits in ((None, None), (None, 4 << dist.get_rank()), (3, 4)):
        dataset = one().distribute_dataset(numbers, tdi.InputOptions(prefetch=prefetch))
        if fits is not None:
            for each in (99, fits, 50):  # as an epoch before did: the largest step counts
                dataset._last.note_fits(each)
        for steps, _ in enumerate(dataset, 1):
            if steps in (1, 10):
                found.append(len(drawn) - steps)
        dataset.close()
    return found


def test_an_epoch_reads_as_far_ahead_as_fits_every_rank_by_the_largest_step_so_far(scenes: Scenes) -> None:
    assert scenes(2, "as far as fits") == [[2, 11, 2, 4, 3, 3]] * 2


def first_in_inference_mode(prefetch: int | None) -> list[Any]:
    """A first batch is only looked at, say to let lazy layers know their sizes; the others are trained on."""
    weight = torch.ones(1, requires_grad=True)
    data = {"x": torch.arange(40.0).reshape(40, 1)}
    batches = iter(one().distribute_dataset(data, tdi.InputOptions(prefetch=prefetch), global_batch_size=4))
    with torch.inference_mode():
        found = [next(batches)["x"].tolist()]
    for batch in batches:
        torch.autograd.backward((batch["x"] * weight).sum())
        found.append(batch["x"].tolist())
    return found


def test_what_was_read_ahead_in_inference_mode_can_be_trained_on(scenes: Scenes) -> None:
    for prefetch in (None, 0, 4):
        parts = scenes(2, f"inference mode, {prefetch}")
        put_together = [list(itertools.chain(*pieces)) for pieces in zip(*parts, strict=True)]
        assert put_together == torch.arange(40.0).reshape(10, 4, 1).tolist()
