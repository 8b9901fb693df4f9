"""Gloo as it is where its transport is libuv (macOS, Windows): who waits hears of messages, and of nothing else."""

from __future__ import annotations

import contextlib
import datetime
import threading
from typing import Any, final

from torch import Tensor

from torchdistinput.backends.mail import Gloo

__all__ = ["SilentGloo"]


@final
class SilentGloo:
    """A group whose waits for single messages neither end with a connection nor close one.

    Args:
      group: of this system's gloo.
    """

    def __init__(self, group: Gloo) -> None:
        self._group = group
        self.rank = self._group.rank
        self.size = self._group.size
        self.allgather = self._group.allgather
        self.allreduce = self._group.allreduce
        self.broadcast = self._group.broadcast

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> SilentWork:
        return SilentWork(self._group.send(tensors, peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> SilentWork:
        return SilentWork(self._group.recv(tensors, peer, tag))


@final
class SilentWork:
    """A wait that expires can be repeated."""

    def __init__(self, work: Any) -> None:
        self._done = threading.Event()
        threading.Thread(target=self._listen, args=(work,), daemon=True).start()

    def _listen(self, work: Any) -> None:
        with contextlib.suppress(RuntimeError):
            work.wait(datetime.timedelta(days=1))
            self._done.set()

    def wait(self, patience: datetime.timedelta) -> None:
        if not self._done.wait(patience.total_seconds()):
            raise RuntimeError(f"Timed out waiting {patience} for an operation to complete")
