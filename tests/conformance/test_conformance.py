"""TensorFlow's and Keras's answers, as the files beside this one have them, through the public API."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.data import Stream
from tests.support.cells import cells
from tests.support.epochs import epoch
from torchdistinput import preprocessing, readers
from torchdistinput.testing import run_ranks

VALUES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "values.json").read_text())


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
    cases = [case for case in VALUES if case["kind"] == kind]
    for case in cases:
        found, want = answer(case), case["want"]
        expected = torch.tensor(numbers(want["data"]), dtype=getattr(torch, want["dtype"])).reshape(want["shape"])
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), case
        assert bool((found.eq(expected) | found.ne(found) & expected.ne(expected)).all()), (case, found)
    assert len(cases) == {"reduce": 432, "gather": 78}[kind]


PER_REPLICA: list[dict[str, Any]] = json.loads((Path(__file__).parent / "per_replica_batch_size.json").read_text())


def context_of(case: dict[str, Any]) -> tdi.InputContext:
    return tdi.InputContext(
        num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=case["num_replicas_in_sync"]
    )


def test_every_case_gives_the_value_or_the_error_text_that_the_file_says() -> None:
    ran = 0
    for case in PER_REPLICA:
        expect = case["expect"]
        if "value" in expect:
            assert context_of(case).get_per_replica_batch_size(case["global_batch_size"]) == expect["value"], case["id"]
        else:
            with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole text is compared below
                context_of(case).get_per_replica_batch_size(case["global_batch_size"])
            assert type(caught.value).__name__ == expect["error"]["kind"], case["id"]
            assert str(caught.value) == expect["error"]["message"], case["id"]
        ran += 1
    assert ran == len(PER_REPLICA) == 28


def test_the_context_that_a_dataset_function_gets_follows_the_same_rule() -> None:
    for case in PER_REPLICA:
        strategy = tdi.Strategy(devices=["cpu"] * case["num_replicas_in_sync"])
        seen: list[tdi.InputContext] = []

        def dataset_fn(context: tdi.InputContext, seen: list[tdi.InputContext] = seen) -> list[torch.Tensor]:
            seen.append(context)
            return [torch.zeros(1)]

        strategy.distribute_datasets_from_function(dataset_fn)
        (context,) = seen
        assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
        assert context.num_replicas_in_sync == case["num_replicas_in_sync"]


ONE_PROCESS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "one_process.json").read_text())


def as_dataset(batches: list[torch.Tensor]) -> Any:
    return Stream(lambda: batches)


def as_generator_function(batches: list[torch.Tensor]) -> Any:
    return lambda: (batch for batch in batches)


def as_generator(batches: list[torch.Tensor]) -> Any:
    return (batch for batch in batches)


def as_list(batches: list[torch.Tensor]) -> Any:
    return batches


def as_loader(batches: list[torch.Tensor]) -> Any:
    return DataLoader(as_dataset(batches), batch_size=None)


ITERABLES: list[Callable[[list[torch.Tensor]], Any]] = [
    as_dataset,
    as_generator_function,
    as_generator,
    as_list,
    as_loader,
]


SETTINGS: dict[str, list[Any]] = {"prefetch": [0, 1, 2], "iterable": ITERABLES}


def delivered(case: dict[str, Any], setting: dict[str, Any]) -> list[list[Any]]:
    strategy = strategy_of(case["replicas"])
    options = tdi.InputOptions(prefetch=setting["prefetch"])
    if "n" in case:
        data: Any = DataLoader(range(case["n"]), batch_size=case["global_batch_size"], drop_last=case["drop_last"])  # type: ignore[arg-type]
    else:
        batches = [torch.tensor(batch, dtype=torch.int64) for batch in case["global_batches"]]
        data = setting["iterable"](batches)
    return epoch(strategy, strategy.distribute_dataset(data, options))


def test_every_case_of_one_process_gives_the_pieces_that_the_file_says(all_cells: bool) -> None:
    ran = [
        (case, setting, delivered(case, setting))
        for case, setting in cells(ONE_PROCESS, SETTINGS, everything=all_cells)
    ]
    wrong = [(case, setting, found) for case, setting, found in ran if found != case["want"]]
    assert not wrong, f"{len(wrong)} of {len(ran)}, the first: {wrong[:3]}"
    assert len({case["id"] for case, _, _ in ran}) == len(ONE_PROCESS) == 418


FILE = Path(__file__).parent / "many_workers.json"
MANY_WORKERS: list[dict[str, Any]] = json.loads(FILE.read_text())
WORLDS = sorted({case["workers"] for case in MANY_WORKERS})
RANK_SETTINGS: dict[str, list[Any]] = {"prefetch": [0, 1, 2], "named_by": ["pattern", "list"]}


def write_files(case: dict[str, Any], folder: Path) -> None:
    """One number a line; the names sort in the order of the case's list."""
    folder.mkdir()
    for number, records in enumerate(case["files"]):
        (folder / f"part-{number:03d}.txt").write_text("".join(f"{record}\n" for record in records))


def source_of(case: dict[str, Any], folder: Path, named_by: str) -> Any:
    if "n" in case:
        return range(case["n"])
    pattern = str(folder / "part-*.txt")
    files: Any = pattern if named_by == "pattern" else [str(path) for path in sorted(folder.iterdir())]
    return tdi.FileDataset(files, readers.text_lines, map_fn=int)


def run_case(case: dict[str, Any], folder: Path, setting: dict[str, Any]) -> dict[str, Any]:
    strategy = strategy_of(case["replicas_per_worker"])
    source = source_of(case, folder, setting["named_by"])
    data = DataLoader(source, batch_size=case["global_batch_size"], drop_last=case["drop_last"])
    options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy[case["policy"]], prefetch=setting["prefetch"])
    try:
        dataset = strategy.distribute_dataset(data, options)
    except tdi.InputError as error:
        return {"error": type(error).__name__}
    return {"steps": epoch(strategy, dataset)}


def cases_of(world: int) -> list[dict[str, Any]]:
    return [case for case in MANY_WORKERS if case["workers"] == world]


def run_cases(folder: str, world: int, everything: bool) -> list[tuple[str, dict[str, Any]]]:
    """One rank: the outcome of each case of this world size."""
    matrix = cells(cases_of(world), RANK_SETTINGS, everything=everything, seed=world)
    return [(case["id"], run_case(case, Path(folder) / case["id"], setting)) for case, setting in matrix]


def wanted(case: dict[str, Any], rank: int) -> dict[str, Any]:
    if "error" in case["want"]:
        return {"error": case["want"]["error"]}
    return {"steps": case["want"]["workers"][rank]}


@pytest.mark.parametrize("world", WORLDS)
def test_every_case_of_many_workers_gives_each_worker_the_steps_that_the_file_says(
    world: int, tmp_path: Path, all_cells: bool
) -> None:
    cases = {case["id"]: case for case in cases_of(world)}
    for case in cases.values():
        if "files" in case:
            write_files(case, tmp_path / case["id"])
    ranks = run_ranks(world, run_cases, str(tmp_path), world, all_cells, timeout_seconds=300)
    wrong = [
        (cases[name], rank, found)
        for rank, outcomes in enumerate(ranks)
        for name, found in outcomes
        if found != wanted(cases[name], rank)
    ]
    assert not wrong, f"{len(wrong)} are wrong, the first: {wrong[:2]}"
    for outcomes in ranks:
        assert {name for name, _ in outcomes} == set(cases)
        assert len(outcomes) == len(cases) * (6 if all_cells else 1)


def test_the_worlds_together_hold_every_case_of_the_file() -> None:
    assert WORLDS == [1, 2, 3, 4, 5]
    assert sum(sum(case["workers"] == world for case in MANY_WORKERS) for world in WORLDS) == len(MANY_WORKERS) == 358
    assert len({case["id"] for case in MANY_WORKERS}) == len(MANY_WORKERS)


PREPROCESSING: list[dict[str, Any]] = json.loads((Path(__file__).parent / "preprocessing.json").read_text())


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


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in PREPROCESSING])
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
