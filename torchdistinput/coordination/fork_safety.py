"""Fork safety: a forked process must not destroy its parent's connections, loader workers and iterators.

A forked process, such as a loader worker, begins with copies of all objects of its parent. Those that belong to one
process (connections to other ranks, loader workers, iterators with their threads and votes) get a call in each fork
(``leave_to_parent``), and leave their work to the parent. Copies of sockets are closed, as they would keep a connection
open after the parent has ended.

The garbage collector is off until these calls are made. It could find an iterator that was garbage in the parent, and
would close it in the parent's name.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from typing import Final, Protocol


class Inherited(Protocol):
    """An object that belongs to one process; a fork has only a copy of it."""

    def leave_to_parent(self) -> None:
        """Called in a fork, before it has other threads: gives up the copy, and leaves the work to the parent."""


_INHERITED: Final[weakref.WeakSet[Inherited]] = weakref.WeakSet()
_COLLECTED: Final[list[bool]] = []
"""Whether the collector was on, for each fork that is being made: one more in the handler of a signal."""


def register_for_forks(inherited: Inherited) -> None:
    """Calls ``leave_to_parent`` of the object's copy in each fork, for as long as the object lives. Local."""
    _INHERITED.add(inherited)


def _before() -> None:
    _COLLECTED.append(gc.isenabled())
    gc.disable()


def _after() -> None:
    if _COLLECTED and _COLLECTED.pop():
        gc.enable()


def _in_child() -> None:
    for inherited in list(_INHERITED):
        inherited.leave_to_parent()
    _after()


if sys.platform != "win32":
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_in_child)
