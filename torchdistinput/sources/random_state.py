"""Random draws that all ranks must make alike, though each has a default random state of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

__all__ = ["BorrowedRandomState", "plainly", "state_of_epoch"]


@final
class BorrowedRandomState:
    """Calls user code with rank 0's default random state in place of this rank's own.

    Without a generator, torch's samplers draw from the default one, and all ranks must draw the same. A rank whose own
    state was that of rank 0 goes on with it as the draws left it, as in one process; the others get their own back.
    """

    def __init__(self, state: torch.Tensor) -> None:
        self._state = state
        self._inside = False

    def __call__(self, call: Callable[[], Any]) -> Any:
        """What the call returns."""
        if self._inside:
            return call()
        own = torch.get_rng_state()
        keeps = torch.equal(own, self._state)
        torch.set_rng_state(self._state)
        self._inside = True
        try:
            return call()
        finally:
            self._inside = False
            self._state = torch.get_rng_state()
            if not keeps:
                torch.set_rng_state(own)


def state_of_epoch(seed: int, epoch: int) -> torch.Tensor:
    """A random state for the ranks of an epoch that do not meet before it."""
    return torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63).get_state()


def plainly(call: Callable[[], Any]) -> Any:
    """Calls user code with the random state as it is."""
    return call()
