"""The shutdown of an iterator: releases its resources once, and makes the errors that later calls raise.

An interruption (Ctrl-C) may come between any two lines of it. So each line can run again, and runs again in the next
call that closes the iterator.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol, final

from torchdistinput.errors import InputError
from torchdistinput.step_types import EmptyStep, LocalStep, Outcome

__all__ = ["Shutdown", "after_the_error", "closed_elsewhere", "left_to_parent", "not_an_end"]


class _Upstream(Protocol):
    """See ``prefetch_thread.Upstream``."""

    def close_source(self) -> None: ...

    def close_devices(self) -> None: ...

    def discard(self, steps: Sequence[LocalStep], /) -> None: ...


class _Votes(Protocol):
    """See ``prefetch_thread.Votes``."""

    def stop(self, delivered: int) -> list[LocalStep]: ...


@final
class Shutdown:
    """Discards the steps that nobody took, once both the consumer and the background thread have left.

    Args:
      upstream: the stages before the vote.
      votes: holds steps that were not agreed.
      ready: holds agreed steps that nobody took.
      threaded: whether there is a background thread.
    """

    def __init__(self, upstream: _Upstream, votes: _Votes, ready: deque[Outcome], *, threaded: bool) -> None:
        self._upstream = upstream
        self._votes = votes
        self._ready = ready
        self._lock = threading.RLock()
        self._consumer_left = False
        self.thread_left = not threaded
        """Whether there is no background thread, or none any more."""
        self._left: list[Outcome] = []  # outcomes that nobody took and that were not discarded yet
        self._is_tidy = False

    def consumer_leaves(self, delivered: int, peeked: LocalStep | None) -> None:
        """The consumer takes no further step. Any thread, idempotent.

        Args:
          delivered: steps that the consumer took.
          peeked: a step that the consumer looked at and did not take.
        """
        if peeked is not None:
            self._upstream.discard([peeked])
        self._consumer_left = True
        self._tidy_up(delivered)

    def thread_leaves(self) -> None:
        """The background thread ends. Called on that thread."""
        self.thread_left = True
        self._tidy_up(0)

    def _tidy_up(self, delivered: int) -> None:
        with self._lock:
            if not (self._consumer_left and self.thread_left) or self._is_tidy:
                return
            self._upstream.close_source()
            held = self._votes.stop(delivered)
            self._upstream.discard(held)
            held.clear()
            left = self._left
            with contextlib.suppress(IndexError):  # a consumer on another thread may take the last one
                while self._ready:
                    left.append(self._ready.popleft())
            steps = [each.share if isinstance(each, EmptyStep) else each for each in left]
            self._upstream.discard([step for step in steps if isinstance(step, LocalStep)])
            left.clear()
            if not self._is_tidy:  # a garbage collection on this thread may have run this method in between
                self._is_tidy = True  # set first: the devices must not be given to the next iterator twice
                self._upstream.close_devices()


def not_an_end(error: BaseException) -> BaseException:
    """The error; for a ``StopIteration``, which would end the user's loop as if the data had ended, another one."""
    if not isinstance(error, StopIteration):
        return error
    found = RuntimeError("an iterator of the input's own ended where it must not: a defect of torchdistinput.")
    found.__cause__ = error
    return found


def after_the_error(error: BaseException, told: str, delivered: int) -> InputError:
    """The error of the next call after an error that ended the epoch. Later calls return the end of the data.

    The original error is raised once. A loop that continues after errors would meet it for ever, each time with a
    longer traceback. The original is not kept either, as its traceback keeps batches in memory.

    Args:
      error: the original error.
      told: the original error in one line.
      delivered: steps before the error.
    """
    if isinstance(error, Exception):
        return InputError(
            f"this epoch ended with the error above, after step {delivered}, and cannot go on. Begin another iterator, "
            f"or go on from a state that was saved before. The error was {told}"
        )
    return InputError(
        f"the input was interrupted while it read, after step {delivered}, by {type(error).__name__}; what it was "
        "reading is lost, so it cannot go on. Begin another iterator, or go on from a state that was saved before."
    )


def closed_elsewhere(delivered: int) -> InputError:
    """The error of a thread that reads an iterator while another thread closes it."""
    return InputError(
        f"the iterator was closed by another thread after step {delivered}, while this one reads it. Let the thread "
        "that reads leave its loop first: set a flag that the loop looks at, and close afterwards."
    )


def left_to_parent() -> InputError:
    """The error of a forked process that reads an iterator of its parent."""
    return InputError(
        "this process was forked from the one that began the iterator, which goes on with it: its loader workers, "
        "background thread and place among the ranks are there. With one rank, begin another one here: iter(loader)."
    )
