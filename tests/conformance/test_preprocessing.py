"""The answers of Keras's preprocessing layers, and the exact ones where Keras's depend on the batches.

The cases and their format are those of the folder's ``README.md``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchdistinput import preprocessing

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "preprocessing.json").read_text())


def number(item: Any) -> Any:
    if isinstance(item, list):
        return [number(each) for each in item]
    return float(item) if item in ("nan", "inf", "-inf") else item


def value(tensor: Any) -> Any:
    """A tensor of a case, as a user would give it."""
    if not isinstance(tensor, dict):
        return tensor
    if tensor["dtype"] == "string":
        return np.empty(tensor["shape"], object) if 0 in tensor["shape"] else tensor["values"]
    found = np.array(number(tensor["values"]), tensor["dtype"]).reshape(tensor["shape"])
    return torch.from_numpy(found)


def data_of(case: dict[str, Any], name: str = "data") -> Any:
    batches = [value(each) for each in case[name]]
    if case.get("as") in ("array", "tensor") and name == "data":
        return batches[0]

    class Batches:
        def __iter__(self) -> Iterator[Any]:
            return iter(batches)

    return Batches()


def arguments(case: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, item in case["args"].items():
        plain = number(item) if name in ("mean", "variance", "bin_boundaries") else item
        is_tuple = isinstance(plain, list) and name == "axis" and not case.get("list_args")
        found[name] = tuple(plain) if is_tuple else plain
    return found


def make(case: dict[str, Any]) -> Any:
    layer = getattr(preprocessing, case["layer"])(**arguments(case))
    if "data_before" in case:
        layer.adapt(data_of(case, "data_before"))
    if "data" in case:
        layer.adapt(data_of(case))
    return layer


def accepts(case: dict[str, Any], *words: str) -> bool:
    return any(word in case.get("accept", []) for word in words)


def same(found: Any, wanted: Any, tolerance: float = 2e-6) -> bool:
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, float):
        return math.isclose(found, wanted, rel_tol=tolerance, abs_tol=0) or (math.isnan(wanted) and math.isnan(found))
    return bool(found == wanted)


def matches(found: Any, wanted: dict[str, Any]) -> bool:
    """Whether an output has the dtype, the shape and the values of a case."""
    if wanted["dtype"] == "string":
        return bool(found == wanted["values"])
    dtype = str(found.dtype).removeprefix("torch.")
    shape = list(found.shape)
    return dtype == wanted["dtype"] and shape == wanted["shape"] and same(found.tolist(), number(wanted["values"]))


def close(found: torch.Tensor, case: dict[str, Any], call: dict[str, Any], layer: Any) -> bool:
    """Whether an output is as near to the exact one as float32 states allow."""
    exact = torch.tensor(number(call["exact"]), dtype=torch.float64)
    if case["layer"] != "Normalization":
        return bool(found.tolist() == number(call["exact"]))
    x = torch.as_tensor(value(call["input"])).double()
    mean, variance = (
        getattr(layer, name).double().reshape(np.shape(case["exact"][name])) for name in ("mean", "variance")
    )
    scale = variance.sqrt().clamp_min(1e-7)
    inverse = exact.abs() + mean.abs() + x.abs() * scale
    bound = inverse if layer.invert else exact.abs() + (x.abs() + mean.abs()) / scale
    near = (found.double() - exact).abs() <= bound * 2.0**-21
    same_limit = (found.double() == exact) | (found.isnan() & exact.isnan())
    return list(found.shape) == list(exact.shape) and bool((near | same_limit).all())


def check_call(case: dict[str, Any], call: dict[str, Any], layer: Any) -> Any:
    """The output, where there is one, after it was compared with the accepted ones."""
    inputs = value(call["input"])
    if "error" in call and not accepts(case, "no_error", "any"):
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
            layer(inputs)
        assert call["error"]["type"] != "ValueError" or isinstance(caught.value, ValueError)
        return None
    try:
        found = layer(inputs)
    except (ValueError, TypeError):
        if accepts(case, "error", "any"):
            return None
        raise
    if "error" in call or accepts(case, "any"):
        return found
    wanted = call.get("documented", call["output"])
    if case.get("approximate") and "exact" in call:
        assert close(found, case, call, layer) or (accepts(case, "keras", "float64") and matches(found, call["output"]))
    else:
        assert matches(found, wanted) or (accepts(case, "float64") and float64_bins(found, layer, inputs)), wanted
    return found


def float64_bins(found: torch.Tensor, layer: Any, inputs: torch.Tensor) -> bool:
    """Whether the bins are those of a comparison in float64."""
    boundaries = layer.bin_boundaries.double().numpy()
    return bool(found.tolist() == np.searchsorted(boundaries, inputs.double().numpy(), side="right").tolist())


def check_state(case: dict[str, Any], layer: Any) -> None:
    state, exact = case.get("state", {}), case.get("exact", {})
    if "vocabulary" in state and not accepts(case, "any"):
        assert layer.get_vocabulary() == state["vocabulary"]
    for name in ("mean", "variance"):
        if name in exact:
            wanted = np.array(number(exact[name]), np.float64).reshape(-1)
            with np.errstate(over="ignore"):
                nearest = wanted.astype(np.float32).tolist()
            assert same(getattr(layer, name).reshape(-1).tolist(), nearest), (name, nearest)
    if "bin_boundaries" in exact:
        wanted = np.array(number(exact["bin_boundaries"]), np.float64).astype(np.float32).tolist()
        assert layer.bin_boundaries.tolist() == wanted


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in CASES])
def test_layers_answer_as_keras(case: dict[str, Any]) -> None:
    if "error" in case and not accepts(case, "no_error"):
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
            make(case)
        assert case["error"]["type"] != "ValueError" or isinstance(caught.value, ValueError)
        return
    try:
        layer = make(case)
    except (ValueError, TypeError):
        if accepts(case, "error", "any"):
            return
        raise
    if "error" in case:
        return
    check_state(case, layer)
    answers = [check_call(case, call, layer) for call in case["calls"]]
    again = getattr(preprocessing, case["layer"])(**arguments(case))
    again.load_state_dict(layer.state_dict())
    for call, answer in zip(case["calls"], answers, strict=True):
        if isinstance(answer, torch.Tensor):
            assert torch.equal(again(value(call["input"])), answer) or bool(answer.isnan().any())
