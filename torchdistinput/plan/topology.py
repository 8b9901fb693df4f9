"""Workers and replicas: which processes read the data, which devices compute on it, and which part a worker reads.

These names mean the same everywhere in the package:

- *worker*: an input pipeline (as in TensorFlow): a rank, or all ranks with the same data coordinate of a mesh. There
  are ``num_workers``, W in the laws. A *loader worker* is another thing: a process of torch's ``DataLoader``.
- *replica*: one copy of the model on one device. Each worker has ``replicas_per_worker``, L in the laws.
- ``num_replicas = num_workers * replicas_per_worker``, N in the laws; replica ``k = worker * replicas_per_worker + r``.
- *global batch*: the batch that a single process would read, G samples. *step*: one global batch over all replicas.
- *shard*: the data that one worker reads. *piece*: one replica's part of a global batch.

The auto-shard policies are those of TensorFlow's distributed input guide, "Autosharding". One difference: where a file
list is too short, TensorFlow fails on some workers at the first read; this library raises on all workers before it.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TypeVar, final

from torchdistinput.errors import ShardingError

T = TypeVar("T")


@final
@dataclass(frozen=True, kw_only=True)
class Topology:
    """The number of workers and replicas, and which worker this process is.

    Args:
      num_workers: the number of workers, W.
      replicas_per_worker: the number of replicas of each worker, L.
      worker: the index of this process's worker.
    """

    num_workers: int
    replicas_per_worker: int
    worker: int

    @property
    def num_replicas(self) -> int:
        """The number of all replicas, N = W * L."""
        return self.num_workers * self.replicas_per_worker

    @property
    def replica_ids(self) -> tuple[int, ...]:
        """The numbers of this worker's replicas among all replicas."""
        first = self.worker * self.replicas_per_worker
        return tuple(range(first, first + self.replicas_per_worker))


@final
@dataclass(frozen=True)
class InputContext:
    """The argument of a dataset function: which worker calls it, as ``tf.distribute.InputContext``.

    Args:
      num_input_pipelines: the number of workers.
      input_pipeline_id: the index of this worker.
      num_replicas_in_sync: how many replicas share a global batch.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The batch size of one replica.

        >>> tdi.InputContext(2, input_pipeline_id=0, num_replicas_in_sync=8).get_per_replica_batch_size(64)
        8

        Args:
          global_batch_size: samples in a step over all replicas.

        Raises:
          ValueError: it does not divide by ``num_replicas_in_sync``.
          TypeError: it is no int.
        """
        given: object = global_batch_size
        if isinstance(given, bool) or not isinstance(given, Integral):
            raise TypeError(f"global_batch_size is {given!r}; an int is needed.")
        if global_batch_size % self.num_replicas_in_sync != 0:
            # TensorFlow's own sentence, its trailing space included: scripts match on it.
            raise ValueError(
                f"The `global_batch_size` {global_batch_size!r} is not divisible by "
                f"`num_replicas_in_sync` {self.num_replicas_in_sync!r} "
            )
        return global_batch_size // self.num_replicas_in_sync


@final
@dataclass(frozen=True)
class ValueContext:
    """The argument of a value function: its replica, as ``tf.distribute.experimental.ValueContext``.

    Args:
      replica_id_in_sync_group: the replica that the value is for.
      num_replicas_in_sync: how many replicas there are.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


@enum.unique
class AutoShardPolicy(enum.Enum):
    """How the input is divided among workers, as ``tf.data.experimental.AutoShardPolicy``.

    >>> fsspec.filesystem("memory").pipe({"/data/a": b"abcd", "/data/b": b"ef"})
    >>> files = tdi.FileDataset("memory://data/*", tdi.readers.fixed_length_records(1))
    >>> for policy in (tdi.AutoShardPolicy.FILE, tdi.AutoShardPolicy.DATA):
    ...     options = tdi.InputOptions(auto_shard_policy=policy)
    ...     loader = tdi.Strategy().distribute_dataset(files, options, global_batch_size=2)
    ...     print(policy.name, [part.samples for part in loader.samples_of(epoch=0, step=0, world_size=2).parts])
    FILE [(FileRecord(file='memory://data/a', record=0),), (FileRecord(file='memory://data/b', record=0),)]
    DATA [(FileRecord(file='memory://data/a', record=0),), (FileRecord(file='memory://data/a', record=1),)]

    Attributes:
      AUTO: FILE if the source has files, else DATA.
      FILE: worker ``i`` reads files ``i, i + W, i + 2W, ...`` of the list.
      DATA: every worker takes its pieces of the same global batches.
      HINT: the source shards itself: its ``shard(num_shards, index)`` is called.
      OFF: every worker reads everything.
    """

    AUTO = "AUTO"
    FILE = "FILE"
    DATA = "DATA"
    HINT = "HINT"
    OFF = "OFF"


def resolve_policy(
    policy: AutoShardPolicy, *, num_files: int | None, can_shard: bool, num_workers: int
) -> AutoShardPolicy:
    """The policy in force: never AUTO.

    Args:
      policy: the policy in the options.
      num_files: files of the source; ``None`` for a source without files.
      can_shard: whether the source has a ``shard`` method of its own, or another way to shard itself.
      num_workers: processes that read, W.

    Raises:
      ShardingError: FILE without files, FILE with fewer files than workers, HINT where the source cannot shard itself.

    >>> resolve_policy(AutoShardPolicy.AUTO, num_files=None, can_shard=False, num_workers=2).name
    'DATA'
    """
    if policy is AutoShardPolicy.AUTO:
        policy = AutoShardPolicy.DATA if num_files is None else AutoShardPolicy.FILE
    if policy is AutoShardPolicy.FILE:
        if num_files is None:
            raise ShardingError(
                "policy FILE was asked for, but the source has no files to deal out; a FileDataset or a FragmentSource "
                "is needed. Use AutoShardPolicy.DATA, or AUTO to let the source decide."
            )
        if num_files < num_workers:
            raise ShardingError(
                f"the source has {num_files} file(s), which is not enough for {num_workers} ranks under policy "
                "FILE: every rank needs at least one. Set auto_shard_policy to AutoShardPolicy.DATA, or split "
                "the input into more files."
            )
    if policy is AutoShardPolicy.HINT and not can_shard:
        raise ShardingError(
            "policy HINT was asked for, but the source has no method shard(num_shards=, index=) to call. Give it one, "
            "or use AutoShardPolicy.DATA."
        )
    return policy


def is_shared(policy: AutoShardPolicy, topology: Topology) -> bool:
    """Whether every worker takes its pieces of the same batches; else each has batches of its own."""
    return policy is AutoShardPolicy.DATA or topology.num_workers == 1


def deal(items: Sequence[T], num_workers: int, worker: int) -> list[T]:
    """The items of one worker: every ``num_workers``-th item, from number ``worker`` on.

    >>> deal(["a", "b", "c", "d", "e"], 2, 1)
    ['b', 'd']
    """
    return list(items[worker::num_workers])


def shards_of(order: Sequence[int], num_workers: int, sizes: Sequence[int] | None = None) -> list[list[int]]:
    """The files of each worker, in their order.

    Without sizes, worker ``i`` gets the files ``[i::W]`` of the order. With sizes (law "FILE by size"), each file goes
    to the worker that has the fewest bytes so far, the largest file first; of equal files the first one in the order
    comes first, and of equal workers the first one gets the file.

    Args:
      order: the numbers of the files, in order.
      num_workers: W.
      sizes: the size in bytes of each file, by its number.

    >>> shards_of([0, 1, 2, 3, 4], 2, [9, 1, 4, 4, 1])
    [[0, 4], [1, 2, 3]]
    """
    if sizes is None:
        return [deal(order, num_workers, worker) for worker in range(num_workers)]
    loads = [(0, worker) for worker in range(num_workers)]  # a heap
    places: list[list[int]] = [[] for _ in range(num_workers)]
    for place in sorted(range(len(order)), key=lambda place: -sizes[order[place]]):
        load, worker = loads[0]
        places[worker].append(place)
        heapq.heapreplace(loads, (load + sizes[order[place]], worker))
    return [[order[place] for place in sorted(mine)] for mine in places]


def parts_of(size: int, largest: int) -> list[tuple[int, int]]:
    """The ranges in bytes of the parts of a file: as few as may be, and equally large but for one byte.

    Args:
      size: how many bytes the file has; an empty file is one part.
      largest: how many bytes a part may have.

    >>> parts_of(10, 4)
    [(0, 3), (3, 6), (6, 10)]
    """
    count = max(1, -(-size // largest))
    ends = [size * number // count for number in range(count + 1)]
    return list(itertools.pairwise(ends))
