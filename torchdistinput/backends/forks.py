"""The door to process groups, its back door: what a fork has of them, and must not end.

A forked process, a loader worker for instance, has the groups of its parent, but none of their threads. To end one
there waits for those threads, or crashes. Nobody would do so on purpose, but the garbage collector does, where a group
is garbage of the parent's that was not collected yet; and so does the end of the interpreter. So a fork begins with one
more reference to each group, which nobody ever gives back.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from typing import Any, Final

__all__ = ["never_ended_by_forks"]

_GROUPS: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def never_ended_by_forks(group: Any) -> None:
    """Remembers a group for as long as it lives here. Local."""
    _GROUPS.add(group)


def _keep_all() -> None:
    for group in list(_GROUPS):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_keep_all)
