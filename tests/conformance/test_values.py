"""Every case of ``conformance/values.json`` through the arithmetic itself: dtype, shape and every bit of the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from torchdistinput.batches.per_replica import PerReplica
from torchdistinput.coordination import reduce as reductions

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "values.json").read_text())
CPU = torch.device("cpu")


def numbers(data: Any) -> Any:
    """The file writes what JSON cannot, such as ``"nan"``, as strings."""
    return (
        [numbers(each) for each in data] if isinstance(data, list) else float(data) if isinstance(data, str) else data
    )


def answer(case: dict[str, Any]) -> torch.Tensor:
    values = [
        torch.tensor(value["flat"], dtype=getattr(torch, value["dtype"])).reshape(value["shape"])
        for value in case["values"]
    ]
    held, local = PerReplica(values), len(values)
    if case["kind"] == "gather":
        result = reductions.gather(held, case["axis"], num_local=local, workers=None, device=CPU)
    else:
        result = reductions.reduce(case["op"], held, case["axis"], num_local=local, workers=None, device=CPU)
    assert isinstance(result, torch.Tensor)
    return result


@pytest.mark.parametrize("kind", ["reduce", "gather"])
def test_every_case_gives_exactly_what_the_file_says(kind: str) -> None:
    cases = [case for case in CASES if case["kind"] == kind]
    for case in cases:
        found, want = answer(case), case["want"]
        expected = torch.tensor(numbers(want["data"]), dtype=getattr(torch, want["dtype"])).reshape(want["shape"])
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), case
        assert bool((found.eq(expected) | found.ne(found) & expected.ne(expected)).all()), (case, found)
    assert len(cases) == {"reduce": 432, "gather": 78}[kind]
