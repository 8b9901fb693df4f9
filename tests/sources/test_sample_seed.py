"""``sample_seed`` and ``seed_samples=True``: augmentation that is the same at any world size and after a resume."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset, get_worker_info

import torchdistinput as tdi
from tests.data import Mapped, Repeated, Stream, Together
from tests.support import inputs
from torchdistinput import readers
from torchdistinput.testing import run_ranks

Row = tuple[int, float, float, float, float]
SEEDED = tdi.InputOptions(seed_samples=True, auto_shard_policy=tdi.AutoShardPolicy.DATA)


def noise() -> float:
    return torch.rand((), generator=torch.Generator().manual_seed(tdi.sample_seed()), dtype=torch.float64).item()


def drawn(number: int) -> tuple[int, float, float, float]:
    """As vision code draws: from the global generators, an uneven number of times."""
    for _ in range(number % 3):
        torch.rand(2)
    by_numpy = float(np.random.rand())
    return number, torch.rand((), dtype=torch.float64).item(), by_numpy, random.random()


def augmented(number: int) -> Row:
    return *drawn(number), noise()


def pictures() -> Mapped:
    return Mapped(11, augmented)


def drawn_in_workers() -> Stream:
    """The loader workers divide it; a row of each is augmented by the same numbers on each rank."""

    def rows() -> Iterable[Any]:
        info = get_worker_info()
        assert info is not None
        return map(drawn, range(info.id, 12, info.num_workers))

    return Stream(rows)


def augmented_line(line: str) -> Row:
    return augmented(int(line))


def rows_of(batch: Any) -> list[Row]:
    return list(zip(*(column.tolist() for column in batch), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("numbers")
    inputs.write_numbers(path)
    return str(path)


def test_generators_go_on_where_they_were() -> None:
    def three() -> tuple[float, float, float]:
        return torch.rand(()).item(), float(np.random.rand()), random.random()

    def seed() -> None:
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)

    loader = tdi.Strategy(devices=["cpu"]).distribute_dataset(pictures(), SEEDED, global_batch_size=4)
    seed()
    list(DataLoader(TensorDataset(torch.arange(11)), batch_size=4))  # an epoch draws a seed for loader workers
    expected = three()
    seed()
    list(loader)
    assert three() == expected


def drawn_in_loader_workers(mesh: bool, drop_in: bool, workers: dict[str, Any]) -> list[list[Any]]:
    """One rank, seeded as all others: what it reads of pictures, and of a stream that every rank reads in full."""
    dims = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) if mesh else None
    strategy = tdi.Strategy(devices=["cpu"], mesh=dims)
    found = []
    for data, seed in ((Mapped(11, drawn), False), (Mapped(11, drawn), True), (drawn_in_workers(), False)):
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
    alone = [row for batch in DataLoader(Mapped(11, drawn), 4, num_workers=2) for row in rows_of(batch)]
    assert ranks[0][0][0] == alone[0]


def function_of_numbers(context: tdi.InputContext) -> Any:
    return DataLoader(pictures(), batch_size=2)


def test_data_without_numbers_is_refused() -> None:
    strategy = tdi.Strategy(devices=["cpu"])
    for data in (Repeated(4), DataLoader(Repeated(4), batch_size=2)):
        with pytest.raises(tdi.InputError, match=r"seed_samples=True was given with .*iterable \(Repeated\)"):
            strategy.distribute_dataset(data, SEEDED)
    with pytest.raises(tdi.InputError, match="seed_samples=True was given with a dataset function"):
        strategy.distribute_datasets_from_function(function_of_numbers, SEEDED)


def test_indices_that_are_no_ints_are_refused() -> None:
    strategy = tdi.Strategy(devices=["cpu"])
    for sampler, index in ((["ab", "c"], "'ab'"), ([[0, 1]], r"\[0, 1\]")):
        size = None if index != "'ab'" else 2
        data: Any = DataLoader(Mapped(4, len), batch_size=size, sampler=sampler)
        with pytest.raises(tdi.InputError, match=f"the index {index} is a"):
            next(iter(strategy.distribute_dataset(data, SEEDED)))


def test_plain_torch_gives_the_records_of_files_the_same_seeds(folder: str) -> None:
    files, same = (
        tdi.FileDataset(folder + "/?.txt", readers.text_lines, map_fn=augmented_line, shuffle_buffer=3, seed=8)
        for _ in range(2)
    )
    loader = tdi.Strategy(devices=["cpu"]).distribute_dataset(DataLoader(same, batch_size=5), SEEDED)
    expected = [row[4] for _ in range(2) for batch in loader for row in rows_of(batch)]
    assert [row[4] for _ in range(2) for row in files] == expected


def read(data: Any) -> None:
    """One epoch in this process."""
    list(tdi.Strategy(devices=["cpu"]).distribute_dataset(data))


def test_seeds_fill_63_bits_and_no_random_number_is_drawn() -> None:
    seeds: list[int] = []

    def asks(index: int) -> int:
        seeds.append(tdi.sample_seed())
        assert tdi.sample_seed() == seeds[-1]
        return index

    start = torch.get_rng_state()
    list(DataLoader(range(200), batch_size=50, shuffle=True))  # type: ignore[arg-type]
    state = torch.get_rng_state(), random.getstate()
    torch.set_rng_state(start)
    read(DataLoader(Mapped(200, asks), batch_size=50, shuffle=True))
    assert len(set(seeds)) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62
    bits = [sum(seed >> bit & 1 for seed in seeds) for bit in range(63)]
    assert all(50 < count < 150 for count in bits)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]


def test_set_epoch_and_another_seed_change_the_seeds() -> None:
    def first(seed: int, number: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        dataset = tdi.Strategy(devices=["cpu"]).distribute_dataset(
            DataLoader(pictures(), batch_size=11, generator=generator)
        )
        dataset.set_epoch(number)
        return next(iter(dataset))[4].tolist()  # type: ignore[no-any-return]

    assert first(1, 3) == first(1, 3)
    assert first(1, 3) != first(1, 4)
    assert first(1, 3) != first(2, 3)


# Where there is no sample


def seed_in_a_thread(_: int) -> int:
    caught: list[RuntimeError] = []

    def ask() -> None:
        try:
            tdi.sample_seed()
        except RuntimeError as error:
            caught.append(error)

    thread = Thread(target=ask)
    thread.start()
    thread.join()
    raise caught[0]


def seed_of(_: Any) -> int:
    return tdi.sample_seed()


def seeds_of_a_batch(rows: list[int]) -> list[int]:
    return [*map(seed_of, rows)]


NO_SAMPLE: dict[str, tuple[Any, str]] = {
    "many at once": (DataLoader(Together(4, seeds_of_a_batch), batch_size=2), "many samples are read at once"),
    "an iterable": (DataLoader(Stream(lambda: map(seed_of, [0])), batch_size=2), "For an iterable seed a generator"),
    "a collate function": (
        DataLoader(range(4), batch_size=2, collate_fn=seeds_of_a_batch),  # type: ignore[arg-type]
        "no numbered sample is being read",
    ),
    "a thread": (DataLoader(Mapped(4, seed_in_a_thread), batch_size=2), "on the thread that called them"),
    "a name": (DataLoader(Mapped(4, seed_of), batch_size=2, sampler=["a"]), "whose index is a str"),
}


@pytest.mark.parametrize("name", NO_SAMPLE)
def test_where_no_numbered_sample_is_read_it_says_so_and_the_way_out(name: str) -> None:
    data, words = NO_SAMPLE[name]
    with pytest.raises(tdi.SourceError, match=words):
        read(data)


def test_outside_of_any_dataset_and_after_a_failure_in_one_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x\n")
    with pytest.raises(tdi.SourceError):
        list(tdi.FileDataset(str(tmp_path / "a.txt"), readers.text_lines, map_fn=int))
    with pytest.raises(RuntimeError, match=r"no numbered sample .* FileDataset"):
        tdi.sample_seed()


def test_only_bools_are_taken(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="seed_samples is 1; True or False is needed"):
        tdi.InputOptions(seed_samples=1)  # type: ignore[arg-type]
