"""Workers and replicas: which processes read the data, and which devices compute on it.

These names mean the same everywhere in the package:

- *worker*: an input pipeline (as in TensorFlow): a rank, or all ranks with the same data coordinate of a mesh. There
  are ``num_workers``, W in the laws. A *loader worker* is another thing: a process of torch's ``DataLoader``.
- *replica*: one copy of the model on one device. Each worker has ``replicas_per_worker``, L in the laws.
- ``num_replicas = num_workers * replicas_per_worker``, N in the laws; replica ``k = worker * replicas_per_worker + r``.
- *global batch*: the batch that a single process would read, G samples. *step*: one global batch over all replicas.
- *shard*: the data that one worker reads. *piece*: one replica's part of a global batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import final


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
