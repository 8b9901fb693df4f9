"""The bound of a wait for other ranks: a warning after some seconds, then an error, which name the late ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, Protocol, final

from torchdistinput.coordination.tree import GAVE_UP
from torchdistinput.errors import CoordinationTimeout

_LOG = logging.getLogger("torchdistinput")
_WARN_SECONDS = 5.0
_IN_A_CALL: Final = (
    ". Every rank of the strategy calls this, in the same order; if the rank is only slow, raise timeout_seconds."
)
_AT_A_STEP: Final = (
    ". It is still busy with its data or its training step, or it left its loop; look at what it does there (py-spy "
    "dump --pid). If it is only slow, raise timeout_seconds."
)


class Awaited(Protocol):
    """What this rank waits for; see ``channel.Channel`` and ``meeting.Meeting``."""

    def waiting_since(self) -> float | None:
        """When the wait began, by the monotonic clock, or ``None``. Local: any thread."""

    def missing(self) -> str:
        """What has not come, in words. Local: any thread."""

    def unreached(self) -> str:
        """Why it cannot be reached, in words; empty where nothing tells so. Local: any thread."""


@final
class StragglerTimeout:
    """Bounds the waits of one iterator, or of one call.

    Args:
      awaited: what is waited for; ``None`` where there is no other rank.
      timeout_seconds: the bound of a wait.
      give_up: gets the reason for the others, when this rank waits no longer.
      what: the name of the call; empty for an iterator.
    """

    def __init__(
        self, awaited: Awaited | None, timeout_seconds: float, give_up: Callable[[str], object], what: str = ""
    ) -> None:
        self._awaited = awaited
        self._timeout_seconds = timeout_seconds
        self._give_up = give_up
        self._what = what
        self._warned = False
        self.nap_seconds = min(1.0, timeout_seconds / 4)
        """How long to sleep between two looks at the clock."""

    def check(self, began: float, step: int | None = None) -> CoordinationTimeout | None:
        """Logs a warning that names the late ranks; after the timeout returns the error, and tells the other ranks.

        Time that this rank spends on its own data does not count.

        Args:
          began: the beginning of the wait, by the monotonic clock.
          step: the number of the awaited step; ``None`` in a call.
        """
        since = None if self._awaited is None else self._awaited.waiting_since()
        if self._awaited is None or since is None:
            return None
        waited = time.monotonic() - max(began, since)
        is_over = waited >= self._timeout_seconds
        if not is_over and (self._warned or waited < _WARN_SECONDS):
            return None
        missing, unreached = self._awaited.missing(), self._awaited.unreached()
        place = f"in {self._what}" if step is None else f"at step {step}"
        call = f"{self._what}: " if self._what else ""
        if is_over:
            seconds = f"{self._timeout_seconds:g} seconds"
            self._give_up(f"{GAVE_UP} for {missing} {place} after {seconds}")
            why = _IN_A_CALL if step is None else _AT_A_STEP
            if unreached:
                why = f": {unreached}."
            exchange = "" if step is None else f" to the exchange {place}"
            return CoordinationTimeout(f"{call}{missing} did not come{exchange} within {seconds}{why}")
        self._warned = True
        where = "" if step is None else f" {place}"
        more = f": {unreached}" if unreached else ""
        _LOG.warning("%swaiting for %s%s for %.0f seconds%s", call, missing, where, waited, more)
        return None
