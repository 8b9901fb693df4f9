"""Forks: what a forked process has of its parent's stores, connections and reading, and must not end.

A forked process, a loader worker for instance, begins with copies of all that its parent has. Nobody would end a store
there on purpose, but the garbage collector does, where it is garbage of the parent's that was not collected yet; and so
does the end of the interpreter. A store in a file counts who uses it, and its last user removes the file; a copy that a
fork ends was never counted, so the ranks would be left without it. So a fork begins with one more reference to each
store, which nobody ever gives back.

What else goes on in the parent (its connections to other ranks, its loader workers, its iterators with their threads
and votes) is told of the fork, in the fork, and leaves all that to the parent: copies of sockets are closed, as they
would keep a connection open when the parent has ended.

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
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any, Final, Protocol, final

__all__ = ["AroundForks", "Inherited", "Undo", "never_ended_by_forks", "told_of_forks"]

Undo = Callable[[], object]
"""Not written in Python; ``int``, which does nothing, where there is nothing to undo."""


class Inherited(Protocol):
    """What a fork has only a copy of."""

    def leave_to_parent(self) -> None:
        """This process was forked, and has no other thread yet: what it stands for goes on in the parent alone."""


_KEPT: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
_INHERITED: Final[weakref.WeakSet[Inherited]] = weakref.WeakSet()


def never_ended_by_forks(kept: Any) -> None:
    """Remembers a store for as long as it lives here. Local."""
    _KEPT.add(kept)


def told_of_forks(inherited: Inherited) -> None:
    """Remembers it for as long as it lives here: it is told of each fork, in the forked process. Local."""
    _INHERITED.add(inherited)


@final
class AroundForks:
    """What is done around each fork: one at a time, but for one that a signal's handler makes in the middle of it.

    A signal that comes while the process is forked is seen to by the first Python code that runs in the parent. Were
    that code of the fork's, Python would ignore what the handler raises, also for a Ctrl-C, and the code would not run:
    a lock would stay taken. So nothing but C runs there.

    Args:
      before: is called before a fork. It returns what undoes that in the parent, an ``Undo``.
      in_child: is called in the fork, with that.
      lock: is held meanwhile.
    """

    def __init__(self, before: Callable[[], Undo], in_child: Callable[[Undo], None], lock: threading.RLock) -> None:
        self._before = before
        self._in_child = in_child
        self._undo: list[Undo] = []
        undone = map(methodcaller("__call__"), iter(self._undo.pop, None))
        self.in_parent: Callable[[], object] = partial(next, undone)
        """It was made, or could not be."""
        os.register_at_fork(before=self.before, after_in_parent=self.in_parent, after_in_child=self._in_fork)
        # What is registered last comes first before a fork, and last after it.
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)

    def before(self) -> None:
        """A fork will be made."""
        self._undo.append(self._before())

    def _in_fork(self) -> None:
        self._in_child(self._undo.pop() if self._undo else int)  # before() may have been interrupted


def _stop_collecting() -> Undo:
    collected = gc.isenabled()
    gc.disable()
    return gc.enable if collected else gc.disable


def _in_child(undo: Undo) -> None:
    for kept in list(_KEPT):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    for inherited in list(_INHERITED):
        inherited.leave_to_parent()
    undo()


if sys.platform != "win32":
    _FORKING: Final = AroundForks(_stop_collecting, _in_child, threading.RLock())
