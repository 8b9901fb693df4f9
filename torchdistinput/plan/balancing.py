"""How the samples of a global batch are divided among the replicas by their costs.

Training in step waits for the slowest replica. Where samples differ in cost (attention over documents of any length),
the split by place (law B1) makes it wait long. The laws, for a batch of ``b`` samples over ``N`` replicas:

(C1) Costs are finite and not negative. They are rounded to multiples of a power of 2, so that all machines find the
    same sums: for 1,024 samples over 64 replicas to at most 2**-33 of the largest cost, so that whole numbers below
    2**34 stay exact.
(C2) The balanced split. The samples are taken by falling cost, equal ones in the order of the batch. Each goes to the
    replica with the least cost so far; of equal ones to the one with the fewest samples, then to the first.
(C3) Equal counts. The sizes are ``[lo+1]*extra + [lo]*(N-extra)`` with ``lo, extra = divmod(b, N)``. The samples of
    (C2) go each to the replica with the least cost among those that have room for it; of equal ones to the one with
    the most room, then to the first. Then, with at most 64 samples for each replica, up to 16 times: if the costliest
    replica (the first of equal ones) has more than 65/64 of the mean, and of the dearest sample with the ``lo-1``
    cheapest, then it and the cheapest replica swap two samples: those whose difference in cost is closest to half that
    of the replicas, by falling cost the first of equal ones, if both replicas get closer by it.
(C4) The samples of a replica keep the order of the batch.
(C5) Micro-batches. A part is cut into runs of samples of at most a given cost, each as long as it may be. All replicas
    have as many as the one that needs the most; the last ones of the others are empty.

All replicas have parts of one batch (policy DATA): parts of different batches differ in cost however they are cut.

(C2) is the rule of Graham, "Bounds on multiprocessing timing anomalies", 1969: the slowest replica has at most
``4/3 - 1/(3N)`` of the least possible cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from heapq import heappop, heapreplace
from itertools import accumulate, pairwise
from typing import Final, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from torchdistinput.errors import BatchingError
from torchdistinput.plan.batching import Limits
from torchdistinput.plan.topology import Topology

Costs: TypeAlias = npt.NDArray[np.float64]
"""The cost of each sample of a batch, ``(b,)``."""

Places: TypeAlias = npt.NDArray[np.int64]
"""Places in a batch."""

_BITS: Final = 62  # of a load: the cost, the samples and the number of a replica in one int
_LEAST_BITS: Final = 8  # to tell costs apart
_SWAPS: Final = 16
_SWAPPED: Final = 64  # samples for each replica


class BalancedSplit(NamedTuple):
    """How a batch is divided among all replicas."""

    order: Places
    """The places of the samples in the batch: those of replica 0, then those of replica 1, and so on."""
    sizes: tuple[int, ...]
    """Samples of each replica."""


def check_costs(costs: Costs) -> int | None:
    """The place of the first cost that is not finite, or is negative (law C1); ``None`` if there is none.

    >>> check_costs(np.array([1.0, 0.0, -2.0]))
    2
    """
    good = (costs >= 0) & (costs < np.inf)
    return None if good.all() else int(good.argmin())


def balanced_split(costs: Costs, num_replicas: int, *, equal_counts: bool = False) -> BalancedSplit:
    """Laws C2, C3 and C4.

    Args:
      costs: of the samples, finite and not negative.
      num_replicas: N.
      equal_counts: whether the sizes differ by one at most.

    Raises:
      BatchingError: there are too many samples and replicas to tell costs apart.

    >>> balanced_split(np.array([1.0, 5.0, 2.0, 2.0]), 2)
    BalancedSplit(order=array([1, 0, 2, 3]), sizes=(1, 3))
    >>> balanced_split(np.array([1.0, 5.0, 2.0, 2.0]), 2, equal_counts=True)
    BalancedSplit(order=array([0, 1, 2, 3]), sizes=(2, 2))
    """
    size = len(costs)
    if num_replicas == 1 or not size:
        return BalancedSplit(np.arange(size), (size,) + (0,) * (num_replicas - 1))
    for_place, for_replica = size.bit_length(), (num_replicas - 1).bit_length()
    bits = _BITS - 2 * for_place - for_replica  # of a cost
    if bits < _LEAST_BITS:
        raise BatchingError(f"a batch of {size} samples is too large to be balanced over {num_replicas} replicas.")
    units = np.rint(np.ldexp(costs, bits - int(np.frexp(costs.max())[1]))).astype(np.int64)
    falling = (-units).argsort(kind="stable")
    # A load is (cost, samples, number) of a replica in one int; a sample adds its cost, and one sample.
    steps = (units[falling] << for_place | 1) << for_replica
    dealt, left = _dealt(steps.tolist(), num_replicas, for_replica, for_place, equal_counts=equal_counts)
    if equal_counts and size <= _SWAPPED * num_replicas:
        _swap(dealt, units[falling], left >> for_place + for_replica)
    owners = np.empty(size, np.int64)
    owners[falling] = dealt
    return BalancedSplit(owners.argsort(kind="stable"), tuple(np.bincount(owners, minlength=num_replicas).tolist()))


def _dealt(
    steps: list[int], num_replicas: int, for_replica: int, for_place: int, *, equal_counts: bool
) -> tuple[Places, Places]:
    """Laws C2 and C3: the replica that gets each sample, and the loads in the end, by replica.

    Args:
      steps: what each sample adds to a load.
      num_replicas: N.
      for_replica: the bits of a load that hold the number of the replica.
      for_place: the bits before these, which hold its samples.
      equal_counts: whether law C3 holds.
    """
    heap, limit = list(range(num_replicas)), len(steps) + 1
    if equal_counts:
        extra, limit = len(steps) % num_replicas, -(-len(steps) // num_replicas)
        for replica in range(extra, num_replicas if extra else 0):
            heap[replica] += 1 << for_replica  # as if these had a sample already
    number, samples = (1 << for_replica) - 1, (1 << for_place) - 1
    dealt, full = [], []
    for step in steps:
        load = heap[0]
        dealt.append(load & number)
        load += step
        if load >> for_replica & samples < limit:
            heapreplace(heap, load)
        else:
            full.append(heappop(heap) + step)
    loads = np.array(sorted(full + heap, key=lambda load: load & number), np.int64)
    return np.array(dealt, np.int64), loads


def _swap(owners: Places, costs: Places, loads: Places) -> None:
    """Law C3: the swaps. Costs fall; all arguments but them are changed."""
    cheapest = len(costs) - len(costs) // len(loads) + 1
    least = max(int(costs.sum()), len(loads) * int(costs[0] + costs[cheapest:].sum()))  # of all replicas together
    for _ in range(_SWAPS):
        high, low = int(loads.argmax()), int(loads.argmin())
        if 64 * len(loads) * int(loads[high]) <= 65 * least:
            return
        gap = int(loads[high] - loads[low])
        given, taken = np.flatnonzero(owners == high), np.flatnonzero(owners == low)
        less = costs[given][:, None] - costs[taken]
        place = int(np.abs(2 * less - gap).argmin())
        one, other = given[place // len(taken)], taken[place % len(taken)]
        moved = int(costs[one] - costs[other])
        if not 0 < moved < gap:
            return
        owners[one], owners[other] = low, high
        loads[high] -= moved
        loads[low] += moved


def runs_within(costs: Costs, max_cost: float) -> list[int]:
    """Law C5: the ends of the runs of at most ``max_cost``, each as long as it may be; no cost is more than that.

    >>> runs_within(np.array([1.0, 1.0, 3.0, 1.0]), 3.0)
    [2, 3, 4]
    """
    ends, total = [], 0.0
    for place, cost in enumerate(costs.tolist()):
        total += cost
        if total > max_cost and place:
            ends.append(place)
            total = cost
    return [*ends, len(costs)] if len(costs) else []


@final
@dataclass(frozen=True)
class Division:
    """A batch divided by cost.

    Args:
      order: the places of its samples, piece by piece.
      row: the limits of this worker's pieces in that order.
      costs: of the samples, in that order.
      ends: where the piece of each replica ends in that order.
    """

    order: Places
    row: Limits
    costs: Costs
    ends: tuple[int, ...]

    @cached_property
    def digest(self) -> int:
        """A number of the costs and the division, for ranks to compare."""
        found = blake2b(self.costs.tobytes(), digest_size=8)
        found.update(self.order.tobytes())
        return int.from_bytes(found.digest(), "little") // 2 + 1

    def runs(self, max_cost: float, replica: int) -> list[int]:
        """Law C5: where the micro-batches of one of this worker's pieces end, from the start of the piece.

        All ranks find the same number of them, as all know the costs.

        Raises:
          ValueError: a sample costs more; on every rank alike.
        """
        if not self.costs.max() <= max_cost:  # also if the bound is no number
            raise ValueError(
                f"max_cost is {max_cost}, and a sample of this step costs {self.costs.max():g}; no micro-batch can "
                "hold it. Give a larger max_cost, or leave such samples out of the data."
            )
        pieces = pairwise([0, *self.ends])
        most = max(len(runs_within(self.costs[lo:hi], max_cost)) for lo, hi in pieces)
        lo, hi = self.row[replica]
        ends = runs_within(self.costs[lo:hi], max_cost)
        return ends + [hi - lo] * (most - len(ends))


@final
@dataclass(frozen=True)
class StepCosts:
    """The costs of this worker's part of a step.

    Args:
      division: of the batch.
      left_out: for each local replica, the places in its piece of the samples that could not be read.
    """

    division: Division
    left_out: tuple[tuple[int, ...], ...] = ()

    @property
    def digest(self) -> int:
        """See ``Division.digest``."""
        return self.division.digest

    @property
    def of_this_worker(self) -> float:
        """The cost of the samples of this worker's part, of those too that were left out."""
        return sum(float(self.division.costs[lo:hi].sum()) for lo, hi in self.division.row)

    def micro_batches(self, max_cost: float, replica: int) -> list[slice]:
        """Law C5 for one local replica: slices of its part, without the samples that were left out.

        Raises:
          ValueError: a sample costs more; on every rank alike.
        """
        ends = self.division.runs(max_cost, replica)
        lost = self.left_out[replica] if self.left_out else ()
        ends = [end - sum(place < end for place in lost) for end in ends]
        return [slice(*limits) for limits in pairwise([0, *ends])]


def divide(costs: Costs, topology: Topology, *, equal_counts: bool = False) -> Division:
    """How a batch of all workers is divided by laws C2, C3 and C4; it has at least one sample.

    >>> divide(np.array([1.0, 5.0, 2.0, 2.0]), Topology(num_workers=2, replicas_per_worker=1, worker=1)).row
    ((1, 4),)
    """
    order, sizes = balanced_split(costs, topology.num_replicas, equal_counts=equal_counts)
    ends = tuple(accumulate(sizes))
    return Division(order, tuple((ends[k] - sizes[k], ends[k]) for k in topology.replica_ids), costs[order], ends)
