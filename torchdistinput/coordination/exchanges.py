"""An exchange between ranks that can be begun, polled, and waited for in short naps.

An exchange is a generator. It sends the messages that it can send, and yields the message that it then needs from
another rank (``Pending``). A thread that must not block asks whether the message has come, and continues the exchange
only if it has.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Generic, Protocol, TypeVar, cast, final

T = TypeVar("T")


class Pending(Protocol):
    """A message that another rank is to send."""

    def has_come(self) -> bool:
        """Whether ``wait`` would return, or raise, at once. Local."""

    def rest(self, seconds: float) -> None:
        """Sleeps until the message may have come, for at most ``seconds``. An interruption loses nothing. Local."""

    def wait(self) -> None:
        """Waits for the message; raises ``RuntimeError`` if it cannot come any more. Local."""


Exchange = Generator[Pending, None, T]


@final
class StartedExchange(Generic[T]):
    """An exchange whose first messages were sent. Used by one thread at a time.

    Args:
      exchange: the exchange; its first messages are sent here, without waiting. Collective, as the exchange is.
    """

    def __init__(self, exchange: Exchange[T]) -> None:
        self._exchange = exchange
        self._pending: Pending | None = None
        self._result: T | None = None
        self._go_on(None)

    def poll(self) -> bool:
        """Continues the exchange until it would have to wait. Returns whether the exchange is complete. Local."""
        while self._pending is not None and self._pending.has_come():
            self._go_on(self._pending)
        return self._pending is None

    def rest(self, seconds: float) -> None:
        """Sleeps until ``poll`` may go on, for at most ``seconds``. An interruption loses nothing. Local."""
        if self._pending is not None:
            self._pending.rest(seconds)

    def conclude(self) -> T:
        """Waits for the rest of the exchange and returns its result. Raises what the exchange raises. Local."""
        while self._pending is not None:
            self._go_on(self._pending)
        return cast(T, self._result)

    def _go_on(self, pending: Pending | None) -> None:
        self._pending = None  # if this raises, the exchange is over
        try:
            if pending is not None:
                try:
                    pending.wait()
                except RuntimeError as error:  # the exchange handles it
                    self._pending = self._exchange.throw(error)
                    return
            self._pending = next(self._exchange)
        except StopIteration as end:
            self._result = end.value


def conclude(exchange: Exchange[T]) -> T:
    """Runs a whole exchange, waits, and returns its result. Collective, as the exchange is."""
    return StartedExchange(exchange).conclude()
