"""The examples of TensorFlow's distributed input guide over real ranks, its caveats too."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support.epochs import pieces, raised
from tests.support.launched import Scenes, launched
from torchdistinput import readers


def number_range(n: int, batch_size: int) -> Any:
    return DataLoader(range(n), batch_size=batch_size)  # type: ignore[arg-type]


def write_files(folder: Path, *files: range) -> None:
    for number, records in enumerate(files):
        (folder / f"file{number}.txt").write_text("".join(f"{record}\n" for record in records))


def scenes_of(world: int, folder: Path) -> dict[str, Callable[[], Any]]:
    if world == 3:
        return {"predictions, 1 replica": lambda: predictions(1)}
    return {
        "predictions, 1 replica": lambda: predictions(1),
        "predictions, 2 replicas": lambda: predictions(2),
        "values": values_and_generator,
        "loops": loops,
        "listings": lambda: listings(folder / "listed"),
        "FILE, shuffled": lambda: shuffle_then_parse(folder / "shuffled", "FILE"),
        "DATA, shuffled": lambda: shuffle_then_parse(folder / "shuffled", "DATA"),
    }


FILES = {
    "listed": [range(1)] * 9,
    "shuffled": [range(10), range(10, 20)],
}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    folder = tmp_path_factory.mktemp("files")
    for name, contents in FILES.items():
        (folder / name).mkdir()
        write_files(folder / name, *contents)
    return launched((2, 3), scenes_of, folder)


def predictions(local_replicas: int) -> tuple[dict[int, int], list[int]]:
    strategy = tdi.Strategy(devices=["cpu"] * local_replicas)
    dataset = strategy.distribute_dataset(DataLoader(list(enumerate(range(24))), batch_size=7))  # type: ignore[arg-type]
    mine: dict[int, int] = {}
    gathered: dict[int, int] = {}
    for index, inputs in dataset:
        index_out, outputs = strategy.run(lambda i, x: (i, 2 * x), args=(index, inputs))
        for indices, values in zip(strategy.local_results(index_out), strategy.local_results(outputs), strict=True):
            mine.update(zip(indices.tolist(), values.tolist(), strict=True))
        everyone = zip(
            strategy.gather(index_out, axis=0).tolist(), strategy.gather(outputs, axis=0).tolist(), strict=True
        )
        gathered.update(everyone)
    return mine, [gathered[index] for index in range(24)]


@pytest.mark.parametrize(("world", "replicas"), [(2, "1 replica"), (2, "2 replicas"), (3, "1 replica")])
def test_predictions_are_ordered_by_an_index_in_the_batch(world: int, replicas: str, scenes: Scenes) -> None:
    ranks = scenes(world, f"predictions, {replicas}")
    assert {index: value for mine, _ in ranks for index, value in mine.items()} == {k: 2 * k for k in range(24)}
    assert sum(len(mine) for mine, _ in ranks) == 24
    assert all(gathered == [2 * k for k in range(24)] for _, gathered in ranks)


def values_and_generator() -> tuple[list[Any], list[Any]]:
    strategy = tdi.Strategy(devices=["cpu"] * 2)

    def value_fn(context: tdi.ValueContext) -> torch.Tensor:
        return torch.tensor([context.replica_id_in_sync_group, context.num_replicas_in_sync])

    values = strategy.distribute_values_from_function(value_fn)
    result = strategy.run(lambda x: x + 1, args=(values,))

    def input_gen() -> Iterator[torch.Tensor]:
        for step in itertools.count():
            yield torch.arange(8 * step, 8 * step + 8)

    iterator = iter(strategy.distribute_dataset(input_gen))
    batches = [pieces(strategy, next(iterator)) for _ in range(3)]
    iterator.close()
    return [value.tolist() for value in strategy.local_results(result)], batches


def test_values_come_from_a_function_and_batches_from_a_generator(scenes: Scenes) -> None:
    (first, first_batches), (second, second_batches) = scenes(2, "values")
    assert (first, second) == ([[1, 5], [2, 5]], [[3, 5], [4, 5]])
    assert first_batches == [[[0, 1], [2, 3]], [[8, 9], [10, 11]], [[16, 17], [18, 19]]]
    assert second_batches == [[[4, 5], [6, 7]], [[12, 13], [14, 15]], [[20, 21], [22, 23]]]


def loops() -> dict[str, Any]:
    strategy = tdi.Strategy(devices=["cpu"])
    dataset = strategy.distribute_dataset(number_range(9, 4))
    spec = dataset.element_spec
    iterator = iter(dataset)
    optionals = []
    for _ in range(5):
        optional = iterator.get_next_as_optional()
        if not optional.has_value():
            break
        optionals.append(optional.get_value().tolist())
    ends = [raised(iterator.get_next) for _ in range(3)]
    fixed = []
    for _ in range(4):
        another = iter(dataset)
        fixed += [next(another).tolist(), another.get_next().tolist()]
    dataset.close()
    return {
        "spec": (spec.shape, str(spec.dtype)),
        "optionals": optionals,
        "ends": [error.kind if error else None for error in ends],
        "again": iterator.get_next_as_optional().has_value(),
        "fixed": fixed,
    }


def test_the_ways_to_loop_agree_on_all_ranks(scenes: Scenes) -> None:
    first, second = scenes(2, "loops")
    for found in (first, second):
        assert found["spec"] == ((None,), "torch.int64")
        assert found["ends"] == ["OutOfRangeError"] * 3
        assert found["again"] is False
    assert first["optionals"] == [[0, 1], [4, 5], [8]]
    assert second["optionals"] == [[2, 3], [6, 7], []]
    assert first["fixed"] == [[0, 1], [4, 5]] * 4
    assert second["fixed"] == [[2, 3], [6, 7]] * 4


def listings(folder: Path) -> dict[str, Any]:
    pattern = str(folder / "*.txt")
    return {
        "sorted": [Path(name).name for name in tdi.list_files(pattern)],
        "shuffled": [Path(name).name for name in tdi.list_files(pattern, shuffle=True, seed=4)],
        "no seed": raised(lambda: tdi.list_files(pattern, shuffle=True)),
    }


def test_list_files_is_alike_on_every_rank(scenes: Scenes) -> None:
    first, second = scenes(2, "listings")
    assert first == second
    assert first["sorted"] == [f"file{k}.txt" for k in range(9)]
    assert sorted(first["shuffled"]) == first["sorted"] != first["shuffled"]
    assert first["no seed"] is not None
    assert first["no seed"].is_value_error
    assert "seed" in first["no seed"].message


class CountingParser:
    """A ``map_fn`` that counts the records that it decoded."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, line: str) -> int:
        self.calls += 1
        return int(line)


def shuffle_then_parse(folder: Path, policy: str) -> tuple[list[int], int]:
    strategy = tdi.Strategy(devices=["cpu"])
    parser = CountingParser()
    data = tdi.FileDataset(str(folder / "*.txt"), readers.text_lines, map_fn=parser, shuffle_buffer=5, seed=2)
    options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy[policy])
    dataset = strategy.distribute_dataset(data, options, global_batch_size=4)
    return [value for element in dataset for value in element.tolist()], parser.calls


@pytest.mark.parametrize("policy", ["FILE", "DATA"])
def test_records_are_shuffled_before_they_are_parsed_and_only_the_kept_ones_are_parsed(
    policy: str, scenes: Scenes
) -> None:
    ranks = scenes(2, f"{policy}, shuffled")
    assert sorted(value for values, _ in ranks for value in values) == list(range(20))
    assert all(values != sorted(values) for values, _ in ranks)
    assert [calls for _, calls in ranks] == [10, 10]
