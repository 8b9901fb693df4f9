"""The end of loader workers whose parent process dies.

Problem. Torch's loader workers look at their parent only between two items, and remember it only once they are set up:
a worker whose parent died before that takes the process that adopted it for its parent, and waits for ever. Another one
sends what it read before it ends, for ever, where nobody reads and the pipe is full. Until a worker is gone, its copies
of its parent's sockets keep the other ranks from noticing that a rank died.

Decision. A worker is told which process starts it, and sets itself up to end with it, before anything is read. On Linux
the kernel ends it. The kernel takes the thread that forked for the parent: only of the main thread is it certain that
it lives as long as the process. Elsewhere, and for workers that another thread or a fork server starts, a thread of the
worker looks at the parent every second.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from typing import Any, Final, NamedTuple, final

__all__ = ["Parent", "end_with", "parent_for"]

_PR_SET_PDEATHSIG: Final = 1
_LOOK_SECONDS: Final = 1.0


@final
class Parent(NamedTuple):
    """The process to end with, as it is when it starts a loader worker. It may be sent to the worker.

    Args:
      pid: its number.
      is_direct: whether the system takes it for the worker's parent; not where a fork server starts the worker.
      by_main_thread: whether its main thread starts the worker.
    """

    pid: int
    is_direct: bool
    by_main_thread: bool


def parent_for(context: Any) -> Parent:
    """This process, for loader workers that this thread starts. Local.

    Args:
      context: what starts them, of ``multiprocessing``; ``None`` for the default.
    """
    method = (multiprocessing if context is None else context).get_start_method()
    return Parent(os.getpid(), method != "forkserver", threading.current_thread() is threading.main_thread())


def end_with(parent: Parent) -> None:
    """Lets this process end when its parent does, at once if it has. Called in the loader worker."""
    if sys.platform == "linux" and parent.is_direct and parent.by_main_thread:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent.pid:  # it died before
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        starter = parent.pid if parent.is_direct else os.getppid()
        threading.Thread(target=_end_after, args=(starter,), name="torchdistinput-parent", daemon=True).start()


def _end_after(starter: int) -> None:
    """Ends this process when the one that started it has ended, or the one for which a fork server did."""
    parent = multiprocessing.parent_process()
    # The second look alone is not enough: a process that was forked later keeps open what ends with the parent.
    while os.getppid() == starter and (parent is None or parent.is_alive()):
        time.sleep(_LOOK_SECONDS)
    os._exit(1)
