"""A state that was damaged is a ``StateMismatch``, or is loaded as a place that exists; never anything else."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import torchdistinput as tdi
from tests.data import Kept, Repeated
from torchdistinput import readers
from torchdistinput.errors import SourceError, StateMismatch
from torchdistinput.plan.checkpoint_format import differences

MUTATIONS = 250


def files(folder: Path) -> tdi.FileDataset:
    for number in range(4):
        (folder / f"{number}.txt").write_text("".join(f"{number}:{line}\n" for line in range(40 + number)))
    return tdi.FileDataset(
        f"{folder}/*.txt", readers.text_lines, shuffle_files=True, shuffle_buffer=7, cycle_length=2, block_length=2
    )


def distributed(kind: str, folder: Path) -> tdi.DistributedDataset:
    strategy = tdi.Strategy(devices=["cpu"] * 2)
    options = tdi.InputOptions(prefetch=0)
    if kind == "function":
        return strategy.distribute_datasets_from_function(lambda _: DataLoader(Kept(50), batch_size=4), options)
    data: dict[str, Callable[[], Any]] = {
        "map": lambda: DataLoader(TensorDataset(torch.arange(100)), 8, shuffle=True, generator=torch.Generator()),
        "default": lambda: DataLoader(TensorDataset(torch.arange(100)), 8, shuffle=True),
        "files": lambda: DataLoader(files(folder), 8),
        "iterable": lambda: DataLoader(Repeated(50), 8),
        "keeping": lambda: DataLoader(Kept(50), 8),
    }
    return strategy.distribute_dataset(data[kind](), options)


ODD: list[Any] = [
    *(None, True, -1, 0, 1, 1 << 31, 10**30, 1.5, "", "x", "\n\0", "first 99999999999999999999", "every \u00b2"),
    *("every 1000000000000", [], {}, [[]], {"a": 1}, [None] * 3, "all", ["all"], ["each"], ["files", 1, [], [], 0]),
    ["all", ["files", 2, [], [[0, [[], 0, 0, [], 0]]], 0]],
]
"""What JSON holds."""


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield from paths(value[key], (*path, key))


def changed(value: Any, rng: random.Random) -> Any:
    """A value like it, or something else altogether."""
    if rng.random() < 0.5:
        if type(value) is int:
            return rng.choice([value + 1, value - 1, value * 2 + 1, -value, value + 10**6, value + 2**62])
        if isinstance(value, str) and value:
            cut = rng.randrange(len(value))
            return value[:cut] + rng.choice(["", "é", "\0", "A", "="]) + value[cut + 1 :]
        if isinstance(value, list) and value:
            return rng.choice([value * 2, value[::-1], value[:-1], [*value, None]])
    return rng.choice(ODD)


def damaged(state: dict[str, Any], rng: random.Random) -> Any:
    """The state with one thing in it changed or gone."""
    path = rng.choice(list(paths(state)))
    if not path:
        return rng.choice(ODD)
    state = copy.deepcopy(state)
    holder: Any = state
    for key in path[:-1]:
        holder = holder[key]
    if rng.random() < 0.15:
        del holder[path[-1]]
    else:
        holder[path[-1]] = changed(holder[path[-1]], rng)
    return state


@pytest.fixture
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("kind", ["map", "default", "files", "iterable", "keeping", "function"])
def test_a_damaged_state_is_refused_or_is_a_place(kind: str, tmp_path: Path, all_cells: bool) -> None:
    source = distributed(kind, tmp_path)
    states = [source.state_dict()]
    for _, _ in zip(range(5), source, strict=False):
        states.append(json.loads(json.dumps(source.state_dict())))
    source.close()
    target = distributed(kind, tmp_path)
    refused: list[str] = []
    for seed in range(MUTATIONS * 10 if all_cells else MUTATIONS):
        rng = random.Random(seed)
        state = damaged(rng.choice(states), rng)
        is_loaded = False
        try:
            target.load_state_dict(state, strict=rng.random() < 0.7)
            json.dumps(target.state_dict())
            is_loaded = True
            iterator = iter(target)
            next(iterator, None)
            iterator.close()
        except StateMismatch as error:
            refused.append(str(error))
        except SourceError as error:
            # An offset that is no record's shows when the file is read there.
            if not is_loaded or kind != "files":
                raise AssertionError(f"seed {seed}: {error}") from error
            target = distributed(kind, tmp_path)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}") from error
    assert MUTATIONS // 3 < len(refused) < MUTATIONS * 10
    assert max(map(len, refused)) < 4000
    target.close()


def test_differences_are_told_in_bounded_length() -> None:
    told = differences({"kind": "a", "seed": "x" * 10**6}, {"kind": "a", "seed": 1})
    assert len(told) == 1
    assert len(told[0]) < 1000


@pytest.mark.parametrize("epochs", ["2", "99999999999999999999", "1" * 5000])
def test_a_state_with_more_epochs_to_draw_than_there_were_is_refused(epochs: str, tmp_path: Path) -> None:
    with distributed("map", tmp_path) as source:
        state = source.state_dict()
        state["random"][0] = f"{state['random'][0].partition(' ')[0]} {epochs}"
        with pytest.raises(StateMismatch, match="random: found '.* as its first entry"):
            source.load_state_dict(state)


SAVED = Path(__file__).parent / "saved"
LINES = (7, 0, 31, 64, 5)  # of each file


@contextmanager
def folder_of_files() -> Iterator[None]:
    """The same files under the same names, in a folder that is the current one meanwhile."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            Path("files").mkdir()
            for number, lines in enumerate(LINES):
                path = Path("files", f"{number}.txt")
                path.write_bytes("".join(f"{number}-{line}\n" for line in range(lines)).encode())
                os.utime(path, ns=(10**18, 10**18))
            yield
        finally:
            os.chdir(before)


def digest(values: object) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]


class Seeds(Dataset[tuple[int, int]]):
    """The number of each sample and its seed; saved states have the name of this class, and of the next one."""

    def __len__(self) -> int:
        return 101

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, tdi.sample_seed() % 2**62


class Counting(IterableDataset[int]):
    """A stream of numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


def seeded_line(line: str) -> tuple[str, int]:
    return line, tdi.sample_seed() % 2**62


def text(**settings: Any) -> tdi.FileDataset:
    return tdi.FileDataset("files/*.txt", readers.text_lines, **settings)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shuffled(n: int, seed: int, epoch: int) -> list[int]:
    """The first and last thousand of an order."""
    order = tdi.ShuffleSampler(n, seed).order(epoch)
    ends = (order.block(0, min(n, 1000)), order.block(max(0, n - 1000), n))
    return [int(number) for end in ends for number in end]


def plain(element: Any) -> Any:
    if isinstance(element, torch.Tensor | np.ndarray):
        return element.tolist()
    return [plain(each) for each in element] if isinstance(element, list | tuple) else element


def distributed_as_saved(data: Any, **settings: Any) -> tdi.DistributedDataset:
    return tdi.Strategy(["cpu"]).distribute_dataset(data, **settings)


def by_function(data: Any) -> tdi.DistributedDataset:
    return tdi.Strategy(["cpu"]).distribute_datasets_from_function(lambda _: data)


def torchs(**settings: Any) -> tdi.DistributedDataset:
    torch.manual_seed(3)
    return distributed_as_saved(DataLoader(Seeds(), batch_size=8, **settings))


def drawn_by_torch(**settings: Any) -> tdi.DistributedDataset:
    return torchs(sampler=RandomSampler(Seeds(), generator=seeded(5), **settings))


INPUTS: dict[str, Callable[[], tdi.DistributedDataset]] = {
    "a shuffle with a generator": lambda: torchs(shuffle=True, generator=seeded(11)),
    "a shuffle without a generator": lambda: torchs(shuffle=True),
    "a shuffle in loader workers": lambda: torchs(shuffle=True, generator=seeded(11), num_workers=2),
    "draws with replacement": lambda: drawn_by_torch(replacement=True),
    "more draws than samples": lambda: drawn_by_torch(num_samples=250),
    "ShuffleSampler": lambda: torchs(sampler=tdi.ShuffleSampler(101, seed=4)),
    "files": lambda: distributed_as_saved(text(), global_batch_size=8),
    "shuffled files": lambda: distributed_as_saved(text(shuffle_files=True, seed=6), global_batch_size=8),
    "window shuffle": lambda: distributed_as_saved(text(shuffle_buffer=10, seed=6), global_batch_size=8),
    "all shuffles of files": lambda: distributed_as_saved(
        text(shuffle_files=True, shuffle_buffer=10, seed=6, cycle_length=2, block_length=3), global_batch_size=8
    ),
    "files in loader workers": lambda: distributed_as_saved(
        DataLoader(text(shuffle_files=True, shuffle_buffer=10, seed=6, cycle_length=2), batch_size=8, num_workers=2)
    ),
    "seeds of lines": lambda: distributed_as_saved(
        text(shuffle_files=True, shuffle_buffer=10, seed=6, map_fn=seeded_line), global_batch_size=8
    ),
    "an iterable": lambda: distributed_as_saved(DataLoader(Counting(), batch_size=8)),
    "a function of an iterable": lambda: by_function(DataLoader(Counting(), batch_size=8)),
    "a function of an iterable with a state": lambda: by_function(DataLoader(Kept(100), batch_size=8)),
    "a function of map-style data": lambda: by_function(
        DataLoader(list(range(101)), batch_size=8, shuffle=True, generator=seeded(11))  # type: ignore[arg-type]
    ),
    "a function of files": lambda: by_function(
        DataLoader(text(shuffle_files=True, shuffle_buffer=10, seed=6), batch_size=8)
    ),
}


def two_epochs(make: Callable[[], tdi.DistributedDataset]) -> Any:
    with make() as dataset:
        return [[plain(element) for element in dataset] for _ in range(2)]


ORDERS: dict[str, Callable[[], Any]] = {
    **{
        f"ShuffleSampler({n}, {seed}), epoch {epoch}": partial(shuffled, n, seed, epoch)
        for n in (1, 2, 10, 255, 256, 4095, 4096, 4097, 10_000, 65_537, 1_000_003, 10**12)
        for seed, epoch in ((0, 0), (0, 1), (1, 0), (-5, 7), (2**70, 3))
    },
    "a whole order": lambda: [list(tdi.ShuffleSampler(n, seed=2)) for n in (5000, 20_000)],
    "list_files": lambda: [tdi.list_files("files/*.txt", shuffle=True, seed=seed) for seed in range(8)],
    **{name: partial(two_epochs, make) for name, make in INPUTS.items()},
}


def order_now(name: str) -> str:
    with folder_of_files():
        return digest(ORDERS[name]())


def state_now(make: Callable[[], tdi.DistributedDataset], steps: int) -> dict[str, Any]:
    """A state in the second epoch, and a digest of all that comes after it, up to the end of the third."""
    with make() as dataset:
        for _ in dataset:
            pass
        iterator = iter(dataset)
        for _ in range(steps):
            next(iterator)
        state = dataset.state_dict()
        rest = [plain(element) for element in iterator]
        return {"state": state, "rest": digest([rest, [plain(element) for element in dataset]])}


def rest_after(make: Callable[[], tdi.DistributedDataset], state: dict[str, Any]) -> str:
    with make() as dataset:
        dataset.load_state_dict(state)
        return digest([[plain(element) for element in dataset] for _ in range(2)])


def records(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SAVED / f"{kind}.json").read_text())
    return found


@pytest.mark.parametrize("name", ORDERS)
def test_the_order_for_a_seed_is_the_saved_one(name: str) -> None:
    assert order_now(name) == records("orders")[name]


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.filterwarnings("ignore")
def test_a_saved_state_is_gone_on_from_as_the_version_did_that_saved_it(name: str) -> None:
    saved = records("states")[name]
    with folder_of_files():
        assert rest_after(INPUTS[name], saved["state"]) == saved["rest"]
        assert state_now(INPUTS[name], saved["state"]["step"])["rest"] == saved["rest"]


def test_every_record_has_its_case() -> None:
    assert set(records("orders")) == set(ORDERS)
    assert set(records("states")) == set(INPUTS)


def add(kind: str, cases: dict[str, Callable[[], Any]]) -> None:
    """Adds the records that are missing."""
    path = SAVED / f"{kind}.json"
    found = records(kind) if path.exists() else {}
    with folder_of_files():
        for name in cases.keys() - found.keys():
            found[name] = cases[name]()
    path.write_text(json.dumps({name: found[name] for name in sorted(found)}, indent=1) + "\n")


if __name__ == "__main__":
    add("orders", {name: partial(order_now, name) for name in ORDERS})
    add("states", {name: partial(state_now, make, 4) for name, make in INPUTS.items()})
