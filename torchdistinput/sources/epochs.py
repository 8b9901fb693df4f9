"""The epoch of a dataset that counts its epochs by itself, in plain torch."""

from __future__ import annotations

import mmap
from typing import Any, final

import torch

__all__ = ["Epochs"]


@final
class Epochs:
    """The epoch of the next ``iter()``: one more than the last one's, or what was announced since.

    Announcements are in memory that forked loader workers share, so that those of a living ``DataLoader`` hear of them;
    torch's own pickling moves it to memory that spawned ones share. An anonymous map costs no file descriptor.
    """

    def __init__(self) -> None:
        self._next = 0
        self._heard = 0
        self._announced = _new_board()

    def announce(self, epoch: int) -> None:
        """Sets the next epoch, in every process that shares the memory."""
        self._announced[0] = epoch
        self._announced[1] += 1

    def take(self) -> int:
        """The epoch that starts now."""
        epoch, announcements = self._announced.tolist()
        if announcements != self._heard:
            self._heard, self._next = announcements, epoch
        self._next += 1
        return self._next - 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._announced.is_shared():  # type: ignore[no-untyped-call] # a copy, whose workers are yet to be forked
            self._announced = _new_board().copy_(self._announced)


def _new_board() -> torch.Tensor:
    """The epoch, and how many were announced."""
    with torch.inference_mode(mode=False):  # else nobody could write on it outside of that mode
        return torch.frombuffer(mmap.mmap(-1, 16), dtype=torch.int64)
