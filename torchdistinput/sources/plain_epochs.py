"""Epochs of datasets in plain torch: a count of ``iter()``, an epoch that loader workers share, and their numbers."""

from __future__ import annotations

import mmap
from typing import Any, final

import torch
from torch.utils.data import get_worker_info

from torchdistinput.sources.checks import checked_int


def loader_worker() -> tuple[int, int]:
    """The number of this loader worker, and how many there are: 0 and 1 in a process that is none."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


@final
class SharedEpoch:
    """The epoch that was announced last.

    It is in memory that forked loader workers share, so that persistent loader workers see it; torch's own pickling
    moves it to memory that spawned loader workers share. An anonymous map costs no file descriptor.
    """

    def __init__(self) -> None:
        self._heard = 0
        self._announced = _new_memory()

    def announce(self, epoch: int, *, asked: bool = True) -> None:
        """Announces an epoch to every process that shares the memory, and whether the user asked for it."""
        self._announced[0] = epoch
        self._announced[2] = asked
        self._announced[1] += 1

    @property
    def last(self) -> int:
        """The epoch that was announced last, by any process; 0 if none was."""
        return int(self._announced[0])

    @property
    def is_asked(self) -> bool:
        """Whether the user asked for the epoch that was announced last."""
        return bool(self._announced[2])

    def announced(self) -> int | None:
        """The epoch that was announced since the last call in this process; ``None`` if none was."""
        epoch, announcements, _ = self._announced.tolist()
        if announcements == self._heard:
            return None
        self._heard = announcements
        return int(epoch)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._announced.is_shared():  # type: ignore[no-untyped-call] # a copy: its workers are not forked yet
            self._announced = _new_memory().copy_(self._announced)


@final
class EpochCounter:
    """The epoch of the next ``iter()``: one more than the last one's, or what was announced since."""

    def __init__(self) -> None:
        self._next = 0
        self._shared = SharedEpoch()

    def announce(self, epoch: int) -> None:
        """Sets the next epoch, in every process that shares the memory.

        Raises:
          TypeError: it is no int.
        """
        self._shared.announce(checked_int("epoch", epoch))

    @property
    def last(self) -> int:
        """The epoch that was announced last; 0 if none was."""
        return self._shared.last

    def take(self) -> int:
        """The epoch that starts now."""
        announced = self._shared.announced()
        epoch = self._next if announced is None else announced
        self._next = epoch + 1
        return epoch


def _new_memory() -> torch.Tensor:
    """A tensor with the epoch, the number of announcements, and whether the user asked for the epoch."""
    with torch.inference_mode(mode=False):  # an inference tensor could not be written outside of inference mode
        return torch.frombuffer(mmap.mmap(-1, 24), dtype=torch.int64)
