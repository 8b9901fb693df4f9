"""Over real ranks: one agreed end, batches of size 0, rows without data, errors at one step; and training."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support import structures
from tests.support.epochs import Raised, raised, steps_until_raised
from tests.support.launched import Scenes, launched
from torchdistinput import readers


def one() -> tdi.Strategy:
    return tdi.Strategy(devices=["cpu"])


def number_range(n: int, batch_size: int) -> Any:
    return DataLoader(range(n), batch_size=batch_size)  # type: ignore[arg-type]


def write(folder: Path, *sizes: int) -> None:
    start = 0
    for number, size in enumerate(sizes):
        (folder / f"{number}.txt").write_text("".join(f"{k}\n" for k in range(start, start + size)))
        start += size


FILES = {"uneven": (7, 0, 2, 5, 1), "one row": (3, 0), "one rank": (2, 0)}
FAILING: list[tuple[int, int, list[int], str, int]] = [  # world, step, on which ranks, in what, prefetch
    (2, 3, [1], "function", 2),
    (2, 0, [0], "function", 0),
    (2, 4, [1], "map-style", 2),
    (2, 2, [0], "map-style", 0),
    (2, 3, [1], "workers", 2),
    (3, 5, [0, 2], "function", 4),
]


def scenes_of(world: int, folder: Path) -> dict[str, Callable[[], Any]]:
    errors = {f"{case}": partial(failing, *case[1:]) for case in FAILING if case[0] == world}
    if world == 3:
        return {
            "uneven": lambda: uneven_functions(THREE, 2),
            "files": lambda: uneven_files(folder / "uneven"),
            "empties": empties,
            **errors,
        }
    return {
        "uneven": lambda: [uneven_functions(sizes, 1) for sizes in UNEVEN],
        "rows": lambda: rows_of_batch_size_one(folder / "one row"),
        "empties after samples, 1": lambda: empties_after_samples(1),
        "empties after samples, 2": lambda: empties_after_samples(2),
        "empties of files": lambda: empties_of_files(folder / "one rank"),
        "specs": specs_before_any_sample,
        **errors,
        "after the error": after_the_error,
        "fails when opened": fails_when_opened,
        "training": lambda: [train(prefetch) for prefetch in (0, 2)],
    }


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    folder = tmp_path_factory.mktemp("files")
    for name, sizes in FILES.items():
        (folder / name).mkdir()
        write(folder / name, *sizes)
    return launched((2, 3), scenes_of, folder)


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


UNEVEN: list[list[list[int]]] = [[[2, 2, 2], [2]], [[1], [3, 3]], [[], [2, 1]], [[2, 2], [2, 2]], [[], []]]


THREE = [[2, 1, 2], [], [3, 3, 3, 3, 1]]


def test_two_workers_of_different_length_end_together_after_the_longer(scenes: Scenes) -> None:
    for rank, outcomes in enumerate(scenes(2, "uneven")):
        for sizes, found in zip(UNEVEN, outcomes, strict=True):
            steps = max(len(mine) for mine in sizes)
            filled = [[*mine, *[0] * (steps - len(mine))] for mine in sizes]
            want = [(t, filled[0][t] + filled[1][t], (filled[rank][t],)) for t in range(steps)]
            assert found == [want] * 4, sizes


def test_three_workers_with_two_replicas_end_together_after_the_longest(scenes: Scenes) -> None:
    ranks = scenes(3, "uneven")
    local = [[(2, 1), (2, 0), (0, 0)], [(0, 0)] * 3, [(3, 3), (3, 3), (1, 0)]]
    for rank, found in enumerate(ranks):
        want = [(t, sum(sum(local[i][t]) for i in range(3)), local[rank][t]) for t in range(3)]
        assert found == [want] * 4


def uneven_files(folder: Path) -> list[list[list[int]]]:
    strategy = one()
    found = []
    for prefetch in (0, 1, 2):
        data = tdi.FileDataset(str(folder / "*.txt"), readers.text_lines, map_fn=int)
        dataset = strategy.distribute_dataset(data, tdi.InputOptions(prefetch=prefetch), global_batch_size=3)
        found.append([element.tolist() for element in dataset])
    return found


def test_files_of_different_length_end_together_and_each_record_comes_once(scenes: Scenes) -> None:
    ranks = scenes(3, "files")
    for epochs in zip(*ranks, strict=True):
        assert len({len(steps) for steps in epochs}) == 1
        assert sorted(value for steps in epochs for step in steps for value in step) == list(range(15))
        assert all(any(step) for step in zip(*epochs, strict=True)), "a step without any sample was delivered"


def test_a_row_without_a_sample_is_passed_over_and_not_counted(scenes: Scenes) -> None:
    first, second = scenes(2, "rows")
    assert first == [(0, 1, [0]), (1, 1, [1]), (2, 1, [2])]
    assert second == [(0, 1, []), (1, 1, []), (2, 1, [])]


def rows_of_batch_size_one(folder: Path) -> list[Any]:
    """G = 1 over two workers: each batch is a row with a sample and a row without."""
    data = tdi.FileDataset(str(folder / "*.txt"), readers.text_lines, map_fn=int)
    dataset = one().distribute_dataset(data, global_batch_size=1)
    return [(dataset.step.index, dataset.step.global_size, element.tolist()) for element in dataset]


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


def empties_after_samples(local_replicas: int) -> dict[str, Any]:
    strategy = tdi.Strategy(devices=["cpu"] * local_replicas)
    found = {}
    for kind, make in structures.EMPTIABLE.items():
        dataset_fn = structures.batches_of([[1, 1, 1], [2]], make)
        dataset = strategy.distribute_datasets_from_function(dataset_fn)
        found[kind] = [
            [structures.described(piece) for piece in strategy.local_results(element)] for element in dataset
        ]
    return found


@pytest.mark.parametrize("local_replicas", [1, 2])
def test_a_rank_that_ran_out_gets_batches_of_size_0_of_the_right_structure(local_replicas: int, scenes: Scenes) -> None:
    first, second = scenes(2, f"empties after samples, {local_replicas}")
    for kind, make in structures.EMPTIABLE.items():
        two, single, none = (structures.described(make(size)) for size in (2, 1, 0))
        if local_replicas == 1:
            assert first[kind] == [[single]] * 3, kind
            assert second[kind] == [[two], [none], [none]], kind
        else:
            assert first[kind] == [[single, single], [single, none]], kind
            assert second[kind] == [[two, none], [none, none]], kind


def parse(line: str) -> dict[str, Any]:
    return {"text": line, "vector": torch.full((2,), float(line)), "n": int(line)}


def empties_of_files(folder: Path) -> list[Any]:
    data = tdi.FileDataset(str(folder / "*.txt"), readers.text_lines, map_fn=parse)
    dataset = one().distribute_dataset(DataLoader(data, batch_size=2))
    return [structures.described(element) for element in dataset]


def test_a_rank_whose_files_are_empty_gets_batches_of_size_0_of_the_right_structure(scenes: Scenes) -> None:
    first, second = scenes(2, "empties of files")
    dtypes = {"vector": ("tensor", "torch.float32", (0, 2)), "n": ("tensor", "torch.int64", (0,))}
    assert len(first) == 2
    assert second == [("dict", {"text": ("list", []), **dtypes})] * 2


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
    return steps_until_raised(dataset)


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


@pytest.mark.parametrize("case", FAILING, ids=str)
def test_an_error_at_a_step_lets_every_rank_deliver_the_steps_before_it(
    case: tuple[int, int, list[int], str, int], scenes: Scenes
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


def after_the_error() -> list[Any]:
    """An epoch that fails on rank 0, then the same strategy with other data."""
    strategy = one()
    data = DataLoader(FailsAt(1, [0]), batch_size=4)
    error = raised(lambda: list(strategy.distribute_dataset(data)))
    rest = [element.tolist() for element in strategy.distribute_dataset(number_range(6, 4))]
    return [None if error is None else error.kind, rest]


def test_a_strategy_is_of_use_after_an_error(scenes: Scenes) -> None:
    assert scenes(2, "after the error") == [["SourceError", [[0, 1], [4]]], ["SourceError", [[2, 3], [5]]]]


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


def features(n: int) -> torch.Tensor:
    return torch.arange(3 * n, dtype=torch.float64).reshape(n, 3) / 10


def test_collectives_of_the_training_and_the_coordination_do_not_mix(scenes: Scenes) -> None:
    first, second = scenes(2, "training")
    assert first == second
    assert first[0] == first[1]
    assert len(first[0][0]) == 18
