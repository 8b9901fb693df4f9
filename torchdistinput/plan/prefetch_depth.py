"""The prefetch depth: how many steps are read ahead. A function of the number of the step alone.

The depth begins small and grows by one with each step, up to a bound on which all ranks agree once (law A8). So user
code is called ahead in the same way in every run, and by the same amount on every rank.
"""

from __future__ import annotations

from typing import Final

_LAZY_FROM: Final = 4  # the least depth at which votes are delayed; with a smaller one they would come too late
_MAX_AT_ONCE: Final = 8
BYTES_AHEAD: Final = 64 << 20
"""Bytes of steps ahead, on each rank, within which the read-ahead grows."""


def steps_that_fit(largest: int, max_bytes: int) -> int | None:
    """How many steps of the largest size fit beside the one in use; ``None`` where the size of no step is known.

    >>> steps_that_fit(10, 100), steps_that_fit(1000, 100), steps_that_fit(0, 100)
    (9, 0, None)
    """
    return max(0, max_bytes // largest - 1) if largest else None


def agreed_bound(fits: int | None, least: int, most: int) -> int:
    """Law A8: what fits on every rank, within ``least`` and ``most``; ``least`` where no rank knows the size of a step.

    >>> agreed_bound(9, 2, 32), agreed_bound(50, 2, 32), agreed_bound(None, 2, 32)
    (9, 32, 2)
    """
    return least if fits is None else max(least, min(most, fits))


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


def ready_at_a_vote(steps: int, rounds: int = 0) -> int:
    """A vote is due when at most this many steps are ready.

    With a deep read-ahead about a third of it, right after a row was drawn, so that a vote covers as many steps as
    possible; else at once.

    Args:
      steps: the prefetch depth.
      rounds: how many times a vote is polled, once at each step, until it is complete.

    >>> [ready_at_a_vote(steps) for steps in (2, 4, 8, 16, 32)]
    [3, 1, 3, 5, 9]
    """
    if not is_deep(steps):
        return steps + 1
    row = drawn_at_once(steps)
    return max(min(range(steps + 1 - row, 0, -row), key=lambda ready: (abs(3 * ready - steps), ready)), rounds)
