"""Every case of ``conformance/values.json`` through ``Strategy.reduce`` and ``gather``: dtype, shape and every bit."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdistinput as tdi

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "values.json").read_text())


def numbers(data: Any) -> Any:
    """The file writes what JSON cannot, such as ``"nan"``, as strings."""
    return (
        [numbers(each) for each in data] if isinstance(data, list) else float(data) if isinstance(data, str) else data
    )


@functools.cache
def strategy_of(replicas: int) -> tdi.Strategy:
    return tdi.Strategy(devices=["cpu"] * replicas)


def answer(case: dict[str, Any]) -> torch.Tensor:
    values = [
        torch.tensor(value["flat"], dtype=getattr(torch, value["dtype"])).reshape(value["shape"])
        for value in case["values"]
    ]
    strategy = strategy_of(len(values))
    held = strategy.distribute_values_from_function(lambda context: values[context.replica_id_in_sync_group])
    found = (
        strategy.gather(held, case["axis"])
        if case["kind"] == "gather"
        else strategy.reduce(case["op"], held, case["axis"])
    )
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("kind", ["reduce", "gather"])
def test_every_case_gives_exactly_what_the_file_says(kind: str) -> None:
    cases = [case for case in CASES if case["kind"] == kind]
    for case in cases:
        found, want = answer(case), case["want"]
        expected = torch.tensor(numbers(want["data"]), dtype=getattr(torch, want["dtype"])).reshape(want["shape"])
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), case
        assert bool((found.eq(expected) | found.ne(found) & expected.ne(expected)).all()), (case, found)
    assert len(cases) == {"reduce": 432, "gather": 78}[kind]
