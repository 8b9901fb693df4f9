"""``sample_seed``: augmentation that is the same at any world size and any number of loader workers."""

from __future__ import annotations

import random
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

import torchdistinput as tdi
from tests.support import inputs
from tests.support.epochs import epoch
from torchdistinput import readers
from torchdistinput.testing import run_ranks

WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


def noise() -> float:
    return torch.rand((), generator=torch.Generator().manual_seed(tdi.sample_seed()), dtype=torch.float64).item()


class Noisy(Dataset[tuple[int, float]]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, noise()


def noisy(line: str) -> tuple[int, float]:
    return int(line), noise()


def augmented(folder: str, workers: dict[str, Any]) -> list[dict[int, list[float]]]:
    """One rank: what became of each sample, over two epochs, for each kind of data."""
    strategy = tdi.Strategy(devices=["cpu"])
    torch.manual_seed(5 if not dist.is_initialized() or dist.get_rank() == 0 else 1000 + dist.get_rank())
    files = tdi.FileDataset(
        folder + "/?.txt", readers.text_lines, map_fn=noisy, shuffle_files=True, shuffle_buffer=2, seed=8
    )
    loaders: list[Any] = [
        DataLoader(Noisy(), batch_size=4, shuffle=True, generator=inputs.generator(), **workers),
        DataLoader(Noisy(), batch_size=4, shuffle=True, **workers),
        DataLoader(files, batch_size=5, **workers),
    ]
    found = []
    policy = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.DATA)
    for number, loader in enumerate([*loaders, files]):
        size = 5 if number == 3 else None
        with strategy.distribute_dataset(loader, policy, global_batch_size=size) as dataset:
            for _ in range(2):
                samples: dict[int, list[float]] = {}
                for numbers, noises in dataset:
                    for key, value in zip(numbers.tolist(), noises.tolist(), strict=True):
                        samples.setdefault(key, []).append(value)
                found.append(samples)
    return found


def put_together(ranks: list[list[dict[int, list[float]]]]) -> list[dict[int, list[float]]]:
    return [{key: rank[each][key] for rank in ranks for key in rank[each]} for each in range(len(ranks[0]))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[int, list[float]]]]:
    folder = tmp_path_factory.mktemp("numbers")
    inputs.write_numbers(folder)
    state = torch.get_rng_state()
    found = augmented(str(folder), {})
    torch.set_rng_state(state)
    return str(folder), found


def test_every_sample_of_every_epoch_has_a_seed_of_its_own(alone: tuple[str, list[dict[int, list[float]]]]) -> None:
    by_generator, by_state, files, bare_files = ([alone[1][2 * k], alone[1][2 * k + 1]] for k in range(4))
    for epochs, count in ((by_generator, 11), (by_state, 11), (files, 12)):
        values = [value for samples in epochs for values in samples.values() for value in values]
        assert len(values) == len(set(values)) == 2 * count
    assert files == bare_files
    assert by_generator != by_state


@pytest.mark.parametrize(("world", "workers"), [(1, 1), (1, 2), (2, 0), (2, 2), (3, 1)])
def test_augmentation_is_the_same_at_any_world_size_and_number_of_workers(
    world: int, workers: int, alone: tuple[str, list[dict[int, list[float]]]]
) -> None:
    folder, expected = alone
    assert put_together(run_ranks(world, augmented, folder, WORKERS[workers])) == expected


def test_plain_torch_gives_the_records_of_files_the_same_seeds(
    alone: tuple[str, list[dict[int, list[float]]]],
) -> None:
    folder, expected = alone
    files = tdi.FileDataset(
        folder + "/?.txt", readers.text_lines, map_fn=noisy, shuffle_files=True, shuffle_buffer=2, seed=8
    )
    for number in range(2):
        assert {key: [value] for key, value in files} == expected[4 + number]


def read(data: Any) -> None:
    """One epoch in this process."""
    strategy = tdi.Strategy(devices=["cpu"])
    epoch(strategy, strategy.distribute_dataset(data))


def test_seeds_fill_63_bits_and_no_random_number_is_drawn() -> None:
    seeds: list[int] = []

    class Asks(Dataset[int]):
        def __len__(self) -> int:
            return 200

        def __getitem__(self, index: int) -> int:
            seeds.append(tdi.sample_seed())
            assert tdi.sample_seed() == seeds[-1]
            return index

    start = torch.get_rng_state()
    list(DataLoader(range(200), batch_size=50, shuffle=True))  # type: ignore[arg-type]
    state = torch.get_rng_state(), random.getstate()
    torch.set_rng_state(start)
    read(DataLoader(Asks(), batch_size=50, shuffle=True))
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
            DataLoader(Noisy(), batch_size=11, generator=generator)
        )
        dataset.set_epoch(number)
        return next(iter(dataset))[1].tolist()  # type: ignore[no-any-return]

    assert first(1, 3) == first(1, 3)
    assert first(1, 3) != first(1, 4)
    assert first(1, 3) != first(2, 3)


# Where there is no sample


class Many(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [tdi.sample_seed() for _ in indices]


class Streams(IterableDataset[int]):
    def __iter__(self) -> Any:
        yield tdi.sample_seed()


class InAThread(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
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


class ByName(Dataset[int]):
    def __getitem__(self, name: str) -> int:
        return tdi.sample_seed()


def seeds_of_a_batch(rows: list[int]) -> list[int]:
    return [tdi.sample_seed() for _ in rows]


NO_SAMPLE: dict[str, tuple[Any, str]] = {
    "many at once": (DataLoader(Many(), batch_size=2), "many samples are read at once"),
    "an iterable": (DataLoader(Streams(), batch_size=2), "samples of an iterable have no number"),
    "a collate function": (
        DataLoader(range(4), batch_size=2, collate_fn=seeds_of_a_batch),  # type: ignore[arg-type]
        "no numbered sample is being read",
    ),
    "a thread": (DataLoader(InAThread(), batch_size=2), "on the thread that called them"),
    "a name": (DataLoader(ByName(), batch_size=2, sampler=["a"]), "whose index is a str"),
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
