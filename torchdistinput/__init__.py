"""TensorFlow's distributed input, native to PyTorch.

Write the loader for one process, with the global batch size. Every replica gets its part of each batch, prefetched to
its device. All replicas run the same number of steps, and each sample is used once, at any world size. The README lists
the promises; ``examples/house.md`` follows a batch from the data to the loop.
"""

from __future__ import annotations

import types
import typing

from torchdistinput import statistics
from torchdistinput.analysis import analyze
from torchdistinput.batches.per_replica import PerReplica, ReduceOp
from torchdistinput.batches.schema import TensorSpec
from torchdistinput.data_loader import DataLoader
from torchdistinput.dataset import DistributedDataset
from torchdistinput.errors import (
    BatchingError,
    CoordinationTimeout,
    InputError,
    OutOfRangeError,
    RankDisagreement,
    RankLost,
    ShardingError,
    SourceError,
    StateMismatch,
)
from torchdistinput.iterator import DistributedIterator
from torchdistinput.losses import average_loss, groups
from torchdistinput.plan.options import Balance, InputOptions, InputReplicationMode, Step
from torchdistinput.plan.topology import AutoShardPolicy, InputContext, ValueContext
from torchdistinput.replicas.run import get_replica_context
from torchdistinput.sources.datasets.fragment_dataset import FileDataset, FragmentDataset, list_files
from torchdistinput.sources.datasets.mixture import Mixture
from torchdistinput.sources.datasets.packed import Packed
from torchdistinput.sources.fragments import Fragment, FragmentSource
from torchdistinput.sources.iterable.source import ShardedIterableDataset
from torchdistinput.sources.map_style.samplers import (
    BucketBatchSampler,
    DistributedBatchSampler,
    ShuffleSampler,
    TokenBatchSampler,
)
from torchdistinput.sources.sample_seed import sample_seed
from torchdistinput.strategy import Strategy, get_strategy

__all__ = [
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

if typing.TYPE_CHECKING:
    from torchdistinput import preprocessing
    from torchdistinput.sources.formats import readers
else:  # hidden from type checkers, which would accept every attribute

    def __getattr__(name: str) -> types.ModuleType:
        """Imports ``readers`` and ``preprocessing`` at their first use; see ``tests/test_public_api.py``."""
        if name == "readers":
            from torchdistinput.sources.formats import readers  # noqa: PLC0415 - only file datasets need them

            return readers
        if name == "preprocessing":
            import torchdistinput.preprocessing as layers  # noqa: PLC0415 - only programs that preprocess need them

            return layers
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
