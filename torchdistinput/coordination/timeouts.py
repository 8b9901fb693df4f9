"""The bound of a wait for other ranks: a warning after some seconds, then an error, which name the late ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol, final

from torchdistinput.coordination.tree import GAVE_UP
from torchdistinput.errors import CoordinationTimeout

_LOG = logging.getLogger("torchdistinput")
_WARN_SECONDS = 5.0
_OPEN_THE_NETWORK: Final = (
    " A firewall, or a network that is down or not the one meant, keeps the hosts apart: open a range of ports for "
    "TORCHDISTINPUT_PORTS=29600-29700, or name the interface in GLOO_SOCKET_IFNAME."
)
_IN_A_CALL: Final = (
    ". Every rank of the strategy calls this, in the same order; if the rank is only slow, raise timeout_seconds."
)
_AT_A_STEP: Final = (
    ". It is still busy with its data or its training step, or it left its loop; look at what it does there (py-spy "
    "dump --pid). If it is only slow, raise timeout_seconds."
)


class Awaited(Protocol):
    """The exchange that this rank waits for; see ``channel.Channel`` and ``step_sync.StepSync``."""

    def waiting_since(self) -> float | None:
        """When the exchange in progress began, by the monotonic clock, or ``None``."""

    def late(self) -> Sequence[int]:
        """The ranks that have not yet joined it."""

    def unreached(self) -> str:
        """Why the late rank cannot be reached, in words; empty where nothing tells so."""

    def give_up(self, reason: str) -> None:
        """This rank waits no longer; the reason is for the others."""


@final
class StragglerTimeout:
    """Bounds the waits of one iterator, or of one call.

    Args:
      awaited: the exchanges that are waited for.
      timeout_seconds: the bound of a wait.
      names: the number of each rank as users know it.
      what: the name of the call; empty for an iterator.
    """

    def __init__(self, awaited: Awaited, timeout_seconds: float, names: Callable[[int], int], what: str = "") -> None:
        self._awaited = awaited
        self._timeout_seconds = timeout_seconds
        self._names = names
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
        since = self._awaited.waiting_since()
        if since is None:
            return None
        waited = time.monotonic() - max(began, since)
        is_over = waited >= self._timeout_seconds
        if not is_over and (self._warned or waited < _WARN_SECONDS):
            return None
        late = ", ".join(str(self._names(rank)) for rank in self._awaited.late()) or "unknown"
        place = f"in {self._what}" if step is None else f"at step {step}"
        unreached = self._awaited.unreached()
        call = f"{self._what}: " if self._what else ""
        if is_over:
            seconds = f"{self._timeout_seconds:g} seconds"
            self._awaited.give_up(f"{GAVE_UP} for rank {late} {place} after {seconds}")
            why = _IN_A_CALL if step is None else _AT_A_STEP
            if unreached:
                why = f": {unreached}.{_OPEN_THE_NETWORK if step is None else ''}"
            exchange = "" if step is None else f" to the exchange {place}"
            return CoordinationTimeout(f"{call}rank {late} did not come{exchange} within {seconds}{why}")
        self._warned = True
        where = "" if step is None else f" {place}"
        more = f": {unreached}" if unreached else ""
        _LOG.warning("%swaiting for rank %s%s for %.0f seconds%s", call, late, where, waited, more)
        return None
