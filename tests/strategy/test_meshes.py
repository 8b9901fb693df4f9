"""Meshes: which ranks read the same samples, and ranks that should and do not."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, IterableDataset

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


class AugmentedStream(IterableDataset[torch.Tensor]):
    """The same samples, of an iterable."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(augment, range(12))


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def states_of_all() -> tuple[bytes, str, str]:
    return torch.get_rng_state().numpy().tobytes(), repr(random.getstate()), repr(np.random.get_state())


def augmented(strategy: tdi.Strategy, kind: str) -> Any:
    if kind == "function":
        return strategy.distribute_datasets_from_function(
            lambda _: DataLoader(Mapped(12, augment), batch_size=2, shuffle=True)
        )
    if kind == "iterable":
        off = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.OFF)
        return strategy.distribute_dataset(DataLoader(AugmentedStream(), batch_size=4), off)
    workers = 1 if kind == "loader workers" else 0
    return strategy.distribute_dataset(DataLoader(Mapped(12, augment), batch_size=4, shuffle=True, num_workers=workers))


Epochs = dict[str, tuple[list[list[Any]], bool]]
"""The batches of each epoch of each kind, and whether the rank's own states are as before."""


def read_augmented(seeds: list[int], in_mesh: bool, kinds: list[str] = KINDS) -> Epochs:
    """One rank: two epochs of each kind, before each of which it is seeded."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) if in_mesh else None
    strategy = tdi.Strategy(["cpu"], mesh=mesh)
    found: Epochs = {}
    for kind in kinds:
        dataset, untouched = augmented(strategy, kind), True
        epochs: list[list[Any]] = []
        for _ in range(2):
            seed_all(seeds[dist.get_rank()] + len(epochs))
            iterator = iter(dataset)
            before = states_of_all()
            epochs.append([])
            for batch in iterator:
                if kind == "function" and not epochs[-1]:  # its loader was made, which draws from the rank's own states
                    before = states_of_all()
                epochs[-1].append(batch.tolist())
                assert (iterator.step.global_size or 0) <= 4, kind  # peers do not count their samples twice
            untouched = untouched and states_of_all() == before
        found[kind] = epochs, untouched
    return found


def test_peers_read_the_same_random_augmentation_whatever_their_random_states() -> None:
    ranks = run_ranks(4, read_augmented, [10, 20, 30, 40], True)
    for kind in KINDS:
        first, peer, other, others_peer = [rank[kind][0] for rank in ranks]
        assert first == peer, kind
        assert other == others_peer, kind
        drawn = [{row[1] for epoch in epochs for batch in epoch for row in batch} for epochs in (first, other)]
        if kind != "loader workers":  # which torch seeds by one number, that all ranks share
            assert not drawn[0] & drawn[1], kind  # each data coordinate has draws of its own, each epoch too
        assert len(drawn[0]) == sum(len(batch) for epoch in first for batch in epoch), kind
        assert ranks[1][kind][1], kind  # a peer's own states are its own
        assert ranks[3][kind][1], kind


def test_with_the_first_peers_states_the_batches_are_those_without_peers() -> None:
    """So tensor parallelism changes no sample: neither where all peers have one seed, nor where they differ."""
    alone = run_ranks(2, read_augmented, [10, 30], False)
    for seeds in ([10, 10, 30, 30], [10, 20, 30, 40]):
        ranks = run_ranks(4, read_augmented, seeds, True, ["map-style", "iterable"])
        for kind in ("map-style", "iterable"):
            assert [rank[kind][0] for rank in ranks] == [alone[rank // 2][kind][0] for rank in range(4)], (seeds, kind)


def epochs_with_dropout_between() -> Any:
    """One rank of a mesh: epochs with draws of its own at each step, as dropout makes them, and a resume."""
    strategy = tdi.Strategy(["cpu"], mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    seed_all(7)  # on every rank, as tensor parallelism wants it
    dataset = augmented(strategy, "map-style")
    epochs: list[list[Any]] = [[], [], []]
    for epoch in epochs:
        for batch in dataset:
            epoch.append(batch.tolist())
            torch.rand(1 + dist.get_rank())
    return epochs


def test_peers_that_draw_differently_while_they_train_go_on_to_read_the_same() -> None:
    first, peer, other, others_peer = run_ranks(4, epochs_with_dropout_between)
    assert (first, other) == (peer, others_peer)
    numbers = [row[1] for epoch in first for batch in epoch for row in batch]
    assert len(set(numbers)) == len(numbers)


def leave_and_resume(seeds: list[int]) -> Any:
    """One rank of a mesh: the numbers of the samples of a shuffled function's epoch, whole, and left and resumed."""
    strategy = tdi.Strategy(["cpu"], mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    seed_all(seeds[dist.get_rank()])
    dataset, whole, state = augmented(strategy, "function"), [], None
    for step, batch in enumerate(dataset):
        whole.append(batch[:, 0].tolist())
        if step == 1:
            state = dataset.state_dict()
    seed_all(1000 + dist.get_rank())
    resumed = augmented(strategy, "function")
    assert state is not None
    resumed.load_state_dict(state)
    return whole, [batch[:, 0].tolist() for batch in resumed]


@pytest.mark.parametrize("seeds", [[7, 7, 7, 7], [10, 20, 30, 40]])
def test_a_dataset_function_of_peers_resumes_in_the_order_that_it_had(seeds: list[int]) -> None:
    ranks = run_ranks(4, leave_and_resume, seeds)
    for whole, rest in ranks:
        assert sorted(index for batch in whole for index in batch) == list(range(12))
        assert rest == whole[2:]
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
