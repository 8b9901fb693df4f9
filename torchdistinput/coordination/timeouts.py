"""The timeout of an iterator's waits for other ranks: a warning, then an error, that name the late ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol, final

from torchdistinput.coordination.connections import AbortMessage
from torchdistinput.errors import CoordinationTimeout

_LOG = logging.getLogger("torchdistinput")
_WARN_SECONDS = 5.0


class _AwaitedExchange(Protocol):
    """The exchange that the consumer waits for; see ``step_sync.StepSync``."""

    def waiting_since(self) -> float | None: ...

    def late(self) -> Sequence[int]: ...

    def unreached(self) -> str: ...

    def abort(self, reason: str) -> None: ...


@final
class StragglerTimeout:
    """Bounds the waits of one iterator.

    Args:
      votes: the exchanges that the consumer waits for.
      timeout_seconds: the bound of a wait.
      names: the number of each rank as users know it.
    """

    def __init__(self, votes: _AwaitedExchange, timeout_seconds: float, names: Callable[[int], int]) -> None:
        self._votes = votes
        self._timeout_seconds = timeout_seconds
        self._names = names
        self._warned = False
        self.nap_seconds = min(1.0, timeout_seconds / 4)
        """How long to sleep between two looks at the clock."""

    def check(self, began: float, step: int) -> CoordinationTimeout | None:
        """Logs a warning that names the late ranks; after the timeout returns the error, and tells the other ranks.

        Time that this rank spends on its own data does not count.

        Args:
          began: the beginning of the wait, by the monotonic clock.
          step: the number of the awaited step.
        """
        since = self._votes.waiting_since()
        if since is None:
            return None
        waited = time.monotonic() - max(began, since)
        is_over = waited >= self._timeout_seconds
        if not is_over and (self._warned or waited < _WARN_SECONDS):
            return None
        late = ", ".join(str(self._names(rank)) for rank in self._votes.late()) or "unknown"
        place = f"at step {step}"
        unreached = self._votes.unreached()
        if is_over:
            self._votes.abort(f"{AbortMessage.GAVE_UP} for rank {late} {place} after {self._timeout_seconds:g} seconds")
            why = (
                f": {unreached}."
                if unreached
                else ". It is still busy with its data or its training step, or it left its loop; look at what it does "
                "there (py-spy dump --pid). If it is only slow, raise timeout_seconds."
            )
            return CoordinationTimeout(
                f"rank {late} did not come to the exchange {place} within {self._timeout_seconds:g} seconds{why}"
            )
        self._warned = True
        _LOG.warning("waiting for rank %s %s for %.0f seconds%s", late, place, waited, unreached and f": {unreached}")
        return None
