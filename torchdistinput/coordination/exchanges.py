"""An exchange between ranks that can be begun, polled, and waited for in short naps.

An exchange is a generator. It sends what it can send. Where it would have to wait for another rank, it yields what
sleeps until it may go on. A thread that must not block asks for the next part only, and never sleeps.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Generic, Protocol, TypeVar, cast, final

T = TypeVar("T")

_REST_SECONDS = 0.5


class Awaits(Protocol):
    """What an exchange waits for."""

    def rest(self, seconds: float) -> None:
        """Sleeps until the exchange may go on, for at most ``seconds``. An interruption loses nothing. Local."""


Exchange = Generator[Awaits, None, T]


@final
class StartedExchange(Generic[T]):
    """An exchange whose first messages were sent. Used by one thread at a time.

    Args:
      exchange: the exchange; its first messages are sent here, without waiting. Collective, as the exchange is.
    """

    def __init__(self, exchange: Exchange[T]) -> None:
        self._exchange = exchange
        self._awaits: Awaits | None = None
        self._is_over = False
        self._result: T | None = None
        self.poll()

    def poll(self) -> bool:
        """Continues the exchange until it would have to wait; raises what it raises. Whether it is complete. Local."""
        if not self._is_over:
            self._is_over = True  # also if this raises
            try:
                self._awaits = next(self._exchange)
                self._is_over = False
            except StopIteration as end:
                self._result = end.value
        return self._is_over

    def rest(self, seconds: float) -> None:
        """Sleeps until ``poll`` may go on, for at most ``seconds``. An interruption loses nothing. Local."""
        if not self._is_over and self._awaits is not None:
            self._awaits.rest(seconds)

    def conclude(self) -> T:
        """Waits for the rest of the exchange and returns its result. Raises what the exchange raises. Local."""
        while not self.poll():
            self.rest(_REST_SECONDS)
        return cast(T, self._result)


def conclude(exchange: Exchange[T]) -> T:
    """Runs a whole exchange, waits, and returns its result. Collective, as the exchange is."""
    return StartedExchange(exchange).conclude()
