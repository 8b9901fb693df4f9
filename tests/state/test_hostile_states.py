"""A state that was damaged is a ``StateMismatch``, or is loaded as a place that exists; never anything else."""

from __future__ import annotations

import copy
import json
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import torchdistinput as tdi
from tests.data import Repeated
from torchdistinput import readers
from torchdistinput.errors import SourceError, StateMismatch
from torchdistinput.plan.checkpoint_format import differences

MUTATIONS = 250


class Keeping(IterableDataset[int]):
    """Keeps a state of its own, and takes any."""

    def __init__(self) -> None:
        self.done = 0

    def __iter__(self) -> Iterator[int]:
        while self.done < 50:
            self.done += 1
            yield self.done - 1
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: Any) -> None:
        done = state.get("done") if isinstance(state, dict) else None
        self.done = done if isinstance(done, int) else 0


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
        return strategy.distribute_datasets_from_function(lambda _: DataLoader(Keeping(), batch_size=4), options)
    data: dict[str, Callable[[], Any]] = {
        "map": lambda: DataLoader(TensorDataset(torch.arange(100)), 8, shuffle=True, generator=torch.Generator()),
        "default": lambda: DataLoader(TensorDataset(torch.arange(100)), 8, shuffle=True),
        "files": lambda: DataLoader(files(folder), 8),
        "iterable": lambda: DataLoader(Repeated(50), 8),
        "keeping": lambda: DataLoader(Keeping(), 8),
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
