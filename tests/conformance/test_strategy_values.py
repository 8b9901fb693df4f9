"""Every case of ``conformance/values.json`` through ``Strategy.reduce`` and ``Strategy.gather``."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchdistinput as tdi

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "values.json").read_text())
# Rounding of one addition in each type; sums here have at most a few dozen terms.
TOLERANCE = {"float16": 2e-3, "float32": 1e-6, "float64": 1e-12, "int32": 0.0, "int64": 0.0}


@functools.cache
def strategy_of(replicas: int) -> tdi.Strategy:
    return tdi.Strategy(devices=["cpu"] * replicas)


def tensor_of(value: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(value["flat"], dtype=getattr(torch, value["dtype"])).reshape(value["shape"])


def answer(case: dict[str, Any]) -> torch.Tensor:
    values = [tensor_of(value) for value in case["values"]]
    strategy = strategy_of(len(values))
    held = strategy.distribute_values_from_function(lambda context: values[context.replica_id_in_sync_group])
    assert isinstance(held, tdi.PerReplica)
    if case["kind"] == "gather":
        return torch.as_tensor(strategy.gather(held, axis=case["axis"]))
    return torch.as_tensor(strategy.reduce(case["op"], held, axis=case["axis"]))


def agrees(found: torch.Tensor, want: dict[str, Any]) -> bool:
    dtype = getattr(torch, want["dtype"])
    if found.dtype != dtype or list(found.shape) != want["shape"]:
        return False
    data = np.array(want["data"], dtype=np.float64)  # a nan is written as a string there, which NumPy reads
    expected = torch.from_numpy(data).to(dtype).reshape(want["shape"])
    bound = TOLERANCE[want["dtype"]]
    return torch.allclose(found.double(), expected.double(), rtol=bound, atol=bound, equal_nan=True)


def test_every_case_of_values_gives_the_result_that_the_file_says() -> None:
    found = {case["id"]: answer(case) for case in CASES}
    wrong = [(case, found[case["id"]]) for case in CASES if not agrees(found[case["id"]], case["want"])]
    assert not wrong, f"{len(wrong)} of {len(CASES)}, the first: {wrong[:3]}"
    assert len(found) == len(CASES) == 510
