"""Meshes: which ranks read the same samples, and ranks that should and do not."""

from __future__ import annotations

import logging
import random
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.data import Mapped
from tests.support.epochs import raised
from torchdistinput.testing import run_ranks

UNTOLD: dict[tuple[str, ...], tuple[str, ...]] = {
    ("tp",): ("tp", "data_dims="),
    ("pp",): ("pp", "data_dims="),
    ("context_parallel",): ("context_parallel", "data_dims="),
    ("dp_cp",): ("dp_cp is none", "data_dims="),
    ("dp_shard_cp",): ("dp_shard_cp is none", "data_dims="),
    ("dp_replicate", "dp_shard_cp"): ("dp_shard_cp is none", "data_dims="),
    ("data_parallel",): ("data_parallel is none", "data_dims="),
    ("ranks",): ("none of them is one", "data_dims="),
    ("tp_sp",): ("tp_sp", "data_dims="),
    ("tp", "cp"): ("('tp', 'cp')", "data_dims="),
    ("dp_cp", "tp"): ("dp_cp is none", "data_dims="),
    ("x", "y"): ("('x', 'y')", "data_dims="),
}
TOLD: dict[tuple[str, ...], tuple[str, ...] | None] = {
    ("dp",): ("dp",),
    ("FSDP",): ("FSDP",),
    ("dp_replicate", "dp_shard"): ("dp_replicate", "dp_shard"),
    ("dp", "tp"): ("dp",),
    ("pp", "data"): ("data",),
}


def mesh_of(names: tuple[str, ...]) -> Any:
    return init_device_mesh("cpu", (4,) if len(names) == 1 else (2, 2), mesh_dim_names=names)


def make_all() -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for names in UNTOLD:
        found[names] = raised(partial(tdi.Strategy, ["cpu"], mesh=mesh_of(names), timeout_seconds=60))
    for names, dims in TOLD.items():
        mine = tdi.Strategy(["cpu"], mesh=mesh_of(names), timeout_seconds=60)
        told = tdi.Strategy(["cpu"], mesh=mesh_of(names), data_dims=dims, timeout_seconds=60)
        found[names] = (mine.input_pipeline_id, mine.num_input_pipelines) == (
            told.input_pipeline_id,
            told.num_input_pipelines,
        )
    return found


def test_names_that_do_not_tell_the_data_parallel_dims_are_refused_on_every_rank() -> None:
    ranks = run_ranks(4, make_all)
    for names, expected in UNTOLD.items():
        for rank in ranks:
            assert rank[names].kind == "ShardingError", names
            assert all(text in rank[names].message for text in expected), rank[names].message
    assert all(rank[names] is True for rank in ranks for names in TOLD)


def make_slices() -> list[Any]:
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    refused = raised(lambda: tdi.Strategy(["cpu"], mesh=whole["tp"], timeout_seconds=60))
    given = tdi.Strategy(["cpu"], mesh=whole["tp"], data_dims=["tp"], timeout_seconds=60)
    same = tdi.Strategy(["cpu"], mesh=whole["tp"], data_dims=[], timeout_seconds=60)
    data = tdi.Strategy(["cpu"], mesh=whole["dp"], timeout_seconds=60)
    assert {(each.rank, each.world_size) for each in (given, same, data)} == {(dist.get_rank(), 4)}
    with mock.patch.object(logging.getLogger("torchdistinput"), "info") as info:
        for each in (same, data):
            each.distribute_dataset([torch.arange(4)])
    told = [each.args[0] % each.args[1:] for each in info.call_args_list]
    return [told, refused, *((each.num_input_pipelines, each.input_pipeline_id) for each in (given, same, data))]


def test_a_slice_along_a_tensor_parallel_dim_needs_data_dims() -> None:
    for rank, (told, refused, given, same, data) in enumerate(run_ranks(4, make_slices)):
        assert refused.kind == "ShardingError"
        assert "('tp',)" in refused.message
        assert given == (2, rank % 2)
        assert same == (1, 0)
        assert data == (2, rank // 2)
        if rank == 0:
            assert [line.rpartition(" over ")[2] for line in told] == ["1 pipeline", "2 ranks"]


def one_rank_names_it_wrongly() -> Any:
    names = ("tp",) if dist.get_rank() == 1 else ("dp",)
    return raised(lambda: tdi.Strategy(["cpu"], mesh=mesh_of(names), timeout_seconds=60))


def test_the_other_ranks_of_the_mesh_hear_of_a_rank_whose_names_do_not_tell() -> None:
    for error in run_ranks(4, one_rank_names_it_wrongly):
        assert error.kind == "ShardingError"
        assert "tp" in error.message


def rows(length: int, added: int, first: int) -> Mapped:
    """Rows of one number, one of which is another one on some rank."""
    return Mapped(length, lambda index: torch.tensor([float(index + (added if index >= first else 0))]))


KINDS = ["map-style", "loader workers", "function", "iterable"]
LATE = 40  # the first step of which the peers read different data


def read_rows(kind: str, other: int) -> Any:
    """Every rank reads in a mesh of 2 x 2; one rank reads other numbers."""
    rank = dist.get_rank()
    strategy = tdi.Strategy(["cpu"], mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    added = 1000 if rank == other else 0
    seen: list[int] = []

    def read() -> None:
        if kind == "function":
            each = DataLoader(rows(200, added, LATE * 2), batch_size=2)
            dataset = strategy.distribute_datasets_from_function(lambda _: each)
        elif kind == "iterable":
            policy = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.OFF)
            dataset = strategy.distribute_dataset([torch.full((4,), float(n + added)) for n in range(99)], policy)
        else:
            workers = 2 if kind == "loader workers" else 0
            loader = DataLoader(rows(400, added, LATE * 4), batch_size=4, num_workers=workers)
            dataset = strategy.distribute_dataset(loader)
        for element in dataset:
            seen.append(len(element))

    return raised(read), len(seen)


def read_all() -> dict[str, Any]:
    found = {kind: read_rows(kind, 3) for kind in KINDS}
    return {**found, "function, all alike": read_rows("function", -1)}


def test_ranks_of_one_data_coordinate_that_read_different_data_are_named_on_every_rank() -> None:
    for found in run_ranks(4, read_all):
        for kind in KINDS:
            error, steps = found[kind]
            assert error.kind == "RankDisagreement", kind
            assert "rank 2: " in error.message
            assert "rank 3: " in error.message
            assert "rank 0" not in error.message
            assert "data_dims" in error.message
            assert "sample(s)" not in error.message  # checksums are told
            assert steps == (0 if kind == "iterable" else 63), kind
        assert found["function, all alike"] == (None, 100)  # ranks of different data coordinates read different data


# ------------------------------------------------------------------------------------------------ random augmentation


def augment(index: int) -> torch.Tensor:
    """A sample with numbers from each of the global generators."""
    return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def augmented(strategy: tdi.Strategy, *, num_workers: int = 0, seed_samples: bool = False) -> Any:
    loader = DataLoader(Mapped(12, augment), batch_size=4, shuffle=True, num_workers=num_workers)
    return strategy.distribute_dataset(loader, tdi.InputOptions(seed_samples=seed_samples))


def read_augmented() -> tuple[Any, list[list[Any]]]:
    """One rank of a mesh, each of which is seeded by its number: its error with draws of its own, and what it reads."""
    strategy = tdi.Strategy(["cpu"], mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    seed_all(dist.get_rank())
    error = raised(lambda: list(augmented(strategy)))
    ways = augmented(strategy, seed_samples=True), augmented(strategy, num_workers=2)
    return error, [[batch.tolist() for batch in each] for each in ways]


def test_peers_that_draw_in_their_process_are_told_what_to_seed_and_draw_alike_then_and_in_loader_workers() -> None:
    ranks = run_ranks(4, read_augmented)
    for error, _ in ranks:
        assert error.kind == "RankDisagreement"
        assert "seed_samples=True" in error.message
    (first, peer), (other, others_peer) = [[found for _, found in ranks[place : place + 2]] for place in (0, 2)]
    assert (first, other) == (peer, others_peer)
    assert first[0] != other[0]


def function_of(strategy: tdi.Strategy) -> Any:
    make = partial(DataLoader, Mapped(12, augment), batch_size=2, shuffle=True)
    return strategy.distribute_datasets_from_function(lambda _: make())


def leave_and_resume() -> Any:
    """One rank of a mesh: the numbers of the samples of a shuffled function's epoch, whole, and left and resumed."""
    strategy = tdi.Strategy(["cpu"], mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    seed_all(7)
    dataset, whole, state = function_of(strategy), [], None
    for step, batch in enumerate(dataset):
        whole.append(batch[:, 0].tolist())
        if step == 1:
            state = dataset.state_dict()
    seed_all(1000)
    resumed = function_of(strategy)
    assert state is not None
    resumed.load_state_dict(state)
    return whole, [batch[:, 0].tolist() for batch in resumed]


def test_a_dataset_function_of_peers_resumes_in_the_order_that_it_had() -> None:
    ranks = run_ranks(4, leave_and_resume)
    for whole, rest in ranks:
        assert sorted(index for batch in whole for index in batch) == list(range(12))
        assert rest == whole[2:]
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
