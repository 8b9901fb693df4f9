"""The public names, frozen: a change of this list is a decision, not an accident."""

from __future__ import annotations

import dataclasses
import inspect
import types

from torch.utils.data import DataLoader

import torchdistinput as tdi

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
