"""The shutdown of an iterator: who releases its resources, and which error later calls raise.

An interruption may come between any two steps of it, so each can be done again, and is, by the next one who closes.
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

    def discard(self, shares: Sequence[LocalStep], /) -> None: ...


class _Votes(Protocol):
    """See ``prefetch_thread.Votes``."""

    def stop(self, delivered: int) -> list[LocalStep]: ...


@final
class Shutdown:
    """The last one to leave, consumer or thread, gives up what nobody took.

    Args:
      upstream: the stages before.
      votes: holds shares that nobody took.
      ready: so does this.
      threaded: whether there is a thread.
    """

    def __init__(self, upstream: _Upstream, votes: _Votes, ready: deque[Outcome], *, threaded: bool) -> None:
        self._upstream = upstream
        self._votes = votes
        self._ready = ready
        self._lock = threading.RLock()
        self._consumer_left = False
        self.thread_left = not threaded
        """Whether nobody votes any more but the consumer."""
        self._left: list[Outcome] = []  # of what nobody took, as far as it was not given up yet
        self._is_tidy = False

    def consumer_leaves(self, delivered: int, peeked: LocalStep | None) -> None:
        """Nobody takes a step any more. Any thread, as often as it likes.

        Args:
          delivered: steps that the consumer took.
          peeked: one that it looked at and did not take.
        """
        if peeked is not None:
            self._upstream.discard([peeked])
        self._consumer_left = True
        self._tidy_up(delivered)

    def thread_leaves(self) -> None:
        """The thread does nothing any more. That thread."""
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
            shares = [each.share if isinstance(each, EmptyStep) else each for each in left]
            self._upstream.discard([share for share in shares if isinstance(share, LocalStep)])
            left.clear()
            if not self._is_tidy:  # by a garbage collection in between, on this thread
                self._is_tidy = True  # before the devices go to the next iterator, which they must not do twice
                self._upstream.close_devices()


def not_an_end(error: BaseException) -> BaseException:
    """The error; a ``StopIteration`` from within would end the user's loop as if the data had ended."""
    if not isinstance(error, StopIteration):
        return error
    found = RuntimeError("an iterator of the input's own ended where it must not: a defect of torchdistinput.")
    found.__cause__ = error
    return found


def after_the_error(error: BaseException, told: str, delivered: int) -> InputError:
    """What the next call raises after an error that ended the epoch. Then nothing more comes.

    The error itself is raised once: a loop that goes on after errors would meet it for ever, and each time with a
    longer traceback. Nor is it kept, as its traceback keeps the batches of those who met it.

    Args:
      error: the error.
      told: the same in one line.
      delivered: steps before it.
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
    """What a thread is told that reads while another one closes."""
    return InputError(
        f"the iterator was closed by another thread after step {delivered}, while this one reads it. Let the thread "
        "that reads leave its loop first: set a flag that the loop looks at, and close afterwards."
    )


def left_to_parent() -> InputError:
    """What a forked process is told that goes on with an iterator of its parent."""
    return InputError(
        "this process was forked from the one that began the iterator, which goes on with it: its loader workers, "
        "background thread and place among the ranks are there. With one rank, begin another one here: iter(loader)."
    )
