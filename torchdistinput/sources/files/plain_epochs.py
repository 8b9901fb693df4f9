"""The number of an epoch, in memory that loader workers share; and a dataset that counts its epochs by itself."""

from __future__ import annotations

import mmap
from typing import Any, final

import torch

__all__ = ["EpochCounter", "SharedEpoch"]


@final
class SharedEpoch:
    """The epoch that was announced last.

    It is in memory that forked loader workers share, so that those of a living ``DataLoader`` hear of it; torch's own
    pickling moves it to memory that spawned ones share. An anonymous map costs no file descriptor.
    """

    def __init__(self) -> None:
        self._heard = 0
        self._announced = _new_board()

    def announce(self, epoch: int) -> None:
        """Tells an epoch, in every process that shares the memory."""
        self._announced[0] = epoch
        self._announced[1] += 1

    def news(self) -> int | None:
        """The epoch that was announced since this process last asked; ``None`` for none."""
        epoch, announcements = self._announced.tolist()
        if announcements == self._heard:
            return None
        self._heard = announcements
        return int(epoch)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._announced.is_shared():  # type: ignore[no-untyped-call] # a copy, whose workers are yet to be forked
            self._announced = _new_board().copy_(self._announced)


@final
class EpochCounter:
    """The epoch of the next ``iter()``: one more than the last one's, or what was announced since."""

    def __init__(self) -> None:
        self._next = 0
        self._board = SharedEpoch()

    def announce(self, epoch: int) -> None:
        """Sets the next epoch, in every process that shares the memory."""
        self._board.announce(epoch)

    def take(self) -> int:
        """The epoch that starts now."""
        announced = self._board.news()
        epoch = self._next if announced is None else announced
        self._next = epoch + 1
        return epoch


def _new_board() -> torch.Tensor:
    """The epoch, and how many were announced."""
    with torch.inference_mode(mode=False):  # else nobody could write on it outside of that mode
        return torch.frombuffer(mmap.mmap(-1, 16), dtype=torch.int64)
