"""The tables of TensorFlow's distributed input guide, from real runs.

    python examples/guide.py  # alone, not under torchrun: it starts the processes itself

Every table below is what the guide says its example gives. Several replicas are CPU replicas of this process; several
workers are real processes with a gloo group.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import torchdistinput as tdi
from torchdistinput.testing import run_ranks

Steps = list[tuple[Any, ...]]  # for each step, what each replica got


def replicas(count: int) -> tdi.Strategy:
    """A strategy with so many replicas in this process."""
    return tdi.Strategy(devices=["cpu"] * count)


def number_range(n: int, batch_size: int) -> DataLoader[int]:
    """The guide's ``tf.data.Dataset.range(n).batch(batch_size)``."""
    return DataLoader(range(n), batch_size=batch_size)  # type: ignore[arg-type]


def steps_of(strategy: tdi.Strategy, dataset: Iterable[Any]) -> Steps:
    """What the local replicas get in each step, as lists."""
    return [tuple(part.tolist() for part in strategy.local_results(element)) for element in dataset]


def show(title: str, steps: Steps) -> None:
    """Prints a table with a line for each step."""
    print(f"\n{title}")
    for number, parts in enumerate(steps):
        cells = "   ".join(f"replica {replica}: {part}" for replica, part in enumerate(parts))
        print(f"  step {number}   {cells}")


# ------------------------------------------------------------------------------------------- batches over replicas


def rebatching() -> None:
    """A global batch goes to the replicas in equal parts; the tail is short, and a replica may get nothing."""
    for n, count in ((6, 2), (4, 5), (8, 3), (9, 4), (9, 2)):
        strategy = replicas(count)
        steps = steps_of(strategy, strategy.distribute_dataset(number_range(n, 4)))
        show(f"range({n}) in global batches of 4 over {count} replicas", steps)


# --------------------------------------------------------------------------------------------- files over workers


def read_on_a_worker(folder: str, policy: tdi.AutoShardPolicy) -> Steps:
    """What one of the workers gets of the files in a folder."""
    files = tdi.FileDataset(f"{folder}/*.txt", tdi.readers.text_lines, map_fn=int)
    strategy = tdi.Strategy(devices=["cpu"])
    options = tdi.InputOptions(auto_shard_policy=policy)
    return steps_of(strategy, strategy.distribute_dataset(DataLoader(files, batch_size=4), options))


def sharding() -> None:
    """Two workers share files (FILE), each batch (DATA), or nothing (OFF: both read everything)."""
    policies = tdi.AutoShardPolicy
    for policy, contents in (
        (policies.FILE, [range(6), range(6, 12)]),
        (policies.DATA, [range(12)]),
        (policies.OFF, [range(12)]),
        (policies.FILE, [range(5), range(5, 7)]),
    ):
        with tempfile.TemporaryDirectory() as folder:
            for number, numbers in enumerate(contents):
                Path(folder, f"file{number}.txt").write_text("".join(f"{n}\n" for n in numbers))
            by_worker = run_ranks(2, read_on_a_worker, folder, policy)
        sizes = " and ".join(str(len(numbers)) for numbers in contents)
        steps = [tuple(itertools.chain(*parts)) for parts in zip(*by_worker, strict=True)]
        show(f"{policy.name}: file(s) of {sizes} lines in global batches of 4 over 2 workers", steps)


def too_few_files() -> None:
    """FILE with fewer files than workers is an error, on every worker."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "file0.txt").write_text("0\n1\n")
        print("\nFILE: one file over 2 workers")
        for worker, error in enumerate(run_ranks(2, error_on_a_worker, folder)):
            print(f"  worker {worker} raises {error}")


def error_on_a_worker(folder: str) -> str:
    """The name of the error that the worker gets."""
    try:
        read_on_a_worker(folder, tdi.AutoShardPolicy.FILE)
    except tdi.ShardingError as error:
        return type(error).__name__
    return "nothing"


def equal_file_lists() -> None:
    """``list_files`` is the same on every worker, shuffled ones too."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(5):
            Path(folder, f"file{number}.txt").write_text("0\n")
        first, second = run_ranks(2, list_on_a_worker, folder)
    print(f"\nlist_files, shuffled by a seed: equal on both workers {first == second}, complete {len(set(first)) == 5}")


def list_on_a_worker(folder: str) -> list[str]:
    """The shuffled names of the files in a folder."""
    return tdi.list_files(f"{folder}/*.txt", shuffle=True, seed=1)


# ----------------------------------------------------------------------------------------------- datasets by function


def from_function_on_a_worker() -> Steps:
    """What one of the workers gets of a dataset that a function shards and batches."""
    strategy = tdi.Strategy(devices=["cpu"])

    def dataset_fn(context: tdi.InputContext) -> DataLoader[int]:
        mine = range(9)[context.input_pipeline_id :: context.num_input_pipelines]
        return DataLoader(mine, batch_size=context.get_per_replica_batch_size(4))  # type: ignore[arg-type]

    return steps_of(strategy, strategy.distribute_datasets_from_function(dataset_fn))


def from_function() -> None:
    """The function gets an ``InputContext`` and does the sharding and batching itself."""
    by_worker = run_ranks(2, from_function_on_a_worker)
    steps = [tuple(itertools.chain(*parts)) for parts in zip(*by_worker, strict=True)]
    show("a dataset function: range(9), every second number, global batches of 4 over 2 workers", steps)


# ------------------------------------------------------------------------------------------------ using the iterators


def ordered_predictions() -> None:
    """An index beside the inputs puts predictions in order, wherever they were made."""
    strategy = replicas(2)
    samples = list(enumerate(range(0, 240, 10)))
    results: dict[int, int] = {}

    def predict(index: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return index, inputs + 1

    for index, inputs in strategy.distribute_dataset(DataLoader(samples, batch_size=5)):  # type: ignore[arg-type]
        outputs = strategy.run(predict, args=(index, inputs))
        for indices, values in strategy.local_results(outputs):
            results.update(zip(indices.tolist(), values.tolist(), strict=True))
    print(f"\npredictions by index: {[results[index] for index in range(len(samples))]}")


def loop_with_optionals() -> None:
    """A loop of a fixed number of steps that stops when the data has ended."""
    strategy = replicas(2)
    iterator = iter(strategy.distribute_dataset(number_range(9, 4)))
    steps: Steps = []
    for _ in range(5):
        optional = iterator.get_next_as_optional()
        if not optional.has_value():
            break
        doubled = strategy.run(lambda numbers: 2 * numbers, args=(optional.get_value(),))
        steps.append(tuple(part.tolist() for part in strategy.local_results(doubled)))
    show("get_next_as_optional: at most 5 steps over range(9), doubled", steps)


def specs() -> None:
    """``element_spec`` describes each replica's part and consumes nothing."""
    for count in (1, 2):
        with replicas(count).distribute_dataset(number_range(6, 4)) as dataset:
            print(f"\nelement_spec over {count} replica(s): {dataset.element_spec}")


# --------------------------------------------------------------------------------------------------- values and tensors


def values_from_a_function() -> None:
    """A value for each replica, made once."""
    strategy = replicas(3)
    values = strategy.distribute_values_from_function(lambda context: 10 * context.replica_id_in_sync_group)
    results = strategy.run(lambda value: value + 1, args=(values,))
    print(f"\nvalues from a function, plus one: {list(strategy.local_results(results))}")


def batches_from_a_generator() -> None:
    """An endless generator of global batches; the loop decides when it is enough."""

    def batches() -> Iterator[Tensor]:
        for number in itertools.count():
            yield torch.arange(4 * number, 4 * number + 4)

    strategy = replicas(4)
    with strategy.distribute_dataset(batches) as dataset:
        show("three steps of an endless generator over 4 replicas", steps_of(strategy, itertools.islice(dataset, 3)))


def main() -> None:
    """Prints all tables."""
    rebatching()
    sharding()
    too_few_files()
    equal_file_lists()
    from_function()
    ordered_predictions()
    loop_with_optionals()
    specs()
    values_from_a_function()
    batches_from_a_generator()


if __name__ == "__main__":
    main()
