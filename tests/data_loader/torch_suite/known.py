"""The tests of torch's own suite that fail with the drop-in, each with its reason."""

from __future__ import annotations

from typing import Final

_FOR_ONE_RANK = "a DistributedSampler is refused: its part would be divided once more when there is a process group"
_LOOKS_INSIDE = (
    "asks the iterator for _workers, which is private to torch; tests/faults/test_exit.py and others count processes"
)

KNOWN: Final = {
    "TestDataLoader.test_duplicating_data_with_drop_last": _FOR_ONE_RANK,
    "TestDataLoader.test_get_worker_info": _LOOKS_INSIDE,
    "TestDataLoader.test_iterable_style_dataset": _LOOKS_INSIDE,
    "TestDataLoader.test_partial_workers": _LOOKS_INSIDE,
    "TestDataLoaderPersistentWorkers.test_duplicating_data_with_drop_last": _FOR_ONE_RANK,
    "TestDataLoaderPersistentWorkers.test_get_worker_info": _LOOKS_INSIDE,
    "TestDataLoaderPersistentWorkers.test_iterable_style_dataset": _LOOKS_INSIDE,
    "TestDataLoaderPersistentWorkers.test_partial_workers": _LOOKS_INSIDE,
}
