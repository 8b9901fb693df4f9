"""How far ahead a rank would read, where that may change. Law A8 makes one wish of those of all ranks."""

from __future__ import annotations

from collections import deque
from typing import Final, final

__all__ = ["PrefetchDepth", "changed", "drawn_at_once", "is_deep", "ready_at_a_vote", "shows"]

_VOTES_LOOKED_AT: Final = 8
_LAZY_FROM: Final = 4  # steps ahead; with fewer, a vote that waits comes too late
_MUCH: Final = 1 / 8
_MOST_AT_ONCE: Final = 8


def changed(steps: int, change: int, least: int, most: int) -> int:
    """The steps ahead after all ranks agreed: twice as many, half as many, or as before, within the bounds.

    >>> changed(8, 1, 2, 12), changed(8, -1, 2, 12), changed(8, 0, 2, 12)
    (12, 4, 8)
    """
    wanted = steps * 2 if change > 0 else steps // 2 if change < 0 else steps
    return min(max(wanted, least), most)


def is_deep(steps: int) -> bool:
    """Whether so much is read ahead that votes are few."""
    return steps >= _LAZY_FROM


def drawn_at_once(steps: int) -> int:
    """How many steps are drawn in a row, where so many are read ahead: a quarter of them, at least 1 and at most 8.

    What draws a step is no longer in the caches after a training step, and costs ten times as much as the second time.
    It is the same on all ranks at each step, as the steps ahead are.

    >>> [drawn_at_once(steps) for steps in (0, 2, 8, 32, 1000)]
    [1, 1, 2, 8, 8]
    """
    return min(max(1, steps // 4), _MOST_AT_ONCE)


def ready_at_a_vote(steps: int) -> int:
    """How many of the steps ahead are left when it is time to vote: about a third, right after others were drawn.

    So a vote covers as many as possible.

    >>> [ready_at_a_vote(steps) for steps in (4, 8, 16, 32)]
    [1, 3, 5, 9]
    """
    row = drawn_at_once(steps)
    return min(range(steps + 1 - row, 0, -row), key=lambda ready: (abs(3 * ready - steps), ready))


def shows(took: float, between: float) -> bool:
    """Whether a vote showed: it took more than an eighth of the time since the one before.

    Args:
      took: seconds of the vote, without those in which this rank read its data meanwhile.
      between: seconds from the beginning of the vote before to that of this one.

    >>> shows(1.0, 9.0), shows(1.0, 7.0)
    (False, True)
    """
    return took > between * _MUCH


@final
class PrefetchDepth:
    """What one rank wishes. Used by the thread that votes.

    Args:
      steps: ahead of the one that the consumer waits for, at first.
      room: bytes of steps ahead within which there may be more; ``None`` where the number stays.
      rounds: how many times a vote is looked after, once at each step, until it is over.
    """

    def __init__(self, steps: int, room: int | None, rounds: int = 0) -> None:
        self._rounds = rounds
        self._room = room
        self._shown: deque[bool] = deque(maxlen=_VOTES_LOOKED_AT)
        self.agreed(steps)

    def voted(self, *, shown: bool) -> None:
        """A vote came back, and showed, or not."""
        self._shown.append(shown)

    def agreed(self, steps: int) -> None:
        """The ranks read so far ahead from now on."""
        self._steps = steps
        self.due_at = max(ready_at_a_vote(steps), self._rounds) if is_deep(steps) else steps + 1
        """The steps that are ready when it is time to vote: the consumer may soon need what is voted for."""
        self._shown.clear()

    def wish(self, largest: int) -> int:
        """1 to read further ahead, -1 not so far, 0 to leave it.

        Args:
          largest: bytes of the largest step so far; 0 where none is known.
        """
        if self._room is None:
            return 0
        if (self._steps + 1) * largest > self._room:
            return -1
        fits = 0 < (2 * self._steps + 1) * largest <= self._room
        return int(fits and sum(self._shown) >= _VOTES_LOOKED_AT // 2)
