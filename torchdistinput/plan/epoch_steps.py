"""Which rows of the ranks' batches make a step of an epoch, and the step of a row.

A row is what ``plan.batching`` says: one worker's part of a step. Worker ``i`` delivers the rows of its batches one
after the other; a step is the rows of one number of all workers. Rows that are empty on every worker are passed over.

(E1) A batch that all workers share is one row; else each batch but the last one of an epoch has ``W`` rows.
(E2) No row is empty on every worker where batches of at least as many samples as replicas are cut, or shared ones. Only
    for smaller batches, and for batches of sizes of their own, the rows of the epoch are walked through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import numpy as np

from torchdistinput.plan.arrays import Ints
from torchdistinput.plan.batching import Cutter, num_batches


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
        whole = self._rows_a_batch == 1 or (cutter.global_batch_size or 0) >= cutter.topology.num_replicas
        # The rows that are steps; ``None``: all are.
        self._kept = None if whole and all(each.ends is None for each in bounds) else self._walked()

    def __len__(self) -> int:
        """How many steps there are."""
        return max(self._rows, default=0) if self._kept is None else len(self._kept)

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
        row = step if self._kept is None else int(self._kept[step])
        return [
            StepRow(worker, *divmod(row, self._rows_a_batch)) for worker, rows in enumerate(self._rows) if row < rows
        ]

    def step_of(self, found: StepRow) -> int:
        """The step of a row that has a sample."""
        row = found.batch * self._rows_a_batch + found.row
        return row if self._kept is None else int(np.searchsorted(self._kept, row))

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

    def _walked(self) -> Ints:
        """Law E2."""
        found = set[int]()
        for worker, bounds in enumerate(self._bounds):
            cutter = self.cutter_of(worker)
            for batch in range(len(bounds)):
                lo, hi = bounds.limits(batch)
                rows = enumerate(cutter.rows(hi - lo), batch * self._rows_a_batch)
                found.update(row for row, limits in rows if _has_samples(limits))
        return np.array(sorted(found), np.int64)


def _has_samples(limits: Sequence[tuple[int, int]]) -> bool:
    return any(lo < hi for lo, hi in limits)
