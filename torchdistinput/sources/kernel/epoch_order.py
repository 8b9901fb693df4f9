"""The samples of any step of an epoch, at any number of ranks, where their order follows from a few numbers.

A source whose order can be known is ``HasOrder``. What a step holds follows from the order of the samples, the bounds
of the batches, and the laws of ``plan`` by which a batch is cut: those that reading uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, final, runtime_checkable

import numpy as np

from torchdistinput.errors import InputError
from torchdistinput.plan.arrays import Ints
from torchdistinput.plan.batching import Cutter, Limits
from torchdistinput.plan.epoch_steps import BatchBounds, EpochSteps, StepRow
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.kernel.sample_costs import CostDivider

_AT_ONCE: Final = 2**15


class FileRecord(NamedTuple):
    """A record: the name of its file or fragment, and its number in it."""

    file: str
    record: int


class SourceSample(NamedTuple):
    """A sample of a mixture: the name of its source, and the sample in it."""

    source: str
    sample: Any


class PackItem(NamedTuple):
    """Part of a pack: a sample, and which of its tokens."""

    sample: Any
    start: int
    stop: int


class PackOf(NamedTuple):
    """A pack: its number, and what is in it."""

    pack: int
    items: tuple[PackItem, ...]


class SampleSequence(Protocol):
    """The samples of one worker in an epoch, in order."""

    def __len__(self) -> int: ...

    def between(self, lo: int, hi: int) -> Sequence[Any]:
        """The samples at places ``lo`` to ``hi - 1``."""

    def places_of(self, sample: Any) -> list[int]:
        """All places of a sample.

        Raises:
          ValueError: the data has no such sample.
        """


class NumbersInOrder(Protocol):
    """Numbers from 0 on in some order: a permutation."""

    def __len__(self) -> int: ...

    def block(self, start: int, stop: int) -> Ints:
        """The numbers at places ``start`` to ``stop - 1``."""


def place_in(order: NumbersInOrder, number: int) -> int:
    """The place of a number in an order, which is walked through as it is read: some 50 ms a million."""
    blocks = (
        (start, order.block(start, min(start + _AT_ONCE, len(order)))) for start in range(0, len(order), _AT_ONCE)
    )
    return next(start + int(found[0]) for start, block in blocks if len(found := np.flatnonzero(block == number)))


@runtime_checkable
class TellsParts(Protocol):
    """A map-style dataset whose samples are made of samples of others: packs, mixtures."""

    def parts_of_sample(self, index: int) -> Any:
        """What the sample is made of. Local, reads no sample."""

    def indices_of(self, parts: Any) -> list[int]:
        """The samples that are made of this; the inverse.

        Raises:
          ValueError: there can be no such sample.
        """


@runtime_checkable
class HasOrder(Protocol):
    """A source whose order of samples can be known without reading."""

    def order_of(
        self, epoch: int, topology: Topology, random_of: Callable[[int], Any], begun_at: Sequence[Any] | None
    ) -> EpochOrder:
        """The order of an epoch. Local.

        Args:
          epoch: its number.
          topology: how many workers and replicas there are; which worker this is does not matter.
          random_of: returns the random states of an epoch (``EpochRng``), for a sampler that draws.
          begun_at: where in the epoch reading began; ``None`` for its start, or if that does not matter.

        Raises:
          InputError: the order cannot be known; the message says what would make it known.
        """


@final
class EpochOrder:
    """The order of an epoch.

    Args:
      topology: the workers and replicas.
      shared: whether all workers share their batches; they are cut then as those of one worker with all replicas.
      batch_size: G; ``None`` for batches of sizes of their own.
      sequences: the samples of each worker; one for all if all have the same.
      drop_last: whether a short last batch is dropped.
      ends: where each batch of a size of its own ends.
      balance: divides batches by cost; ``None``: by place.
      composed: the dataset, if its samples are made of others.
      notes: on what it depends.
    """

    def __init__(  # noqa: PLR0913 - one epoch is one call
        self,
        topology: Topology,
        sequences: Sequence[SampleSequence],
        batch_size: int | None,
        *,
        shared: bool,
        drop_last: bool,
        ends: Ints | None = None,
        balance: CostDivider | None = None,
        composed: TellsParts | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.topology, self.notes, self._balance, self._composed = topology, notes, balance, composed
        own = replace(topology, worker=0)
        if shared:
            own = Topology(num_workers=1, replicas_per_worker=topology.num_replicas, worker=0)
        self._sequences = sequences
        bounds = [BatchBounds(len(each), batch_size or 1, drop_last, ends) for each in sequences]
        self._steps = EpochSteps(Cutter(own, shared, batch_size), bounds)
        self._local = own.replicas_per_worker

    def __len__(self) -> int:
        """How many steps the epoch has."""
        return len(self._steps)

    def parts(self, step: int) -> list[list[Any]]:
        """The samples of a step, for each replica.

        Raises:
          IndexError: there is no such step.
        """
        found: list[list[Any]] = [[] for _ in range(self.topology.num_replicas)]
        for row in self._steps.at(step):
            order, limits_of = self._rows_of(row.worker, row.batch)
            limits = limits_of(row.row)
            first, end = limits[0][0], limits[-1][1]
            start, stop = self._steps.limits(row.worker, row.batch)
            if order is None:  # no more of the batch than the row has
                start, stop = start + first, start + end
            samples = self._sequence(row.worker).between(start, stop)
            for replica, (lo, hi) in enumerate(limits, row.worker * self._local):
                own = samples[lo - first : hi - first]
                found[replica] = list(own) if order is None else [samples[place] for place in order[lo:hi].tolist()]
        if self._composed is None:
            return found
        return [[self._composed.parts_of_sample(sample) for sample in part] for part in found]

    def steps_of(self, sample: Any) -> list[tuple[int, int]]:
        """The steps of a sample, each with the replica that gets it.

        Raises:
          ValueError: the data has no such sample.
        """
        if self._composed is not None and not isinstance(sample, int):
            return sorted({step for index in self._composed.indices_of(sample) for step in self.steps_of(index)})
        found = set[tuple[int, int]]()
        for worker in range(self._steps.num_workers):
            for place in self._sequence(worker).places_of(sample):
                at = self._steps.find(worker, place)
                if at is None:
                    continue
                batch, inside = at
                order, limits_of = self._rows_of(worker, batch)
                inside = inside if order is None else int(np.flatnonzero(order == inside)[0])
                for row in range(self._steps.rows_of(worker, batch)):
                    for replica, (lo, hi) in enumerate(limits_of(row), worker * self._local):
                        if lo <= inside < hi:
                            found.add((self._steps.step_of(StepRow(worker, batch, row)), replica))
        return sorted(found)

    def _sequence(self, worker: int) -> SampleSequence:
        return self._sequences[worker if len(self._sequences) > 1 else 0]

    def _batch(self, worker: int, batch: int) -> list[Any]:
        return list(self._sequence(worker).between(*self._steps.limits(worker, batch)))

    def _rows_of(self, worker: int, batch: int) -> tuple[Ints | None, Callable[[int], Limits]]:
        """The order in which the samples of a batch are dealt, if not their own; and the limits of each of its rows."""
        cutter = self._steps.cutter_of(worker)
        lo, hi = self._steps.limits(worker, batch)
        if self._balance is None or lo == hi:
            return None, partial(cutter.row, hi - lo)
        balance = replace(self._balance, topology=cutter.topology)
        division = balance.divide(self._batch(worker, batch))
        return division.order, [division.row].__getitem__


def cannot_know(what: str, way_out: str) -> InputError:
    """The error for an order that cannot be known without reading."""
    return InputError(f"which samples a step holds cannot be known before it is read: {what}. {way_out}")
