"""The migration tables of packages that need an environment of their own; ``scripts/test_apart`` runs them."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.ecosystem.kinds import SAMPLES, ByIndex, write_litdata, write_mosaicml
from tests.support.migration import FROM_LITDATA, FROM_MOSAICML, Row, run
from torchdistinput.testing import run_ranks


def numbers_in(samples: Any) -> list[int]:
    """Those of all samples, or of the batches of a loader."""
    return [number for each in samples for number in each["x"].reshape(-1).tolist()]


def rest_after_a_batch(rows: dict[str, Row], side: str, given: dict[str, Any], held: str) -> list[list[int]]:
    """An epoch; and what comes of one after the state that its first batch left."""
    make, save = getattr(rows["loader"], side), getattr(rows["state"], side)
    scope = run(make, dict(given))
    epoch = numbers_in(scope["loader"])
    scope = run(make, {**given, "num_samples": given["B"]})
    iterator = iter(scope["loader"])
    first = numbers_in([next(iterator)])
    run(save, scope)
    del iterator
    later = run(make, dict(given))
    later[held].load_state_dict(scope["state"])
    return [epoch, first + numbers_in(later["loader"])]


def mosaicml(folder: Path) -> dict[str, Any]:
    streaming = import_module("streaming")
    for name in ("a", "b"):
        write_mosaicml(folder / name)
    given = {"tdi": tdi, "DataLoader": DataLoader, "ByIndex": ByIndex, "B": 10, "N": 1}
    given |= {"StreamingDataset": streaming.StreamingDataset, "Stream": streaming.Stream}
    found: dict[str, Any] = {"epochs": []}
    for side, held in (("before", "data"), ("after", "loader")):
        found["epochs"] += rest_after_a_batch(FROM_MOSAICML, side, {**given, "folder": str(folder / "a")}, held)
    given |= {"a": str(folder / "a"), "b": str(folder / "b"), "folder": str(folder / "b")}
    run(FROM_MOSAICML["nodes"].before, dict(given))
    theirs = len(list(run(FROM_MOSAICML["mix"].before, dict(given))["mixed"]))
    given |= {"data_a": range(SAMPLES), "data_b": range(1000, 1000 + SAMPLES), "num_samples": theirs}
    ours = list(run(FROM_MOSAICML["mix"].after, dict(given))["mixed"])
    return {**found, "theirs": theirs, "of_a": sum(number < 1000 for number in ours), "ours": len(ours)}


def litdata(folder: Path) -> list[list[int]]:
    module = import_module("litdata")
    write_litdata(folder / "data")
    index = json.loads((folder / "data" / "index.json").read_text())
    given = {"tdi": tdi, "ByIndex": ByIndex, "B": 10, "N": 1, "folder": str(folder / "data")}
    given |= {"StreamingDataset": module.StreamingDataset, "StreamingDataLoader": module.StreamingDataLoader}
    given["length"] = sum(chunk["chunk_size"] for chunk in index["chunks"])
    run(FROM_LITDATA["tail"].before, dict(given))
    return [epoch for side in ("before", "after") for epoch in rest_after_a_batch(FROM_LITDATA, side, given, "loader")]


def test_a_streaming_dataset_of_mosaicml(tmp_path: Path) -> None:
    pytest.importorskip("streaming")
    found = run_ranks(1, mosaicml, tmp_path, timeout_seconds=240)[0]
    assert found["theirs"] == found["ours"] == 2 * SAMPLES
    assert abs(found["of_a"] - 0.75 * found["ours"]) < 10  # of a block that is cut off at the end
    for epoch in found["epochs"]:
        assert sorted(epoch) == [*range(SAMPLES)]


def test_a_streaming_dataset_of_litdata(tmp_path: Path) -> None:
    pytest.importorskip("litdata")
    for epoch in run_ranks(1, litdata, tmp_path, timeout_seconds=240)[0]:
        assert sorted(epoch) == [*range(SAMPLES)]
