"""What Linux tells of processes, and what it does for those who look after some."""

from __future__ import annotations

import ctypes
import os
import re
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = [
    "adopt_orphans",
    "descendants",
    "die_with_parent",
    "open_sockets",
    "parent_of",
    "shared_memory",
    "sockets_of",
    "state_of",
]

_SET_PARENT_DEATH_SIGNAL: Final = 1
_SET_CHILD_SUBREAPER: Final = 36
_ESTABLISHED, _LISTENS = "01", "0A"


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def die_with_parent() -> None:
    """This process is killed when its parent ends, however that ends."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def adopt_orphans() -> None:
    """Whatever this process starts, and what that starts, stays below it, also when those between them have ended."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def _stat(pid: int) -> list[str]:
    """State, parent, and what follows in ``/proc/PID/stat``; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def parent_of(pid: int) -> int:
    """The parent of a process; 0 if there is no such process."""
    found = _stat(pid)
    return int(found[1]) if found else 0


def state_of(pid: int) -> str:
    """The letter for what a process does: ``T`` for one that is stopped, ``Z`` for one that ended."""
    found = _stat(pid)
    return found[0] if found else "X"


def descendants(ancestor: int) -> list[int]:
    """All processes below one.

    One that has ended is among them until its parent has asked for its exit code: some of its threads may still be on
    their way out, and have its files open.
    """
    children: dict[int, list[int]] = {}
    for folder in os.listdir("/proc"):
        if folder.isdigit():
            children.setdefault(parent_of(int(folder)), []).append(int(folder))
    found = [ancestor]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def sockets_of(pids: Iterable[int]) -> set[str]:
    """The inodes of the sockets that processes have open."""
    return {link[8:-1] for pid in pids for link in _links(pid) if link.startswith("socket:[")}


def _links(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    with suppress(FileNotFoundError, ProcessLookupError):
        for name in os.listdir(folder):
            with suppress(FileNotFoundError, ProcessLookupError):
                yield os.readlink(f"{folder}/{name}")


def open_sockets(inodes: set[str]) -> list[str]:
    """Those of the sockets on which somebody listens, or that are connected."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and fields[3] in (_ESTABLISHED, _LISTENS):
                found.append(f"{table} {fields[1]}-{fields[2]}")
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    return found + [f"unix {line}" for line in lines if line.split()[6] in inodes]


def shared_memory(pids: set[int]) -> list[str]:
    """Entries of ``/dev/shm`` that bear the number of one of the processes, as torch's do."""
    marked = {name: re.findall(r"(?<=[_-])\d+(?=[_-]|$)", name) for name in os.listdir("/dev/shm")}
    return [name for name, numbers in marked.items() if pids & {int(number) for number in numbers}]
