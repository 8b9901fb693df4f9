"""Acts on command: exceptions, data, collate functions, readers and copies that fail where the test wants it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, final

import torch
from torch.utils.data import IterableDataset, Sampler

from tests.data import Acts
from tests.support.waiting import wait_for
from torchdistinput.devices.copy_ahead import HostCopier, Transfer

PATIENCE_SECONDS = 40.0  # how long a rank waits for what the test itself brings about

# --------------------------------------------------------------------------------------------- exceptions


class BrokenError(Exception):
    """What broken data raises."""


def plain() -> NoReturn:
    raise BrokenError("this sample is broken")


def huge() -> NoReturn:
    raise BrokenError("x" * 10_000_000)


def wait_until_sent() -> None:
    """Until this loader worker has sent what it read before, by a thread.

    A queue that is left in the middle of a write would be another matter.
    """
    threads = [thread.ident for thread in threading.enumerate() if thread.name == "QueueFeederThread"]

    def sends_nothing(thread: int | None) -> bool:
        frame = sys._current_frames().get(thread or 0)
        feeds = None if frame is None or frame.f_code.co_name != "wait" else frame.f_back
        return feeds is not None and not feeds.f_locals["buffer"]

    wait_for(lambda: all(map(sends_nothing, threads)))


def quit_worker(code: int) -> NoReturn:
    wait_until_sent()
    os._exit(code)


def kill_worker() -> None:
    wait_until_sent()
    os.kill(os.getpid(), signal.SIGKILL)


def stop_worker() -> None:
    """Until somebody continues it, which nobody does."""
    wait_until_sent()
    os.kill(os.getpid(), signal.SIGSTOP)


@final
class Stall:
    """Waits for a file that the other ranks write once they have their error."""

    def __init__(self, release: Path) -> None:
        self.release = release

    def __call__(self) -> None:
        wait_for(self.release.exists)


# --------------------------------------------------------------------------------------------- data


@final
class Stream(IterableDataset[int]):
    """The same, one after the other; every loader worker has all of them."""

    def __init__(self, faults: Acts) -> None:
        self.faults = faults

    def __iter__(self) -> Iterator[int]:
        for index in range(600):
            if index in self.faults:
                self.faults[index]()
            yield index


@final
class BrokenSampler(Sampler[int]):
    """Draws in order, until it fails."""

    def __init__(self, until: int) -> None:
        self.until = until

    def __len__(self) -> int:
        return 600

    def __iter__(self) -> Iterator[int]:
        yield from range(self.until)
        plain()


@final
class BrokenCollate:
    """Makes tensors, but not of batches that begin with one number."""

    def __init__(self, refused: int) -> None:
        self.refused = refused

    def __call__(self, samples: list[int]) -> torch.Tensor:
        if samples[0] == self.refused:
            plain()
        return torch.tensor(samples)


@final
class BrokenDecode:
    """A ``map_fn``."""

    def __init__(self, refused: int) -> None:
        self.refused = refused

    def __call__(self, line: str) -> int:
        if int(line) == self.refused:
            plain()
        return int(line)


@final
class BrokenReader:
    """Reads lines, until it fails."""

    def __init__(self, refused: int) -> None:
        self.refused = refused

    def __call__(self, file: Any) -> Iterator[str]:
        for line in file:
            if int(line) == self.refused:
                plain()
            yield line.decode()


@final
class BrokenCopier:
    """Passes batches through, and runs out of memory at one of them."""

    def __init__(self, at: int) -> None:
        self._host = HostCopier()
        self._left = at

    def enter_thread(self) -> None:
        self._host.enter_thread()

    def begin_step(self) -> None:
        self._host.begin_step()

    def send(self, batch: Any) -> Transfer:
        if not self._left:
            raise MemoryError("the device has no memory left")
        self._left -= 1
        return self._host.send(batch)

    def hand_over(self, transfer: Transfer) -> Any:
        return self._host.hand_over(transfer)

    def discard(self, transfer: Transfer) -> None:
        self._host.discard(transfer)

    def close(self) -> None:
        self._host.close()
