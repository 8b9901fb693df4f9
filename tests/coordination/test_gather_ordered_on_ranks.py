"""Indices and ordered outputs over real ranks: the same at any world size, each sample once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support import inputs
from tests.support.epochs import Raised, lists, raised
from torchdistinput import PerReplica, readers
from torchdistinput.testing import run_ranks

FILE = 2**40
SIZES = (5, 0, 3, 4, 1, 2)


def write_files(folder: Path) -> None:
    """Six files; record r of file f says 100 f + r."""
    for number, size in enumerate(SIZES):
        lines = "".join(f"{100 * number + record}\n" for record in range(size))
        (folder / f"{number}.txt").write_text(lines)


def records(folder: str) -> tdi.FileDataset:
    return tdi.FileDataset(
        folder + "/?.txt",
        readers.text_lines,
        map_fn=int,
        shuffle_files=True,
        shuffle_buffer=2,
        cycle_length=2,
        seed=dist.get_world_size(),
    )


def unknown_length() -> Iterator[int]:
    yield from range(17)


class Scored(NamedTuple):
    score: torch.Tensor
    name: list[str]


def outputs_of(numbers: torch.Tensor) -> dict[str, Any]:
    """Predictions for some samples: nested, with strings, and records as dicts."""
    return {
        "scored": Scored(numbers[:, None] * torch.ones(1, 2, dtype=torch.float64), [f"s{n}" for n in numbers.tolist()]),
        "records": [{"id": n, "half": n / 2} for n in numbers.tolist()],
    }


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "scored": Scored(
            torch.cat([part["scored"].score for part in parts]), [n for part in parts for n in part["scored"].name]
        ),
        "records": [record for part in parts for record in part["records"]],
    }


def predict(strategy: tdi.Strategy, dataset: Any) -> Any:
    """Every sample's outputs, gathered once after the epoch."""
    indices, found = [], []
    for index, numbers in dataset:
        indices.append(index)
        found.append(outputs_of(numbers))
    return lists(strategy.gather_ordered(torch.cat(indices), joined(found)))


def predict_all(folder: str, workers: int) -> dict[str, Any]:
    """One rank: the ordered predictions for each kind of data."""
    strategy = tdi.Strategy(devices=["cpu"])
    data = tdi.AutoShardPolicy.DATA
    rank = dist.get_rank()
    numbers: Any = range(23)
    shuffled = DataLoader(numbers, batch_size=4, shuffle=True, generator=inputs.generator(), num_workers=workers // 2)
    cases: dict[str, tuple[Any, Any, int | None]] = {
        "map-style": (shuffled, data, None),
        "files under FILE": (
            DataLoader(records(folder), batch_size=4, num_workers=workers),
            tdi.AutoShardPolicy.FILE,
            None,
        ),
        "files under FILE, bare": (records(folder), tdi.AutoShardPolicy.FILE, 4),
        "files under DATA": (DataLoader(records(folder), batch_size=4, num_workers=workers), data, None),
        "unknown length": (unknown_length, data, 4),
        "a loader over an iterable": (DataLoader(inputs.Count(17), batch_size=4, num_workers=workers), data, None),
    }
    found = {}
    for name, (source, policy, size) in cases.items():
        options = tdi.InputOptions(with_index=True, auto_shard_policy=policy)
        found[name] = predict(strategy, strategy.distribute_dataset(source, options, global_batch_size=size))

    def own_part(_: tdi.InputContext) -> list[torch.Tensor]:
        return [torch.arange(start, start + 2) + 100 * rank for start in range(0, 2 * rank + 2, 2)]

    options = tdi.InputOptions(with_index=True)
    found["from function"] = predict(strategy, strategy.distribute_datasets_from_function(own_part, options))
    return found


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 2), (3, 2), (5, 0)])
def test_outputs_of_any_data_are_gathered_in_its_order_each_once(world: int, workers: int, tmp_path: Path) -> None:
    write_files(tmp_path)
    of_files = [100 * file + record for file, size in enumerate(SIZES) for record in range(size)]
    expected = {
        "map-style": list(range(23)),
        "files under FILE": of_files,
        "files under FILE, bare": of_files,
        "files under DATA": of_files,
        "unknown length": list(range(17)),
        "a loader over an iterable": [
            number
            for batch in DataLoader(inputs.Count(17), batch_size=4, num_workers=workers)
            for number in batch.tolist()
        ],
        "from function": [100 * rank + number for rank in range(world) for number in range(2 * rank + 2)],
    }
    for found in run_ranks(world, predict_all, str(tmp_path), workers):
        assert found == {name: lists(outputs_of(torch.tensor(order))) for name, order in expected.items()}


def index_under(policy: str, replicas: int) -> list[tuple[int, int]]:
    """One rank: each sample with its index, under a policy that gives workers data of their own."""
    strategy = tdi.Strategy(devices=["cpu"] * replicas)
    options = tdi.InputOptions(with_index=True, auto_shard_policy=tdi.AutoShardPolicy[policy])
    data = Sharded(range(7)) if policy == "HINT" else unknown_length
    dataset = strategy.distribute_dataset(data, options, global_batch_size=3)
    parts = [part for element in dataset for part in strategy.local_results(element)]
    return [pair for index, part in parts for pair in zip(index.tolist(), part.tolist(), strict=True)]


@dataclasses.dataclass
class Sharded:
    """Shards itself, as Hugging Face datasets do."""

    numbers: range

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def shard(self, num_shards: int, index: int) -> Sharded:
        return Sharded(self.numbers[index::num_shards])


@pytest.mark.parametrize("replicas", [1, 2])
def test_where_workers_have_data_of_their_own_the_index_names_the_worker(replicas: int) -> None:
    hinted = run_ranks(2, index_under, "HINT", replicas)
    assert hinted == [[(2**48 * w + k, 2 * k + w) for k in range(len(range(w, 7, 2)))] for w in range(2)]
    assert run_ranks(2, index_under, "OFF", replicas) == [[(2**48 * w + k, k) for k in range(17)] for w in range(2)]


@dataclasses.dataclass
class ShardedTable(torch.utils.data.Dataset[int]):
    """A map-style dataset that shards itself."""

    numbers: range

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> int:
        return self.numbers[index]

    def shard(self, num_shards: int, index: int) -> ShardedTable:
        return ShardedTable(self.numbers[index::num_shards])


def index_in_shards() -> list[tuple[int, int]]:
    strategy = tdi.Strategy(devices=["cpu"])
    options = tdi.InputOptions(with_index=True, auto_shard_policy=tdi.AutoShardPolicy.HINT)
    loader = DataLoader(ShardedTable(range(9)), batch_size=2, shuffle=True, generator=inputs.generator())
    parts = list(strategy.distribute_dataset(loader, options))
    return [pair for index, part in parts for pair in zip(index.tolist(), part.tolist(), strict=True)]


def test_under_hint_the_index_of_a_map_style_dataset_counts_in_the_workers_shard() -> None:
    for worker, pairs in enumerate(run_ranks(2, index_in_shards)):
        assert sorted(pairs) == [(2**48 * worker + k, 2 * k + worker) for k in range(len(range(worker, 9, 2)))]


def gathered_on_a_mesh() -> list[int]:
    """Two workers of two ranks each, which get the same batches."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    strategy = tdi.Strategy(devices=["cpu"], mesh=mesh)
    data: Any = DataLoader(range(7), batch_size=3, shuffle=True, generator=inputs.generator())  # type: ignore[arg-type]
    elements = list(strategy.distribute_dataset(data, tdi.InputOptions(with_index=True)))
    index, numbers = (torch.cat(each) for each in zip(*elements, strict=True))
    return strategy.gather_ordered(index, numbers * 2).tolist()  # type: ignore[no-any-return]


def test_ranks_that_share_a_worker_bring_its_rows_once() -> None:
    assert run_ranks(4, gathered_on_a_mesh) == [[2 * number for number in range(7)]] * 4


# gather_ordered by itself


def uneven(replicas: int) -> list[Any]:
    """One rank: only the second rank has rows, the others do not know what they look like; then none has any."""
    strategy = tdi.Strategy(devices=["cpu"] * replicas)
    numbers = torch.tensor([4, 0, 3])
    full = (numbers, outputs_of(numbers))
    empty = (torch.zeros(0, dtype=torch.int64), None)
    mine = [full if dist.get_rank() == 1 and replica == 0 else empty for replica in range(replicas)]
    index = PerReplica([pair[0] for pair in mine]) if replicas > 1 else mine[0][0]
    outputs = PerReplica([pair[1] for pair in mine]) if replicas > 1 else mine[0][1]
    found = strategy.gather_ordered(index, outputs)
    assert isinstance(found["scored"], Scored)
    none = strategy.gather_ordered(PerReplica([empty[0]] * replicas), PerReplica([None] * replicas))
    return [lists(found), none]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_rank_without_rows_learns_from_the_others_what_they_look_like(replicas: int) -> None:
    for found in run_ranks(3, uneven, replicas):
        assert found == [lists(outputs_of(torch.tensor([0, 3, 4]))), None]


def padded_rows() -> list[float]:
    strategy = tdi.Strategy(devices=["cpu"])
    options = tdi.InputOptions(with_index=True, partial_batch="pad")
    dataset = strategy.distribute_dataset(DataLoader(range(10), batch_size=4), options)  # type: ignore[arg-type]
    elements = [(index, numbers + 0.5) for index, numbers, _ in dataset]
    index, numbers = (torch.cat(each) for each in zip(*elements, strict=True))
    assert len(index) == 3 * 2
    return strategy.gather_ordered(index, numbers).tolist()  # type: ignore[no-any-return]


def test_padded_rows_are_not_gathered() -> None:
    assert run_ranks(3, padded_rows) == [[number + 0.5 for number in range(10)]] * 3


@dataclasses.dataclass
class Local:
    """An output class; on some ranks it is unknown."""

    x: torch.Tensor


def wrong_calls() -> list[Raised | None]:
    """One rank of two: what each wrong call raises here."""
    strategy, rank = tdi.Strategy(devices=["cpu"]), dist.get_rank()
    gather = strategy.gather_ordered
    index = torch.arange(2) + 2 * rank
    hidden = type("Hidden", (Local,), {})
    return [
        raised(lambda: gather(index - rank, torch.ones(2))),
        raised(lambda: gather(index, torch.ones(2 + rank))),
        raised(lambda: gather(index, torch.ones(2, 1 + rank))),
        raised(lambda: gather(index, torch.ones(2) if rank else {"x": torch.ones(2)})),
        raised(lambda: gather(index, ["a", object() if rank else "b"])),
        raised(lambda: gather(index if rank else index.float(), torch.ones(2))),
        raised(lambda: gather(index[:0] if rank else index, hidden(torch.ones(2)) if not rank else None)),
        raised(lambda: gather(index, torch.ones(2)) if rank else strategy.gather(torch.ones(2), 0)),
        raised(lambda: gather(index, torch.ones(2))),
    ]


def test_what_is_wrong_on_one_rank_is_raised_on_all_and_the_next_call_works() -> None:
    expected = [
        ("ValueError", r"found 1 index(es) more than once: 1 (replica 0, 1)"),
        ("ValueError", "rank 1: the index has 2 entries, and outputs has 3 rows"),
        ("ValueError", "replica 0: float32[batch, 1]; replica 1: float32[batch, 2]"),
        ("ValueError", "replica 0: dict(x: float32[batch]); replica 1: float32[batch]"),
        ("TypeError", "rank 1: gather_ordered found <object object"),
        ("TypeError", "rank 0: the index is of torch.float32"),
        ("BatchingError", "rank 1: this rank has seen no sample and cannot build the batch's dataclass"),
        ("RankDisagreement", "the ranks differ in calls"),
    ]
    for found in run_ranks(2, wrong_calls):
        assert [None if each is None else each.kind for each in found] == [*(kind for kind, _ in expected), None]
        for each, (_, words) in zip(found, expected, strict=False):
            assert each is not None
            assert words in each.message
