"""The exchanges that all ranks make together on the caller's thread, outside of iterators.

The caller's thread waits half a second at most before it handles signals and looks at the clock. A rank that gives up,
after an error that names the late rank, or after an interruption, may call again, and continues the same exchange.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar, final

from torchdistinput.coordination.channel import Channel
from torchdistinput.coordination.exchanges import Exchange, StartedExchange
from torchdistinput.coordination.timeouts import StragglerTimeout
from torchdistinput.errors import RankLost

T = TypeVar("T")


@final
class Calls:
    """The exchanges of one channel on the caller's thread.

    Args:
      channel: the channel.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._pending: StartedExchange[Any] | None = None  # what this rank gave up and may continue

    def make(self, what: str, seconds: float, exchange: Callable[[Channel], Exchange[T]]) -> T:
        """An exchange with all ranks; or the rest of the one that this rank gave up. Collective: every rank calls this.

        Args:
          what: the name of the public call, for messages.
          seconds: how long to wait for the others.
          exchange: begins it.

        Raises:
          CoordinationTimeout: a rank did not come; it is named.
          RankLost: a rank went away.
        """
        channel = self.channel
        patience = StragglerTimeout(channel, seconds, channel.give_up, what)
        began = time.monotonic()
        channel.gave_up = ""
        try:
            if self._pending is None:
                self._pending = StartedExchange(exchange(channel))
            while not self._poll(what):
                late = patience.check(began)
                if late is not None:
                    raise late
                self._pending.rest(min(patience.nap_seconds, max(0.01, seconds - (time.monotonic() - began))))
            found: T = self._pending.conclude()
            self._pending = None
        except RankLost as error:
            self._pending = None
            raise RankLost(f"{what}: {error}") from None
        return found

    def _poll(self, what: str) -> bool:
        """An interruption in here loses the exchange; one in ``rest`` loses nothing."""
        try:
            return self._pending is None or self._pending.poll()
        except RankLost:
            raise
        except BaseException as error:
            self.leave(f"was interrupted by {type(error).__name__} in {what}")
            raise

    def leave(self, why: str) -> None:
        """This rank takes part in no further exchange. Local, idempotent."""
        self._pending = None
        self.channel.abort(why)
