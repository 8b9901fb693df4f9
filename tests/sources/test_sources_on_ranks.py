"""Every kind of data over real ranks: the ranks' pieces put together are torch's batches in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchdistinput as tdi
from tests.support import inputs
from tests.support.epochs import cut_by_s, epoch, pieces
from torchdistinput import readers
from torchdistinput.testing import run_ranks

SEED = 11


def distribute_all(folder: str, names: list[str], epochs: int, replicas: int) -> dict[str, Any]:
    """One rank: each input, some epochs, with the prefetch rotated; the default generators of the ranks differ."""
    strategy = tdi.Strategy(devices=["cpu"] * replicas)
    found: dict[str, Any] = {}
    for number, name in enumerate(names):
        given = inputs.FINITE[name]
        torch.manual_seed(SEED + 100 * dist.get_rank())
        options = tdi.InputOptions(auto_shard_policy=given.policy, prefetch=(number + replicas) % 3)
        data = given.make(Path(folder))
        with strategy.distribute_dataset(data, options, global_batch_size=given.global_batch_size) as dataset:
            found[name] = [epoch(strategy, dataset) for _ in range(epochs if given.repeats else 1)]
    return found


def put_together(ranks: list[Any]) -> list[Any]:
    """Steps with the pieces of all ranks, in replica order."""
    assert len({len(steps) for steps in ranks}) == 1, "the ranks made different numbers of steps"
    return [[piece for step in row for piece in step] for row in zip(*ranks, strict=True)]


def expected(name: str, folder: Path, epochs: int, replicas: int) -> list[Any]:
    given = inputs.FINITE[name]
    torch.manual_seed(SEED)
    reference = given.reference(folder)
    return [[cut_by_s(batch, replicas) for batch in reference] for _ in range(epochs if given.repeats else 1)]


def check(folder: Path, names: list[str], world: int, replicas: int, epochs: int) -> None:
    inputs.write_numbers(folder)
    ranks = run_ranks(world, distribute_all, str(folder), names, epochs, replicas, timeout_seconds=120)
    for name in names:
        together = [put_together([rank[name][k] for rank in ranks]) for k in range(len(ranks[0][name]))]
        assert together == expected(name, folder, epochs, world * replicas), name


@pytest.mark.parametrize(("world", "replicas", "epochs"), [(2, 1, 2), (2, 2, 1), (3, 1, 1)])
def test_the_ranks_pieces_put_together_are_torchs_batches(
    world: int, replicas: int, epochs: int, tmp_path: Path
) -> None:
    check(tmp_path, [*inputs.INDEXED, *inputs.STREAMED], world, replicas, epochs)


def test_the_ranks_pieces_put_together_are_torchs_batches_with_loader_workers(tmp_path: Path) -> None:
    check(tmp_path, list(inputs.WITH_WORKERS), world=2, replicas=1, epochs=2)


def file_epochs(folder: str) -> list[list[list[int]]]:
    """One rank: FILE with 0 and 2 loader workers, and without a loader."""
    strategy = tdi.Strategy(devices=["cpu"])
    found = []
    for workers in (None, 0, 2):
        data: Any = inputs.numbers_of(Path(folder))
        size = None
        if workers is None:
            size = 4
        else:
            data = torch.utils.data.DataLoader(data, batch_size=4, num_workers=workers)
        dataset = strategy.distribute_dataset(data, global_batch_size=size)
        found.append([element.tolist() for element in dataset])
    return found


def test_under_file_every_record_is_delivered_once_with_and_without_loader_workers(tmp_path: Path) -> None:
    inputs.write_numbers(tmp_path)
    ranks = run_ranks(2, file_epochs, str(tmp_path))
    for k in range(3):
        delivered = [sorted(value for step in rank[k] for value in step) for rank in ranks]
        assert delivered == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11]]
        assert len({len(rank[k]) for rank in ranks}) == 1
    assert [rank[0] for rank in ranks] == [rank[1] for rank in ranks]


class Hinted:
    """A source that shards itself, as Hugging Face datasets do: by ``shard(num_shards=, index=)``."""

    def __init__(self, records: list[int]) -> None:
        self.records = records

    def __iter__(self) -> Any:
        return iter(self.records)

    def shard(self, num_shards: int, index: int) -> Hinted:
        return Hinted(self.records[index::num_shards])


def hinted() -> list[list[int]]:
    strategy = tdi.Strategy(devices=["cpu"])
    options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.HINT)
    dataset = strategy.distribute_dataset(Hinted(list(range(11))), options, global_batch_size=4)
    return [element.tolist() for element in dataset]


def test_under_hint_the_source_shards_itself_and_each_worker_batches_its_own_records() -> None:
    assert run_ranks(2, hinted) == [
        [[0, 2], [4, 6], [8], [10]],
        [[1, 3], [5, 7], [9], []],
    ]


def steps_of(replicas: int) -> list[Any]:
    """One rank: the fields of every step over two epochs, and the values of the strategy."""
    strategy = tdi.Strategy(devices=["cpu"] * replicas)
    dataset = strategy.distribute_dataset(torch.utils.data.DataLoader(range(7), batch_size=5))  # type: ignore[arg-type]
    found: list[Any] = [(strategy.num_replicas_in_sync, strategy.num_input_pipelines, strategy.input_pipeline_id)]
    for _ in range(2):
        for element in dataset:
            step = dataset.step
            assert tuple(len(piece) for piece in pieces(strategy, element)) == step.local_sizes
            found.append((step.epoch, step.index, step.global_size, step.local_sizes))
            assert (step.num_replicas, step.num_workers, step.num_ranks) == (2 * replicas, 2, 2)
    return [*found, len(dataset)]


def test_the_step_has_the_global_size_and_this_ranks_sizes() -> None:
    first, second = run_ranks(2, steps_of, 1)
    assert first == [(2, 2, 0), (0, 0, 5, (3,)), (0, 1, 2, (1,)), (1, 0, 5, (3,)), (1, 1, 2, (1,)), 2]
    assert second == [(2, 2, 1), (0, 0, 5, (2,)), (0, 1, 2, (1,)), (1, 0, 5, (2,)), (1, 1, 2, (1,)), 2]
    first, second = run_ranks(2, steps_of, 2)
    assert first == [(4, 2, 0), (0, 0, 5, (2, 2)), (0, 1, 2, (1, 1)), (1, 0, 5, (2, 2)), (1, 1, 2, (1, 1)), 2]
    assert second == [(4, 2, 1), (0, 0, 5, (1, 0)), (0, 1, 2, (0, 0)), (1, 0, 5, (1, 0)), (1, 1, 2, (0, 0)), 2]


def own_state_after(seed: int) -> tuple[list[list[int]], float, float]:
    """One rank: shuffling by the default generator; then what this rank draws next, with and without the epoch."""
    torch.manual_seed(seed + dist.get_rank())
    untouched = torch.rand(()).item()
    torch.manual_seed(seed + dist.get_rank())
    strategy = tdi.Strategy(devices=["cpu"])
    loader = strategy.distribute_dataset(torch.utils.data.DataLoader(range(6), batch_size=4, shuffle=True))  # type: ignore[arg-type]
    order = [element.tolist() for element in loader]
    return order, untouched, torch.rand(()).item()


def test_without_a_generator_rank_0_decides_the_order_and_each_rank_keeps_its_own_random_state() -> None:
    ranks = run_ranks(2, own_state_after, 40)
    torch.manual_seed(40)
    batches = [batch.tolist() for batch in torch.utils.data.DataLoader(range(6), batch_size=4, shuffle=True)]  # type: ignore[arg-type]
    assert [[*a, *b] for a, b in zip(ranks[0][0], ranks[1][0], strict=True)] == batches
    assert ranks[0][2] != ranks[1][2], "after the epoch the ranks must not draw alike"


def numbers_by_files(folder: str, cycle_length: int, shuffle: bool) -> list[list[int]]:
    strategy = tdi.Strategy(devices=["cpu"])
    data = tdi.FileDataset(
        str(Path(folder) / "?.txt"),
        readers.text_lines,
        map_fn=int,
        shuffle_files=shuffle,
        shuffle_buffer=3 if shuffle else 0,
        seed=9,
        cycle_length=cycle_length,
    )
    dataset = strategy.distribute_dataset(data, global_batch_size=4)
    return [[value for element in dataset for value in element.tolist()] for _ in range(3)]


@pytest.mark.parametrize(("cycle_length", "shuffle"), [(1, True), (2, False), (2, True)])
def test_shuffled_and_interleaved_files_are_delivered_once_each_epoch(
    cycle_length: int, shuffle: bool, tmp_path: Path
) -> None:
    inputs.write_numbers(tmp_path)
    ranks = run_ranks(2, numbers_by_files, str(tmp_path), cycle_length, shuffle)
    for epochs in zip(*ranks, strict=True):
        assert sorted(epochs[0] + epochs[1]) == list(range(12))
    if shuffle:
        assert len({tuple(order) for order in ranks[0]}) > 1
