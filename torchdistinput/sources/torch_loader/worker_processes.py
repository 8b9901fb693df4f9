"""Loader workers as processes: which are stopped, and how they end with their parent.

Problem. Torch's loader workers look at their parent only between two items, and note its process id only once they are
set up: a worker whose parent died before takes the process that adopted it for its parent, and waits for ever. A worker
may also send the last item before it ends, and waits for ever where nobody reads and the pipe is full. Until a worker
is gone, its copies of its parent's sockets keep the other ranks from noticing that a rank died.

Decision. A worker gets the id of the process that starts it, and arranges to end with that process before it reads
anything. On Linux the kernel ends the worker. The kernel watches the thread that forked, not the process, and only the
main thread is certain to live as long as the process. Elsewhere, and for workers that another thread or a fork server
starts, as Python does by default from 3.14 on, a thread of the worker looks at the parent every second.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, NamedTuple, final

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


_PR_SET_PDEATHSIG: Final = 1
_LOOK_SECONDS: Final = 1.0


@final
class Parent(NamedTuple):
    """The process with which a loader worker ends, as the process is when it starts the worker. It can be pickled.

    Args:
      pid: the id of the process.
      is_direct: whether the system counts the process as the worker's parent; not so with a fork server.
      by_main_thread: whether the main thread of the process starts the worker.
    """

    pid: int
    is_direct: bool
    by_main_thread: bool


def parent_for(context: Any) -> Parent:
    """This process, for loader workers that this thread starts. Local.

    Args:
      context: the ``multiprocessing`` context that starts the workers; ``None`` for the default.
    """
    method = (multiprocessing if context is None else context).get_start_method()
    return Parent(os.getpid(), method != "forkserver", threading.current_thread() is threading.main_thread())


def end_with(parent: Parent) -> None:
    """Ends this process when its parent ends, at once if the parent has ended. Called in the loader worker."""
    if sys.platform == "linux" and parent.is_direct and parent.by_main_thread:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent.pid:  # the parent died before
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        starter = parent.pid if parent.is_direct else os.getppid()
        threading.Thread(target=_end_after, args=(starter,), name="torchdistinput-parent", daemon=True).start()


def _end_after(starter: int) -> None:
    """Ends this process when the process that started it ends, or the process for which a fork server started it."""
    parent = multiprocessing.parent_process()
    # The handle alone is not enough: processes that were forked later keep open the pipe that closes with the parent.
    while os.getppid() == starter and (parent is None or parent.is_alive()):
        time.sleep(_LOOK_SECONDS)
    os._exit(1)
