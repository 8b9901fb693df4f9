"""What the operating system knows about loader workers: whether they are stopped, and their open files (Linux only)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
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
_MOST_FILES: Final = 8


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
    if state in {"S", "D"}:
        with suppress(OSError):
            facts.append(f"in {Path(f'/proc/{process.pid}/wchan').read_text()}")
    return f"loader worker {number} ({', '.join(facts)})"


def files_read_by(process: BaseProcess) -> Sequence[str]:
    """The files that a loader worker has open and this process does not."""
    if sys.platform != "linux":
        return ()
    return sorted(_open_files(process.pid) - _open_files(os.getpid()))[:_MOST_FILES]


def _open_files(pid: int | None) -> set[str]:
    found: set[str] = set()
    with suppress(OSError):  # the process ended meanwhile
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    kernels = ("/dev/", "/proc/", "/memfd:")
    return {each for each in found if each.startswith("/") and not each.startswith(kernels)}
