"""A wait of a test for what must come: by an event, not by a time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

PATIENCE_SECONDS = 90.0


def wait_for(condition: Callable[[], object], what: str = "what the test waits for") -> None:
    """Until it holds; fails after far longer than a busy machine takes."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < until, f"it never came: {what}"
        time.sleep(0.01)


def wait_for_end(alive: Callable[[], object]) -> None:
    """Until nothing of it is alive; what garbage keeps alive is collected."""

    def has_ended() -> bool:
        gc.collect()
        return not alive()

    wait_for(has_ended, "the end of what is alive")
