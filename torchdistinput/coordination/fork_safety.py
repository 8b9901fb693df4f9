"""Fork safety: a forked process must not destroy its parent's connections, loader workers and iterators.

A forked process, such as a loader worker, begins with copies of all objects of its parent. Those that belong to one
process (connections to other ranks, loader workers, iterators with their threads and votes) get a call in each fork
(``leave_to_parent``), and leave their work to the parent. Copies of sockets are closed, as they would keep a connection
open after the parent has ended.

A Ctrl-C in the functions that ``logging`` runs at a fork, which may be lost before Python 3.13, leaves its lock held,
and other threads would wait for ever: it is given back here.

The garbage collector is off until these calls are made. It could find an iterator that was garbage in the parent, and
would close it in the parent's name.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from typing import Final, Protocol

from torchdistinput.coordination.private_names import give_back_logging, holds_logging


class Inherited(Protocol):
    """An object that belongs to one process; a fork has only a copy of it."""

    def leave_to_parent(self) -> None:
        """Called in a fork, before it has other threads: gives up the copy, and leaves the work to the parent."""


_INHERITED: Final[weakref.WeakSet[Inherited]] = weakref.WeakSet()
_BEFORE: Final[list[tuple[bool, bool]]] = []
"""Whether the collector was on, and whether this thread held the lock of ``logging``, for each fork that is being made:
one more in the handler of a signal."""


def register_for_forks(inherited: Inherited) -> None:
    """Calls ``leave_to_parent`` of the object's copy in each fork, for as long as the object lives. Local."""
    _INHERITED.add(inherited)


def _before() -> None:
    _BEFORE.append((gc.isenabled(), holds_logging()))
    gc.disable()


def _after() -> None:
    collects, held = _BEFORE.pop() if _BEFORE else (False, True)
    if not held:
        give_back_logging()
    if collects:
        gc.enable()


def _in_child() -> None:
    for inherited in list(_INHERITED):
        inherited.leave_to_parent()
    _after()


if sys.platform != "win32":
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_in_child)
