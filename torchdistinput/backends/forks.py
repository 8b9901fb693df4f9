"""The door to process groups, its back door: what a fork has of them and of its parent's reading, and must not end.

A forked process, a loader worker for instance, has the groups of its parent, but none of their threads. To end one
there waits for those threads, or crashes. Nobody would do so on purpose, but the garbage collector does, where a group
is garbage of the parent's that was not collected yet; and so does the end of the interpreter. So a fork begins with one
more reference to each group, which nobody ever gives back. And to each store: one in a file counts who uses it, and its
last user removes the file; a copy that a fork ends was never counted, so the ranks would be left without it.

What else goes on in the parent (its loader workers, its iterators with their threads and votes) is told of the fork, in
the fork, and leaves all that to the parent.

Until then the garbage collector is off: it may find an iterator there that was garbage of the parent's, and would close
it in the parent's name.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import weakref
from typing import Any, Final, Protocol, final

__all__ = ["Inherited", "never_ended_by_forks", "told_of_forks"]


class Inherited(Protocol):
    """What a fork has only a copy of."""

    def leave_to_parent(self) -> None:
        """This process was forked, and has no other thread yet: what it stands for goes on in the parent alone."""


_KEPT: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
_INHERITED: Final[weakref.WeakSet[Inherited]] = weakref.WeakSet()


def never_ended_by_forks(kept: Any) -> None:
    """Remembers a group, or a store, for as long as it lives here. Local."""
    _KEPT.add(kept)


def told_of_forks(inherited: Inherited) -> None:
    """Remembers it for as long as it lives here: it is told of each fork, in the forked process. Local."""
    _INHERITED.add(inherited)


@final
class _Forking:
    """A fork that is being made; one at a time, but for one that a signal's handler makes in the middle of it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._collects: list[bool] = []

    def before(self) -> None:
        """Nothing is collected from here on."""
        self._lock.acquire()
        self._collects.append(gc.isenabled())
        gc.disable()

    def in_parent(self) -> None:
        """It was made, or could not be."""
        if self._collects.pop():
            gc.enable()
        self._lock.release()

    def in_child(self) -> None:
        """This is it."""
        for kept in list(_KEPT):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        for inherited in list(_INHERITED):
            inherited.leave_to_parent()
        self.in_parent()


if sys.platform != "win32":
    _FORKING: Final = _Forking()
    os.register_at_fork(before=_FORKING.before, after_in_parent=_FORKING.in_parent, after_in_child=_FORKING.in_child)
