"""How long a consumer waits for other ranks, and what it says meanwhile: who is late."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol, final

from torchdistinput.errors import CoordinationTimeout

__all__ = ["StragglerTimeout"]

_LOG = logging.getLogger("torchdistinput")
_WARN_SECONDS = 5.0


class _Exchange(Protocol):
    """What is waited for; see ``prefetch_thread.Votes``."""

    def waiting_since(self) -> float | None: ...

    def late(self) -> Sequence[int]: ...

    def abort(self, reason: str) -> None: ...


@final
class StragglerTimeout:
    """Bounds the waits of one iterator.

    Args:
      votes: what is waited for.
      timeout_seconds: how long.
      names: the ranks, as users know them.
    """

    def __init__(self, votes: _Exchange, timeout_seconds: float, names: Callable[[int], int]) -> None:
        self._votes = votes
        self._timeout_seconds = timeout_seconds
        self._names = names
        self._warned = False
        self.nap_seconds = min(1.0, timeout_seconds / 4)
        """How long to sleep between two looks at the clock."""

    def look(self, began: float, step: int) -> CoordinationTimeout | None:
        """Names who is late, first in a warning, then in an error, which is returned. Other ranks learn of that.

        Time spent on our own data does not count.

        Args:
          began: when the wait did, by the monotonic clock.
          step: which step is waited for.
        """
        since = self._votes.waiting_since()
        if since is None:
            return None
        waited = time.monotonic() - max(began, since)
        is_over = waited >= self._timeout_seconds
        if not is_over and (self._warned or waited < _WARN_SECONDS):
            return None  # all ranks ask the same store who is late
        late = ", ".join(str(self._names(rank)) for rank in self._votes.late()) or "unknown"
        place = f"at step {step}"
        if is_over:
            self._votes.abort(f"gave up waiting for rank {late} {place} after {self._timeout_seconds:g} seconds")
            return CoordinationTimeout(
                f"rank {late} did not come to the exchange {place} within {self._timeout_seconds:g} seconds. It is "
                "still busy with its data or its training step, or it left its loop; look at what it does there "
                "(py-spy dump --pid). If it is only slow, raise timeout_seconds."
            )
        self._warned = True
        _LOG.warning("waiting for rank %s %s for %.0f seconds", late, place, waited)
        return None
