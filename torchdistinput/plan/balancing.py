"""How a global batch is divided by the costs of its samples: who computes what, and nothing else.

Training in step waits for the slowest replica. Where samples differ in cost (attention over documents of any length),
the split by place (law B1) makes it wait long. The laws, for a batch of ``b`` samples over ``N`` replicas:

(C1) Costs are finite and not negative. They are rounded to multiples of a power of 2, so that all machines find the
    same sums: for 1,024 samples over 64 replicas to at most 2**-33 of the largest cost, so that whole numbers below
    2**34 stay exact.
(C2) The balanced split. The samples are taken by falling cost, equal ones in the order of the batch. Each goes to the
    replica with the least cost so far; of equal ones to the one with the fewest samples, then to the first.
(C3) Equal counts. The sizes are ``[lo+1]*extra + [lo]*(N-extra)`` with ``lo, extra = divmod(b, N)``. The samples are
    dealt by (C2), and each replica keeps the first that it gets, up to its size. The rest are dealt again by falling
    cost: each to the replica with the least cost among those that have room; of equal ones to the first.
(C4) Batches of a worker's own (FILE, OFF). Each of the ``R`` steps that the batch lasts takes the next samples in
    order, at least one, so that the delivered samples are a prefix of the batch. A sample is in step ``r`` (from 0) if
    its middle, in the running sum of the costs, lies from ``r/R`` to ``(r+1)/R`` of the whole. The samples of a step
    are divided among the worker's replicas by (C2). A batch of at most ``N`` samples is cut by place.
(C5) The samples of a replica keep the order of the batch.
(C6) Micro-batches. A part is cut into runs of samples of at most a given cost, each as long as it may be. All replicas
    have as many as the one that needs the most; the last ones of the others are empty.

(C2) is the rule of Graham, "Bounds on multiprocessing timing anomalies", 1969: the slowest replica has at most
``4/3 - 1/(3N)`` of the least possible cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from heapq import heapify, heappop, heapreplace
from itertools import accumulate, pairwise
from typing import Final, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from torchdistinput.errors import BatchingError
from torchdistinput.plan.batching import Cutter, Row

__all__ = [
    "BalancedSplit",
    "CostCutter",
    "Costs",
    "Division",
    "StepCosts",
    "balanced_split",
    "check_costs",
    "runs_within",
]

Costs: TypeAlias = npt.NDArray[np.float64]
"""The cost of each sample of a batch, ``(b,)``."""

Places: TypeAlias = npt.NDArray[np.int64]
"""Places in a batch."""

_BITS: Final = 62  # of a load: the cost, the samples and the number of a replica in one int
_LEAST_BITS: Final = 8  # to tell costs apart
_MANY: Final = 24  # replicas


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
    """Laws C2, C3 and C5.

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
    # One sort of plain ints: the cost, then the place, so that equal ones fall in the order of the batch.
    keys = units << for_place | np.arange(size - 1, -1, -1)
    keys.sort()
    keys = keys[::-1]
    fallen = size - 1 - (keys & (1 << for_place) - 1)
    # A load is (cost, samples, number) of a replica in one int; a sample adds its cost, and one sample.
    steps = (keys >> for_place << for_place | 1) << for_replica
    sizes = _equal_sizes(size, num_replicas) if equal_counts else None
    owners = np.empty(size, np.int16 if num_replicas < 1 << 15 else np.int64)  # int16 is sorted by its digits
    owners[fallen] = _owners(steps, num_replicas, sizes, for_place, for_replica)
    counts = np.bincount(owners, minlength=num_replicas)
    return BalancedSplit(owners.argsort(kind="stable"), tuple(counts.tolist()))


def _owners(steps: Places, num_replicas: int, sizes: Places | None, for_place: int, for_replica: int) -> Places:
    """The replica of each sample, by falling cost: law C2; with sizes, law C3."""
    before = _dealt_in_rounds(steps, num_replicas) if num_replicas >= _MANY else _dealt_singly(steps, num_replicas)
    owners = before & (1 << for_replica) - 1
    if sizes is None:
        return owners
    keeps = before >> for_replica & (1 << for_place) - 1 < sizes[owners]
    kept = np.arange(num_replicas)
    np.add.at(kept, owners[keeps], steps[keeps])
    room = sizes - (kept >> for_replica & (1 << for_place) - 1)
    again = ~keeps
    owners[again] = _dealt_again(steps[again].tolist(), kept.tolist(), room.tolist())
    return owners


def _dealt_singly(steps: Places, num_replicas: int) -> Places:
    """Law C2: the load of the replica that gets each sample, before it gets it."""
    loads = list(range(num_replicas))  # a heap
    return np.fromiter([heapreplace(loads, loads[0] + step) for step in steps.tolist()], np.int64, len(steps))


def _dealt_in_rounds(steps: Places, num_replicas: int) -> Places:
    """The same, faster for many replicas: in a round, the samples go to the replicas by rising load.

    A round ends before the first replica that has more than one that got a sample in this round.
    """
    loads = np.arange(num_replicas)
    found = np.empty_like(steps)
    done = 0
    while done < len(steps):
        loads.sort()
        wanted = steps[done : done + num_replicas]
        after = loads[: len(wanted)] + wanted
        too_much = loads[1 : len(wanted)] > np.minimum.accumulate(after)[:-1]
        first = int(too_much.argmax()) if len(too_much) else 0
        taken = first + 1 if len(too_much) and too_much[first] else len(wanted)
        found[done : done + taken] = loads[:taken]
        loads[:taken] = after[:taken]
        done += taken
    return found


def _dealt_again(steps: list[int], loads: list[int], room: list[int]) -> list[int]:
    """Law C3: the replicas of the samples that the first ones had no room for."""
    heap = [(load, replica) for replica, load in enumerate(loads) if room[replica]]
    heapify(heap)
    found = []
    for step in steps:
        load, replica = heap[0]
        found.append(replica)
        room[replica] -= 1
        if room[replica]:
            heapreplace(heap, (load + step, replica))
        else:
            heappop(heap)
    return found


def _equal_sizes(size: int, num_replicas: int) -> Places:
    low, extra = divmod(size, num_replicas)
    return np.full(num_replicas, low) + (np.arange(num_replicas) < extra)


def _ends_of_steps(costs: Costs, num_steps: int) -> list[int]:
    """Law C4: where each step of a batch ends; there are at least as many samples as steps."""
    size = len(costs)
    if not costs.any():
        costs = np.ones(size)
    sums = costs.cumsum()
    steps = np.arange(1, num_steps)
    ends = np.searchsorted(sums - costs / 2, sums[-1] * steps / num_steps)
    ends = np.maximum.accumulate(np.maximum(ends, steps) - steps) + steps
    return [*np.minimum(ends, size - num_steps + steps).tolist(), size]


def runs_within(costs: Costs, max_cost: float) -> list[int]:
    """Law C6: the ends of the runs of at most ``max_cost``, each as long as it may be; no cost is more than that.

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
      rows: the limits of this worker's pieces in that order, for each step that the batch lasts.
      costs: of the samples, in that order.
      ends: where the piece of each replica ends in that order; empty for a batch of a worker's own.
    """

    order: Places
    rows: list[Row]
    costs: Costs
    ends: tuple[int, ...] = ()

    @cached_property
    def digest(self) -> int:
        """A number of the costs and the division, for ranks to compare."""
        found = blake2b(self.costs.tobytes(), digest_size=8)
        found.update(self.order.tobytes())
        return int.from_bytes(found.digest(), "little") // 2 + 1

    def runs(self, max_cost: float, replica: int) -> list[int]:
        """Law C6: where the micro-batches of one of this worker's pieces end, from the start of the piece.

        For a batch that all workers share.
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
        lo, hi = self.rows[0][replica]
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

    def micro_batches(self, max_cost: float, replica: int) -> list[slice]:
        """Law C6 for one local replica: slices of its part. What was left out is missing in them, and nothing else.

        Raises:
          ValueError: a sample costs more; on every rank alike.
        """
        ends = self.division.runs(max_cost, replica)
        lost = self.left_out[replica] if self.left_out else ()
        ends = [end - sum(place < end for place in lost) for end in ends]
        return [slice(*limits) for limits in pairwise([0, *ends])]


@final
@dataclass(frozen=True)
class CostCutter:
    """Divides the batches of one worker by cost.

    Args:
      cutter: where this worker stands, and whose batches it gets.
      equal_counts: see law C3.
    """

    cutter: Cutter
    equal_counts: bool = False

    def divide(self, costs: Costs) -> Division:
        """How a batch is divided; it has at least one sample.

        >>> from torchdistinput.plan.topology import Topology
        >>> two = Topology(num_workers=2, replicas_per_worker=1, worker=1)
        >>> CostCutter(Cutter(two, shared=True)).divide(np.array([1.0, 5.0, 2.0, 2.0])).rows
        [((1, 4),)]
        """
        topology = self.cutter.topology
        if self.cutter.shared or topology.num_workers == 1:
            order, sizes = balanced_split(costs, topology.num_replicas, equal_counts=self.equal_counts)
            ends = tuple(accumulate(sizes))
            row = tuple((ends[k] - sizes[k], ends[k]) for k in topology.replica_ids)
            return Division(order, [row], costs[order], ends)
        rows = self.cutter.rows(len(costs))
        if len(costs) <= topology.num_replicas:
            return Division(np.arange(len(costs)), rows, costs)
        return self._in_steps(costs, len(rows))

    def _in_steps(self, costs: Costs, num_steps: int) -> Division:
        local = self.cutter.topology.replicas_per_worker
        orders, rows, start = [], [], 0
        for end in _ends_of_steps(costs, num_steps):
            order, sizes = balanced_split(costs[start:end], local)
            orders.append(order + start)
            bounds = [start, *(start + passed for passed in accumulate(sizes))]
            rows.append(tuple(pairwise(bounds)))
            start = end
        order = np.concatenate(orders)
        return Division(order, rows, costs[order])
