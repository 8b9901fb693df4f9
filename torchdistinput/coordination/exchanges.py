"""Exchanges between ranks as generators, so that whoever has nothing else to do may wait, and others only look.

An exchange sends what it can send, and yields what it then needs of another rank. One who may not wait asks whether
that has come, and goes on with the exchange if it has; another thread may take over at that point, and wait.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Generic, Protocol, TypeVar, cast, final

__all__ = ["Exchange", "Pending", "StartedExchange", "conclude"]

T = TypeVar("T")


class Pending(Protocol):
    """What another rank is to send."""

    def has_come(self) -> bool:
        """Whether ``wait`` would return, or raise, at once. Local."""

    def wait(self) -> None:
        """Waits for it; raises ``RuntimeError`` if it cannot come any more. Local."""


Exchange = Generator[Pending, None, T]


@final
class StartedExchange(Generic[T]):
    """An exchange whose first messages are on their way. Used by one thread at a time.

    Args:
      exchange: is begun here. Collective, as the exchange is; never waits.
    """

    def __init__(self, exchange: Exchange[T]) -> None:
        self._exchange = exchange
        self._pending: Pending | None = None
        self._result: T | None = None
        self._go_on(None)

    def look(self) -> bool:
        """Goes on as far as that is possible without waiting; whether it has come to its end. Local."""
        while self._pending is not None and self._pending.has_come():
            self._go_on(self._pending)
        return self._pending is None

    def conclude(self) -> T:
        """Waits for the rest. Raises what the exchange raises. Local."""
        while self._pending is not None:
            self._go_on(self._pending)
        return cast(T, self._result)

    def _go_on(self, pending: Pending | None) -> None:
        self._pending = None  # if this raises, the exchange is over
        try:
            if pending is not None:
                try:
                    pending.wait()
                except RuntimeError as error:  # the exchange knows what that means
                    self._pending = self._exchange.throw(error)
                    return
            self._pending = next(self._exchange)
        except StopIteration as end:
            self._result = end.value


def conclude(exchange: Exchange[T]) -> T:
    """All of an exchange, waiting. Collective, as the exchange is."""
    return StartedExchange(exchange).conclude()
