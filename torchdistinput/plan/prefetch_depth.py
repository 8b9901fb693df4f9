"""The prefetch depth: how many steps a rank asks to read ahead. Law A8 combines the requests of all ranks."""

from __future__ import annotations

from collections import deque
from typing import Final, final

_VOTES_LOOKED_AT: Final = 8
_LAZY_FROM: Final = 4  # the least depth at which votes are delayed; with a smaller one they would come too late
_MUCH: Final = 1 / 8
_OFTEN_SECONDS: Final = 5e-3
_MAX_AT_ONCE: Final = 8


def changed(steps: int, change: int, least: int, most: int) -> int:
    """The steps ahead after all ranks agreed: twice as many, half as many, or as before, within the bounds.

    >>> changed(8, 1, 2, 12), changed(8, -1, 2, 12), changed(8, 0, 2, 12)
    (12, 4, 8)
    """
    wanted = steps * 2 if change > 0 else steps // 2 if change < 0 else steps
    return min(max(wanted, least), most)


def is_deep(steps: int) -> bool:
    """Whether the depth is large enough to delay votes, so that one vote covers several steps."""
    return steps >= _LAZY_FROM


def drawn_at_once(steps: int) -> int:
    """How many steps are drawn in a row at a prefetch depth: a quarter of the depth, at least 1 and at most 8.

    A training step evicts the loader's code from the processor's caches. The first draw after it costs ten times as
    much as the second. The number is the same on all ranks at each step, as the depth is.

    >>> [drawn_at_once(steps) for steps in (0, 2, 8, 32, 1000)]
    [1, 1, 2, 8, 8]
    """
    return min(max(1, steps // 4), _MAX_AT_ONCE)


def ready_at_a_vote(steps: int) -> int:
    """How many ready steps are left when a vote is due: about a third of the depth, right after a row was drawn.

    So a vote covers as many steps as possible.

    >>> [ready_at_a_vote(steps) for steps in (4, 8, 16, 32)]
    [1, 3, 5, 9]
    """
    row = drawn_at_once(steps)
    return min(range(steps + 1 - row, 0, -row), key=lambda ready: (abs(3 * ready - steps), ready))


def is_costly(took: float, between: float) -> bool:
    """Whether a vote was costly: it took more than an eighth of the time since the vote before, or came within 5 ms.

    A vote costs its process some 70 us of computing, more than 1 % of 5 ms. How long a vote takes depends on chance, as
    the last rank to begin it waits for nobody. How often votes come is the same on all ranks.

    Args:
      took: seconds of the vote, without the seconds in which this rank read its data meanwhile.
      between: seconds from the beginning of the vote before to the beginning of this vote.

    >>> is_costly(1.0, 9.0), is_costly(1.0, 7.0), is_costly(0.0, 0.004)
    (False, True, True)
    """
    return took > between * _MUCH or between < _OFTEN_SECONDS


@final
class PrefetchDepth:
    """The prefetch depth, and the change of it that one rank asks for. Used by the thread that votes.

    Args:
      steps: the depth at first: steps ahead of the one that the consumer waits for.
      room: bytes of steps ahead within which the depth may grow; ``None`` for a fixed depth.
      rounds: how many times a vote is polled, once at each step, until it is complete.
    """

    def __init__(self, steps: int, room: int | None, rounds: int = 0) -> None:
        self._rounds = rounds
        self._room = room
        self._costly: deque[bool] = deque(maxlen=_VOTES_LOOKED_AT)
        self.agreed(steps)

    def voted(self, *, costly: bool) -> None:
        """Notes that a vote is complete, and whether it was costly (``is_costly``)."""
        self._costly.append(costly)

    def agreed(self, steps: int) -> None:
        """Notes the depth on which the ranks agreed."""
        self._steps = steps
        self.due_at = max(ready_at_a_vote(steps), self._rounds) if is_deep(steps) else steps + 1
        """A vote is due when at most this many steps are ready."""
        self._costly.clear()

    def requested_change(self, largest: int) -> int:
        """The change that this rank asks for: 1 for a larger depth, -1 for a smaller one, 0 for the present one.

        Args:
          largest: bytes of the largest step so far; 0 where the size of no step is known.
        """
        if self._room is None:
            return 0
        if (self._steps + 1) * largest > self._room:
            return -1
        fits = 0 < (2 * self._steps + 1) * largest <= self._room
        return int(fits and sum(self._costly) >= _VOTES_LOOKED_AT // 2)
