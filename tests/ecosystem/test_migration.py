"""The migration tables, row by row: what the old and the new code give, in one process and over three ranks."""

from __future__ import annotations

import importlib
import io
import itertools
import json
import math
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

import torchdistinput as tdi
from tests.ecosystem.test_kinds import SAMPLES, ByIndex, write_litdata, write_mosaicml
from tests.support.epochs import epoch, pieces
from tests.support.migration import (
    FROM_ACCELERATE,
    FROM_GRAIN,
    FROM_LITDATA,
    FROM_MOSAICML,
    FROM_SAMPLER,
    FROM_TENSORFLOW,
    FROM_TORCHDATA,
    FROM_WEBDATASET,
    PAGE,
    TABLES,
    Row,
    result,
    run,
)
from torchdistinput.testing import run_ranks


def train_step(x: Tensor) -> Tensor:
    return x + 1


def dataset_fn(context: tdi.InputContext) -> list[Tensor]:
    return list(torch.split(torch.arange(6), context.get_per_replica_batch_size(4)))


def value_fn(context: tdi.ValueContext) -> int:
    return 10 * context.replica_id_in_sync_group


def names(**more: Any) -> dict[str, Any]:
    return {"tdi": tdi, "strategy": tdi.Strategy(["cpu", "cpu"]), "dataset": range(6), "G": 4, **more}


def here(row: str, **more: Any) -> Any:
    return result(FROM_TENSORFLOW[row].after, names(**more))


def test_strategies_and_what_they_distribute() -> None:
    strategy = here("strategy")
    assert (strategy.num_replicas_in_sync, strategy.num_input_pipelines) == (2, 1)
    assert epoch(strategy, here("dataset", strategy=strategy)) == [[[0, 1], [2, 3]], [[4], [5]]]
    by_function = here("function", strategy=strategy, dataset_fn=dataset_fn)
    assert epoch(strategy, by_function) == [[[0, 1], [2, 3]], [[4, 5], []]]
    assert here("values", strategy=strategy, value_fn=value_fn).values == (0, 10)
    assert here("policy").auto_shard_policy is tdi.AutoShardPolicy.DATA


def test_steps_and_values() -> None:
    scope = names()
    strategy, loader = scope["strategy"], here("dataset")
    element = next(iter(loader))
    done = here("step", **scope, element=element, train_step=train_step)
    assert pieces(strategy, done) == [[1, 2], [3, 4]]
    assert torch.equal(here("gather", strategy=strategy, value=done), torch.tensor([1, 2, 3, 4]))
    assert [part.tolist() for part in here("local", strategy=strategy, value=done)] == [[1, 2], [3, 4]]
    ones = strategy.run(lambda x: x.sum(), args=(element,))
    assert here("reduce", strategy=strategy, value=ones) == 0 + 1 + 2 + 3
    assert strategy.run(lambda: here("context")).values == (0, 1)
    shares = [here("loss", losses=part.double(), loader=loader) for part in strategy.local_results(element)]
    assert sum(shares) == (0 + 1 + 2 + 3) / 4


def test_iterators_and_specs() -> None:
    loader = here("dataset")
    assert here("optional", loader=loader)
    assert not here("optional", loader=here("dataset", dataset=range(0)))
    assert [spec.dtype for spec in here("spec", loader=loader).values] == [torch.int64] * 2


def test_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(f"first of {name}\nsecond of {name}\n")
    files = here("list_files", pattern=str(tmp_path / "*.txt"))
    assert [Path(file).name for file in files] == ["a.txt", "b.txt"]
    assert len(list(here("records", files=files))) == 4


def test_tar_archives_of_webdataset(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset")
    for shard in range(3):
        with wds.TarWriter(f"{tmp_path}/{shard:03}.tar") as writer:
            for number in range(shard, 30, 3):
                writer.write(
                    {"__key__": str(number), "npy": np.arange(3) + number, "cls": number, "bin": b"%d" % number}
                )
    scope: dict[str, Any] = {"wds": wds, "tdi": tdi, "np": np, "io": io, "decode": int, "B": 5, "N": 1}
    scope |= {"DataLoader": DataLoader, "strategy": tdi.Strategy(["cpu"]), "urls": f"{tmp_path}/{{000..002}}.tar"}

    def both(name: str, made: str = "dataset") -> list[list[Any]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = FROM_WEBDATASET[name]
            return [[*run(code, dict(scope))[made]] for code in (row.before, row.after)]

    for name in ("read", "decoder"):
        before, after = both(name)
        for sample in before:
            del sample["__url__"], sample["__local_path__"]
        assert list(map(repr, after)) == list(map(repr, before))
    before, after = both("decode")
    assert list(map(repr, after)) == list(map(repr, before))
    before, after = both("shuffle")
    assert sorted(sample["__key__"] for sample in after) == sorted(sample["__key__"] for sample in before)
    assert after != run(FROM_WEBDATASET["read"].after, dict(scope))["dataset"]
    before, after = both("split", "loader")
    keys = [sorted(sample["__key__"] for batch in side for sample in batch) for side in (before, after)]
    assert keys[0] == keys[1] == sorted(map(str, range(30)))


@pytest.mark.filterwarnings("ignore")
def test_a_stateful_loader_of_torchdata() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    given = {"tdi": tdi, "StatefulDataLoader": stateful, "dataset": list(range(10)), "B": 4, "N": 1}

    def rest(side: str) -> list[Any]:
        make, save, load = (getattr(FROM_TORCHDATA[name], side) for name in ("loader", "save", "load"))
        scope = run(make, dict(given))
        for _ in scope["loader"]:
            run(save, scope)
            break
        later = run(load, run(make, {**given, "state": scope["state"]}))
        return [batch.tolist() for batch in later["loader"]]

    assert rest("before") == rest("after") == [[4, 5, 6, 7], [8, 9]]


def test_datasets_of_grain() -> None:
    grain = pytest.importorskip("grain")
    scope = {"tdi": tdi, "grain": grain, "data": list(range(10)), "B": 4, "N": 1, "rank": 0}
    scope |= {"a": grain.MapDataset.range(12), "b": grain.MapDataset.range(100, 104)}

    def both(name: str) -> list[list[Any]]:
        made = [run(code, dict(scope))["loader"] for code in (FROM_GRAIN[name].before, FROM_GRAIN[name].after)]
        return [[*itertools.islice(each, 16)] for each in made]

    before, after = both("shard")
    assert [each.tolist() for each in before] == [each.tolist() for each in after]
    before, after = both("shuffle")
    assert sorted(map(int, before)) == sorted(map(int, after)) == list(range(10))
    before, after = both("mix")
    assert sum(each >= 100 for each in before) == sum(each >= 100 for each in after) == 4
    numbers: Any = [1, 2]
    iterator, loader = iter(grain.MapDataset.source(numbers).to_iter_dataset()), tdi.DataLoader[Any](numbers)
    states = [
        run(code, {"iterator": iterator, "loader": loader})["state"]
        for code in (FROM_GRAIN["state"].before, FROM_GRAIN["state"].after)
    ]
    assert all(states)


def test_every_row_of_every_table_is_run() -> None:
    tests = Path(__file__).read_text()
    missing = [name for rows in TABLES for name in rows if f'"{name}"' not in tests]
    assert not missing
    assert len(TABLES) == PAGE.count("\n## From ")


def test_the_names_that_the_readme_gives_for_tensorflows_exist() -> None:
    pages = "".join((Path(__file__).parents[2] / "examples" / name).read_text() for name in ("guide.md", "strategy.md"))
    tables = re.findall(r"^## (?:Names from TensorFlow|Every symbol).*\n[^|]*((?:\|.*\n)+)", pages, re.MULTILINE)
    assert len(tables) == 2
    holders = (tdi, tdi.Strategy, tdi.DistributedDataset, tdi.DistributedIterator, tdi.InputOptions, tdi.InputContext)
    known = {name for holder in holders for name in dir(holder)} | {"all_reduce", "all_gather"}  # of ReplicaContext
    for row in [row for table in tables for row in table.splitlines()[2:]]:
        theirs, ours = row.strip("| ").split(" | ", 1)
        cells = theirs + ours if "the same" in ours else ours
        names = [re.match(r"(?:strategy\.|tf\.distribute\.)?(\w+)", code) for code in re.findall(r"`([^`]+)`", cells)]
        assert names, row
        missing = {name[1] for name in names if name is not None} - known
        assert not missing, row


NUMBERS = range(10)
N, B, G = 3, 2, 6


def known_to_all(**more: Any) -> dict[str, Any]:
    """What a cell may use."""
    from_torch = {each.__name__: each for each in (DataLoader, DistributedSampler, WeightedRandomSampler)}
    sizes = {"dataset": NUMBERS, "N": N, "B": B, "G": G}
    return {**from_torch, **sizes, "dist": dist, "tdi": tdi, "strategy": tdi.Strategy(devices=["cpu"]), **more}


def steps(loader: Iterable[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def both(row: Row, **scope: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The names after the old code, and after the new."""
    return run(row.before, dict(scope)), run(row.after, dict(scope))


def both_results(row: Row, **scope: Any) -> tuple[Any, Any]:
    """The values of the old and the new code."""
    return result(row.before, dict(scope)), result(row.after, dict(scope))


def in_step(ranks: list[list[list[int]]]) -> list[list[int]]:
    """What the ranks had together at each step."""
    return [[*itertools.chain(*parts)] for parts in zip(*ranks, strict=True)]


# ------------------------------------------------------------------------------------------------ DistributedSampler


def sampler_rows() -> dict[str, Any]:
    rows, scope = FROM_SAMPLER, known_to_all()
    strategy = scope["strategy"]
    found: dict[str, Any] = {"world": both_results(rows["world"], **scope)}
    for name in ("divide", "drop-in", "same steps"):
        before, after = both(rows[name], **scope)
        found[name] = steps(before["loader"]), steps(after["loader"])
        found[f"{name}, again"] = steps(before["loader"]), steps(after["loader"])
        run(rows["epochs"].before, {**before, "epoch": 1})
        found[f"{name}, set_epoch"] = steps(before["loader"])
    before, after = both(rows["other samplers"], **scope, weights=[1.0] * 5 + [0.0] * 5)
    found["other samplers"] = steps(before["loader"]), steps(after["loader"])
    loader = strategy.distribute_dataset(NUMBERS, global_batch_size=G)
    found["device"] = [x.device == strategy.device for x in loader]
    for x in loader:
        made = both(rows["loss"], **scope, losses=x.double(), loader=loader)
        found["loss"] = tuple(strategy.reduce("MEAN", side["loss"]).item() for side in made)
    found["metric"] = metrics(rows["metric"], scope, loader)
    return found


def metrics(row: Row, scope: dict[str, Any], loader: Iterable[torch.Tensor]) -> tuple[float, float]:
    """The share of the numbers that are 0."""
    sampler: DistributedSampler[int] = DistributedSampler(NUMBERS, shuffle=False)  # type: ignore[arg-type]
    old = torch.cat(list(DataLoader(NUMBERS, batch_size=B, sampler=sampler)))  # type: ignore[arg-type]
    before = result(row.before, {**scope, "sampler": sampler, "hits": old == 0})
    after = result(row.after, {**scope, "hits": (torch.cat(list(loader)) == 0).double()})
    return before.item(), after.item()


def test_from_the_distributed_sampler() -> None:
    ranks = run_ranks(N, sampler_rows)

    def column(name: str, side: int) -> list[Any]:
        return [found[name][side] for found in ranks]

    def epoch(name: str, side: int) -> list[int]:
        return sorted(itertools.chain(*in_step(column(name, side))))

    assert [found["world"] for found in ranks] == [((rank, N), (rank, N)) for rank in range(N)]
    for name in ("divide", "drop-in"):
        assert len(epoch(name, 0)) == 12  # two of the numbers came twice
        assert epoch(name, 1) == [*NUMBERS]
        assert [len(step) for step in in_step(column(name, 1))] == [6, 4]
    assert column("divide, again", 0) == column("divide", 0) != [found["divide, set_epoch"] for found in ranks]
    assert column("divide, again", 1) != column("divide", 1)  # with nothing called
    assert len(epoch("same steps", 0)) == 9  # one was left out
    assert epoch("same steps", 1) == [*NUMBERS]
    assert len(epoch("other samplers", 0)) == 8 * N
    assert len(epoch("other samplers", 1)) == 8
    assert set(epoch("other samplers", 1)) <= {0, 1, 2, 3, 4}
    assert [found["device"] for found in ranks] == [[True, True]] * N
    for before, after in (found["loss"] for found in ranks):  # the last step has 6, 7; 8, 9; nothing
        assert math.isnan(before)
        assert after == pytest.approx(7.5)
    for before, after in (found["metric"] for found in ranks):
        assert before == pytest.approx(2 / 12)  # the number 0 is one of those that came twice
        assert after == pytest.approx(1 / 10)


# --------------------------------------------------------------------------------------------------------- accelerate


def accelerate_rows() -> dict[str, Any]:
    with warnings.catch_warnings():  # about the environment variables of its own launcher
        warnings.simplefilter("ignore")
        accelerate = importlib.import_module("accelerate")  # it is in an extra of its own, and has no types
        accelerator = accelerate.Accelerator(cpu=True)
    rows, scope = FROM_ACCELERATE, known_to_all(accelerator=accelerator, Accelerator=accelerate.Accelerator)
    scope["DataLoaderConfiguration"] = importlib.import_module("accelerate.utils").DataLoaderConfiguration
    found: dict[str, Any] = {"world": both_results(rows["world"], **scope)}
    for name in ("divide", "split_batches", "even_batches"):
        before, after = both(rows[name], **scope)
        found[name] = steps(before["loader"]), steps(after["loader"])
    found["any size"] = any_size(rows["split_batches"], scope)
    for name in ("gather_for_metrics", "ordered"):
        found[name] = gathered(rows[name], scope)
    uneven = torch.arange(accelerator.process_index + 1)
    found["pad"] = tuple(x.tolist() for x in both_results(rows["pad"], **scope, scores=uneven))
    found["reduce"] = tuple(x.item() for x in both_results(rows["reduce"], **scope, losses=uneven.double()))
    found["backward"], found["prepare"] = trained(scope)
    return found


def any_size(row: Row, scope: dict[str, Any]) -> tuple[str, list[list[int]]]:
    """Global batches of 4, which 3 does not divide."""
    message = ""
    try:
        run(row.before, {**scope, "G": 4})
    except ValueError as error:
        message = str(error)
    return message, steps(run(row.after, {**scope, "G": 4})["loader"])


def gathered(row: Row, scope: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    """What all ranks get of each step."""
    before, after = both(FROM_ACCELERATE["divide"], **scope)
    return (
        [result(row.before, {**before, "x": x, "index": x, "scores": 10 * x}).tolist() for x in before["loader"]],
        [result(row.after, {**after, "x": x, "index": x, "scores": 10 * x}).tolist() for x in after["loader"]],
    )


def trained(scope: dict[str, Any]) -> tuple[tuple[float, float], tuple[bool, bool]]:
    """A weight that is moved to the numbers' mean, by the old code and by the new."""
    weights, types = [], []
    for side in ("before", "after"):
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        known = {**scope, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5)}
        known = run(FROM_ACCELERATE["divide"].after, known)
        if side == "before":
            known = run(("loader = DataLoader(dataset, batch_size=B)",), known)
        known = run(getattr(FROM_ACCELERATE["prepare"], side), known)
        for x in known["loader"]:
            known["losses"] = (known["model"](torch.ones(len(x), 1).double()).squeeze(1) - x) ** 2
            run(getattr(FROM_ACCELERATE["backward"], side), known)
            known["optimizer"].step()
            known["optimizer"].zero_grad()
        weights.append(model.weight.item())
        types.append(isinstance(known["loader"], tdi.DistributedDataset))
    return (weights[0], weights[1]), (types[0], types[1])


def test_from_accelerate() -> None:
    ranks = run_ranks(N, accelerate_rows)

    def column(name: str, side: int) -> list[Any]:
        return [found[name][side] for found in ranks]

    for rank, found in enumerate(ranks):
        assert found["world"] == ((rank, N, rank == 0),) * 2
    assert in_step(column("divide", 0)) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 0, 1]]
    assert in_step(column("divide", 1)) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    assert column("split_batches", 0) == column("divide", 0)
    assert column("split_batches", 1) == column("divide", 1)
    assert [len(rank) for rank in column("even_batches", 0)] == [2, 2, 1]
    assert [len(rank) for rank in column("even_batches", 1)] == [2, 2, 2]
    assert "round multiple of the number of processes" in column("any size", 0)[0]
    assert in_step(column("any size", 1)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    for before, after in (found["gather_for_metrics"] for found in ranks):
        assert before == after == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    for before, after in (found["ordered"] for found in ranks):
        assert before == after == [[0, 10, 20, 30, 40, 50], [60, 70, 80, 90]]
    for before, after in (found["pad"] for found in ranks):
        assert before == [0, 0, 0, 0, 1, 0, 0, 1, 2]
        assert after == [0, 0, 1, 0, 1, 2]
    for before, after in (found["reduce"] for found in ranks):
        assert before == 0.5
        assert after == 4 / 6
    for before, after in (found["backward"] for found in ranks):
        assert before == pytest.approx((6 + 7 + 8 + 9 + 0 + 1) / 6)  # with what was filled up
        assert after == pytest.approx((6 + 7 + 8 + 9) / 4)
    assert [found["prepare"] for found in ranks] == [(False, True)] * N


# ------------------------------------------------- packages of an environment of their own: ``scripts/test_apart``


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
    streaming = importlib.import_module("streaming")
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
    module = importlib.import_module("litdata")
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
    for numbers in found["epochs"]:
        assert sorted(numbers) == [*range(SAMPLES)]


def test_a_streaming_dataset_of_litdata(tmp_path: Path) -> None:
    pytest.importorskip("litdata")
    for numbers in run_ranks(1, litdata, tmp_path, timeout_seconds=240)[0]:
        assert sorted(numbers) == [*range(SAMPLES)]
