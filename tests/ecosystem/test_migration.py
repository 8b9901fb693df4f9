"""The migration table from ``tf.distribute``, row by row, in one process with two replicas."""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support.epochs import epoch, pieces
from tests.support.migration import (
    FROM_GRAIN,
    FROM_TENSORFLOW,
    FROM_TORCHDATA,
    FROM_WEBDATASET,
    PAGE,
    TABLES,
    result,
    run,
)


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
        return [[each[place] for place in range(16)] if name == "mix" else [*each] for each in made]

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
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_migration*.py"))
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
