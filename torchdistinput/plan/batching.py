"""How a global batch is cut into the pieces of the replicas.

A *row* is one worker's part of a step: a range ``(lo, hi)`` of the batch for each of its L replicas. The laws:

(B1) The split. A batch of ``b`` samples over ``N`` replicas: ``c = ceil(b / N)``; replica ``k`` gets rows
    ``[k*c, min((k+1)*c, b))``, nothing if none are left. So 4 over 3 is 2, 2, 0.
(B2) Global batches (policy DATA, or one worker): step ``t`` is batch ``t``; replica ``k`` gets its piece by (B1).
(B3) The cycle (FILE, OFF, HINT with several workers): each worker has batches of its own and cuts a full batch of G
    for all N replicas, taking L pieces a step, so a batch lasts W steps. ``lo, extra = divmod(G, N)``;
    ``base = [lo+1]*extra + [lo]*(N-extra)``; worker ``i`` uses ``base`` rotated left by ``i*L``. Every step then sums
    to G over the workers, and sizes differ by at most one.
(B4) The tail. A short batch is cut by (B1); its empty pieces are dropped, and new ones fill the last row.
(B5) Ready batches (batches that the source makes, of any size) are cut by (B1) into all N pieces.

Worked: G = 4, two workers of one replica; each cuts ``[0 1 2 3]`` into ``[0 1]`` and ``[2 3]`` (two steps), and a short
``[4 5]`` into ``[4]`` and ``[5]``. Source: TensorFlow's guide and its ``batch_sizes_for_worker``; where they differ,
the guide won.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import final

from torchdistinput.errors import BatchingError
from torchdistinput.plan.topology import Topology

Limits = tuple[tuple[int, int], ...]
"""One range ``(lo, hi)`` of a batch for each local replica."""


def check_batch_size(size: object, name: str = "global_batch_size") -> int:
    """The size, if it is a positive int.

    Raises:
      BatchingError: it is not.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise BatchingError(f"{name} is {size!r}; a positive int is needed.")
    return size


def split(size: int, num_replicas: int, replica: int) -> tuple[int, int]:
    """Law B1: the range of a batch that a replica gets.

    >>> [split(4, 3, k) for k in range(3)]
    [(0, 2), (2, 4), (4, 4)]
    """
    most = -(-size // num_replicas)
    return min(replica * most, size), min((replica + 1) * most, size)


def refuse_empty_pieces(step: int, size: int, num_replicas: int) -> None:
    """Refuses a batch that leaves a replica without a sample, for loaders that cannot make an empty batch.

    Raises:
      BatchingError: it does; the step is named.
    """
    lo, hi = split(size, num_replicas, num_replicas - 1)
    if lo >= hi:
        raise BatchingError(
            f"the batch of step {step} has {size} sample(s), which leaves replica {num_replicas - 1} of {num_replicas} "
            "without any, and a plain DataLoader cannot make an empty batch. Use another batch size, drop_last=True, "
            "or Strategy.distribute_dataset, which delivers batches of size 0."
        )


def distinct_steps(num_samples: int, batch_size: int, *, drop_last: bool) -> list[tuple[int, int]]:
    """The first full batch and the short last one, as (step, size): no other sizes occur.

    >>> distinct_steps(10, 4, drop_last=False)
    [(0, 4), (2, 2)]
    """
    num_full, last = divmod(num_samples, batch_size)
    full = [(0, batch_size)] if num_full else []
    return full + ([(num_full, last)] if last and not drop_last else [])


def num_steps(records: list[int] | None, global_batch_size: int, *, drop_last: bool) -> int | None:
    """The steps of an epoch whose batches all workers share, from the records of each file; ``None`` for ``None``."""
    if records is None:
        return None
    return sum(records) // global_batch_size if drop_last else num_batches(sum(records), global_batch_size)


def num_batches(num_samples: int, batch_size: int) -> int:
    """How many batches there are, the short last one included.

    >>> num_batches(10, 4)
    3
    """
    return -(-num_samples // batch_size)


def check_replica(num_replicas: object, replica: int) -> None:
    """Refuses a replica that does not exist.

    Raises:
      BatchingError: ``num_replicas`` is not a positive int.
      ValueError: ``replica`` is not in ``[0, num_replicas)``.
    """
    count = check_batch_size(num_replicas, "num_replicas")
    if not 0 <= replica < count:
        raise ValueError(f"rank is {replica}; it must be in [0, {count}), as num_replicas is {count}.")


def _cycle_sizes(global_batch_size: int, topology: Topology) -> tuple[int, ...]:
    """Law B3: the N sizes into which this worker cuts a full batch, in the order in which it takes them.

    >>> _cycle_sizes(4, Topology(num_workers=3, replicas_per_worker=1, worker=1))
    (1, 1, 2)
    """
    low, extra = divmod(global_batch_size, topology.num_replicas)
    base = (low + 1,) * extra + (low,) * (topology.num_replicas - extra)
    turn = topology.worker * topology.replicas_per_worker
    return base[turn:] + base[:turn]


def told_batch(size: int, topology: Topology, *, shared: bool) -> str:
    """A full batch as the sum of the workers' parts in the first step, for the log; long runs of parts by number.

    >>> told_batch(32, Topology(num_workers=2, replicas_per_worker=1, worker=0), shared=True)
    '32 = 16 + 16'
    >>> told_batch(100, Topology(num_workers=64, replicas_per_worker=1, worker=0), shared=False)
    '100 = 36 x 2 + 28 x 1'
    """
    workers, local = topology.num_workers, topology.replicas_per_worker
    if shared:
        most = -(-size // topology.num_replicas) * local
        parts = [min((worker + 1) * most, size) - min(worker * most, size) for worker in range(workers)]
    else:
        sizes = _cycle_sizes(size, replace(topology, worker=0))
        parts = [sum(sizes[worker * local : (worker + 1) * local]) for worker in range(workers)]
    if workers > 8:
        return f"{size} = " + " + ".join(f"{len(list(run))} x {part}" for part, run in groupby(parts))
    return f"{size} = " + " + ".join(map(str, parts))


@final
@dataclass(frozen=True)
class Cutter:
    """Cuts the batches of one worker into rows.

    Args:
      topology: the number of workers and replicas, and which worker this is.
      shared: every worker sees the same batches (law B2); else each has batches of its own (laws B3, B4, B5).
      global_batch_size: G, or ``None`` where the source yields ready batches.
    """

    topology: Topology
    shared: bool
    global_batch_size: int | None = None

    def rows(self, size: int) -> list[Limits]:
        """The rows of a batch of ``size`` samples, one a step.

        >>> two = Topology(num_workers=2, replicas_per_worker=1, worker=0)
        >>> Cutter(two, shared=True, global_batch_size=4).rows(4)
        [((0, 2),)]
        >>> Cutter(two, shared=False, global_batch_size=4).rows(4)
        [((0, 2),), ((2, 4),)]
        >>> Cutter(two, shared=False, global_batch_size=4).rows(1)
        [((0, 1),)]
        """
        topology, local = self.topology, self.topology.replicas_per_worker
        if self.shared:
            return [tuple(split(size, topology.num_replicas, k) for k in topology.replica_ids)]
        if topology.num_workers > 1 and size == self.global_batch_size:
            pieces = list(pairwise(accumulate(_cycle_sizes(size, topology), initial=0)))
        else:
            pieces = [split(size, topology.num_replicas, k) for k in range(self.num_rows(size) * local)]
        return [tuple(pieces[start : start + local]) for start in range(0, len(pieces), local)]

    def num_rows(self, size: int) -> int:
        """How many rows a batch has.

        >>> three = Topology(num_workers=3, replicas_per_worker=1, worker=0)
        >>> Cutter(three, shared=False, global_batch_size=9).num_rows(4)
        2
        """
        if self.shared or self.topology.num_workers == 1 or self.global_batch_size in (None, size):
            return self.rows_of_ready_batch
        most = -(-size // self.topology.num_replicas)
        return -(-num_batches(size, most) // self.topology.replicas_per_worker) if size else 0

    @property
    def read_by_all(self) -> bool:
        """Whether several workers read the same batches, so that they can compare what they read."""
        return self.shared and self.topology.num_workers > 1

    @property
    def rows_of_ready_batch(self) -> int:
        """How many rows a ready batch has (law B5); a full batch of G samples has as many."""
        return 1 if self.shared else self.topology.num_workers

    @property
    def largest_piece_size(self) -> int | None:
        """``ceil(G / N)``, the largest size of a piece; ``None`` where the source yields ready batches."""
        size = self.global_batch_size
        return None if size is None else -(-size // self.topology.num_replicas)

    def epoch(self, samples: Sequence[int], *, drop_last: bool) -> tuple[int | None, int]:
        """The steps of an epoch, and the samples in them.

        The steps are ``None`` where rows without a sample on any worker may be passed over: with batches of fewer
        samples than replicas, which workers do not share.

        Args:
          samples: of each worker; one number if they share them.
          drop_last: whether a short last batch is dropped.

        >>> Cutter(Topology(num_workers=2, replicas_per_worker=1, worker=0), False, 4).epoch([9, 2], drop_last=False)
        (5, 11)
        """
        size = self.global_batch_size or 1
        kept = [count - count % size if drop_last else count for count in samples]
        if self.rows_of_ready_batch > 1 and size < self.topology.num_replicas:
            return None, sum(kept)
        rows = [self.rows_of_ready_batch * (count // size) for count in kept]
        ends = [self.num_rows(count % size) if count % size else 0 for count in kept]
        return max(map(sum, zip(rows, ends, strict=True)), default=0), sum(kept)

    def may_lack_samples(self, *, drop_last: bool, num_samples: int | None, cuts_empty: bool = False) -> bool:
        """Whether some replica may be left without a sample at some step, so that an empty piece has to be made.

        Args:
          drop_last: whether a short last batch is dropped.
          num_samples: samples of an epoch; ``None`` where the number is not known.
          cuts_empty: whether an empty piece is cut out of its batch, where the worker has that batch.

        >>> two = Cutter(Topology(num_workers=2, replicas_per_worker=1, worker=0), shared=True, global_batch_size=4)
        >>> two.may_lack_samples(drop_last=True, num_samples=None), two.may_lack_samples(drop_last=False, num_samples=9)
        (False, True)
        """
        count, size = self.topology.num_replicas, self.global_batch_size
        if count == 1 or (self.shared and cuts_empty):
            return False
        if not self.shared or size is None or (num_samples is None and not drop_last):
            return True
        steps = [(0, size)] if num_samples is None else distinct_steps(num_samples, size, drop_last=drop_last)
        return any(lo >= hi for lo, hi in (split(each, count, count - 1) for _, each in steps))

    def certain_piece_size(self, *, drop_last: bool) -> int | None:
        """The size of every piece, where it is certain: full batches only, and N divides G."""
        if self.global_batch_size is None or not drop_last or self.global_batch_size % self.topology.num_replicas:
            return None
        return self.global_batch_size // self.topology.num_replicas
