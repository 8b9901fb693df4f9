"""What only some systems have."""

from __future__ import annotations

import sys
from typing import Final

import pytest

__all__ = ["FORK_WARNING", "linux_memory", "linux_pipes", "linux_processes", "quick_forks"]

FORK_WARNING: Final = "This process .* is multi-threaded, use of fork"
"""What Python itself warns of, from 3.12 on, where loader workers are forked."""

_ELSEWHERE: Final = sys.platform != "linux"

linux_memory = pytest.mark.skipif(_ELSEWHERE, reason="memory is shared without a name on Linux only")
linux_pipes = pytest.mark.skipif(_ELSEWHERE, reason="messages to loader workers go without a thread on Linux only")
linux_processes = pytest.mark.skipif(_ELSEWHERE, reason="what processes hold is read from /proc")
quick_forks = pytest.mark.skipif(_ELSEWHERE, reason="loader workers are forked by default on Linux only")
