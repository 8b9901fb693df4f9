"""What only some systems have."""

from __future__ import annotations

import sys
from typing import Final

import pytest

__all__ = ["linux_memory", "linux_pipes", "linux_processes", "quick_forks"]

_ELSEWHERE: Final = sys.platform != "linux"

linux_memory = pytest.mark.skipif(_ELSEWHERE, reason="memory is shared without a name on Linux only")
linux_pipes = pytest.mark.skipif(_ELSEWHERE, reason="messages to loader workers go without a thread on Linux only")
linux_processes = pytest.mark.skipif(_ELSEWHERE, reason="what processes hold is read from /proc")
quick_forks = pytest.mark.skipif(_ELSEWHERE, reason="loader workers are forked by default on Linux only")
