"""Which rows of the ranks' batches make a step of an epoch, and the step of a row: without walking through the epoch.

A row is what ``plan.batching`` says: one worker's part of a step. Worker ``i`` delivers the rows of its batches one
after the other; a step is the rows of one number of all workers. Rows that are empty on every worker are passed over.

(E1) A batch that all workers share is one row; else each batch but the last one of an epoch has ``W`` rows.
(E2) Which rows are empty on every worker repeats every ``W`` rows, while the same workers have full batches. So an
    epoch is a few *stretches*, in each of which a step is found by division. Batches of sizes of their own have no such
    stretches: their rows are looked at one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, final

import numpy as np

from torchdistinput.plan.arrays import Ints
from torchdistinput.plan.batching import Cutter, cycle_sizes, num_batches


@final
@dataclass(frozen=True)
class BatchBounds:
    """The batches of one worker in the order of its samples.

    Args:
      samples: how many there are.
      size: of each batch but the last one, G.
      drop_last: whether a short last batch is dropped.
      ends: where each batch ends, for batches of sizes of their own; else ``None``.
    """

    samples: int
    size: int = 1
    drop_last: bool = False
    ends: Ints | None = None

    def __len__(self) -> int:
        """How many batches there are."""
        if self.ends is not None:
            return len(self.ends)
        return self.samples // self.size if self.drop_last else num_batches(self.samples, self.size)

    def limits(self, batch: int) -> tuple[int, int]:
        """The first sample of a batch, and the one after its last."""
        if self.ends is not None:
            return int(self.ends[batch - 1]) if batch else 0, int(self.ends[batch])
        return batch * self.size, min((batch + 1) * self.size, self.samples)

    def batch_of(self, place: int) -> int | None:
        """The batch of the sample at a place; ``None``: it is dropped."""
        batch = place // self.size if self.ends is None else int(np.searchsorted(self.ends, place, side="right"))
        return batch if batch < len(self) else None


@final
class StepRow(NamedTuple):
    """A worker's row of a step: the batch, and the number of the row in it."""

    worker: int
    batch: int
    row: int


class _Stretch(NamedTuple):
    """Rows among which every ``period``-th is alike: the first one, the steps before, and which rows are steps."""

    first: int
    steps: int
    kept: Ints


@final
class EpochSteps:
    """The steps of an epoch, from either end.

    Args:
      cutter: of any of the workers.
      bounds: the batches of each worker; one for all if all have the same.
    """

    def __init__(self, cutter: Cutter, bounds: Sequence[BatchBounds]) -> None:
        self._cutter = cutter
        workers = self.num_workers = cutter.topology.num_workers
        self._bounds = list(bounds) * (workers if len(bounds) == 1 else 1)
        self._rows_a_batch = cutter.rows_of_ready_batch
        self._rows = [self.num_rows(worker) for worker in range(workers)]
        own = any(each.ends is not None for each in bounds)
        self._stretches = self._walked() if own else self._planned()

    def __len__(self) -> int:
        """How many steps there are."""
        return self._stretches[-1].steps

    @property
    def num_samples(self) -> int:
        """How many samples all workers get."""
        bounds = self._bounds[:1] if self._cutter.shared else self._bounds
        return sum(each.limits(len(each) - 1)[1] for each in bounds if len(each))

    def cutter_of(self, worker: int) -> Cutter:
        """The cutter of a worker."""
        return replace(self._cutter, topology=replace(self._cutter.topology, worker=worker))

    def limits(self, worker: int, batch: int) -> tuple[int, int]:
        """See ``BatchBounds.limits``."""
        return self._bounds[worker].limits(batch)

    def rows_of(self, worker: int, batch: int) -> int:
        """How many rows a batch of a worker has."""
        lo, hi = self.limits(worker, batch)
        return self._cutter.num_rows(hi - lo)

    def at(self, step: int) -> list[StepRow]:
        """The rows of a step, of the workers that have one.

        Raises:
          IndexError: there is no such step.
        """
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} is outside of an epoch of {len(self)} steps")
        first, before, kept = self._stretches[bisect_right(self._stretches, step, key=lambda each: each.steps) - 1]
        inside = first % self._period
        skipped = int(np.searchsorted(kept, inside))  # steps of the period that come before the stretch
        periods, place = divmod(step - before + skipped, len(kept))
        row = first - inside + periods * self._period + int(kept[place])
        return [
            StepRow(worker, *divmod(row, self._rows_a_batch)) for worker, rows in enumerate(self._rows) if row < rows
        ]

    def step_of(self, found: StepRow) -> int:
        """The step of a row that has a sample."""
        row = found.batch * self._rows_a_batch + found.row
        first, before, kept = self._stretches[bisect_right(self._stretches, row, key=lambda each: each.first) - 1]

        def steps_before(row: int) -> int:
            periods, place = divmod(row, self._period)
            return periods * len(kept) + int(np.searchsorted(kept, place))

        return before + steps_before(row) - steps_before(first)

    def find(self, worker: int, place: int) -> tuple[int, int] | None:
        """The batch of a worker's sample at a place of its order, and the place in the batch; ``None`` if dropped."""
        batch = self._bounds[worker].batch_of(place)
        return None if batch is None else (batch, place - self._bounds[worker].limits(batch)[0])

    def num_rows(self, worker: int) -> int:
        """How many rows a worker has."""
        bounds = self._bounds[worker]
        if not len(bounds):
            return 0
        return (len(bounds) - 1) * self._rows_a_batch + self.rows_of(worker, len(bounds) - 1)

    def _planned(self) -> list[_Stretch]:
        """Law E2."""
        period = self._period = self._rows_a_batch
        size = self._cutter.global_batch_size or 0
        if period == 1 or size >= self._cutter.topology.num_replicas:  # no row is empty
            most = max(self._rows, default=0)
            return [_Stretch(0, 0, np.arange(period)), _Stretch(most, most, np.arange(1))]
        full = np.array([each.samples // each.size * period for each in self._bounds])
        rows, longest = np.array(self._rows), np.argsort(full)
        sizes = [cycle_sizes(size, self.cutter_of(worker).topology) for worker in longest.tolist()]
        full_rows = np.array(sizes).reshape(len(rows), period, -1).max(axis=2)
        # Which rows are not empty on all of the workers from this one on, each of which has more full batches.
        kept = np.maximum.accumulate(full_rows[::-1])[::-1]
        stretches: list[_Stretch] = []
        first, steps = 0, 0
        for end in sorted({*full.tolist(), *self._rows} - {0}):
            some = np.arange(period)
            if not ((full <= first) & (end <= rows)).any():  # a short batch has no empty rows
                some = np.flatnonzero(kept[np.searchsorted(full[longest], end)])
            stretches.append(_Stretch(first, steps, some))
            before, after = (
                each // period * len(some) + int(np.searchsorted(some, each % period)) for each in (first, end)
            )
            first, steps = end, steps + after - before
        return [*stretches, _Stretch(first, steps, np.arange(1))]

    def _walked(self) -> list[_Stretch]:
        found = set[int]()
        for worker, bounds in enumerate(self._bounds):
            cutter = self.cutter_of(worker)
            ends = [0] if bounds.ends is None else [0, *bounds.ends.tolist()]
            for batch, (lo, hi) in enumerate(pairwise(ends)):
                for row, limits in enumerate(cutter.rows(hi - lo)):
                    if _has_samples(limits):
                        found.add(batch * self._rows_a_batch + row)
        self._period = max(self._rows, default=0) + 1
        return [_Stretch(0, 0, np.array(sorted(found), np.int64)), _Stretch(self._period, len(found), np.arange(1))]


def _has_samples(limits: Sequence[tuple[int, int]]) -> bool:
    return any(lo < hi for lo, hi in limits)
