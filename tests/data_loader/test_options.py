"""Every option at both doors: the drop-in gives what ``distribute_dataset`` gives with the same options."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.data import Kept, Mapped
from tests.support.epochs import pieces

DATA = tdi.AutoShardPolicy.DATA
Make = Callable[[Path], dict[str, Any]]
"""Makes the arguments of a loader, in a folder."""


def squares(_: Path) -> dict[str, Any]:
    return {"dataset": Mapped(11, lambda index: torch.tensor([index, index * index])), "batch_size": 4}


def random_numbers(_: Path) -> dict[str, Any]:
    return {"dataset": Mapped(11, lambda _: torch.rand(2)), "batch_size": 4}


def some_bad(_: Path) -> dict[str, Any]:
    return {"dataset": Mapped(11, lambda index: torch.tensor([6 // (index % 5)])), "batch_size": 4}


def ready(_: Path) -> dict[str, Any]:
    """Ready batches that say themselves how many samples they have; with a state of their own."""
    batches = Kept(4, lambda number: {"x": torch.arange(2 * number + 2).reshape(-1, 2)})
    return {"dataset": batches, "batch_size": None}


def files(folder: Path) -> dict[str, Any]:
    for number, lines in enumerate((2, 7, 1)):
        (folder / f"{number}.txt").write_text("".join(f"{number}{line}\n" for line in range(lines)))
    data = tdi.FileDataset(f"{folder}/*.txt", tdi.readers.text_lines, map_fn=lambda line: torch.tensor([int(line)]))
    return {"dataset": data, "batch_size": 4}


def halves(batch: Any, sizes: list[int]) -> list[Any]:
    return [{"x": part} for part in batch["x"].flip(0).split(sizes)]


OPTIONS: dict[str, tuple[Make, dict[str, Any]]] = {
    "auto_shard_policy": (files, {"auto_shard_policy": tdi.AutoShardPolicy.FILE}),
    "prefetch": (squares, {"prefetch": 3}),
    "fetch_to_device": (squares, {"fetch_to_device": False}),
    "coordination": (squares, {"coordination": "off"}),
    "timeout_seconds": (squares, {"timeout_seconds": 50.0}),
    "with_index": (squares, {"with_index": True}),
    "partial_batch": (squares, {"partial_batch": "pad"}),
    "on_error": (some_bad, {"on_error": "skip"}),
    "max_errors": (some_bad, {"on_error": "skip", "max_errors": 2}),
    "log_every": (squares, {"log_every": 1}),
    "trace": (squares, {"trace": "here"}),
    "seed_samples": (random_numbers, {"seed_samples": True}),
    "count_fn": (ready, {"count_fn": lambda batch: len(batch["x"])}),
    "split_fn": (ready, {"split_fn": halves}),
    "empty_fn": (ready, {"empty_fn": lambda: {"x": torch.zeros(0, 2, dtype=torch.int64)}}),
    "own_state": (ready, {"own_state": "ignore"}),
    "file_assignment": (files, {"auto_shard_policy": tdi.AutoShardPolicy.FILE, "file_assignment": "by_size"}),
    "balance": (squares, {"balance": tdi.Balance([9, *[1] * 10], equal_counts=True)}),
    "sums": (squares, {"sums": {"ones": lambda batch: int(batch[:, 0].sum())}}),
}
"""One setting of each option that shows where it works."""

REFUSED: dict[str, Any] = {"replication_mode": tdi.InputReplicationMode.PER_REPLICA}


def seen(loader: Any, strategy: tdi.Strategy, folder: Path, caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """What an epoch shows of the options: its steps, its state after two of them, its plan, lines and traces."""
    caplog.clear()
    torch.manual_seed(7)
    found: dict[str, Any] = {"elements": [], "steps": [], "error": None}
    try:
        for element in loader:
            found["elements"].append(pieces(strategy, element))
            found["steps"].append((loader.step.global_size, loader.step.local_sizes, loader.step.sums))
            if len(found["steps"]) == 2:
                state = loader.state_dict()
                found["state"] = state["position"], dict(state["input"])["kind"] if "input" in state else None
    except tdi.InputError as error:
        found["error"] = type(error), str(error)[:60]
    found["skipped"] = loader.stats()["skipped_samples"]
    found["plan"] = loader.explain().to_json()
    found["logged"] = len([each for each in caplog.messages if "epoch 0" in each])
    loader.close()
    found["traces"] = len([*folder.glob("*")])
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_does_the_same_at_both_doors(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    make, given = OPTIONS[name]
    shows = False
    for replicas in (1, 2):
        found = []
        for place, chosen in enumerate((given, given, {})):
            folder = tmp_path / f"{replicas}{place}"
            strategy, arguments = tdi.Strategy(devices=["cpu"] * replicas), make(tmp_path)
            written = {"trace": folder} if "trace" in chosen else {}
            options = tdi.InputOptions(**{"auto_shard_policy": DATA, "prefetch": 0, **chosen, **written})
            if place:
                loader: Any = strategy.distribute_dataset(DataLoader(**arguments), options)
            else:
                loader = tdi.DataLoader(**arguments, strategy=strategy, options=options)
            found.append(seen(loader, strategy, folder, caplog))
        assert found[0] == found[1]
        shows = shows or found[1] != found[2]
    assert shows == (name not in {"fetch_to_device", "coordination", "timeout_seconds", "count_fn", "empty_fn"})


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_of_dataset_functions_is_refused_at_both_doors(name: str, tmp_path: Path) -> None:
    strategy, options = tdi.Strategy(devices=["cpu"]), tdi.InputOptions(**{name: REFUSED[name]})
    for make in (
        lambda: strategy.distribute_dataset(DataLoader(**squares(tmp_path)), options),
        lambda: next(iter(tdi.DataLoader(**squares(tmp_path), strategy=strategy, options=options))),
    ):
        with pytest.raises(ValueError, match=f"{name}.* belongs to distribute_datasets_from_function"):
            make()


def test_each_option_stands_here() -> None:
    assert {*OPTIONS, *REFUSED} == {field.name for field in dataclasses.fields(tdi.InputOptions)}


def test_the_policy_that_nobody_chose_is_data_in_the_drop_in_and_auto_elsewhere(tmp_path: Path) -> None:
    strategy = tdi.Strategy(devices=["cpu"] * 2)
    for options in (None, tdi.InputOptions(prefetch=1)):
        with tdi.DataLoader(**files(tmp_path), strategy=strategy, options=options) as loader:
            assert loader.explain().policy == "DATA"
        with strategy.distribute_dataset(DataLoader(**files(tmp_path)), options) as dataset:
            assert dataset.explain().policy == "FILE"
    auto = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.AUTO)
    with tdi.DataLoader(**files(tmp_path), strategy=strategy, options=auto) as loader:
        assert loader.explain().policy == "FILE"


def test_what_is_no_input_options_is_refused() -> None:
    with pytest.raises(TypeError, match=r"options is \{'prefetch': 2\}; an InputOptions is needed"):
        tdi.DataLoader(range(3), options={"prefetch": 2})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="prefetch"):
        tdi.DataLoader(range(3), prefetch=2)  # type: ignore[call-arg, arg-type]
