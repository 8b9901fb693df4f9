"""``IndexedRecords``: the samples of files by number, for what needs them in any order, such as packs.

Nothing is kept open between two calls, so it can be forked and pickled.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, final

from torch.utils.data import Dataset

from torchdistinput.sources.datasets.fragment_dataset import NEEDS_AN_INDEX, FragmentDataset
from torchdistinput.sources.kernel.epoch_order import FileRecord


@final
class IndexedRecords(Dataset[Any]):
    """The samples of a dataset of files, map-style: in the order of its list of files.

    Args:
      records: the files, of which the numbers of records are known.

    Raises:
      ValueError: the numbers of records are not known, or the dataset shuffles.
      SourceError: naming a file that is missing or cannot be opened.
    """

    def __init__(self, records: FragmentDataset) -> None:
        if records.shuffled_by:
            raise ValueError(
                f"its samples are taken by number. Give the {type(records).__name__} {records.shuffled_by}. "
                "A loader may shuffle them."
            )
        counts = records.count_records()
        if counts is None:
            raise ValueError(f"{type(records).__name__}: {NEEDS_AN_INDEX}.")
        self.records = records
        self._ends = [*accumulate(counts)]

    def __len__(self) -> int:
        return self._ends[-1]

    def place_of(self, index: int) -> FileRecord:
        """The file and record of a sample. Local, reads nothing."""
        file = bisect_right(self._ends, index)
        return FileRecord(self.records.names[file], index - (self._ends[file - 1] if file else 0))

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of some numbers; each file is opened once for them."""
        by_file: dict[int, list[int]] = {}
        for index in sorted(indices):
            if not 0 <= index < len(self):
                raise IndexError(f"sample {index} is outside of {len(self)} samples")
            by_file.setdefault(bisect_right(self._ends, index), []).append(index)
        found: dict[int, Any] = {}
        for file, own in by_file.items():
            first = self._ends[file - 1] if file else 0
            found.update(zip(own, self.records.samples_at(file, [index - first for index in own]), strict=True))
        return [found[index] for index in indices]
