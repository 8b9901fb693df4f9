"""``seed_samples=True``: ordinary augmentation is the same at any world size, with loader workers, after a resume."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import torchdistinput as tdi
from tests.support import inputs
from torchdistinput import readers
from torchdistinput.testing import run_ranks

Found = list[list[tuple[int, float, float, float]]]
SEEDED = tdi.InputOptions(seed_samples=True, auto_shard_policy=tdi.AutoShardPolicy.DATA)
WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


def augmented(number: int) -> tuple[int, float, float, float]:
    """As vision code does it: from the global generators, an uneven number of times."""
    for _ in range(number % 3):
        torch.rand(2)
    noise = np.random.rand()
    return number, torch.rand((), dtype=torch.float64).item(), float(noise), random.random()


class Pictures(Dataset[tuple[int, float, float, float]]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return augmented(index)


def augmented_line(line: str) -> tuple[int, float, float, float]:
    return augmented(int(line))


def datasets(folder: str, workers: dict[str, Any]) -> list[Any]:
    files = tdi.FileDataset(folder + "/?.txt", readers.text_lines, map_fn=augmented_line, shuffle_buffer=3, seed=8)
    return [
        DataLoader(Pictures(), batch_size=4, shuffle=True, generator=inputs.generator(), **workers),
        DataLoader(Subset(Pictures(), range(10)), batch_size=4, shuffle=True, **workers),  # it has __getitems__
        DataLoader(files, batch_size=5, **workers),
    ]


def rows_of(batch: Any) -> list[tuple[int, float, float, float]]:
    return list(zip(*(column.tolist() for column in batch), strict=True))


def loaders(folder: str, workers: dict[str, Any], drop_in: bool) -> list[Any]:
    strategy = tdi.Strategy(devices=["cpu"])
    torch.manual_seed(5 if not dist.is_initialized() or dist.get_rank() == 0 else 1000 + dist.get_rank())
    if not drop_in:
        return [strategy.distribute_dataset(data, SEEDED) for data in datasets(folder, workers)]
    made = []
    for data in datasets(folder, workers):
        order = {} if isinstance(data.dataset, IterableDataset) else {"sampler": data.sampler}
        loader: Any = tdi.DataLoader(
            data.dataset,
            data.batch_size,
            generator=data.generator,
            strategy=strategy,
            seed_samples=True,
            **order,
            **workers,
        )
        made.append(loader)
    return made


def two_epochs(folder: str, workers: dict[str, Any], drop_in: bool) -> list[Found]:
    """One rank: its part of each step, over two epochs, for each kind of data."""
    found = []
    for loader in loaders(folder, workers, drop_in):
        found.append([rows_of(batch) for _ in range(2) for batch in loader])
    return found


def first_steps(folder: str) -> list[tuple[Found, dict[str, Any]]]:
    """One rank: its part of two steps, and the state after them, for each kind of data."""
    found = []
    for loader in loaders(folder, {}, drop_in=False):
        iterator = iter(loader)
        steps = [rows_of(next(iterator)) for _ in range(2)]
        found.append((steps, loader.state_dict()))
        iterator.close()
    return found


def other_steps(folder: str, states: list[dict[str, Any]]) -> list[Found]:
    """One rank: its part of the rest of that epoch, and of the next one."""
    found = []
    for loader, state in zip(loaders(folder, WORKERS[1], drop_in=False), states, strict=True):
        loader.load_state_dict(state)
        found.append([rows_of(batch) for _ in range(2) for batch in loader])
    return found


def put_together(ranks: list[list[Found]]) -> list[Found]:
    """The global batches, for each kind of data; a batch of a rank may be empty."""
    return [
        [[row for part in parts for row in part] for parts in zip(*of_ranks, strict=True)]
        for of_ranks in zip(*ranks, strict=True)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("numbers")
    inputs.write_numbers(path)
    return str(path)


@pytest.fixture(scope="module")
def alone(folder: str) -> list[Found]:
    with torch.random.fork_rng():
        return two_epochs(folder, {}, drop_in=False)


def test_no_two_samples_draw_the_same(alone: list[Found]) -> None:
    for steps in alone:
        rows = [row for step in steps for row in step]
        for column in (1, 2, 3):
            assert len({row[column] for row in rows}) == len(rows)


@pytest.mark.parametrize(
    ("world", "workers", "drop_in"), [(1, 1, True), (2, 0, False), (2, 1, False), (3, 1, True), (5, 0, True)]
)
def test_ordinary_augmentation_is_the_same_everywhere(
    world: int, workers: int, drop_in: bool, folder: str, alone: list[Found]
) -> None:
    assert put_together(run_ranks(world, two_epochs, folder, WORKERS[workers], drop_in)) == alone


def test_loader_workers_that_live_on_see_the_same(folder: str, alone: list[Found]) -> None:
    """As in torch, they change the order of later epochs, but no sample."""
    found = put_together(run_ranks(2, two_epochs, folder, WORKERS[2], False))
    for ours, expected in zip(found, alone, strict=True):
        assert sorted(row for step in ours for row in step) == sorted(row for step in expected for row in step)


def test_it_goes_on_alike_at_another_world_size(folder: str, alone: list[Found]) -> None:
    first = run_ranks(2, first_steps, folder)
    states = [state for _, state in first[0]]
    begun = put_together([[steps for steps, _ in rank] for rank in first])
    rest = put_together(run_ranks(3, other_steps, folder, states))
    assert [before + after for before, after in zip(begun, rest, strict=True)] == alone


def test_generators_go_on_where_they_were() -> None:
    def drawn() -> tuple[float, float, float]:
        return torch.rand(()).item(), float(np.random.rand()), random.random()

    def seed() -> None:
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)

    loader = tdi.Strategy(devices=["cpu"]).distribute_dataset(Pictures(), SEEDED, global_batch_size=4)
    seed()
    list(DataLoader(TensorDataset(torch.arange(11)), batch_size=4))  # an epoch draws a seed for loader workers
    expected = drawn()
    seed()
    list(loader)
    assert drawn() == expected


def test_they_go_on_where_they_were_after_a_sample_that_fails() -> None:
    class Fails(Pictures):
        def __getitem__(self, index: int) -> tuple[int, float, float, float]:
            torch.rand(3)
            raise ValueError("no picture")

    loader = tdi.Strategy(devices=["cpu"]).distribute_dataset(Fails(), SEEDED, global_batch_size=4)
    iterator = iter(loader)
    state = torch.get_rng_state()
    with pytest.raises(tdi.SourceError, match="no picture"):
        next(iterator)
    assert torch.equal(torch.get_rng_state(), state)


def test_samples_that_are_left_out_change_no_other_one(folder: str, alone: list[Found]) -> None:
    class Holes(Pictures):
        def __getitem__(self, index: int) -> tuple[int, float, float, float]:
            if index == 4:
                torch.rand(1)
                raise ValueError("no picture")
            return augmented(index)

    options = tdi.InputOptions(seed_samples=True, on_error="skip")
    data = DataLoader(Holes(), batch_size=4, shuffle=True, generator=inputs.generator())
    loader = tdi.Strategy(devices=["cpu"]).distribute_dataset(data, options)
    found = [rows_of(batch) for _ in range(2) for batch in loader]
    assert found == [[row for row in step if row[0] != 4] for step in alone[0]]


def test_without_it_torch_draws_as_ever() -> None:
    """The default: in one process the drop-in is torch's loader, augmentation included."""
    found = []
    for cls in (tdi.DataLoader, DataLoader):
        torch.manual_seed(7)
        np.random.seed(7)
        random.seed(7)
        loader: Any = cls(Pictures(), batch_size=4, shuffle=True)
        found.append([rows_of(batch) for batch in loader])
    assert found[0] == found[1]


def drawn_in_loader_workers(mesh: bool, drop_in: bool, workers: dict[str, Any]) -> list[list[Any]]:
    """One rank, seeded as all others: what it reads of pictures, and of a stream that every rank reads in full."""
    dims = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) if mesh else None
    strategy = tdi.Strategy(devices=["cpu"], mesh=dims)
    found = []
    for data, seed in ((Pictures(), False), (Pictures(), True), (AugmentedStream(), False)):
        generator = torch.Generator().manual_seed(3) if seed else None
        torch.manual_seed(7)
        loader: Any = DataLoader(data, 4, generator=generator, num_workers=2, **workers)
        if drop_in:
            loader = tdi.DataLoader(data, 4, generator=generator, num_workers=2, strategy=strategy, **workers)
        else:
            loader = strategy.distribute_dataset(loader)
        with loader:
            found.append([row for batch in loader for row in rows_of(batch)])
    return found


@pytest.mark.parametrize(
    ("mesh", "drop_in", "workers"), [(False, True, {}), (False, False, {"persistent_workers": True}), (True, False, {})]
)
def test_loader_workers_of_ranks_that_read_different_samples_draw_different_numbers(
    mesh: bool, drop_in: bool, workers: dict[str, Any]
) -> None:
    ranks = run_ranks(4 if mesh else 2, drawn_in_loader_workers, mesh, drop_in, workers)
    coordinates = ranks[::2] if mesh else ranks
    if mesh:
        assert ranks[1::2] == coordinates  # peers read the same samples, augmented alike
    for of_kind in zip(*coordinates, strict=True):
        rows = [row for part in of_kind for row in part]
        for column in (1, 2, 3):
            assert len({row[column] for row in rows}) == len(rows)
    torch.manual_seed(7)  # the first ranks draw as torch's loader does
    alone = [row for batch in DataLoader(Pictures(), 4, num_workers=2) for row in rows_of(batch)]
    assert ranks[0][0][0] == alone[0]


class AugmentedStream(IterableDataset[tuple[int, float, float, float]]):
    """The loader workers divide it; a row of each is augmented by the same numbers on each rank."""

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        yield from map(augmented, range(info.id, 12, info.num_workers))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        yield from range(4)


def function_of_numbers(context: tdi.InputContext) -> Any:
    return DataLoader(Pictures(), batch_size=2)


def test_data_without_numbers_is_refused() -> None:
    strategy = tdi.Strategy(devices=["cpu"])
    for data in (Stream(), DataLoader(Stream(), batch_size=2)):
        with pytest.raises(tdi.InputError, match=r"seed_samples=True was given with .*iterable \(Stream\)"):
            strategy.distribute_dataset(data, SEEDED)
    with pytest.raises(tdi.InputError, match="seed_samples=True was given with a dataset function"):
        strategy.distribute_datasets_from_function(function_of_numbers, SEEDED)


def test_indices_that_are_no_ints_are_refused() -> None:
    class ByName(Dataset[int]):
        def __getitem__(self, name: str) -> int:
            return len(name)

    strategy = tdi.Strategy(devices=["cpu"])
    for sampler, index in ((["ab", "c"], "'ab'"), ([[0, 1]], r"\[0, 1\]")):
        size = None if index != "'ab'" else 2
        data: Any = DataLoader(ByName(), batch_size=size, sampler=sampler)
        with pytest.raises(tdi.InputError, match=f"the index {index} is a"):
            next(iter(strategy.distribute_dataset(data, SEEDED)))


def test_only_bools_are_taken(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="seed_samples is 1; True or False is needed"):
        tdi.InputOptions(seed_samples=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="seed_samples"):
        partial(tdi.DataLoader, Pictures())(seed_samples="yes")  # type: ignore[arg-type]
