"""What the operating system knows about loader workers: whether they are stopped (Linux only)."""

from __future__ import annotations

import sys
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

_STATES: Final = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "in a system call that cannot be interrupted",
    "S": "waiting",
    "R": "running",
}


def _state(pid: int | None) -> str:
    """The system's letter for the state of a process; empty where it is not known."""
    with suppress(OSError):  # the process ended meanwhile
        if sys.platform == "linux":
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def is_stopped(process: BaseProcess) -> bool:
    """Whether a loader worker is stopped, so that only SIGKILL reaches it."""
    return _state(process.pid) in {"T", "t"}


def words_for(number: int, process: BaseProcess) -> str:
    """Describes a loader worker: its number, its process, and the state of the process where the kernel shows it."""
    state = _state(process.pid)
    facts = [f"pid {process.pid}", *([_STATES[state]] if state in _STATES else [])]
    return f"loader worker {number} ({', '.join(facts)})"
