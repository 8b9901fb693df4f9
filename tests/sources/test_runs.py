"""The end of a loader's run while a thread waits for its workers."""

from __future__ import annotations

import struct
import threading
import time
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from torchdistinput.sources.runs import LoaderRuns
from torchdistinput.sources.torch_loaders import settings_of
from torchdistinput.sources.worker_side import PieceDataset, as_is

BOUND_SECONDS = 60.0


class Slow(Dataset[int]):
    """Samples that take half a second each."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        time.sleep(0.5)
        return index


@pytest.mark.parametrize("left_by_a_worker", ["nothing", "the lock", "the lock and half a message"])
def test_a_thread_that_waits_for_a_run_leaves_when_it_is_closed(left_by_a_worker: str) -> None:
    user = DataLoader(Slow(), num_workers=1, prefetch_factor=1)
    requests: list[Any] = [(False, k, 0) for k in range(100)]
    runs = LoaderRuns(
        lambda pieces: DataLoader(pieces, batch_size=None, sampler=requests, collate_fn=as_is, **settings_of(user)),
        lasting=False,
    )
    run = runs.start(PieceDataset(Slow(), as_is))
    assert next(run) == 0
    workers: Any = run._workers
    results = workers._worker_result_queue
    if left_by_a_worker != "nothing":
        assert results._wlock.acquire(timeout=BOUND_SECONDS)
    if left_by_a_worker == "the lock and half a message":
        results._writer._write(results._writer.fileno(), struct.pack("!i", 1000) + bytes(10))
    ended = threading.Event()

    def wait() -> None:
        list(run)
        ended.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.05)  # so that it waits
    runs.finish(run)
    assert ended.wait(BOUND_SECONDS)
    assert list(run) == []
