"""The pipeline stage that copies the pieces of a step to the devices of this process, one for each local replica."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, final

from torchdistinput.devices.copy_ahead import Copier, HostCopier, Transfer


@final
class ToDevice:
    """Copies the pieces of a step to their devices ahead of time, and hands them over together.

    Local: no communication. A background thread calls ``enter_thread`` and ``send``; the consumer calls ``begin_step``
    and ``hand_over`` in its ``next``, and ``send`` for pieces that a vote has it make. They may be the same thread.

    Args:
      copiers: one per local replica, in the order of the replicas.

    Attributes:
      moves: whether any piece is copied; where every piece stays on the host, pieces pass through unchanged.
    """

    def __init__(self, copiers: Sequence[Copier]) -> None:
        self._copiers = tuple(copiers)
        self._sends = threading.RLock()  # a garbage collection in ``send`` may close an iterator
        self.moves = not all(isinstance(copier, HostCopier) for copier in copiers)

    def enter_thread(self) -> None:
        """Called once by the background thread when it starts; makes the first replica's device the current one."""
        for copier in reversed(self._copiers):
            copier.enter_thread()

    def begin_step(self) -> None:
        """Called by the consumer first in each ``next``."""
        for copier in self._copiers:
            copier.begin_step()

    def send(self, pieces: Sequence[Any]) -> Sequence[Transfer]:
        """Begins the copies of the pieces of one step to their devices; all of them, or none if one fails.

        Args:
          pieces: one batch per local replica, in the order of the replicas.
        """
        if not self.moves:
            return pieces
        transfers: list[Transfer] = []
        with self._sends:
            try:
                for copier, piece in zip(self._copiers, pieces, strict=True):
                    transfers.append(copier.send(piece))
            except BaseException:
                for copier, transfer in zip(self._copiers, transfers, strict=False):
                    copier.discard(transfer)
                raise
        return transfers

    def hand_over(self, transfers: Sequence[Transfer]) -> Sequence[Any]:
        """The pieces of one step, each on its device and safe to use on the consumer's current streams."""
        if not self.moves:
            return transfers
        return [copier.hand_over(transfer) for copier, transfer in zip(self._copiers, transfers, strict=True)]

    def discard(self, transfers: Sequence[Transfer]) -> None:
        """Discards the pieces of a step that will not be delivered."""
        if not self.moves:
            return
        for copier, transfer in zip(self._copiers, transfers, strict=True):
            copier.discard(transfer)

    def close(self) -> None:
        """Releases the devices' streams and memory, once the background thread has stopped. Idempotent."""
        for copier in self._copiers:
            copier.close()
