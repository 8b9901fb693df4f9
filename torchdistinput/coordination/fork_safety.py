"""Fork safety: a forked process must not destroy its parent's stores, connections, loader workers and iterators.

A forked process, such as a loader worker, begins with copies of all objects of its parent. The fork's garbage collector
destroys the copy of a store that was garbage in the parent and not collected yet; the end of the fork's interpreter
destroys all copies. A store in a file counts its users, and the last user removes the file. A copy in a fork was never
counted, so its destruction would remove the file while the ranks use it. So a fork begins with one more reference to
each store, which is never released.

Other objects of the parent (connections to other ranks, loader workers, iterators with their threads and votes) get a
call in each fork (``leave_to_parent``), and leave their work to the parent. Copies of sockets are closed, as they would
keep a connection open after the parent has ended.

``logging`` takes its lock for a fork, and before Python 3.13 releases it in Python code. There Python ignores what the
handler of a signal raises that came during the fork, also a Ctrl-C, and the lock stays taken: the next thread that asks
for a logger waits for ever. So code that forks loader workers looks for it (``private_names.interrupted_in_a_fork``).

The garbage collector is off until these calls are made. It could find an iterator that was garbage in the parent, and
would close it in the parent's name.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any, Final, Protocol, final

from torchdistinput.coordination.private_names import keep_until_the_process_ends

AfterFork = Callable[[], object]
"""A function that is not written in Python; ``int``, which does nothing, where there is nothing to after_fork."""


class Inherited(Protocol):
    """An object that belongs to one process; a fork has only a copy of it."""

    def leave_to_parent(self) -> None:
        """Called in a fork, before it has other threads: gives up the copy, and leaves the work to the parent."""


_KEPT: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
_INHERITED: Final[weakref.WeakSet[Inherited]] = weakref.WeakSet()


def keep_alive_in_forks(kept: Any) -> None:
    """Keeps the copies of a store alive in all forks. Local."""
    _KEPT.add(kept)


def register_for_forks(inherited: Inherited) -> None:
    """Calls ``leave_to_parent`` of the object's copy in each fork, for as long as the object lives. Local."""
    _INHERITED.add(inherited)


@final
class ForkHandlers:
    """Runs code before and after each fork; one fork at a time, except for forks in a signal handler during a fork.

    A signal that comes during the fork is handled by the first Python code that runs in the parent afterwards. If that
    were an ``after_in_parent`` function in Python, Python would ignore the exception of the handler, also a Ctrl-C, and
    the function would not run: a lock would stay taken. So ``after_in_parent`` runs C code only.

    Args:
      before: is called before a fork. It returns the ``AfterFork`` for the parent.
      in_child: is called in the fork, with that ``AfterFork``.
      lock: is held during the fork.
    """

    def __init__(
        self, before: Callable[[], AfterFork], in_child: Callable[[AfterFork], None], lock: threading.RLock
    ) -> None:
        self._before = before
        self._in_child = in_child
        self._after_fork: list[AfterFork] = []
        undone = map(methodcaller("__call__"), iter(self._after_fork.pop, None))
        self.in_parent: Callable[[], object] = partial(next, undone)
        """Called in the parent after a fork, also after a failed one."""
        os.register_at_fork(before=self.before, after_in_parent=self.in_parent, after_in_child=self._in_fork)
        # The functions registered last run first before a fork, and last after it.
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)

    def before(self) -> None:
        """Called before a fork."""
        self._after_fork.append(self._before())

    def _in_fork(self) -> None:
        self._in_child(self._after_fork.pop() if self._after_fork else int)  # before() may have been interrupted


def _stop_collecting() -> AfterFork:
    collected = gc.isenabled()
    gc.disable()
    return gc.enable if collected else gc.disable


def _in_child(after_fork: AfterFork) -> None:
    for kept in list(_KEPT):
        keep_until_the_process_ends(kept)
    for inherited in list(_INHERITED):
        inherited.leave_to_parent()
    after_fork()


if sys.platform != "win32":
    _FORKING: Final = ForkHandlers(_stop_collecting, _in_child, threading.RLock())
