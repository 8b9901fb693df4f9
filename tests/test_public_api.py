"""The public names, frozen: a change of this list is a decision, not an accident."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import io
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import fsspec
import pytest
import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
import torchdistinput.testing
from tests.support.interpreters import ROOT

PUBLIC_NAMES = [
    "AutoShardPolicy",
    "Balance",
    "BatchingError",
    "BucketBatchSampler",
    "CoordinationTimeout",
    "DataLoader",
    "DistributedBatchSampler",
    "DistributedDataset",
    "DistributedIterator",
    "FileDataset",
    "Fragment",
    "FragmentDataset",
    "FragmentSource",
    "InputContext",
    "InputError",
    "InputOptions",
    "InputReplicationMode",
    "Mixture",
    "OutOfRangeError",
    "Packed",
    "PerReplica",
    "RankDisagreement",
    "RankLost",
    "ReduceOp",
    "ShardedIterableDataset",
    "ShardingError",
    "ShuffleSampler",
    "SourceError",
    "StateMismatch",
    "Step",
    "Strategy",
    "TensorSpec",
    "TokenBatchSampler",
    "ValueContext",
    "analyze",
    "average_loss",
    "get_replica_context",
    "get_strategy",
    "groups",
    "list_files",
    "preprocessing",
    "readers",
    "sample_seed",
    "statistics",
]

STRATEGY_NAMES = [
    "cluster_resolver",
    "device",
    "devices",
    "distribute_dataset",
    "distribute_datasets_from_function",
    "distribute_values_from_function",
    "gather",
    "gather_ordered",
    "input_pipeline_id",
    "local_results",
    "mirror",
    "num_input_pipelines",
    "num_replicas_in_sync",
    "rank",
    "reduce",
    "replica_ids",
    "run",
    "scope",
    "world_size",
]

DATASET_NAMES = [
    "close",
    "element_spec",
    "epoch",
    "explain",
    "load_state_dict",
    "samples_of",
    "seek",
    "set_epoch",
    "state_dict",
    "stats",
    "step",
    "steps_of",
]

LOADER_NAMES = [
    "close",
    "epoch",
    "explain",
    "has_equal_parts",
    "load_state_dict",
    "samples_of",
    "seek",
    "set_epoch",
    "state_dict",
    "stats",
    "step",
    "steps_of",
    "torch_loader",
]
"""Those that torch's loader does not have."""

ITERATOR_NAMES = ["close", "element_spec", "get_next", "get_next_as_optional", "has_next", "reads", "step"]

STEP_FIELDS = [
    *["epoch", "index", "global_size", "local_sizes", "num_replicas", "num_workers", "costs", "sums", "local_sums"],
]

STEP_NAMES = sorted([*STEP_FIELDS, "micro_batches", "num_ranks"])

OPTION_FIELDS = [
    "auto_shard_policy",
    "prefetch",
    "fetch_to_device",
    "coordination",
    "timeout_seconds",
    "replication_mode",
    "with_index",
    "partial_batch",
    "on_error",
    "max_errors",
    "log_every",
    "trace",
    "seed_samples",
    "count_fn",
    "split_fn",
    "empty_fn",
    "own_state",
    "file_assignment",
    "balance",
    "sums",
]


def public_attributes(thing: object) -> list[str]:
    return sorted(name for name in dir(thing) if not name.startswith("_"))


def test_the_public_names_are_frozen() -> None:
    assert list(tdi.__all__) == PUBLIC_NAMES


def test_nothing_else_is_public_but_modules() -> None:
    others = {name for name in dir(tdi) if not name.startswith("_")} - {*PUBLIC_NAMES, "annotations"}
    assert [name for name in others if not isinstance(getattr(tdi, name), types.ModuleType)] == []


def test_the_faces_of_the_classes_are_frozen() -> None:
    assert public_attributes(tdi.Strategy) == STRATEGY_NAMES
    assert public_attributes(tdi.DistributedDataset) == DATASET_NAMES
    like_torch = public_attributes(DataLoader(range(1)))  # type: ignore[arg-type] # a dataset by its methods
    assert [name for name in public_attributes(tdi.DataLoader) if name not in like_torch] == LOADER_NAMES
    assert public_attributes(tdi.DistributedIterator) == ITERATOR_NAMES
    assert public_attributes(tdi.Step(0, 0, 3, (3,), 1, 1)) == STEP_NAMES


def test_the_fields_of_the_values_are_frozen() -> None:
    assert [field.name for field in dataclasses.fields(tdi.Step)] == STEP_FIELDS
    assert [field.name for field in dataclasses.fields(tdi.InputOptions)] == OPTION_FIELDS


def test_every_public_thing_says_what_it_is() -> None:
    for name in PUBLIC_NAMES:
        thing = getattr(tdi, name)
        assert inspect.getdoc(thing), f"{name} has no docstring"


NAMES = {"fsspec": fsspec, "io": io, "tdi": tdi, "torch": torch}
PUBLIC = (tdi, tdi.readers, tdi.statistics, tdi.preprocessing, torchdistinput.testing)


def examples() -> dict[str, doctest.DocTest]:
    """Those of public names, by these names, and all others."""
    things = [(f"{module.__name__}.{name}", getattr(module, name)) for module in PUBLIC for name in module.__all__]
    modules = [path for path in (ROOT / "torchdistinput").rglob("*.py") if ">>> " in path.read_text()]
    for path in sorted(modules):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        things.append((name, importlib.import_module(name)))
    found: dict[str, doctest.DocTest] = {}
    for name, thing in things:
        module = thing if isinstance(thing, ModuleType) else sys.modules.get(getattr(thing, "__module__", ""), tdi)
        for each in doctest.DocTestFinder().find(thing, name, globs=vars(module) | NAMES):
            if each.examples:
                found.setdefault(f"{each.docstring}", each)
    return {each.name: each for each in found.values()}


EXAMPLES = examples()


@pytest.fixture
def files_in_memory() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.usefixtures("files_in_memory")
def test_the_example_is_true(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctest.DocTestRunner().run(EXAMPLES[name]).failed == 0, capsys.readouterr().out


# Names without an example of their own, and the example that shows each.
SHOWN_BY = {
    "Fragment": "FragmentSource",
    "FragmentDataset": "FileDataset",
    "InputReplicationMode": "Strategy.distribute_datasets_from_function",
    "PerReplica": "Strategy.run",
    "ReduceOp": "Strategy.reduce",
    "ValueContext": "Strategy.distribute_values_from_function",
}


def test_every_public_name_is_in_an_example() -> None:
    things = {name: getattr(tdi, name) for name in tdi.__all__}
    asked = {name for name, thing in things.items() if not isinstance(thing, ModuleType)}
    asked -= {name for name in asked if isinstance(things[name], type) and issubclass(things[name], Exception)}
    assert asked - {name.split(".")[1] for name in EXAMPLES} == set(SHOWN_BY)
    assert {f"torchdistinput.{name}" for name in SHOWN_BY.values()} <= set(EXAMPLES)


LATER = {
    "torchdistinput.coordination.gather_ordered",
    "torchdistinput.sources.from_function",
    "torchdistinput.sources.formats.npy",
    "torchdistinput.sources.formats.text",
    "torchdistinput.sources.formats.tfrecords",
    "torchdistinput.sources.formats.fixed_length",
    "torchdistinput.sources.formats.readers",
    "torchdistinput.sources.datasets.record_position",
    "torchdistinput.sources.datasets.record_rows",
    "torchdistinput.sources.datasets.record_source",
    "torchdistinput.preprocessing",
    "torchdistinput.testing",
}

SCRIPT = """
import json, sys
import torch
before = set(sys.modules)
import torchdistinput as tdi
loaded = sorted(set(sys.modules) - before)
shown, has_readers = dir(tdi), "readers" in vars(tdi)
from torchdistinput import readers
from torchdistinput import *
dataset = FileDataset("no such file", tdi.readers.text_lines, compression="gzip")
try:
    FileDataset("no such file", tdi.readers.text_lines, compression="no such method")
except ValueError as error:
    refused = str(error)
print(json.dumps({
    "loaded": loaded, "shown": shown, "has_readers": has_readers, "same": readers is tdi.readers is sys.modules[
        "torchdistinput.sources.formats.readers"], "refused": refused, "public": tdi.__all__,
}))
"""


@pytest.fixture(scope="module")
def told() -> Mapping[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found


def own(modules: Sequence[str]) -> set[str]:
    return {name for name in modules if name.split(".")[0] == "torchdistinput"}


def test_what_only_some_programs_use_is_loaded_when_they_use_it(told: Mapping[str, Any]) -> None:
    assert not own(told["loaded"]) & LATER
    assert {"torchdistinput.strategy", "torchdistinput.sources.datasets.fragment_dataset"} <= own(told["loaded"])


def test_nothing_from_outside_is_loaded_that_torch_had_not_loaded(told: Mapping[str, Any]) -> None:
    outside = {name.split(".")[0] for name in told["loaded"]} - {"torchdistinput"} - set(sys.stdlib_module_names)
    assert {name for name in outside if "cython" not in name} <= {"torch", "numpy"}  # numpy.random brings Cython's own


def test_a_bad_compression_is_refused_at_once_though_fsspec_comes_later(told: Mapping[str, Any]) -> None:
    assert told["refused"].startswith("compression must be 'infer', None or one of")
