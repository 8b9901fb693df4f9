"""The sample index (``InputOptions(with_index=True)``): a number for each sample, the same on whichever rank reads it.

Laws. ``W`` is the number of workers; the numbers are int64 and never negative.
  (I1) A map-style dataset: the index that the sampler gave. Where the indices of a batch are not ints: the positions of
      its samples in the order of the epoch.
  (I2) A ``FileDataset``: ``file * 2**40 + record``: the position of the file in the dataset's list, and the position of
      the record in its file. So it does not depend on shuffling, on the policy, or on the rank that reads.
  (I3) Other iterables: the position in the order of the epoch, if all workers have the same order (DATA, or
      ``W == 1``). Otherwise, and with a dataset function, ``worker * 2**48`` plus the position in the worker's own
      order. Under HINT law I1 becomes ``worker * 2**48`` plus the index in the worker's shard.
Where one item of a map-style dataset, or one record of a file, is a whole batch, its samples have no numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import torch

from torchdistinput.errors import BatchingError
from torchdistinput.plan.batching import Cutter
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.kernel.batcher import Cut, labelled
from torchdistinput.sources.kernel.index_array import IndexArray
from torchdistinput.sources.kernel.read_failures import RecordPlace
from torchdistinput.step_types import Row

_FILE: Final = 2**40
_WORKER: Final = 2**48


def number_of(place: RecordPlace) -> int:
    """The number of a record, law I2."""
    return place.file_number * _FILE + place.record


def file_and_record(number: int) -> tuple[int, int]:
    """The number of the file, and the record in it: the inverse of ``number_of``."""
    return divmod(number, _FILE)


@final
class Positions:
    """Numbers the samples of one epoch by their order, law I3.

    Args:
      topology: the position of this worker among all workers.
      shared: whether every worker has the same order.
      taken: how many samples come before the first one that is numbered here.
    """

    def __init__(self, topology: Topology, *, shared: bool, taken: int = 0) -> None:
        self._next = taken if shared else topology.worker * _WORKER + taken

    def take(self, count: int) -> int:
        """The number of the first of the next ``count`` samples."""
        first = self._next
        self._next += count
        return first

    def beside(self, batches: Row, sizes: Sequence[int]) -> tuple[Row, int]:
        """The next batches, each with its index, and how many samples they have; ``None`` stands for no batch."""
        first, numbered = self._next, []
        for batch, size in zip(batches, sizes, strict=True):
            if batch is not None:
                start = self.take(size)
                batch = torch.arange(start, start + size, device="cpu"), batch  # noqa: PLW2901 - replaced by the pair
            numbered.append(batch)
        return numbered, self._next - first

    def label(self, cutter: Cutter, cut: Cut) -> list[Row]:
        """The rows of the next batch, each piece with its index: cut by the cutter, unless it was divided by cost."""
        first, places = self.take(cut.size), cut.numbers
        if places is None:
            places = [[np.arange(lo, hi) for lo, hi in row] for row in cutter.rows(cut.size)]
        return [labelled(row, [place + first for place in its]) for row, its in zip(cut.rows, places, strict=True)]


@final
class SampleNumbers:
    """Numbers the samples that the sampler of a map-style dataset yields, law I1. One object for each epoch.

    Args:
      topology: the position of this worker among all workers.
      sharded: whether the indices are those of this worker's own shard (policy HINT).
      shared: whether every worker has the same order.
    """

    def __init__(self, topology: Topology, *, sharded: bool, shared: bool) -> None:
        of_worker = topology.worker * _WORKER
        self._base = of_worker if sharded else 0
        self._base_of_positions = 0 if shared else of_worker
        self._taken = 0

    def pass_over(self, samples: int) -> None:
        """Counts samples that are skipped and not numbered."""
        self._taken += samples

    def of_batch(self, indices: IndexArray | Sequence[Any]) -> npt.NDArray[np.int64]:
        """The numbers of a batch of samples, ``(len(indices),)``."""
        first = self._base_of_positions + self._taken
        self._taken += len(indices)
        if isinstance(indices, IndexArray):
            return indices.array() + self._base
        try:
            numbers = np.fromiter(map(operator.index, indices), dtype=np.int64, count=len(indices))
        except TypeError:
            return np.arange(first, first + len(indices))
        if len(numbers) and numbers.min() < 0:
            raise BatchingError(
                f"the sampler gave the index {numbers.min()}; with_index=True needs indices of 0 and above, as -1 "
                "stands for a padded row. Let the sampler count from the front."
            )
        return numbers + self._base


def no_numbers(what: str) -> BatchingError:
    """The error for samples without numbers, as only their batches have one."""
    return BatchingError(
        f"with_index=True was given with {what}, whose samples have no numbers. Let the data give single samples, with "
        "a batch size, and a function that makes the batch as collate_fn."
    )
