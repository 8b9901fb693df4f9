"""A thread that looks after iterators whose rank may stay in its training code: there it hears of no other rank.

A collective of the training waits, mostly without a bound, for a rank that has left its loop or died. The message of
that rank has come, but is read only in ``next``. No thread waits for it: a second thread that goes on with the votes
would cost the training more than it hides (``engine.py``). This one sleeps, and looks twice a second whether
an iterator was left alone for some time. It ends with the last iterator, and at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import weakref
from typing import Final, Protocol, final

from torchdistinput.coordination.fork_safety import register_for_forks

_LOOK_SECONDS: Final = 0.5
_EXIT_SECONDS: Final = 2.0


class Watched(Protocol):
    """An iterator of several ranks."""

    closed: bool

    def tell_departure(self) -> None:
        """Logs that a rank left, if this rank is away from ``next`` and has not logged it."""


@final
class Watch:
    """Looks at all live iterators of this process."""

    def __init__(self) -> None:
        self._begin()
        register_for_forks(self)
        atexit.register(self._end)

    def _begin(self) -> None:
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._looks: queue.SimpleQueue[None] = queue.SimpleQueue()  # safe where a garbage collection closes an iterator
        self._thread: threading.Thread | None = None

    def add(self, each: Watched) -> None:
        """Looks at an iterator from now on, until it is closed. Any thread."""
        with self._lock:
            self._watched.add(each)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="torchdistinput-watch", daemon=True)
                self._thread.start()

    def look(self) -> None:
        """Makes the thread look now, and end if no iterator is live. Any thread, also in a garbage collection."""
        self._looks.put(None)

    def _run(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                self._looks.get(timeout=_LOOK_SECONDS)
            with self._lock:
                live = [each for each in self._watched if not each.closed]
                if not live:
                    self._thread = None
                    return
            while live:  # no name is kept while it sleeps: it would keep an iterator alive
                live.pop().tell_departure()

    def _end(self) -> None:
        """The interpreter exits: a thread that logs meanwhile could hold the lock of a stream."""
        thread = self._thread
        self._watched = weakref.WeakSet()
        self.look()
        if thread is not None:
            thread.join(_EXIT_SECONDS)

    def leave_to_parent(self) -> None:
        """See ``fork_safety.Inherited``: the thread is the parent's."""
        self._begin()


WATCH: Final = Watch()
